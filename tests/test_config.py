from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from config import PRESETS, LlamaConfig, swiglu_hidden_dim

STORIES42M_ARGS = dict(dim=512, n_layers=8, n_heads=8, n_kv_heads=8, vocab_size=32000, multiple_of=32, max_seq_len=1024)


def test_the_defaults_are_those_of_stories42M():
    assert LlamaConfig() == LlamaConfig(**STORIES42M_ARGS) == LlamaConfig.from_preset("stories42M")
    assert LlamaConfig().hidden_dim == 1376  # the width of the feed-forward matrices in the published checkpoint
    assert LlamaConfig().attention == "bidirectional"


@pytest.mark.parametrize(("dim", "multiple_of", "width"), [(512, 32, 1376), (64, 4, 172), (288, 32, 768), (48, 1, 128)])
def test_hidden_dim_follows_the_swiglu_rule(dim: int, multiple_of: int, width: int):
    assert swiglu_hidden_dim(dim, multiple_of) == width


def test_none_means_derived():
    config = LlamaConfig(dim=64, n_heads=8, n_kv_heads=None, multiple_of=4)
    assert (config.n_kv_heads, config.head_dim, config.hidden_dim) == (8, 8, 172)
    assert LlamaConfig(dim=64, n_heads=8, hidden_dim=100).hidden_dim == 100


@pytest.mark.parametrize(("field", "value"), [
    ("dim", 0), ("dim", "512"), ("n_layers", -1), ("n_layers", True), ("vocab_size", 1.5), ("n_heads", 7),
    ("n_heads", 512),  # heads of one number, which cannot be rotated
    ("n_kv_heads", 3), ("max_seq_len", None), ("max_seq_len", 2**31), ("hidden_dim", 0), ("dropout", 1.0),
    ("dropout", "0.1"), ("dropout", False), ("layer_norm_eps", 0.0), ("rope_theta", float("nan")),
    ("attention", "sideways"), ("tied", 1), ("rope_scaling", "linear"),
    ("rope_scaling", ("yarn", 2.0)), ("rope_scaling", ("linear",)), ("rope_scaling", ("linear", True)),
    ("rope_scaling", ("linear", float("nan"))),
    ("rope_scaling", (["linear"], 2.0)), ("rope_scaling", ("llama3", 8.0, 4.0, 1.0, 64.0)),
])  # fmt: skip
def test_an_impossible_value_is_refused_by_name(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        LlamaConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [
    ("dropout", 0.0), ("layer_norm_eps", 0.5), ("rope_theta", 0.5), ("rope_theta", 10**20), ("vocab_size", 1),
    ("max_seq_len", 2**31 - 1), ("tied", False),
])  # fmt: skip
def test_a_possible_value_is_taken(field: str, value: float):
    assert getattr(LlamaConfig(**{field: value}), field) == value


def test_a_scaling_is_kept_as_plain_numbers():
    """So that a checkpoint can hold it, in which a list is as good."""
    assert LlamaConfig(rope_scaling=["linear", 4]).rope_scaling == ("linear", 4.0)
    assert hash(LlamaConfig(rope_scaling=["linear", 4])) == hash(LlamaConfig(rope_scaling=("linear", 4.0)))


def test_an_unknown_key_of_a_checkpoint_is_named():
    with pytest.raises(ValueError, match="n_experts"):
        LlamaConfig.from_checkpoint({**STORIES42M_ARGS, "n_experts": 8})
    with pytest.raises(ValueError, match="not a dict"):
        LlamaConfig.from_checkpoint(["dim", 512])


def test_a_checkpoint_declares_its_attention_and_a_change_wins():
    declared = {**PRESETS["tiny"], "attention": "causal"}
    assert LlamaConfig.from_checkpoint(declared).is_causal
    assert not LlamaConfig.from_checkpoint(declared, attention="bidirectional").is_causal


@pytest.mark.parametrize("field", ["attention", "n_kv_heads", "hidden_dim", "rope_theta", "use_cache"])
def test_a_config_that_a_model_was_made_for_is_not_changed(field: str):
    config = LlamaConfig.from_preset("tiny")
    with pytest.raises(FrozenInstanceError, match=field):
        setattr(config, field, "causal")
    assert replace(config, attention="causal").is_causal and not config.is_causal
    assert replace(config) == config == pickle.loads(pickle.dumps(config)) and hash(replace(config)) == hash(config)
    with pytest.raises(ValueError, match="attention='sideways'"):
        replace(config, attention="sideways")


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="stories42M"):
        LlamaConfig.from_preset("stories43M")


def test_config_does_not_import_torch():
    code = "import sys, config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
