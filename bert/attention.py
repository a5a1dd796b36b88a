"""PyTorch's fused attention in the place of the one that bert/model.py spells out, see `fast/attention.py`.

Shapes: b batch   s position   n real tokens of several texts   g texts of a group   t its longest text
h heads   d head dim
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bert.config import BertConfig
from bert.model import Bert, BertAttention
from bert.unpadded import Texts, put_back, take_out
from fast.equivalence import Case, Comparison, EquivalenceCheck
from fast.kernel import has_hooks, own_methods
from fast.layers import CheckedKernel, has_more


class FusedBertAttention(CheckedKernel, BertAttention):
    """`BertAttention` by PyTorch's fused kernel, which keeps no scores; while weights are dropped, in two products.

    (No fused kernel for CPUs drops weights.) In the place of the mask it takes the `Texts` of an `UnpaddedBert`.
    """

    __slots__ = ()
    replaces = BertAttention

    def compute_query_key_value_scores(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        """query, key, value: b h s d -> b h s d. others: the mask, if any: bool, b 1 1 s; or `Texts`, of 1 h n d"""
        if has_more("mask", others, named):
            return super().compute_query_key_value_scores(query, key, value, *others, **named)
        (mask,) = others or (named.get("mask"),)
        if isinstance(mask, Texts):
            return self._attend_texts(query, key, value, mask)
        if not self.may_compute(scores_check(query.device.type)):
            return super().compute_query_key_value_scores(query, key, value, mask)
        if mask is not None and mask.device.type == "cpu" and mask.all():  # a GPU would have to wait for this question
            mask = None
        return self._attend(query, key, value, mask)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if mask is not None:  # as on the page, a row of nothing but padding stays free of NaN
            lowest = torch.finfo(query.dtype).min / 2  # some kernels multiply it by log2(e)
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, lowest)
        if self._keeps_weights():
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        scores = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)  # b h s t
        weights = (scores if mask is None else scores.add_(mask)).softmax(dim=-1)
        return self.attn_dropout(weights) @ value

    def _attend_texts(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, texts: Texts) -> torch.Tensor:
        """1 h n d each -> 1 h n d: every text sees itself alone."""
        lengths = [group.n_tokens for group in texts.groups]
        tokens = (x[0].transpose(0, 1).split(lengths) for x in (query, key, value))  # n h d each, group by group
        outputs = []
        for group, *parts in zip(texts.groups, *tokens, strict=True):
            n_rows = group.size[0] * group.size[1]
            rows = parts if group.at is None else [put_back(x, group.at, n_rows) for x in parts]
            heads = (x.unflatten(0, group.size).transpose(1, 2) for x in rows)  # g h t d
            output = self._attend(*heads, group.mask).transpose(1, 2).flatten(0, 1)  # gt h d
            outputs.append(output if group.at is None else take_out(output, group.at))
        return torch.cat(outputs)[None].transpose(1, 2)

    def _keeps_weights(self) -> bool:
        """Whether the dropout of the weights does nothing, and nobody is told of them."""
        dropout = self.attn_dropout
        if type(dropout) is not nn.Dropout or has_hooks(dropout) or own_methods(dropout):
            return False
        return dropout.p == 0.0 or not dropout.training


def small_bert(**changes: Any) -> Bert:
    """A random model whose weights are large enough to matter, above all in the scores."""
    sizes = dict(vocab_size=20, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_seq_len=24)
    bert = Bert(BertConfig(**{**sizes, "dropout": 0.0, "attention_dropout": 0.0, **changes}))
    for name, parameter in bert.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.3)
    return bert


def _scores(device: str) -> Comparison:
    """The page's scores and the kernel's, with and without dropout, which both draw alike."""
    plain = {p: small_bert(attention_dropout=p).layers[0].attention for p in (0.0, 0.5)}
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
    heads = tuple(torch.randn(3, 2, 9, 8) for _ in range(3))  # of nothing but padding, gradients mean nothing
    cases += [Case(f"an empty text, dropout {p}", (p, True, *heads, empty[:, None, None])) for p in plain]
    return Comparison(ask(plain), ask(kernels), cases)


@cache
def scores_check(device: str) -> EquivalenceCheck:
    """Of the kernels of one kind of device."""
    where = device if device in ("cuda", "mps") else "cpu"
    return EquivalenceCheck(
        "bert's Attention.compute_query_key_value_scores",
        ((BertAttention, "compute_query_key_value_scores"),),
        lambda: _scores(where),
        reads={"head_dim", "attn_dropout"},
    )
