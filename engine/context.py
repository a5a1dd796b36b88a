"""One pass of a Llama whose attention is told positions, a mask and a cache: `AttentionContext`.

llama.py reads a whole text from position 0. A key/value cache, padding before a text, a mask of one's own and a query
at one position need more. Here they meet the model's own code: `ContextLlama` is a second set of modules that share
parameters, children and hooks with the model's; only the attention is of another class, `ContextAttention`, which has
`Attention.forward` once more, with a context. So what is edited in llama.py counts here as well, but for that method
and `rope.apply_rotary_emb`: `engine.passes.context_check` says whether these still agree.

Shapes:
    b batch      s query position   t key position   h query heads   g key/value heads
    d head dim   D model dim        v vocabulary
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from base_llama import causal_mask
from llama import Attention, Llama
from rope import Scaling, frequencies, rope_table


class AttentionContext(NamedTuple):
    """Positions and attention mask of one forward pass; every layer gets the same object.

    start: the position of the first token in its text, an int for all rows or a tensor of shape b (negative for a row
    that begins with padding). mask: bool, broadcasts to b h s t, True where a query may see a key; None: every query
    sees every key. at: b, the only query position of each row; None: every position is a query. cache: an object
    whose `store` adds the keys and values of earlier texts, as `KVCache` does.
    """

    start: int | torch.Tensor = 0
    mask: torch.Tensor | None = None
    at: torch.Tensor | None = None
    cache: Any = None

    @classmethod
    def of_text(cls, length: int, is_causal: bool, device: torch.device) -> AttentionContext:
        """The context of a pass over a whole text, from position 0."""
        return cls(mask=causal_mask(length, device) if is_causal else None)

    def queried_at(self, at: torch.Tensor) -> AttentionContext:
        """This context with one query in each row, at position `at` (b); it sees the same keys as before."""
        mask = self.mask
        if mask is not None and mask.shape[-2] > 1:  # a mask with one row is the same for all queries
            of_row = mask[at] if mask.dim() == 2 else mask[torch.arange(len(at), device=at.device), 0, at]  # b t
            mask = of_row[:, None, None]  # b 1 1 t
        return self._replace(mask=mask, at=at)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Select the query positions. x: b s D -> b s D, or b 1 D if `at` is set"""
        return x if self.at is None else x[torch.arange(len(self.at), device=self.at.device), self.at][:, None]


class ContextAttention(Attention):
    """`Attention` with a context: that of a call, else its own `context`, else that of a whole text."""

    context: AttentionContext | None = None
    layer_id = 0

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """x: b s D -> b s D, or b 1 D if the context has one query in each row"""
        context = context or self.context or AttentionContext.of_text(x.shape[1], self.is_causal, x.device)
        query = self.compute_query(context.queries(x)).unflatten(-1, (-1, self.head_dim))  # b s h d
        key, value = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.compute_key, self.compute_value))
        settings = self.head_dim, self.max_seq_len, *self.rope
        query_start = context.start if context.at is None else context.start + context.at
        query, key = rotate(query, query_start, *settings), rotate(key, context.start, *settings)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # b h s d, b g s d
        if context.cache is not None:
            key, value = context.cache.store(self.layer_id, key, value)  # b g t d
        if self.n_rep > 1:  # each key/value head serves n_rep query heads
            key, value = (part.repeat_interleave(self.n_rep, dim=1) for part in (key, value))  # b h t d
        mask = () if context.mask is None else (context.mask,)
        output = self.compute_query_key_value_scores(query, key, value, *mask)  # b h s d
        return self.resid_dropout(self.compute_output(output.transpose(1, 2).flatten(-2)))  # b s D


def rotate(
    x: torch.Tensor,
    start: int | torch.Tensor,
    head_dim: int,
    max_seq_len: int,
    theta: float = 10000.0,
    scaling: Scaling | None = None,
) -> torch.Tensor:
    """`rope.apply_rotary_emb` for queries or keys that begin at any position. x: b s h d -> b s h d

    start: as in `AttentionContext`; at a negative position the angle is 0.
    """
    length = x.shape[1]
    if isinstance(start, int):
        cos, sin = rope_table(head_dim, max(max_seq_len, start + length), theta, x.device, scaling)
        cos, sin = cos[start : start + length], sin[start : start + length]  # s d/2
    else:  # no table: reading the largest position from a tensor would make a GPU wait
        positions = (start[:, None] + torch.arange(length, device=x.device)).clamp(min=0)  # b s
        angles = positions[..., None].float() * frequencies(head_dim, theta, scaling).to(x.device)  # b s d/2
        cos, sin = angles.cos(), angles.sin()
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # b s h d/2
    turned = pairs * torch.complex(cos, sin).unsqueeze(-2)  # one angle for all heads
    return torch.view_as_real(turned).flatten(-2).type_as(x)


# ---------------------------------------------------------------------------------------------------- shared modules


def sharing(module: nn.Module, kind: type[nn.Module], **children: nn.Module) -> Any:
    """A module of the class `kind` that shares everything with `module`, but for these children."""
    shared = object.__new__(kind)  # not by the class: a sharded module's class would make the model's own
    own = {**vars(module), "_modules": {**module._modules, **children}}
    object.__setattr__(shared, "__dict__", own)
    for name in _slots(type(module)):
        object.__setattr__(shared, name, getattr(module, name))
    return shared


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """The names of the attributes that do not lie in `__dict__`, as those of a kernel."""
    return tuple(name for base in kind.__mro__ for name in vars(base).get("__slots__", ()))


@cache
def with_context(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of an attention of class `kind` that takes a context. What a subclass overrides stays overridden."""
    if issubclass(kind, ContextAttention):
        return kind
    if kind is Attention:
        return ContextAttention
    return getattr(kind, "with_context", None) or type(kind.__name__, (kind, ContextAttention), {})


class ContextLlama:
    """Reads texts by the code of a Llama as it stands, with a context. It is made for the modules of this moment."""

    def __init__(self, llama: Llama):
        self.attentions = [sharing(each.attention, with_context(type(each.attention))) for each in llama.layers]
        layers = []
        for number, (layer, attention) in enumerate(zip(llama.layers, self.attentions, strict=True)):
            vars(attention)["layer_id"] = number
            layers.append(sharing(layer, type(layer), attention=attention))
        self.llama = sharing(llama, type(llama), layers=nn.ModuleList(layers))

    def __call__(self, tokens: torch.Tensor, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Llama.forward`. tokens: b s -> logits b 1 v, hidden states b s D"""
        for attention in self.attentions:
            vars(attention)["context"] = context
        return self.llama(tokens)
