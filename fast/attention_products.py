"""Attention by batched products, which can be faster than PyTorch's fused kernel in bfloat16 on CPUs.

Shapes:  b batch   s query position   t key position   h query heads   d head dim
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from base_llama import causal_mask

# The ways that are measured beside PyTorch's: of texts that are classified, and of gradients
BY_PRODUCTS, TRAINED_BY_PRODUCTS = "short texts in two products", "gradients by products"
MOST_QUERIES = 160  # whose scores are computed at once for gradients: fewer calls against fewer hidden scores


def attention_by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention by two batched products, with all scores b h s t in memory, in the inputs' dtype.

    query: b h s d, key and value: b h t d -> b h s d
    mask: bool, broadcasts to b h s t, True where a query may see a key.
    """
    queries, keys, values = (x.flatten(0, 1) for x in (query, key, value))  # bh s d, or t
    hidden = _added_to_scores(query, key, mask)
    scores = torch.baddbmm(hidden, queries, keys.transpose(1, 2), alpha=query.shape[-1] ** -0.5)  # bh s t
    return torch.bmm(scores.softmax(-1), values).view_as(query)  # b h s d


def _added_to_scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """-inf for every score that a mask hides, else 0. query: b h s d, key: b h t d -> s t, or bh s t"""
    zeros = query.new_zeros(()).expand(query.shape[2], key.shape[2])
    if mask is None:
        return zeros
    hidden = zeros.expand(mask.shape[:-2] + zeros.shape).masked_fill(~mask, float("-inf"))  # ... s t
    return hidden if mask.dim() == 2 else hidden.expand(*query.shape[:3], key.shape[2]).flatten(0, 1)


def trained_by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> torch.Tensor:
    """Fused attention whose gradients are batched products. Shapes as in `attention_by_products`.

    is_causal: the mask hides exactly what follows each query.
    """
    return _TrainedByProducts.apply(query, key, value, mask, is_causal)


class _TrainedByProducts(torch.autograd.Function):
    """y = P V, where P = softmax(Q K^T / sqrt(d)): forward as PyTorch does it, which keeps no P.

    Backward, with G the gradient of y (Dao et al. 2022, appendix B.2): dV = P^T G; dS = P * (G V^T - rowsum(P * G V^T))
    dQ = dS K / sqrt(d), dK = dS^T Q / sqrt(d). P is computed again for some queries at a time, and in a causal model
    for the keys before them alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.is_causal = is_causal
        seen = None if is_causal else mask
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=is_causal)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        scale, length = query.shape[-1] ** -0.5, query.shape[2]
        if mask is not None:
            mask = mask.expand(*mask.shape[:-2], length, key.shape[2])  # ... s t
        queries, keys, values, grads = (x.flatten(0, 1) for x in (query, key, value, grad))  # bh s d, or t
        needs_query, needs_key, needs_value = ctx.needs_input_grad[:3]
        grad_query = torch.empty_like(queries) if needs_query else None
        grad_key = grad_value = None
        size = math.ceil(length / math.ceil(length / MOST_QUERIES))
        for start in reversed(range(0, length, size)):  # the last queries see every key
            some = slice(start, start + size)
            seen = slice(start + size if ctx.is_causal else None)
            q, k, v, g = queries[:, some], keys[:, seen], values[:, seen], grads[:, some]
            shown = None if mask is None else mask[..., some, seen]
            hidden = _added_to_scores(query[:, :, some], key[:, :, seen], shown)
            weights = torch.baddbmm(hidden, q, k.transpose(1, 2), alpha=scale).softmax(-1)  # bh s t
            if needs_value:
                grad_value = _added(grad_value, seen, torch.bmm(weights.transpose(1, 2), g))
            if not (needs_query or needs_key):
                continue
            along = torch.bmm(g, v.transpose(1, 2))  # bh s t
            along = torch._softmax_backward_data(along, weights, -1, along.dtype).mul_(scale)
            if needs_query:
                grad_query[:, some] = torch.bmm(along, k)
            if needs_key:
                grad_key = _added(grad_key, seen, torch.bmm(along.transpose(1, 2), q))
        pairs = zip((grad_query, grad_key, grad_value), (query, key, value), strict=True)
        return *(found if found is None else found.view_as(x) for found, x in pairs), None, None


def _added(total: torch.Tensor | None, seen: slice, of_some: torch.Tensor) -> torch.Tensor:
    """A sum over queries, bh t d, with that of some queries more, for the keys that these see."""
    if total is None:
        return of_some
    total[:, seen] += of_some
    return total


def ways_read() -> dict[str, Callable[[], object]]:
    """Of short texts, such as are classified in bfloat16."""
    texts = torch.ones(3, 10, 8, 48, 64, dtype=torch.bfloat16)
    mask = causal_mask(48, texts.device)
    return {
        "fused": lambda: F.scaled_dot_product_attention(*texts, is_causal=True),
        BY_PRODUCTS: lambda: attention_by_products(*texts, mask),
    }


def ways_trained() -> dict[str, Callable[[], object]]:
    """Of queries, keys and values in bfloat16, which the fused kernel's gradients need as float32."""
    texts = torch.ones(3, 10, 8, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    mask = causal_mask(128, texts.device)

    def train(way: Callable[[], torch.Tensor]) -> None:
        output = way()
        torch.autograd.grad(output, texts, output)

    ways = {
        "fused in float32": lambda: F.scaled_dot_product_attention(*texts.float(), is_causal=True).bfloat16(),
        TRAINED_BY_PRODUCTS: lambda: trained_by_products(*texts, mask, is_causal=True),
    }
    return {name: partial(train, way) for name, way in ways.items()}
