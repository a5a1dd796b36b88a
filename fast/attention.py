"""PyTorch's fused attention, or batched products, in the place of the attention that llama.py spells out.

The fused one computes the same without keeping the scores (Dao et al. 2022, "FlashAttention", arXiv:2205.14135), in
less time, on every device. In bfloat16 on CPUs batched products can be faster, for short texts and for gradients, which
is measured (`fast.apply`).

Shapes:  b batch   s query position   t key position   h query heads   d head dim
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from base_llama import causal_mask
from config import LlamaConfig
from engine.context import ContextAttention
from engine.equivalence import Case, Comparison, EquivalenceCheck
from engine.weights import takes_mask
from fast.kernel import has_hooks, own_methods, replace
from fast.layers import CheckedKernel, has_more
from fast.linear import readable
from llama import Attention

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


# ---------------------------------------------------------------------------------------------------------- the modules

LONG_TEXT = 1100  # positions: more than most models have
MOST_LANES = 16  # float32 numbers in a register of AVX-512
SHORT_TEXT = 256  # positions up to which scores may be kept: 128 KB for a head in bfloat16
BY_PRODUCTS_FROM = 2**16  # scores in all that are worth the calls of two products: 4 texts of 45 tokens, 8 heads


class FusedAttention(CheckedKernel, Attention):
    """`Attention` whose scores, softmax and weighted sum are one kernel.

    products_from: for a number format, how many scores are enough for `attention_by_products`, if texts are short and
    nothing is trained. trained_by_products: number formats whose gradients are those of `trained_by_products`.
    """

    __slots__ = ("products_from", "trained_by_products")
    replaces = Attention

    def __init__(self, config: LlamaConfig, **settings: Any):
        super().__init__(config)
        self.set_ways(**settings)

    @classmethod
    def from_attention(cls, attention: Attention, **settings: Any) -> FusedAttention:
        kernel = cls.sharing(attention)
        kernel.set_ways(**settings)
        return kernel

    def set_ways(
        self, products_from: Mapping[torch.dtype, int] | None = None, trained_by_products: Collection[torch.dtype] = ()
    ) -> None:
        """Once, when the kernel is made."""
        self.products_from, self.trained_by_products = dict(products_from or {}), frozenset(trained_by_products)

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """As `Attention.forward`, of inputs that the norm may give in bfloat16. inputs: b s D, and others"""
        of_norm = (readable(x, self, "compute_query", "compute_key", "compute_value") for x in inputs[:1])
        return super().forward(*of_norm, *inputs[1:], **named)

    def compute_query_key_value_scores(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        """query: b h s d, key and value: b h t d -> b h s d. others: the mask, if any: bool, broadcasts to b h s t.

        With more arguments `Attention` was edited, and computes by itself.
        """
        return readable(self._attend(*alike(query, key, value), *others, **named), self, "compute_output")

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        is_known = not has_more("mask", others, named) and self._has_plain_dropout()
        if not is_known or may_hide_nan(query, key) or not self.may_compute(scores_check(query.device.type)):
            return super().compute_query_key_value_scores(query, key, value, *others, **named)
        (mask,) = others or (named.get("mask"),)
        is_causal = mask is not None and is_lower_triangle(mask)  # which the kernel has a faster way for
        if mask is not None and not is_causal and mask.device.type == "cpu" and not mask.any(-1).all():
            # a query that sees nothing gives NaN in llama.py and 0 in the kernel (a GPU would have to wait for this)
            return super().compute_query_key_value_scores(query, key, value, mask)
        if self._multiplies(query, key):
            return attention_by_products(query, key, value, mask)
        if torch.is_grad_enabled() and query.dtype in self.trained_by_products:
            return trained_by_products(query, key, value, mask, is_causal)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=None if is_causal else mask, is_causal=is_causal
        )

    def _multiplies(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        scores = query.shape[:3].numel() * key.shape[2]
        is_enough = scores >= self.products_from.get(query.dtype, math.inf)
        return is_enough and key.shape[2] <= SHORT_TEXT and not torch.is_grad_enabled()

    def _has_plain_dropout(self) -> bool:
        """Whether the dropout of the attention weights does nothing: the kernel never makes these weights."""
        dropout = self.attn_dropout
        if type(dropout) is not nn.Dropout or has_hooks(dropout) or own_methods(dropout):
            return False
        return dropout.p == 0.0 or not (self.training or dropout.training)  # an edit may read either


class FusedContextAttention(FusedAttention, ContextAttention):
    """`ContextAttention` with the same kernel."""

    __slots__ = ()
    replaces = ContextAttention


FusedAttention.with_context = FusedContextAttention  # see `engine.context.with_context`


def may_hide_nan(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a score may not be finite where PyTorch's fused kernel would not show it.

    On a CPU it takes the largest score in lanes. With fewer keys than lanes it overlooks NaN, and gives 0 for a query
    whose scores are all NaN.
    """
    if query.device.type != "cpu" or key.shape[2] >= MOST_LANES:
        return False
    largest = torch.linalg.vector_norm(query.detach()) * torch.linalg.vector_norm(key.detach())  # no score exceeds it
    return not largest.isfinite()


def alike(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs of several layers, as float32 unless all are bfloat16: a user's own layer may give float32."""
    if len({part.dtype for part in parts}) == 1:
        return parts
    return tuple(part.float() if part.dtype == torch.bfloat16 else part for part in parts)


def is_lower_triangle(mask: torch.Tensor) -> bool:
    """Whether a mask hides exactly what follows each query. Compared once for each mask: a GPU would have to wait."""
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1]:
        return False
    version = None if mask.is_inference() else mask._version  # such tensors count no changes
    known = getattr(mask, "_is_lower_triangle", None)
    if known is None or known[0] is None or known[0] != version:
        known = version, torch.equal(mask, torch.ones_like(mask).tril())
        mask._is_lower_triangle = known
    return known[1]


WITHOUT_MASK = 4  # inputs of such a case: whether it is training, and three tensors


def _sides(device: str) -> Comparison:
    """Scores of llama.py and of PyTorch's kernel, with the masks that the three commands use."""
    plain = Attention(LlamaConfig.from_preset("tiny", dim=16, n_heads=2, n_kv_heads=2))

    def ask(make: Callable[..., Attention]) -> Callable[..., list[torch.Tensor]]:
        def run(training: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
            answers, by_products = [], {"products_from": {torch.float32: 0}, "trained_by_products": {torch.float32}}
            for settings in ({}, by_products):
                layer = make(plain.train(training), **settings)
                with torch.set_grad_enabled(training):
                    answers.append(layer.compute_query_key_value_scores(*(tensor.to(device) for tensor in tensors)))
            return answers

        return run

    cases = (case for case in _cases() if len(case.inputs) == WITHOUT_MASK or takes_mask(Attention))
    return Comparison(ask(lambda layer, **_: layer), ask(FusedAttention.from_attention), list(cases))


def _cases() -> Iterator[Case]:
    def tensors(b: int, s: int, t: int, scale: float = 1.0, grad: bool = True) -> tuple[torch.Tensor, ...]:
        sizes = ((b, 2, s, 8), (b, 2, t, 8), (b, 2, t, 8))
        return tuple((torch.randn(size) * scale).requires_grad_(grad) for size in sizes)

    def triangle(s: int, t: int) -> torch.Tensor:  # not `causal_mask`, which may have been edited
        return torch.ones(s, t, dtype=torch.bool).tril(t - s)

    at = torch.arange(6) <= torch.tensor([[5], [2]])  # b t
    padded = triangle(4, 8) & (torch.arange(8) >= torch.tensor([[3], [0]]))[:, None]  # b s t
    long = 2 * MOST_QUERIES
    for what, hidden in (("all keys", lambda s: ()), ("a causal mask", lambda s: (triangle(s, s),))):
        yield Case(what, (True, *tensors(3, 7, 7), *hidden(7)))
        yield Case(f"{what}, {long} positions", (True, *tensors(1, long, long), *hidden(long)))
        yield Case(f"{what}, large scores", (False, *tensors(2, 5, 5, 4.0, grad=False), *hidden(5)))
        yield Case(f"{what}, many texts", (False, *tensors(81, 3, 3, grad=False), *hidden(3)))
    yield Case("a long text", (False, *tensors(1, 64, LONG_TEXT, grad=False), triangle(64, LONG_TEXT)))
    yield Case("a mask for new positions", (False, *tensors(2, 3, 9), triangle(3, 9)))
    yield Case("one position of each text", (True, *tensors(2, 1, 6), at[:, None, None]))
    yield Case("padded texts", (False, *tensors(2, 4, 8), padded[:, None]))
    yield Case("one new position", (False, *tensors(2, 1, LONG_TEXT, grad=False)))


@cache
def scores_check(device: str) -> EquivalenceCheck:
    """Of the fused attention of one type of device, which has kernels of its own."""
    where = device if device in ("cuda", "mps") else "cpu"
    return EquivalenceCheck(
        "Attention.compute_query_key_value_scores",
        ((Attention, "compute_query_key_value_scores"),),
        lambda: _sides(where),
        reads={"head_dim", "attn_dropout", "training"},
    )


def fuse_attention(model: nn.Module) -> None:
    """Give every `Attention` in `model` the fused kernel and nothing else another one."""
    replace(model, {part: FusedAttention.from_attention(part) for part in model.modules() if type(part) is Attention})
