"""The kernels that `fast.accelerate` gives a BERT: PyTorch's fused attention, and linear layers in oneDNN.

Shapes: b batch   s position   h heads   d head dim
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bert.config import BertConfig
from bert.model import Bert, BertAttention
from engine.equivalence import Case, Comparison, EquivalenceCheck
from fast.apply import Choice, LinearKernel
from fast.attention import may_hide_nan
from fast.kernel import has_hooks, own_methods
from fast.layers import CheckedKernel, has_more
from fast.measure import Products
from fast.plan import KernelPlan, plan_linears, plan_parts


class FusedBertAttention(CheckedKernel, BertAttention):
    """`BertAttention` by PyTorch's fused kernel, which keeps no scores (see `fast/attention.py`).

    While weights are dropped in training, attention is two products: no fused kernel for CPUs drops weights.
    """

    __slots__ = ()
    replaces = BertAttention

    def compute_query_key_value_scores(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        """query, key, value: b h s d -> b h s d. others: the mask, if there is one: bool, b 1 1 s

        With more arguments `BertAttention` was edited, and computes by itself.
        """
        if has_more("mask", others, named) or not self.may_compute(scores_check(query.device.type)):
            return super().compute_query_key_value_scores(query, key, value, *others, **named)
        (mask,) = others or (named.get("mask"),)
        if mask is not None and mask.device.type == "cpu" and mask.all():  # a GPU would have to wait for this question
            mask = None
        if mask is not None:  # as in `BertAttention`, a row of nothing but padding stays free of NaN
            lowest = torch.finfo(query.dtype).min / 2  # some kernels multiply it by log2(e)
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, lowest)
        if self._keeps_weights() and not may_hide_nan(query, key):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        scores = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)  # b h s s
        weights = (scores if mask is None else scores.add_(mask)).softmax(dim=-1)
        return self.attn_dropout(weights) @ value

    def _keeps_weights(self) -> bool:
        """Whether the dropout of the weights does nothing, and no hook reads them."""
        dropout = self.attn_dropout
        if type(dropout) is not nn.Dropout or has_hooks(dropout) or own_methods(dropout):
            return False
        return dropout.p == 0.0 or not dropout.training


def _sides(device: str) -> Comparison:
    """Scores of `BertAttention` and of the kernel, with and without dropout, which draws the same in both."""
    sizes = {"vocab_size": 20, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "max_seq_len": 24}
    plain = {p: BertAttention(BertConfig(**sizes, attention_dropout=p)) for p in (0.0, 0.5)}
    kernels = {p: FusedBertAttention.sharing(attention) for p, attention in plain.items()}

    def ask(layers: dict[float, BertAttention]) -> Any:
        def run(p: float, training: bool, *tensors: torch.Tensor) -> torch.Tensor:
            layer = layers[p].train(training)
            return layer.compute_query_key_value_scores(*(tensor.to(device) for tensor in tensors))

        return run

    padded, empty = (torch.arange(9) < torch.tensor(lengths)[:, None] for lengths in ([9, 4, 1], [9, 4, 0]))  # b s
    cases = [Case("a long text", (0.0, False, *(torch.randn(1, 2, 1100, 8) for _ in range(3))))]
    for name, mask in (("texts", ()), ("padded texts", (padded[:, None, None],))):
        heads = tuple(torch.randn(3, 2, 9, 8).requires_grad_() for _ in range(3))  # b h s d
        cases += [Case(f"{name}, dropout {p}", (p, True, *heads, *mask)) for p in plain]
        cases.append(Case(f"{name}, not trained", (0.5, False, *heads, *mask)))
    heads = tuple(torch.randn(3, 2, 9, 8) for _ in range(3))  # gradients of a text of only padding mean nothing
    cases += [Case(f"an empty text, dropout {p}", (p, True, *heads, empty[:, None, None])) for p in plain]
    return Comparison(ask(plain), ask(kernels), cases)


@cache
def scores_check(device: str) -> EquivalenceCheck:
    """Of the fused attention of one type of device, which has kernels of its own."""
    where = device if device in ("cuda", "mps") else "cpu"
    return EquivalenceCheck(
        "bert's Attention.compute_query_key_value_scores",
        ((BertAttention, "compute_query_key_value_scores"),),
        lambda: _sides(where),
        reads={"head_dim", "attn_dropout"},
    )


# ------------------------------------------------------------------------------------- what `fast.apply` looks up here

BERT_KERNELS = {FusedBertAttention}


def products(bert: Bert) -> Products:
    """The linear layers whose products are measured: those of one layer."""
    dim, hidden_dim = bert.config.dim, bert.config.hidden_dim
    shapes = ((dim, dim),) * 4 + ((hidden_dim, dim), (dim, hidden_dim))
    return Products(f"float32 products with biases of {dim} and {hidden_dim}", shapes, biases=True)


def plan_kernels(plan: KernelPlan, bert: Bert, device: torch.device, linears: LinearKernel | None) -> list[Choice]:
    """Put the kernels of a BERT into `plan`, for modules of exactly the classes of bert/model.py.

    linears: the kernel of linear layers; None for PyTorch's own. Returns what was chosen for its attention.
    """
    if linears is not None:
        plan_linears(plan, bert, *linears, biases=True)
    if found := scores_check(device.type).difference():
        return [Choice("BERT's attention", "plain", f"bert/model.py has changed: {found}")]
    plan_parts(plan, bert, BertAttention, FusedBertAttention.sharing)
    return [Choice("BERT's attention", "fused", "keeps no scores, but where weights are dropped in training")]


def one_layer() -> Bert:
    """A small BERT, for `python -m fast`, which prints the kernels that this machine gives it."""
    return Bert(BertConfig(vocab_size=300, dim=384, n_heads=12, n_layers=1))
