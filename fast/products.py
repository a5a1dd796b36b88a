"""The products of linear layers that are measured, to choose what computes them.

Shapes:  r rows, batch and positions together   i input features   o output features
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

ROWS, WIDTH, HIDDEN = 512, 512, 1376  # of measured products: a small batch in the feed-forward of stories42M


class Products(NamedTuple):
    """A small batch in layers of these shapes, o i each."""

    question: str = "float32 products"
    shapes: tuple[tuple[int, int], ...] = ((HIDDEN, WIDTH),)
    biases: bool = False
    rows: int = ROWS

    def trained(self) -> list[tuple[torch.Tensor | None, ...]]:
        """Inputs (r i), weight (o i), bias (o, or None) and the gradient of the outputs (r o) of each layer."""
        return [
            (
                torch.ones(self.rows, inputs, requires_grad=True),
                torch.ones(outputs, inputs, requires_grad=True),
                torch.ones(outputs) if self.biases else None,
                torch.ones(self.rows, outputs),
            )
            for outputs, inputs in self.shapes
        ]

    def not_trained(self) -> list[tuple[torch.Tensor, nn.Linear]]:
        """Inputs (r i) of each layer, and the layer. The state of the random numbers stays as it is."""
        with torch.random.fork_rng(devices=[]):  # skip_init would import sympy, a quarter of a second in a first run
            made = [nn.Linear(inputs, outputs, bias=self.biases) for outputs, inputs in self.shapes]
        for linear in made:
            for parameter in linear.requires_grad_(False).parameters():
                nn.init.ones_(parameter)
        return [(torch.ones(self.rows, linear.in_features), linear) for linear in made]


PRODUCTS_OF_LLAMAS = Products()
# Of a text that is generated, most layers are so small that what a kernel does before its product counts as well.
FEW_ROWS = Products("float32 products of few rows", ((WIDTH, WIDTH),) * 4, rows=64)
