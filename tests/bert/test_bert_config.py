from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from bert.config import BertConfig


def test_the_presets_are_the_published_shapes():
    base, large = BertConfig.from_preset("base"), BertConfig.from_preset("large")
    assert base == BertConfig()
    shapes = [(c.n_layers, c.dim, c.n_heads, c.head_dim, c.hidden_dim) for c in (base, large)]
    assert shapes == [(12, 768, 12, 64, 3072), (24, 1024, 16, 64, 4096)]
    for config in (base, large):
        sizes = config.vocab_size, config.max_seq_len, config.n_segments, config.layer_norm_eps
        assert sizes == (30522, 512, 2, 1e-12)
        assert (config.dropout, config.attention_dropout, config.head_dropout) == (0.1, 0.1, 0.1)
    assert BertConfig.from_preset("mini", dim=64).dim == 64
    with pytest.raises(ValueError, match="no preset 'huge'; there are base, large, mini"):
        BertConfig.from_preset("huge")


IMPOSSIBLE = {
    "vocab_size": (0,),
    "dim": (2.0, True),
    "n_layers": (0,),
    "n_heads": (7, 2**31),
    "hidden_dim": (0,),
    "max_seq_len": (0, 2**31),
    "n_segments": (-1,),
    "has_pooler": (1,),
    "positions": ("rotary", ["learned"]),
    "activation": ("swiglu",),
    "dropout": (1.0,),
    "attention_dropout": (-0.1,),
    "head_dropout": ("0.1",),
    "layer_norm_eps": (0.0,),
    "pad_id": (-1, 30522),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in IMPOSSIBLE for value in IMPOSSIBLE[field]])
def test_an_impossible_value_is_refused_by_name(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        BertConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("n_segments", 0), ("has_pooler", False), ("pad_id", 30521), ("head_dropout", 0.0)]
)
def test_a_possible_value_is_taken(field: str, value: object):
    assert getattr(BertConfig(**{field: value}), field) == value


def test_sinusoids_come_in_pairs():
    with pytest.raises(ValueError, match="dim=33 must be even"):
        BertConfig(dim=33, n_heads=3, positions="sinusoidal")
    assert BertConfig(dim=33, n_heads=3).hidden_dim == 132


def test_a_config_is_frozen_and_needs_no_torch():
    with pytest.raises(FrozenInstanceError):
        BertConfig().dim = 3
    code = "import sys, bert.config, bert.wordpiece; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
