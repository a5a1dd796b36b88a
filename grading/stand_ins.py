"""Stand-ins for the parts that another part needs: simple functions, known to script and student's process.

With them a part is asked alone, whatever the parts that it needs compute. They hold no right number of any part.
"""

from __future__ import annotations

from typing import Any

import torch


class Product(torch.nn.Module):
    """In the place of a module from states to states: the product with a matrix, whatever else it is given."""

    def __init__(self, matrix: torch.Tensor):
        super().__init__()
        self.matrix = matrix

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return x @ self.matrix.to(x)


def turned(query: torch.Tensor, key: torch.Tensor, *others: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of the rotation: position s is multiplied by s + 1 in queries, by s + 2 in keys. b s h d, b s g d"""
    places = torch.arange(1.0, query.shape[1] + 1)[:, None, None].to(query)
    return query * places, key * (places + 1)


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    """In the place of scores and softmax: a sum, in which every position is its own. All b h s d"""
    return query + 2 * key + 3 * value


def summed(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """In the place of the hidden states: rows of a table, summed up to each position. v D, b s -> b s D"""
    rows = table[tokens.masked_fill(tokens < 0, 0)]
    return (rows * torch.arange(1.0, tokens.shape[1] + 1)[:, None].to(rows)).cumsum(1)


def replace_parts(module: torch.nn.Module, matrices: dict[str, torch.Tensor]) -> None:
    """Put a `Product` in the place of each part with one of these names: "norm", or "layers.1" for one of a list."""
    for name, matrix in matrices.items():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, Product(matrix))


def replace_forward(model: torch.nn.Module, table: torch.Tensor) -> None:
    """Let a student's Llama return `summed` hidden states, and the logits that its head makes of them."""

    def forward(tokens: torch.Tensor, targets: Any = None, *others: Any, **named: Any) -> tuple:
        hidden = summed(table, tokens)
        return model.output(hidden if targets is not None else hidden[:, [-1]]), hidden

    model.forward = forward
