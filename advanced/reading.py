"""How a text becomes the vector that is classified, in three parts that a method may change each by itself:

    embed    the tokens' vectors, perhaps behind trained ones           (prompt-tuning)
    see      which positions are seen: all, or those of real tokens     (padding-mask)
    pool     what is read of the last layer: one position, or several   (pooling)

A `TextRepresentation` in which nothing was changed is `classifier.read_last`.

Shapes: b batch   p position of the prompt   s position of the text   D model dim
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from base_llama import AttentionContext, causal_mask, sequence_lengths
from classifier import read_last
from llama import Llama
from utils import UserError


def is_within(lengths: torch.Tensor, size: int) -> torch.Tensor:
    """Which of so many positions stand before the end of a row. lengths: b -> b s, boolean"""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


class TextRepresentation(nn.Module):
    """What stands in the place of a classifier's `read`.

    prompt: p D, vectors before the text. hides_padding: whether a bidirectional model sees real tokens alone. pool:
    "mean", "attention" or "last", of the real tokens; None for the position that the base reads. query: D, what
    "attention" compares the tokens with.
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
        context = self.see(llama, is_real, before)
        if self.pool in ("mean", "attention"):
            states = llama.encode(h, context)[:, before:]  # b s D
            return (self.weights(states, is_real)[..., None] * states).sum(dim=1)  # b D
        reads_last_real = llama.config.is_causal or self.hides_padding or self.pool == "last"
        at = before + lengths - 1 if reads_last_real else torch.full_like(lengths, h.shape[1] - 1)  # b
        return llama.encode(h, context, at)[:, 0]  # b D

    def embed(self, llama: Llama, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: b s -> b p+s D"""
        h = llama.embed(token_ids)  # b s D
        if self.prompt is None:
            return h
        return torch.cat((self.prompt.to(h.dtype).expand(len(h), -1, -1), h), dim=1)

    def see(self, llama: Llama, is_real: torch.Tensor, before: int) -> AttentionContext:
        """is_real: b s. before: how many vectors stand before the text, which are always seen."""
        if llama.config.is_causal:
            length = before + is_real.shape[1]
            return AttentionContext(mask=causal_mask(length, length, is_real.device))  # p+s p+s
        if not self.hides_padding:
            return AttentionContext()
        is_seen = torch.cat((is_real.new_ones(len(is_real), before), is_real), dim=1)  # b p+s
        return AttentionContext(mask=is_seen[:, None, None, :])  # b 1 1 p+s: all queries see the same

    def weights(self, states: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
        """How much each token counts: 0 for padding, 1 in all. states: b s D, is_real: b s -> b s"""
        if self.pool == "mean":
            return is_real / is_real.sum(dim=1, keepdim=True)
        scores = states @ self.query / math.sqrt(states.shape[-1])  # b s
        return scores.masked_fill(~is_real, float("-inf")).softmax(dim=-1)


class Listening:
    """What a layer's attention takes for a cache: keeps the keys and values that it is given, b g s d of each layer.

    No dataclass, as `Heard` is none: of one among a layer's inputs, `fully_shard` hands on a copy, which is lost.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[torch.Tensor, torch.Tensor]] = []

    def store(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.heard.append((key, value))
        return key, value


class Heard:
    """The same with texts that were read before: each stands in front of `copies` rows, one after the other.

    As a `KVCache`, but gradients flow through it, and the texts are read once for all rows.
    """

    def __init__(self, texts: Listening, copies: int):
        self.texts, self.copies = texts, copies

    def store(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """key and value: r g k d -> r g s+k d"""
        before = (x.repeat_interleave(self.copies, dim=0) for x in self.texts.heard[layer_id])  # r g s d
        key, value = (torch.cat(pair, dim=2) for pair in zip(before, (key, value), strict=True))
        return key, value


def reading_of(model: nn.Module) -> TextRepresentation:
    """The `TextRepresentation` of a classifier, put there by whichever method asks first.

    Raises `UserError` if the classifier has no `read`, or one of its own. A classifier that has one and does not ask it
    is refused when it has computed its first outputs.
    """
    if not isinstance(getattr(model, "read", None), TextRepresentation):
        if getattr(model, "read", None) is not read_last:
            raise UserError("this classifier reads a text in its own way, which a method cannot change")
        model.read = TextRepresentation()
        model.register_forward_hook(_refuse_what_does_not_ask)
    return model.read


def _refuse_what_does_not_ask(model: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
    if not model.read.is_asked:
        raise UserError(
            "the classifier's forward does not call self.read(self.llama, token_ids, pad_id), so the methods that "
            "change how a text is read would do nothing"
        )
