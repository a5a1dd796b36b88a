"""One position of the last layer, fast/last_position.py: what a classifier reads and trains is what llama.py gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import random_llama
from test_fast import TWO_LABELS
from torch import nn
from torch.profiler import profile

import classifier
from base_llama import sequence_lengths
from classifier import LlamaEmbeddingClassifier
from engine.equivalence import notice
from engine.families import reads_last
from fast import accelerate, last_position
from fast.last_position import hidden_state_at, next_logits, read_alone
from llama import Attention, FeedForward, Llama, LlamaLayer

PAD = 3
BATCH = torch.tensor([[1, 70, 80, 90, 5, 8], [1, 60, PAD, PAD, PAD, PAD], [1, PAD, 70, 9, PAD, PAD]])
SCALED = ("llama3", 8.0, 1.0, 4.0, 64.0)


@pytest.fixture(autouse=True)
def notes_again() -> None:
    """A note is given once in a process; each test reads its own."""
    notice.cache_clear()


def by_products(run: Callable[[], object]) -> int:
    """Operations of the products of linear layers."""
    with profile(with_flops=True) as watched:
        run()
    return sum(event.flops for event in watched.key_averages() if event.key in ("aten::mm", "aten::addmm"))


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("changes", [{}, {"rope_scaling": SCALED}, {"norm": "layer"}, {"n_layers": 1}])
def test_one_position_is_that_of_the_whole_pass(attention: str, n_kv_heads: int, changes: dict):
    model = random_llama(attention=attention, n_kv_heads=n_kv_heads, **changes)
    whole = model(BATCH)[1]  # b s D
    for at in ([5, 5, 5], [0, 3, 1], [4, 0, 5]):
        expected = whole[torch.arange(3), at]
        torch.testing.assert_close(hidden_state_at(model, BATCH, torch.tensor(at)), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(next_logits(model, BATCH), model(BATCH)[0][:, 0], atol=1e-5, rtol=1e-5)
    long = random_llama(attention=attention, max_seq_len=4)
    torch.testing.assert_close(next_logits(long, BATCH), long(BATCH[:, -4:])[0][:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("n_kv_heads", [4, 1])
def test_what_is_read_and_its_gradients_are_those_of_the_classifier_s_own(attention: str, n_kv_heads: int):
    model, results, operations = random_llama(attention=attention, n_kv_heads=n_kv_heads), [], []
    direction = torch.randn(3, 32)
    read_alone(model, BATCH, PAD)  # compares it with llama.py
    for read in (classifier.read_last, read_alone):
        model.zero_grad()
        operations.append(by_products(lambda read=read: results.append(read(model, BATCH, PAD))))
        (results[-1] * direction).sum().backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    expected, of_expected, actual, of_actual = results
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for mine, its in zip(of_actual, of_expected, strict=True):
        assert (mine - its).abs().max() <= 1e-5 * its.abs().max()
    config = model.config
    of_position = 2 * (2 * config.dim**2 + 3 * config.dim * config.hidden_dim)
    of_logits = 2 * 3 * config.dim * config.vocab_size  # which `read_alone` leaves out as well
    assert operations[0] - operations[1] == 3 * 5 * of_position + of_logits


def made(attention: str = "causal", **changes: Any) -> LlamaEmbeddingClassifier:
    model = random_llama(attention=attention, n_layers=3, **changes)
    torch.manual_seed(1)
    return LlamaEmbeddingClassifier(TWO_LABELS, llama=model).eval()


def test_an_accelerated_classifier_reads_so_unless_it_reads_in_its_own_way():
    model = made()
    assert model.read is classifier.read_last
    for precision in ("fp32", "bf16", "fp32"):
        accelerate(model, precision)
        assert model.read is read_alone and reads_last(model)
    model.read = lambda llama, tokens, pad: llama(tokens)[1].mean(1)  # a method's own
    mine = model.read
    accelerate(model)
    assert model.read is mine and not reads_last(model)


def centred(plain: Callable) -> Callable:
    def forward(self: LlamaLayer, x: torch.Tensor) -> torch.Tensor:
        y = plain(self, x)
        return y - y.mean(1, keepdim=True)

    return forward


def centred_at_last(plain: Callable) -> Callable:
    return lambda self, x: centred(plain)(self, x) if self.layer_id == 2 else plain(self, x)


def mean_of_states(plain: Callable) -> Callable:
    def forward(self: Llama, tokens: torch.Tensor, targets: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        logits, h = plain(self, tokens, targets)
        return logits, h + h.mean(1, keepdim=True)

    return forward


def shifted(plain: Callable) -> Callable:
    return lambda self, x: plain(self, x + F.pad(x, (0, 0, 1, -1)))


EDITS = {
    "LlamaLayer.forward": (LlamaLayer, "forward", centred),
    "LlamaLayer.forward of the last layer": (LlamaLayer, "forward", centred_at_last),
    "Llama.forward": (Llama, "forward", mean_of_states),
    "Attention.forward": (Attention, "forward", shifted),
    "FeedForward.forward": (FeedForward, "forward", shifted),
}


def check_equal(plain: nn.Module, fast: nn.Module, before: torch.Tensor) -> None:
    """Log-probabilities and gradients of both, which are no longer what they were."""
    expected = plain(BATCH)
    assert not torch.allclose(expected, before, atol=1e-3), "the edit does nothing, and tests nothing"
    torch.testing.assert_close(fast(BATCH), expected, atol=1e-4, rtol=1e-4)
    gradients = []
    for model in (plain, fast):
        model.zero_grad()
        F.nll_loss(model(BATCH), torch.tensor([0, 1, 1])).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for mine, its in zip(*reversed(gradients), strict=True):
        assert (mine - its).abs().max() <= 1e-3 * its.abs().max()


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_edit_of_llama_py_is_what_is_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, attention: str, name: str, when: str
):
    plain, fast = made(attention), made(attention)
    before, (owner, attribute, edit) = plain(BATCH).detach(), EDITS[name]
    if when == "after":
        accelerate(fast)
        torch.testing.assert_close(fast(BATCH), before, atol=1e-5, rtol=1e-5)
        assert last_position.agrees(fast.llama) and capfd.readouterr().err == ""
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, edit(getattr(owner, attribute)))
        accelerate(fast)
        check_equal(plain, fast, before)
        lines = capfd.readouterr().err.splitlines()
        assert sum("every position of the last layer is computed: " in line for line in lines) == 1
    assert last_position.agrees(fast.llama)  # and when it is taken back
    torch.testing.assert_close(fast(BATCH), before, atol=1e-5, rtol=1e-5)


def second_position(llama: Llama, token_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    return llama(token_ids)[1][:, 1]


def one_before(llama: Llama, token_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """The last token but one, of causal models."""
    at = torch.full_like(token_ids[:, 0], token_ids.shape[1] - 1)
    if llama.config.is_causal:
        at = sequence_lengths(token_ids, pad_id) - 2
    return llama(token_ids)[1][torch.arange(len(at)), at]


@pytest.mark.parametrize("edit", [second_position, one_before])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_an_edit_of_read_last_is_what_is_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, edit: Callable, when: str
):
    """Before a classifier is made, before it is accelerated, and afterwards: by another text of the function."""
    assert last_position.READ_CHECK.holds()  # whatever it was asked of last, the edit comes anew
    fast, before = made(), made()(BATCH).detach()
    if when == "after":
        accelerate(fast)
        assert fast.read is read_alone
    monkeypatch.setattr(classifier.read_last, "__code__", edit.__code__)
    if when == "before":
        fast = made()
    if when != "after":
        accelerate(fast)
    check_equal(made(), fast, before)
    accelerate(fast)
    assert fast.read is classifier.read_last
    check_equal(made(), fast, before)
    assert "classifier.read_last is computed as it is written" in capfd.readouterr().err


def test_a_replaced_read_last_counts(monkeypatch: pytest.MonkeyPatch):
    accelerate(fast := made())  # compares it as it is
    before = fast(BATCH).detach()
    monkeypatch.setattr(classifier, "read_last", second_position)
    fast = made()
    accelerate(fast)
    check_equal(made(), fast, before)


@pytest.mark.parametrize("part", ["forward", "attention", "class"])
def test_a_last_layer_of_its_own_gives_every_position(part: str):
    plain, fast = made(), made()
    before = plain(BATCH).detach()
    for model in (plain, fast):
        last = model.llama.layers[-1]
        if part == "forward":
            last.forward = lambda x, last=last: centred(LlamaLayer.forward)(last, x)
        elif part == "attention":
            last.attention.forward = lambda x: F.pad(x, (0, 0, 1, -1))
        else:
            last.__class__ = type("Other", (LlamaLayer,), {"forward": centred(LlamaLayer.forward)})
    accelerate(fast)
    assert not last_position.agrees(fast.llama)
    check_equal(plain, fast, before)
