"""LoRA: low-rank updates of frozen matrices (Hu et al. 2021, arXiv:2106.09685).

A linear layer with the pretrained matrix W0 computes (equation 3, with the scale of section 4.1)

    h = W0 x + (alpha / r) B A dropout(x)        A: r i, drawn;  B: o r, zero

so that it begins as the pretrained layer. All weights but A, B and the classifier's head are frozen. The model that is
evaluated and saved is a plain one, with W0 + (alpha / r) B A in the place of W0.

A and B are two more parameters of the layer, and a hook adds the update to its output. So the layer's weight keeps its
name in the state dict, and a kernel may compute the layer.

Shapes: r rank   i input features   o output features
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from engine.methods import Method
from utils import UserError


class LoRA(Method):
    """rank: r. alpha: the scale of the update is alpha / r. targets: the layers' names, joined by +."""

    name = "lora"
    freezes = True

    def __init__(
        self, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0, targets: str = "compute_query+compute_value"
    ):
        super().__init__(rank=rank, alpha=alpha, dropout=dropout, targets=targets)
        self.rank, self.scale, self.dropout = rank, alpha / rank, dropout
        self.targets = tuple(targets.split("+"))
        self.is_merged = False

    def prepare(self, model: nn.Module) -> None:
        """Raises `UserError` if the model has no layer of a target's name."""
        names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        if absent := [target for target in self.targets if target not in names]:
            raise UserError(f"lora: this model has no {absent[0]}")
        for layer in self.layers(model):
            layer.lora_A = nn.Parameter(torch.empty(self.rank, layer.in_features))  # r i
            layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, self.rank))  # o r
            nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))
            layer.lora_dropout = nn.Dropout(self.dropout)
            layer.register_forward_hook(self.add_update)

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The linear layers that are updated."""
        return [module for name, module in model.named_modules() if name.rpartition(".")[2] in self.targets]

    def add_update(self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """inputs: x, ... i; output: W0 x, ... o -> h, ... o"""
        if self.is_merged:
            return output
        x = layer.lora_dropout(inputs[0].to(layer.lora_A.dtype))  # ... i
        update = F.linear(F.linear(x, layer.lora_A), layer.lora_B)  # ... o
        return output + (self.scale * update).to(output.dtype)

    @contextmanager
    def evaluation_weights(self, model: nn.Module) -> Iterator[None]:
        frozen = {layer: layer.weight.detach().clone() for layer in self.layers(model)}
        with torch.no_grad():
            for layer in frozen:
                layer.weight += self.scale * (layer.lora_B @ layer.lora_A)  # o i
        self.is_merged = True
        try:
            yield
        finally:
            self.is_merged = False
            with torch.no_grad():
                for layer, weight in frozen.items():
                    layer.weight.copy_(weight)  # subtracting the update again would leave its rounding

    def export(self, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return {name: tensor for name, tensor in state.items() if not name.endswith((".lora_A", ".lora_B"))}, {}
