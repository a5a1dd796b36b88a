"""The hidden state at one position of each text: elsewhere the last layer computes only keys and values.

A classifier reads one position of all those that `Llama.forward` returns, and so does the next token of a text that is
computed anew for every token. For stories42M's shape that saves a tenth of the products.

Shapes:  b texts   s positions   D model dim   v vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

import classifier
from base_llama import sequence_lengths
from config import ATTENTION_KINDS, LlamaConfig
from engine.context import (
    LIMIT,
    LONG_TEXT,
    AttentionContext,
    ContextAttention,
    has_known_attention,
    has_own_forward,
    sharing,
    small_models,
    with_context,
)
from engine.equivalence import Case, Comparison, EquivalenceCheck
from engine.weights import computable_kinds
from llama import NORMS, Attention, FeedForward, Llama, LlamaLayer

ASKED = (LlamaLayer, Attention, FeedForward, (Llama, "forward"))


class LastLayer(LlamaLayer):
    """`LlamaLayer` at the query positions of its attention's context."""

    attention: ContextAttention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: b s D -> b 1 D"""
        h = self.attention.context.queries(x) + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


def hidden_state_at(llama: Llama, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The hidden state of `Llama.forward` at one position of each row. tokens: b s, at: b -> b D"""
    *earlier, last = llama.layers
    attention = sharing(last.attention, with_context(type(last.attention)))
    context = AttentionContext.of_text(tokens.shape[1], llama.config.is_causal, tokens.device)
    vars(attention)["context"] = context.queried_at(at)
    layers = nn.ModuleList([*earlier, sharing(last, LastLayer, attention=attention)])
    return sharing(llama, type(llama), layers=layers, output=nn.Identity())(tokens)[1][:, 0]


def next_logits(llama: Llama, idx: torch.Tensor) -> torch.Tensor:
    """The logits after each text, of which the model sees the last `max_seq_len` tokens. idx: b s -> b v"""
    tokens = idx[:, -llama.config.max_seq_len :]
    return llama.output(hidden_state_at(llama, tokens, torch.full_like(tokens[:, 0], tokens.shape[1] - 1)))


def read_alone(llama: Llama, token_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """As `classifier.read_last`, which computes where this does not agree with the model. token_ids: b s -> b D

    So it does where the last layer draws dropout masks: for one position they would be other ones.
    """
    if has_dropout(llama.layers[-1]) or not (READ_CHECK.holds() and agrees(llama)):
        return as_written(llama, token_ids, pad_id)
    if llama.config.is_causal:
        return hidden_state_at(llama, token_ids, sequence_lengths(token_ids, pad_id) - 1)
    return hidden_state_at(llama, token_ids, torch.full_like(token_ids[:, 0], token_ids.shape[1] - 1))


read_alone.replaces = classifier.read_last  # `engine.families.reads_last` knows it by that


def as_written(llama: Llama, token_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """By the function that has the name now."""
    return classifier.read_last(llama, token_ids, pad_id)


def agrees(llama: Llama) -> bool:
    """Whether `hidden_state_at` gives what the model gives, as llama.py stands."""
    last = llama.layers[-1]
    if has_own_forward(last, LlamaLayer) or not has_known_attention(last):
        return False
    return last_position_check(tuple(vars(llama.config).items())).holds()


def has_dropout(layer: nn.Module) -> bool:
    """Whether a part of a layer drops numbers in training, an `nn.Dropout` or what stands in its place."""
    return any(part.training and getattr(part, "p", 0.0) > 0.0 for part in layer.modules())


def read_one_position(model: nn.Module) -> None:
    """Let every classifier in `model` that reads the last position compute that one alone in the last layer."""
    for part in model.modules():
        if vars(part).get("read") in (classifier.read_last, read_alone):
            part.read = read_alone if READ_CHECK.holds() else classifier.read_last


# ------------------------------------------------------------------------------------------- comparison with llama.py


@lru_cache(maxsize=16)
def last_position_check(config: tuple[tuple[str, Any], ...]) -> EquivalenceCheck:
    """Whether `hidden_state_at` agrees with a model of these settings, as llama.py stands."""
    made = LlamaConfig(**dict(config))
    said = "every position of the last layer is computed"
    return EquivalenceCheck("Llama.forward", (*ASKED, NORMS[made.norm]), partial(_sides, made), instead=said)


def compared_models(config: LlamaConfig) -> dict[tuple[str, int], Llama]:
    """A small model as deep as `config` says, because an edit may concern one layer, and two of two layers.

    The first has the attention of `config`, the second the other one, and the third reads `LONG_TEXT` tokens.
    """
    other = "bidirectional" if config.is_causal else "causal"
    depths = {(config.attention, LIMIT): config.n_layers, (other, LIMIT): 2, (config.attention, LONG_TEXT): 2}
    return small_models(config, depths)


def _sides(config: LlamaConfig) -> Comparison:
    models = compared_models(config)

    def plain(which: tuple[str, int], tokens: torch.Tensor, at: torch.Tensor) -> list[torch.Tensor]:
        logits, h = models[which](tokens)
        every = models[which](tokens, tokens)[0]
        return [h[torch.arange(len(at)), at], logits[:, -1], every[:, -1]]

    def kernel(which: tuple[str, int], tokens: torch.Tensor, at: torch.Tensor) -> list[torch.Tensor]:
        logits = next_logits(models[which], tokens)
        return [hidden_state_at(models[which], tokens, at), logits, logits]

    return Comparison(plain, kernel, list(_cases(models)))


def _cases(models: dict[tuple[str, int], Llama]) -> Iterator[Case]:
    """Which model, texts, and a position of each; the deep model's gradients as well."""

    def tokens(texts: int, length: int) -> torch.Tensor:
        return torch.randint(0, 50, (texts, length))

    deep, other, long = models
    trained = tuple(each for name, each in models[deep].named_parameters() if "embeddings" in name or ".0." in name)
    yield Case(f"{deep[0]}, several texts", (deep, tokens(3, 4), torch.tensor([3, 0, 2])), trained)
    yield Case(f"{deep[0]}, one token", (deep, tokens(1, 1), torch.tensor([0])))
    if other[0] in computable_kinds():
        yield Case(f"{other[0]}, two texts", (other, tokens(2, LIMIT), torch.tensor([LIMIT - 1, 5])))
    yield Case(f"{LONG_TEXT} tokens", (long, tokens(1, LONG_TEXT), torch.tensor([LONG_TEXT - 1])))


def _readings() -> Comparison:
    configs = (LlamaConfig.from_preset("tiny", attention=kind) for kind in ATTENTION_KINDS)
    models = [Llama(config).eval().requires_grad_(False) for config in configs]
    for layer in models[-1].layers if "causal" not in computable_kinds() else ():
        layer.attention.is_causal = False  # it cannot be computed; where a causal model is read can be compared

    def ask(read: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
        return lambda tokens: [read(each, tokens, 3) for each in models]

    tokens = torch.tensor([[1, 7, 9, 3, 5], [1, 8, 3, 3, 3]])
    return Comparison(ask(as_written), ask(read_alone), [Case("two texts", (tokens,))])


READ_CHECK = EquivalenceCheck("classifier.read_last", (as_written,), _readings, but=(Llama,))
