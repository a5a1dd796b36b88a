"""A Llama that is wrong on purpose: usual mistakes (see `grading/mistakes.py`) and parts that are switched off.

`page/live/model.js` has the same switches; the tests compare both with each other and with `grading/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from engine.context import rotate
from explore.look import ForwardRecord, read, replaced, with_attention
from llama import Attention, Llama, LlamaLayer


class Break(NamedTuple):
    """A usual mistake. code: the line that it changes, as it stands in `file`. page: the component's, in docs/."""

    file: str
    code: str
    page: str


BREAKS = {
    "mask": Break("llama.py", "scores = scores.masked_fill(~mask, float", "mask.md"),
    "scores": Break("llama.py", "scores = query @ key.transpose", "attention.md"),
    "halves": Break("rope.py", "pairs = (torch.view_as_complex", "rope.md"),
    "position": Break("llama.py", "query, key = apply_rotary_emb", "rope.md"),
    "heads": Break("llama.py", "part.repeat_interleave(self.n_rep", "grouped-queries.md"),
    "repeat": Break("llama.py", "part.repeat_interleave(self.n_rep", "grouped-queries.md"),
    "residual": Break("llama.py", "h = x + self.attention", "layer.md"),
    "gelu": Break("llama.py", "return self.dropout(self.w2(F.silu", "swiglu.md"),
    "norm": Break("llama.py", "return x * torch.rsqrt(x.pow(2)", "rmsnorm.md"),
}


@dataclass(frozen=True)
class Switches:
    """What is wrong or off. attention: None is the model's own. breaks: names of `BREAKS`.

    off: layers ("2") and heads ("2.1": layer 2, head 1) whose output is dropped. uniform: heads whose weights are all
    equal. Raises `ValueError` for a name that is unknown.
    """

    attention: str | None = None
    breaks: Collection[str] = ()
    off: Collection[str] = ()
    uniform: Collection[str] = ()

    def __post_init__(self) -> None:
        if unknown := {*self.breaks} - BREAKS.keys():
            raise ValueError(f"no switch {sorted(unknown)[0]!r}; there are {', '.join(BREAKS)}")

    def attention_of(self, llama: Llama) -> str:
        """The kind of attention under these switches."""
        kind = self.attention or llama.config.attention
        if "mask" in self.breaks:
            return "bidirectional" if kind == "causal" else "causal"
        return kind


def read_broken(llama: Llama, ids: Sequence[int], switches: Switches) -> ForwardRecord:
    """`look.read` under switches. A layer that is off has no attention: its weights are 0."""
    with broken(llama, switches):
        record = read(llama, ids, llama.config.attention)
    for number, _ in enumerate(llama.layers):
        if f"{number + 1}" in switches.off:
            record.attention.insert(number, torch.zeros(llama.config.n_heads, len(ids), len(ids)))
    return record


@contextmanager
def broken(llama: Llama, switches: Switches) -> Iterator[None]:
    """Change a model inside the block; after it the model is as before."""
    with ExitStack() as undone:
        undone.enter_context(with_attention(llama, switches.attention_of(llama)))

        def put(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
            undone.enter_context(replaced(module, name, function))

        for number, layer in enumerate(llama.layers, 1):
            attention = layer.attention
            put(attention, "compute_query_key_value_scores", _attend(attention, number, switches))
            if "halves" in switches.breaks:
                for linear in (attention.compute_query, attention.compute_key):
                    undone.callback(linear.register_forward_hook(_halves_as_neighbours(attention.head_dim)).remove)
            if "gelu" in switches.breaks:
                put(layer.feed_forward, "forward", _with_gelu(layer.feed_forward))
            if f"{number}" in switches.off:
                undone.enter_context(_of_class(layer, LayerThatIsOff))
            elif "residual" in switches.breaks:
                undone.enter_context(_of_class(layer, LayerWithoutResidual))
        for norm in (module for module in llama.modules() if hasattr(module, "_norm") and "norm" in switches.breaks):
            put(norm, "_norm", _without_square(norm))
        yield


class LayerWithoutResidual(LlamaLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.feed_forward(self.ffn_norm(self.attention(self.attention_norm(x))))


class LayerThatIsOff(LlamaLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@contextmanager
def _of_class(layer: LlamaLayer, kind: type[LlamaLayer]) -> Iterator[None]:
    """A class, not a function: so a layer that a cache shares (`engine.context`) calls its own attention."""
    kept = type(layer)
    layer.__class__ = kind
    try:
        yield
    finally:
        layer.__class__ = kept


def _attend(attention: Attention, number: int, switches: Switches) -> Callable[..., torch.Tensor]:
    """Attention with changed queries, keys and values. number: of the layer, from 1."""
    compute, breaks, count = attention.compute_query_key_value_scores, switches.breaks, attention.n_heads
    chosen = {kind: [head for head in range(count) if f"{number}.{head + 1}" in getattr(switches, kind)]
              for kind in ("off", "uniform")}  # fmt: skip

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **more: Any) -> torch.Tensor:
        if "scores" in breaks:
            query = query * math.sqrt(attention.head_dim)
        if "position" in breaks:  # turned once more, by the angle of one position
            each = query.transpose(1, 2).flatten(0, 1)[:, None]  # bs 1 h d
            turned = rotate(each, 1, attention.head_dim, 2, *attention.rope)
            query = turned.view_as(query.transpose(1, 2)).transpose(1, 2)
        if {"heads", "repeat"} & {*breaks}:
            n_kv_heads = 1 if "heads" in breaks else attention.n_kv_heads
            heads = [head % n_kv_heads * attention.n_rep for head in range(count)]
            key, value = key[:, heads], value[:, heads]
        if chosen["uniform"]:
            query = query.index_fill(1, torch.tensor(chosen["uniform"]), 0.0)  # equal scores, equal weights
        output = compute(query, key, value, *mask, **more)
        return output.index_fill(1, torch.tensor(chosen["off"]), 0.0) if chosen["off"] else output

    return attend


def _halves_as_neighbours(head_dim: int) -> Callable[..., torch.Tensor]:
    """A hook that puts x1 beside x_{d/2+1}: what is then turned as neighbours are the halves of a head.

    Queries and keys change places alike, which leaves their products as they are.
    """

    def hook(_: nn.Module, __: tuple, output: torch.Tensor) -> torch.Tensor:
        return output.unflatten(-1, (-1, 2, head_dim // 2)).transpose(-1, -2).flatten(-3)

    return hook


def _with_gelu(module: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x: module.w2(F.gelu(module.w1(x)) * module.w3(x))


def _without_square(norm: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x: x * torch.rsqrt(x.mean(-1, keepdim=True) + norm.eps)
