"""Reading with a context, engine/context.py: as llama.py reads, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import random_llama, slow_among
from test_rope import rotate_as_complex
from torch import nn

import base_llama
import llama
import rope
from base_llama import causal_mask
from engine.context import (
    AttentionContext,
    ContextAttention,
    ContextLlama,
    KVCache,
    embed,
    hidden_states,
    rotate,
    why_no_context,
)
from engine.decoding import Decoder, continue_texts
from engine.equivalence import notice
from engine.inference import generate
from llama import Attention, FeedForward, Llama, LlamaLayer, RMSNorm
from rope import apply_rotary_emb
from tokenizer import Tokenizer
from utils import UserError

TOKENS = torch.tensor([[1, 45, 299, 7, 7, 120, 33], [1, 45, 8, 260, 3, 3, 3]])


@pytest.fixture(autouse=True)
def notes_again() -> None:
    """A note is given once in a process; each test reads its own."""
    notice.cache_clear()


# ------------------------------------------------------------------------------------------------------ rotation


def test_a_text_is_continued_at_its_position():
    x = torch.randn(2, 12, 4, 8)
    whole, _ = apply_rotary_emb(x, x, 8, 32)
    assert torch.equal(whole[:, 5:], rotate(x[:, 5:], 5, 8, 32)) and torch.equal(whole, rotate(x, 0, 8, 32))


@pytest.mark.parametrize("scaling", [None, ("linear", 4.0), ("llama3", 8.0, 1.0, 4.0, 200.0)])
def test_every_row_may_start_somewhere_else(scaling: tuple | None):
    x, starts = torch.randn(3, 4, 2, 8), torch.tensor([0, 7, 20])  # also beyond max_seq_len
    rows = rotate(x, starts, 8, 16, 500.0, scaling)
    angles = rope.frequencies(8, 500.0, scaling).double()
    for row, start in enumerate(starts.tolist()):
        expected = rotate_as_complex(x[[row]], start=start, frequencies=angles)[0]
        torch.testing.assert_close(rows[row].double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(rows[row], rotate(x[[row]], start, 8, 16, 500.0, scaling)[0])


def test_half_precision_is_rotated_in_float32():
    x = torch.randn(2, 30, 2, 8).bfloat16()
    for start in (3, torch.tensor([3, 5])):
        turned = rotate(x, start, 8, 30)
        assert turned.dtype == torch.bfloat16
        assert torch.equal(turned, rotate(x.float(), start, 8, 30).bfloat16())


# ---------------------------------------------------------------------------------------------------- one pass


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_a_whole_text_is_read_as_by_the_model(attention: str, n_kv_heads: int):
    model = random_llama(attention=attention, n_kv_heads=n_kv_heads)
    context = AttentionContext.of_text(7, model.config.is_causal, TOKENS.device)
    for actual, expected in zip(ContextLlama(model)(TOKENS, context), model(TOKENS), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(hidden_states(model, TOKENS, context), ContextLlama(model)(TOKENS, context)[1])


def test_vectors_may_be_given_and_logits_are_not_computed():
    for attention in ("bidirectional", "causal"):
        model, seen = random_llama(attention=attention), []
        model.output.register_forward_hook(lambda *args, seen=seen: seen.append(args))
        states = model(TOKENS)[1]
        seen.clear()
        context = AttentionContext.of_text(7, model.config.is_causal, TOKENS.device)
        for read in (hidden_states(model, TOKENS), hidden_states(model, embedded=embed(model, TOKENS))):
            assert torch.equal(read, states)
        read = hidden_states(model, context=context, embedded=embed(model, TOKENS))
        torch.testing.assert_close(read, states, atol=1e-5, rtol=1e-5)
        assert not seen
    minus_one = TOKENS.masked_fill(TOKENS == 3, -1)
    assert torch.equal(embed(model, minus_one), model.tok_embeddings(minus_one.clamp(min=0)))


def test_a_mask_of_one_s_own_is_what_queries_see():
    """The second half of a text sees no first half: as if it were a text by itself, of the same positions."""
    model = random_llama(attention="causal")
    mask = causal_mask(7).clone()
    mask[3:, :3] = False
    whole = hidden_states(model, TOKENS, AttentionContext(0, mask))
    half = hidden_states(model, TOKENS[:, 3:], AttentionContext(3, causal_mask(4)))
    torch.testing.assert_close(whole[:, 3:], half, atol=1e-5, rtol=1e-5)
    alone = model(TOKENS[:, 3:])[1]  # rotation tells distances alone, so that positions may all be others
    torch.testing.assert_close(half, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [None, (7, 7), (2, 1, 7, 7), (2, 1, 1, 7)])
def test_one_query_sees_what_it_saw_among_all(shape: tuple[int, ...] | None):
    model, at = random_llama(), torch.tensor([2, 6])
    mask = None
    if shape is not None:
        mask = torch.rand(shape) < 0.6
        mask[..., 0] = True
    attention = ContextLlama(model).attentions[0]
    context, x = AttentionContext(2, mask), torch.randn(2, 7, 32)
    every = attention(x, context)
    one = attention(x, context.queried_at(at))
    assert one.shape == (2, 1, 32)
    torch.testing.assert_close(one[:, 0], every[torch.arange(2), at], atol=1e-5, rtol=1e-5)


def test_hooks_run_once_in_a_pass_of_the_model_and_in_one_with_a_context():
    model, seen = random_llama(attention="causal"), []
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    model(TOKENS)
    expected = list(seen)
    assert len(set(expected)) == len(expected) > 20
    cache = KVCache(model, 2, 7)
    for piece in (TOKENS[:, :4], TOKENS[:, 4:]):
        seen.clear()
        cache.read(piece)
        assert sorted(seen) == sorted(expected)


def test_what_a_hook_changes_is_changed_in_both():
    model = random_llama(attention="causal")
    before = model.generate(TOKENS, 12, 0.0)
    model.layers[0].register_forward_hook(lambda module, args, output: 0.3 * output)
    model.layers[1].attention.register_forward_hook(lambda module, args, output: output + 1.0)
    model.layers[1].feed_forward.register_forward_pre_hook(lambda module, args: (2.0 * args[0],))
    text = model.generate(TOKENS, 12, 0.0)
    assert torch.equal(continue_texts(model, TOKENS, 12, 0.0), text) and not torch.equal(text, before)


def test_a_subclass_of_attention_keeps_what_it_overrides():
    class Flat(Attention):
        def compute_query_key_value_scores(self, query: torch.Tensor, *others: Any) -> torch.Tensor:
            return super().compute_query_key_value_scores(0.1 * query, *others)

    model = random_llama(attention="causal")
    for layer in model.layers:
        layer.attention.__class__ = Flat
    kinds = [type(attention) for attention in ContextLlama(model).attentions]
    assert all(issubclass(kind, Flat) and issubclass(kind, ContextAttention) for kind in kinds)
    assert "layer 0 has another attention" in why_no_context(model)
    context = AttentionContext.of_text(7, True, TOKENS.device)
    torch.testing.assert_close(ContextLlama(model)(TOKENS, context)[1], model(TOKENS)[1], atol=1e-5, rtol=1e-5)


def test_gradients_go_through_a_pass_with_a_context():
    model = random_llama(attention="causal", n_kv_heads=2)
    direction = torch.randn(2, 7, 32)
    (model(TOKENS)[1] * direction).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    context = AttentionContext.of_text(7, True, TOKENS.device)
    (hidden_states(model, TOKENS, context) * direction).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ edits of llama.py


def without_positions(plain: Callable) -> Callable:
    """Attention that asks no rotation of the keys."""

    def forward(self: Attention, x: torch.Tensor) -> torch.Tensor:
        heads = (self.compute_query, self.compute_key, self.compute_value)
        query, key, value = (each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in heads)
        if self.n_rep > 1:
            key, value = (part.repeat_interleave(self.n_rep, dim=1) for part in (key, value))
        mask = (base_llama.causal_mask(x.shape[1]),) if self.is_causal else ()
        output = self.compute_query_key_value_scores(query, key, value, *mask)
        return self.compute_output(output.transpose(1, 2).flatten(-2))

    return forward


def values_of_the_past(plain: Callable) -> Callable:
    """Attention whose input at each position is mixed with that before."""
    return lambda self, x: plain(self, (x + F.pad(x, (0, 0, 1, -1))) / 2)


def half_vectors(plain: Callable) -> Callable:
    def rotated(query: torch.Tensor, key: torch.Tensor, head_dim: int, *others: Any) -> list[torch.Tensor]:
        order = torch.arange(head_dim).view(2, -1).T.flatten()
        turned = plain(query[..., order], key[..., order], head_dim, *others)
        return [each[..., order.argsort()] for each in turned]

    return rotated


def keys_alone(plain: Callable) -> Callable:
    return lambda query, key, *settings: (query, plain(query, key, *settings)[1])


def from_position_one(plain: Callable) -> Callable:
    """Of the queries alone, so that distances are others."""

    def rotated(query: torch.Tensor, key: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        later = F.pad(query, (0, 0, 0, 0, 1, 0))  # b s+1 h d
        return plain(later, later, *settings)[0][:, 1:], plain(query, key, *settings)[1]

    return rotated


def centred(plain: Callable) -> Callable:
    """A layer that mixes positions."""

    def forward(self: LlamaLayer, x: torch.Tensor) -> torch.Tensor:
        y = plain(self, x)
        return y - 0.9 * y.mean(1, keepdim=True)

    return forward


def shifted_in_layer_1(plain: Callable) -> Callable:
    """A layer whose tokens see the one before, in the place of what the tiny models of a comparison may not have."""

    def forward(self: LlamaLayer, x: torch.Tensor) -> torch.Tensor:
        y = plain(self, x)
        return y + F.pad(y, (0, 0, 1, -1)) * (self.layer_id == 3)

    return forward


def over_positions(plain: Callable) -> Callable:
    return lambda self, x: x / (x.square().mean((1, 2), keepdim=True) + 1e-5).sqrt()


def of_the_length(plain: Callable) -> Callable:
    return lambda self, tokens, targets=None: [part * tokens.shape[1] ** 0.5 for part in plain(self, tokens, targets)]


def reads_first(plain: Callable) -> Callable:
    def forward(self: Llama, tokens: torch.Tensor, targets: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        logits, h = plain(self, tokens, targets)
        return logits + 3 * self.output(h[:, :1]), h

    return forward


EDITS = {
    "Attention.forward: no rotation": (Attention, "forward", without_positions),
    "Attention.forward: a shift": (Attention, "forward", values_of_the_past),
    "apply_rotary_emb: half-vectors": (llama, "apply_rotary_emb", half_vectors),
    "apply_rotary_emb: keys alone": (llama, "apply_rotary_emb", keys_alone),
    "apply_rotary_emb: queries from 1": (llama, "apply_rotary_emb", from_position_one),
    "LlamaLayer.forward: centred": (LlamaLayer, "forward", centred),
    "LlamaLayer.forward: one layer": (LlamaLayer, "forward", shifted_in_layer_1),
    "FeedForward.forward: over positions": (FeedForward, "forward", over_positions),
    "RMSNorm.forward: over positions": (RMSNorm, "forward", over_positions),
    "Llama.forward: the first position": (Llama, "forward", reads_first),
}


def edited(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, edit = EDITS[name]
    monkeypatch.setattr(owner, attribute, edit(getattr(owner, attribute)))


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("when", slow_among(["before", "after"], ["before"]))
def test_after_an_edit_text_is_computed_whole(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, name: str, when: str
):
    """As by `Llama.generate`, which an edit is written for; one line says so, and where the edit is undone none."""
    model = random_llama(attention="causal", n_layers=4, n_kv_heads=2, gain=6.0, max_seq_len=24)
    before = model.generate(TOKENS, 30, 0.0)
    if when == "after":
        assert torch.equal(continue_texts(model, TOKENS, 30, 0.0), before) and capfd.readouterr().err == ""
    with monkeypatch.context() as patch:
        edited(patch, name)
        expected = model.generate(TOKENS, 30, 0.0)
        assert not torch.equal(expected, before), "the edit does nothing, and tests nothing"
        for text in (continue_texts(model, TOKENS, 30, 0.0), Decoder(model).generate(TOKENS, 30, 0.0)):
            assert torch.equal(text, expected)
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("note: every text is read whole, without a cache, positions or a mask of its own: ")
        with pytest.raises(UserError, match="positions or a mask of its own, which the model does not take"):
            hidden_states(model, TOKENS, AttentionContext(1))
    notice.cache_clear()
    assert torch.equal(continue_texts(model, TOKENS, 30, 0.0), before) and why_no_context(model) is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", [*EDITS][::3])
def test_the_command_gives_the_edited_text(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, name: str):
    model = random_llama(attention="causal", n_layers=4, n_kv_heads=2, gain=6.0)
    edited(monkeypatch, name)
    ids = torch.tensor([tokenizer.encode("A film", bos=True, eos=False)])
    expected = tokenizer.decode(model.generate(ids, 20, 0.0)[0].tolist())
    assert generate(model, tokenizer, "A film", 20, 0.0) == expected


def test_an_edit_that_changes_every_position_alike_keeps_the_cache(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    forward = LlamaLayer.forward
    monkeypatch.setattr(LlamaLayer, "forward", lambda self, x: 0.5 * forward(self, x) + x)
    model, made = random_llama(attention="causal"), []
    monkeypatch.setattr(KVCache, "store", lambda *args, store=KVCache.store: made.append(args) or store(*args))
    text = continue_texts(model, TOKENS, 20, 0.0)
    assert made and torch.equal(text, model.generate(TOKENS, 20, 0.0)) and capfd.readouterr().err == ""


@pytest.mark.parametrize("part", ["the model", "a layer", "an attention", "a subclass", "a layer's subclass"])
def test_a_forward_of_its_own_is_not_split(part: str):
    """What one model or module alone has is compared with nothing: its texts are read whole."""
    model = random_llama(attention="causal")
    if part == "the model":
        model.forward = lambda tokens, targets=None: reads_first(Llama.forward)(model, tokens, targets)
    elif part == "a layer":
        model.layers[1].forward = lambda x: centred(LlamaLayer.forward)(model.layers[1], x)
    elif part == "an attention":
        model.layers[1].attention.forward = lambda x: F.pad(x, (0, 0, 1, -1))
    elif part == "a subclass":
        model.__class__ = type("Other", (Llama,), {"forward": reads_first(Llama.forward)})
    else:
        model.layers[0].__class__ = type("Other", (LlamaLayer,), {"forward": centred(LlamaLayer.forward)})
    before = random_llama(attention="causal").generate(TOKENS, 20, 0.0)
    text = model.generate(TOKENS, 20, 0.0)
    assert torch.equal(continue_texts(model, TOKENS, 20, 0.0), text) and not torch.equal(text, before)
    assert why_no_context(model)


def test_modules_of_methods_may_be_read_with_a_cache():
    """A linear layer of another class, as LoRA's, gives each position by itself."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.5 * super().forward(x)

    model = random_llama(attention="causal")
    model.layers[0].feed_forward.w1.__class__ = Scaled
    assert why_no_context(model) is None
    assert torch.equal(continue_texts(model, TOKENS, 12, 0.0), model.generate(TOKENS, 12, 0.0))
