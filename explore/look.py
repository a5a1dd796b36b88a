"""What a Llama computes from a text: attention weights, the prediction after each layer, queries before and after RoPE.

The model itself computes all of it. A text passes through the model once for each kind of attention, and hooks keep
the values in between: the page therefore shows every edit of `llama.py` or `rope.py`.

- Attention: `compute_query_key_value_scores` is called a second time with the identity matrix as values. Its result,
  weights times the identity, is the weights.
- The logit lens (nostalgebraist 2020, "interpreting GPT: the logit lens"): the model's own final norm and output
  matrix, applied to the residual stream after each layer.
- RoPE: the output of `compute_query`, and the queries that the attention receives.

Shapes: s query position, t key position, L layers, h heads, d head dim, D model dim, v vocabulary, k candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from config import ATTENTION_KINDS, LlamaConfig
from engine.weights import takes_mask
from llama import Attention, Llama
from rope import apply_rotary_emb
from utils import UserError


@dataclass
class ForwardRecord:
    """The values inside a model during one pass over one text.

    attention: L of h s t. states: L + 1 of s D, the residual stream before the first layer and after each layer.
    queries: L pairs of h s d, before and after the rotation. logits: s v.
    """

    attention: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    queries: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    logits: torch.Tensor | None = None


def read(llama: Llama, ids: Sequence[int], attention: str) -> ForwardRecord | None:
    """Run the model over a text with one kind of attention, which need not be the model's own.

    Returns None if the kind is not the model's own and its attention takes no mask. Raises `UserError` if a method adds
    positions to the text.
    """
    tokens = torch.tensor([[*ids]], device=next(llama.parameters()).device)  # 1 s
    if attention != llama.config.attention and not takes_mask(llama.layers[0].attention):
        return None
    with recorded(llama) as record, with_attention(llama, attention), torch.inference_mode():
        record.logits = llama(tokens, targets=tokens)[0][0]  # s v
    if any(weights.shape[1:] != (len(ids), len(ids)) for weights in record.attention):
        raise UserError("a method of this model adds positions to a text, which the page cannot show")
    return record


@contextmanager
def with_attention(llama: Llama, attention: str) -> Iterator[None]:
    """Let a model have this kind of attention inside the block."""
    kept = llama.config
    _set_config(llama, dataclasses.replace(kept, attention=attention))
    try:
        yield
    finally:
        _set_config(llama, kept)


def _set_config(llama: Llama, config: LlamaConfig) -> None:
    llama.config = config
    for layer in llama.layers:
        layer.attention.is_causal = config.is_causal


@contextmanager
def recorded(llama: Llama) -> Iterator[ForwardRecord]:
    """Record the model's values inside the block; after it the model is unchanged."""
    record = ForwardRecord()

    def keep_output(_: nn.Module, __: tuple, output: torch.Tensor) -> None:
        record.states.append(output[0])  # s D

    def keep_input(_: nn.Module, inputs: tuple) -> None:
        record.states.append(inputs[0][0])  # s D

    with ExitStack() as undone:
        undone.callback(llama.layers[0].register_forward_pre_hook(keep_input).remove)
        for layer in llama.layers:
            undone.callback(layer.register_forward_hook(keep_output).remove)
            undone.enter_context(_recorded_attention(layer.attention, record))
        yield record


@contextmanager
def replaced(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Give a module another function of this name inside the block; after it the module is as before."""
    own = vars(module).get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(module, name)
        else:
            setattr(module, name, own)


@contextmanager
def _recorded_attention(attention: Attention, record: ForwardRecord) -> Iterator[None]:
    """Record one layer's weights and queries inside the block."""
    compute = attention.compute_query_key_value_scores
    before: list[torch.Tensor] = []

    def keep_query(_: nn.Module, __: tuple, output: torch.Tensor) -> None:
        before.append(output[0].unflatten(-1, (attention.n_heads, -1)).transpose(0, 1))  # h s d

    def twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **more: Any) -> torch.Tensor:
        identity = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device)  # t t
        weights = compute(query, key, identity.expand(*key.shape[:2], -1, -1), *mask, **more)  # 1 h s t
        record.attention.append(weights[0].float())
        record.queries.append((before[-1].float(), query[0].float()))
        return compute(query, key, value, *mask, **more)

    hook = attention.compute_query.register_forward_hook(keep_query)
    with ExitStack() as undone:
        undone.callback(hook.remove)
        undone.enter_context(replaced(attention, "compute_query_key_value_scores", twice))
        yield


def read_both(llama: Llama, ids: Sequence[int]) -> dict[str, ForwardRecord | None]:
    """The record of each kind of attention, see `read`."""
    return {attention: read(llama, ids, attention) for attention in ATTENTION_KINDS}


# ------------------------------------------------------------------------------------------------- predictions


class Lens(NamedTuple):
    """The predictions of the next token after one layer: the likeliest tokens, and the token that does come next.

    ids, probabilities: s k. next_probability, next_rank: s - 1; rank 1 is the likeliest.
    """

    ids: torch.Tensor
    probabilities: torch.Tensor
    next_probability: torch.Tensor
    next_rank: torch.Tensor


def lens(logits: torch.Tensor, ids: Sequence[int], candidates: int) -> Lens:
    """logits: s v"""
    probabilities = logits.float().softmax(-1)  # s v
    top = probabilities.topk(min(candidates, logits.shape[-1]), dim=-1)
    following = torch.tensor([*ids][1:], device=logits.device)  # s - 1
    of_next = probabilities[:-1].gather(1, following[:, None])  # s - 1 1
    rank = (probabilities[:-1] > of_next).sum(-1) + 1
    return Lens(top.indices, top.values, of_next[:, 0], rank)


@torch.inference_mode()
def lenses(llama: Llama, record: ForwardRecord, ids: Sequence[int], candidates: int) -> list[Lens]:
    """L + 1 lenses: before the first layer and after each layer; the last one is the model's own prediction."""
    early = [lens(llama.output(llama.norm(state)), ids, candidates) for state in record.states[:-1]]
    return [*early, lens(record.logits, ids, candidates)]


# -------------------------------------------------------------------------------------------------------- RoPE


def rotated(config: LlamaConfig, length: int) -> torch.Tensor:
    """The pair (1, 0) after `apply_rotary_emb`, at each position. Returns s d/2 2"""
    ones = torch.tensor([1.0, 0.0]).repeat(config.head_dim // 2).expand(1, length, 1, -1)  # 1 s 1 d
    angles = (config.head_dim, config.max_seq_len, config.rope_theta)
    pairs, _ = apply_rotary_emb(ones, ones, *angles, scaling=config.rope_scaling)
    return pairs[0, :, 0].unflatten(-1, (-1, 2))


def match_at_distance(config: LlamaConfig, length: int) -> torch.Tensor:
    """The product of a query and an equal key, by the distance between them; 1 at distance 0. Returns s"""
    pairs = rotated(config, length)  # s d/2 2
    return (pairs[-1] * pairs.flip(0)).sum(-1).mean(-1)
