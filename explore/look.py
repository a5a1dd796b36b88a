"""What a Llama computes of a text: who attends to whom, what each layer would predict, how RoPE turns the queries.

Nothing is computed here in the model's place. A text goes through the model once for each semantics, and hooks keep
what passes: so an edit of `llama.py` or `rope.py` is seen on the page.

- Attention: `compute_query_key_value_scores` is asked a second time, with the identity for values: what it then
  returns, weights times the identity, are the weights.
- The logit lens (nostalgebraist 2020, "interpreting GPT: the logit lens"): the model's own final norm and output
  matrix, on the residual stream after each layer.
- RoPE: what `compute_query` returns, and the queries that arrive at the attention.

Shapes: s query position, t key position, L layers, h heads, d head dim, D model dim, v vocabulary, k candidates.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from base_llama import AttentionContext, causal_mask
from config import ATTENTION_KINDS, LlamaConfig
from llama import Attention, Llama
from rope import apply_rotary_emb
from utils import UserError


@dataclass
class ForwardRecord:
    """What passed through a model while it read one text.

    attention: L of h s t. states: L + 1 of s D, the residual stream before the first layer and after each. queries:
    L of h s d, before and after they are turned. logits: s v.
    """

    attention: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    queries: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    logits: torch.Tensor | None = None


def read(llama: Llama, ids: Sequence[int], attention: str) -> ForwardRecord | None:
    """Read a text under one semantics, whichever the model was made for.

    None where the model's attention takes no mask, so that it can only be read as it was made. Raises `UserError` where
    something hangs on the model that gives it other positions than the text has.
    """
    tokens = torch.tensor([[*ids]], device=next(llama.parameters()).device)  # 1 s
    is_own = attention == llama.config.attention
    if not is_own and not takes_mask(llama.layers[0].attention):
        return None
    with recorded(llama) as reading, torch.inference_mode():
        if is_own:
            logits, _ = llama(tokens, targets=tokens)  # 1 s v
        else:
            seen = causal_mask(len(ids), len(ids), tokens.device)  # s t
            mask = seen if attention == "causal" else torch.ones_like(seen)
            logits = llama.output(llama.encode(llama.embed(tokens), AttentionContext(mask=mask)))
        reading.logits = logits[0]
    if any(weights.shape[1:] != (len(ids), len(ids)) for weights in reading.attention):
        raise UserError("a method of this model adds positions to a text, which the page cannot show")
    return reading


def takes_mask(attention: Attention) -> bool:
    """Whether its scores can be masked: those of the assignment's first editions cannot."""
    return len(inspect.signature(attention.compute_query_key_value_scores).parameters) > 3


@contextmanager
def recorded(llama: Llama) -> Iterator[ForwardRecord]:
    """Inside it, what passes through the model is kept; afterwards it is as it was."""
    reading = ForwardRecord()
    with ExitStack() as undone:

        def keep_state(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            reading.states.append(output[0])  # s D

        def keep_first(_: nn.Module, inputs: tuple) -> None:
            reading.states.append(inputs[0][0])

        undone.callback(llama.layers[0].register_forward_pre_hook(keep_first).remove)
        for layer in llama.layers:
            undone.callback(layer.register_forward_hook(keep_state).remove)
            undone.enter_context(_recorded(layer.attention, reading))
        yield reading


@contextmanager
def _recorded(attention: Attention, reading: ForwardRecord) -> Iterator[None]:
    """One layer's weights and queries."""
    compute, own = attention.compute_query_key_value_scores, vars(attention).copy()
    before: list[torch.Tensor] = []

    def keep_query(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        before.append(output[0].unflatten(-1, (attention.n_heads, -1)).transpose(0, 1))  # h s d

    def ask_twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *seen: Any, **more: Any) -> torch.Tensor:
        identity = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device)  # t t
        weights = compute(query, key, identity.expand(*key.shape[:2], -1, -1), *seen, **more)  # 1 h s t
        reading.attention.append(weights[0].float())
        reading.queries.append((before[-1].float(), query[0].float()))
        return compute(query, key, value, *seen, **more)

    hook = attention.compute_query.register_forward_hook(keep_query)
    attention.compute_query_key_value_scores = ask_twice
    try:
        yield
    finally:
        hook.remove()
        if "compute_query_key_value_scores" in own:
            attention.compute_query_key_value_scores = own["compute_query_key_value_scores"]
        else:
            del attention.compute_query_key_value_scores


def readings(llama: Llama, ids: Sequence[int]) -> dict[str, ForwardRecord | None]:
    """Under both semantics, by name; None where that is not possible."""
    return {attention: read(llama, ids, attention) for attention in ATTENTION_KINDS}


# ------------------------------------------------------------------------------------------------- predictions


@dataclass
class Lens:
    """What would come next, after one layer: the likeliest tokens, and the one that does come.

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
def lenses(llama: Llama, reading: ForwardRecord, ids: Sequence[int], candidates: int) -> list[Lens]:
    """After each layer, and first before any; the last one is what the model says."""
    early = [lens(llama.output(llama.norm(state)), ids, candidates) for state in reading.states[:-1]]
    return [*early, lens(reading.logits, ids, candidates)]


# -------------------------------------------------------------------------------------------------------- RoPE


def turned(config: LlamaConfig, length: int) -> torch.Tensor:
    """Where `apply_rotary_emb` turns the pair (1, 0) to, at each position. Returns s d/2 2"""
    ones = torch.tensor([1.0, 0.0]).repeat(config.head_dim // 2).expand(1, length, 1, -1)  # 1 s 1 d
    angles = (config.head_dim, config.max_seq_len, config.rope_theta)
    rotated, _ = apply_rotary_emb(ones, ones, *angles, scaling=config.rope_scaling)
    return rotated[0, :, 0].unflatten(-1, (-1, 2))


def match_at_distance(config: LlamaConfig, length: int) -> torch.Tensor:
    """How well a query matches an equal key that stands so far before it: their product, 1 at distance 0. Returns s"""
    pairs = turned(config, length)  # s d/2 2
    return (pairs[-1] * pairs.flip(0)).sum(-1).mean(-1)
