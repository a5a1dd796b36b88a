"""How a text becomes the vector that is classified: three parts, each of which a method may change.

    embed    the tokens' vectors, perhaps behind trained ones                (prompt-tuning)
    see      the positions that attention sees: all, or the real tokens      (padding-mask)
    pool     the states of the last layer that are read: one, or several     (pooling)

An unchanged `TextRepresentation` computes the same as `classifier.read_last`.

Shapes: b batch   p position of the prompt   s position of the text   D model dim
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from base_llama import sequence_lengths
from engine.context import AttentionContext, embed, hidden_states, last_rows
from engine.families import reads_last
from llama import Llama
from utils import UserError


def is_within(lengths: torch.Tensor, size: int) -> torch.Tensor:
    """Which of `size` positions lie within each row's length. lengths: b -> b s, boolean"""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


class TextRepresentation(nn.Module):
    """Replaces a classifier's `read`.

    prompt: p D, vectors before the text. hides_padding: whether a bidirectional model sees only the real tokens. pool:
    "mean", "attention" or "last", of the real tokens; None: the position that the base reads. query: D, the trained
    query of "attention".
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("prompt", None)
        self.register_parameter("query", None)
        self.hides_padding = False
        self.pool: str | None = None
        self.is_asked = False

    def forward(self, llama: Llama, token_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
        """token_ids: b s -> b D"""
        self.is_asked = True
        lengths = sequence_lengths(token_ids, pad_id)  # b
        is_real = is_within(lengths, token_ids.shape[1])  # b s
        h = self.embed(llama, token_ids)  # b p+s D
        before = h.shape[1] - token_ids.shape[1]
        states = hidden_states(llama, context=self.see(llama, is_real, before), embedded=h)  # b p+s D
        if self.pool in ("mean", "attention"):
            return pooled(states[:, before:], is_real, self.pool, self.query)
        reads_last_real = llama.config.is_causal or self.hides_padding or self.pool == "last"
        at = before + lengths - 1 if reads_last_real else torch.full_like(lengths, h.shape[1] - 1)  # b
        return states[torch.arange(len(at), device=at.device), at]  # b D

    def embed(self, llama: Llama, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: b s -> b p+s D"""
        h = embed(llama, token_ids)  # b s D
        if self.prompt is None:
            return h
        return torch.cat((self.prompt.to(h.dtype).expand(len(h), -1, -1), h), dim=1)

    def see(self, llama: Llama, is_real: torch.Tensor, before: int) -> AttentionContext | None:
        """The mask; None: the model's own. is_real: b s. before: the number of vectors before the text, always seen."""
        if llama.config.is_causal or not self.hides_padding:
            return None
        is_seen = torch.cat((is_real.new_ones(len(is_real), before), is_real), dim=1)  # b p+s
        return AttentionContext(mask=is_seen[:, None, None, :])  # b 1 1 p+s: all queries see the same


def pooled(states: torch.Tensor, is_real: torch.Tensor, kind: str, query: torch.Tensor | None = None) -> torch.Tensor:
    """A weighted sum of the states of real tokens. kind, query: see `TextRepresentation`. states: b s D -> b D"""
    if kind == "attention":
        scores = states @ query / math.sqrt(states.shape[-1])  # b s
        weights = scores.masked_fill(~is_real, float("-inf")).softmax(dim=-1)  # b s
    else:
        counted = is_real if kind == "mean" else is_real & (is_real.cumsum(dim=1) == is_real.sum(dim=1, keepdim=True))
        weights = counted / counted.sum(dim=1, keepdim=True)  # b s
    return (weights[..., None] * states).sum(dim=1)


class Listening:
    """A cache of a layer's attention that only keeps the keys and values it is given, b g s d of each layer.

    Neither this nor `Heard` is a dataclass: `fully_shard` copies dataclasses among a layer's inputs, and what is kept
    in the copy would be lost.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def length(self) -> int:
        """The number of positions that were read."""
        return self.heard[0][0].shape[2]

    def store(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.heard.append((key, value))
        return key, value


class Continued(Listening):
    """A cache of texts that continue one text, which was read before; it is kept in front of each of them."""

    def __init__(self, before: Listening):
        super().__init__()
        self.before = before

    def store(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """key and value: b g s d -> b g p+s d"""
        before = (x.expand(len(key), -1, -1, -1) for x in self.before.heard[layer_id])  # b g p d
        return super().store(layer_id, *(torch.cat(pair, dim=2) for pair in zip(before, (key, value), strict=True)))


def context_after(
    before: Listening | None, token_ids: torch.Tensor, begin: int
) -> tuple[torch.Tensor, AttentionContext]:
    """The tokens that a causal model has still to read of each row, and the context of this pass. token_ids: b s

    before: the one text that stands before all rows, in the place of their first `begin` tokens (bos); None: no text.
    """
    if before is None:
        return token_ids, AttentionContext.of_text(token_ids.shape[1], True, token_ids.device)
    p, s = before.length, token_ids.shape[1] - begin
    return token_ids[:, begin:], AttentionContext(p, last_rows(s, p + s, token_ids.device), cache=Continued(before))


class Heard:
    """A cache with texts that were read before: each text stands before the next `copies` rows.

    It is like a `KVCache`, but gradients flow through it, and each text is read once for all of its rows.
    """

    def __init__(self, texts: Listening, copies: int):
        self.texts, self.copies = texts, copies

    def store(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """key and value: r g k d -> r g s+k d"""
        before = (x.repeat_interleave(self.copies, dim=0) for x in self.texts.heard[layer_id])  # r g s d
        key, value = (torch.cat(pair, dim=2) for pair in zip(before, (key, value), strict=True))
        return key, value


def reading_of(model: nn.Module) -> TextRepresentation:
    """The `TextRepresentation` of a classifier; the first call puts it in the place of `read`.

    Raises `UserError` if the classifier has no `read` or another one. If its `forward` does not call `self.read`, a
    `UserError` is raised after its first outputs.
    """
    if not isinstance(getattr(model, "read", None), TextRepresentation):
        if not reads_last(model):
            raise UserError("this classifier reads a text in its own way, which a method cannot change")
        model.read = TextRepresentation()
        model.register_forward_hook(_check_that_read_was_called)
    return model.read


def _check_that_read_was_called(model: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
    if not model.read.is_asked:
        raise UserError(
            "the classifier's forward does not call self.read(self.llama, token_ids, pad_id), so the methods that "
            "change how a text is read would do nothing"
        )
