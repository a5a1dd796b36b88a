"""LoRA: low-rank updates of frozen matrices (Hu et al. 2021, arXiv:2106.09685).

A linear layer with the pretrained matrix W0 computes (equation 3, with the scale of section 4.1)

    h = W0 x + (alpha / r) B A dropout(x)        A: r i, drawn;  B: o r, zero

so that it begins as the pretrained layer. All weights but A, B and the classifier's head are frozen. The model that is
evaluated and saved is a plain one, with W0 + (alpha / r) B A in the place of W0; the factors are kept beside it, for
`convert/peft.py`. Four variants of this are in `lora_variants.py`.

A is drawn as in the authors' code, uniformly as a linear layer's weights are (the paper: from a normal distribution).

LoRA+ (Hayou et al. 2024, arXiv:2402.12354, section 4): B's learning rate is `plus` times that of A; 16 is the paper's.
The head keeps the rate of A; in the authors' code biases, the head's too, have that of B, and no weight decay.

A and B are two more parameters of the layer, and a hook adds the update to its output. So the layer's weight keeps its
name in the state dict, and a kernel may compute the layer.

Shapes: r rank   i input features   o output features
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from advanced.added import State, layers_named, replaced, split_groups
from engine.methods import Method
from utils import UserError


class LoRA(Method):
    """rank: r. alpha: the scale of the update is alpha / r. targets: the layers' names, joined by +.

    variant: the name of the class in `lora_variants.VARIANTS`. plus: B's learning rate divided by A's.
    """

    name = "lora"
    freezes = True

    def __init__(
        self, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0, targets: str = "compute_query+compute_value",
        variant: str = "plain", plus: float = 1.0,
    ):  # fmt: skip
        super().__init__(rank=rank, alpha=alpha, dropout=dropout, targets=targets, variant=variant, plus=plus)
        self.rank, self.scale, self.dropout, self.plus = rank, alpha / rank, dropout, plus
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
            layer.register_forward_hook(self.add_update, prepend=True)  # before what others do to W0 x

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The linear layers that are updated."""
        return layers_named(model, self.targets)

    def add_update(self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """inputs: x, ... i; output: W0 x, ... o -> h, ... o"""
        if self.is_merged:
            return output
        x = layer.lora_dropout(inputs[0].to(layer.lora_A.dtype))  # ... i
        update = self.scale * F.linear(F.linear(x, layer.lora_A), layer.lora_B)  # ... o
        return output + update.to(output.dtype)

    def merged(self, layer: nn.Module) -> torch.Tensor:
        """The matrix that computes the same as the layer with its update: o i"""
        return layer.weight + self.scale * (layer.lora_B @ layer.lora_A)

    def parameter_groups(self, groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        faster = {layer.lora_B: 1 for layer in self.layers(model)}
        return groups if self.plus == 1.0 else split_groups(groups, faster, self.plus)

    @contextmanager
    def evaluation_weights(self, model: nn.Module) -> Iterator[None]:
        with replaced((layer.weight, self.merged(layer)) for layer in self.layers(model)):
            self.is_merged = True
            try:
                yield
            finally:
                self.is_merged = False

    def export(self, state: State) -> tuple[State, State]:
        return {name: tensor for name, tensor in state.items() if ".lora_" not in name}, {}

    def kept(self, state: State) -> State:
        return {name: tensor for name, tensor in state.items() if ".lora_" in name}
