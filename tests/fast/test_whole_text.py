"""Texts that are computed anew for every token, fast/whole_text.py: their tokens are those of llama.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import random_llama
from test_last_position import EDITS, SCALED
from torch import nn

from engine.decoding import logits_after
from engine.equivalence import notice
from fast import accelerate, decoder
from fast.decode import WholeTextDecoder
from fast.kernel import replace
from fast.linear import OneDNNLinear, has_onednn
from fast.whole_text import WholeTextEngine
from llama import Llama
from utils import UserError

TEXTS = torch.randint(0, 100, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def notes_again() -> None:
    """A note is given once in a process; each test reads its own."""
    notice.cache_clear()


def check_texts(model: Llama, ours: WholeTextDecoder, idx: torch.Tensor = TEXTS) -> None:
    expected = model.generate(idx, 5, 0.0)
    assert torch.equal(ours.generate(idx, 5, 0.0), expected)
    torch.testing.assert_close(ours._next_logits(expected, None), logits_after(model, expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "changes", [{}, {"rope_scaling": SCALED}, {"norm": "layer"}, {"n_layers": 1}, {"tied": False}, {"max_seq_len": 20}]
)
def test_the_engine_computes_what_the_model_does(n_kv_heads: int, changes: dict[str, Any]):
    model = random_llama(n_kv_heads=n_kv_heads, **changes)
    ours = decoder(model)
    assert ours._may_compute() and ours._engine is not None
    check_texts(model, ours)
    check_texts(model, ours, TEXTS[:1, :3])  # and where the text is short, the model
    padded = TEXTS.clone()
    padded[0, :2] = -1
    torch.testing.assert_close(ours._next_logits(padded, None), logits_after(model, padded), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not has_onednn(), reason="oneDNN's products do not work here")
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_packed_weights_lie_side_by_side(n_kv_heads: int):
    model = random_llama(dim=128, hidden_dim=384, n_kv_heads=n_kv_heads)
    plain = WholeTextEngine(model)
    replace(model, {part: OneDNNLinear.from_linear(part) for part in model.modules() if type(part) is nn.Linear})
    packed = WholeTextEngine(model)
    assert all(product.packed is not None for product in (packed.head, *packed.layers[0][1:3], *packed.layers[0][4:]))
    torch.testing.assert_close(packed.next_logits(TEXTS), plain.next_logits(TEXTS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in EDITS if name != "Llama.forward"])
def test_an_edit_of_llama_py_is_what_is_generated(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, name: str
):
    model = random_llama(n_layers=3)
    ours, before = decoder(model), logits_after(model, TEXTS)
    assert ours._may_compute()
    owner, attribute, edit = EDITS[name]
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, edit(getattr(owner, attribute)))
        assert not torch.allclose(logits_after(model, TEXTS), before, atol=1e-3), "the edit does nothing"
        assert not ours._may_compute()
        assert torch.equal(ours.generate(TEXTS, 5, 0.0), model.generate(TEXTS, 5, 0.0))
        lines = capfd.readouterr().err.splitlines()
        assert sum("text is generated as the model is written: " in line for line in lines) == 1
    assert ours._may_compute()


def test_other_kernels_compute_for_themselves():
    """The decoder was made for float32; then the layers are given other formats, or a bias."""
    model = random_llama()
    ours = decoder(model)
    assert ours._may_compute() and ours._engine is not None
    accelerate(model, "bf16")
    assert ours._may_compute() and ours._engine is None
    assert torch.equal(ours.generate(TEXTS, 5, 0.0), model.generate(TEXTS, 5, 0.0))
    accelerate(model)
    assert ours._may_compute() and ours._engine is not None


def test_a_bias_is_no_engine_s():
    model = random_llama()
    gate = model.layers[0].feed_forward.w1
    gate.bias = nn.Parameter(torch.ones(gate.out_features))
    ours = decoder(model)
    assert ours.generate(TEXTS, 5, 0.0).equal(model.generate(TEXTS, 5, 0.0)) and ours._engine is None


@pytest.mark.parametrize("length", [3, 24])
def test_numbers_that_are_not_finite_are_an_error(length: int):
    model = random_llama()
    model.layers[0].attention.compute_query.weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        decoder(model).generate(TEXTS[:, :length], 5, 0.0)
