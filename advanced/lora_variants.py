"""Variants of `lora.py`, which differ in one formula each.

    rslora    h = W0 x + (alpha / sqrt(r)) B A x                      (Kalajdzievski 2023, arXiv:2312.03732, thm 3.2)
    dora      h = m (W0 + s B A) x / |W0 + s B A|                     (Liu et al. 2024, arXiv:2402.09353, equation 5)
    pissa     h = (W0 - s B0 A0) x + s B A x, from B = B0, A = A0     (Meng et al. 2024, arXiv:2404.02948, section 3)
    normal    A is drawn from N(0, 0.02^2)                            (the course's fall 2025 edition)

rslora: with alpha / r the updates of high ranks are too small to learn.

dora: m and |.| have one number for each row of the matrix, an output neuron, as in the authors' code; the paper writes
of columns. m is trained and begins as |W0|. The norm below is a constant for the gradient (section 4.3). Dropout is of
what B A reads alone; the authors' code drops out a part of what W0 reads as well.

pissa: s B0 A0 is the best approximation of W0 of rank r, from its singular values and vectors, with U S V^T = W0 / s,
A0 = S^(1/2) V^T and B0 = U S^(1/2). The layer's own weight is what is left of W0. It begins as the base up to rounding.

Shapes: r rank   i input features   o output features
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from advanced.lora import LoRA
from utils import UserError

SMALLEST = 1e-30  # of a row's norm: a row of zeros stays one


class RsLoRA(LoRA):
    """The scale of the update is alpha / sqrt(r)."""

    def __init__(self, rank: int = 8, alpha: float = 16.0, **others: Any):
        super().__init__(rank, alpha, **others)
        self.scale = alpha / math.sqrt(rank)


class DoRA(LoRA):
    """Directions are updated as in LoRA, sizes by a trained number for each row."""

    def prepare(self, model: nn.Module) -> None:
        super().prepare(model)
        for layer in self.layers(model):
            layer.lora_magnitude = nn.Parameter(row_norms(layer.weight.detach()))  # o: m

    def add_update(self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """inputs: x, ... i; output: W0 x + bias, ... o -> h + bias, ... o"""
        if self.is_merged:
            return output
        plain = output if layer.bias is None else output - layer.bias
        updated = super().add_update(layer, inputs, plain)
        # a sum with the output, which stays as it is to the last bit while there is nothing to add
        return output + (self.factor(layer) * updated - plain).to(output.dtype)

    def factor(self, layer: nn.Module) -> torch.Tensor:
        """m / |W0 + s B A|: o"""
        return layer.lora_magnitude / row_norms(super().merged(layer).detach()).clamp(min=SMALLEST)

    def merged(self, layer: nn.Module) -> torch.Tensor:
        return self.factor(layer)[:, None] * super().merged(layer)


class PiSSA(LoRA):
    """The principal part of each matrix is trained, and the rest of it is frozen."""

    begins_as_base = False  # up to rounding it does

    def prepare(self, model: nn.Module) -> None:
        """Raises `UserError` as `LoRA`, and for a rank that a matrix does not have."""
        super().prepare(model)
        for layer in self.layers(model):
            if self.rank > (most := min(layer.weight.shape)):
                raise UserError(f"lora: rank={self.rank} with variant=pissa, but a matrix here has rank {most}")
            u, s, v = torch.linalg.svd(layer.weight.detach() / self.scale, full_matrices=False)  # o k, k, k i
            roots = s[: self.rank].sqrt()
            first = u[:, : self.rank] * roots, roots[:, None] * v[: self.rank]  # o r, r i
            with torch.no_grad():
                for name, factor in zip("BA", first, strict=True):
                    layer.get_parameter(f"lora_{name}").copy_(factor)
                    layer.register_buffer(f"lora_{name}0", factor)  # the update is told by both
                layer.weight -= self.scale * (layer.lora_B @ layer.lora_A)


class NormalLoRA(LoRA):
    """The first A is drawn as in the course's edition that asks for LoRA."""

    def prepare(self, model: nn.Module) -> None:
        super().prepare(model)
        for layer in self.layers(model):
            nn.init.normal_(layer.lora_A, std=0.02)


def row_norms(weight: torch.Tensor) -> torch.Tensor:
    """o i -> o"""
    return torch.linalg.vector_norm(weight, dim=1)


VARIANTS = {"plain": LoRA, "dora": DoRA, "rslora": RsLoRA, "pissa": PiSSA, "normal": NormalLoRA}


def lora(variant: str = "plain", **settings: Any) -> LoRA:
    """LoRA in one of its variants. settings: the arguments of `LoRA`."""
    return VARIANTS[variant](variant=variant, **settings)
