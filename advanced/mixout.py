"""Mixout: in each step a random part of the weights is replaced by the pretrained ones (Lee et al. 2020,
arXiv:1909.11299).

A linear layer with the weight W, which began as W_pre, computes in training with (section 3)

    W' = (M * W + (1 - M) * W_pre - p W_pre) / (1 - p)

where M is 0 with probability p and else 1: W' is W on average, and W in evaluation. Dropout is the same with W_pre = 0:
it pulls the weights towards zero, and mixout pulls them towards the pretrained ones.

In mixout M has one value for each *input neuron*, a column of W: "all outgoing parameters from a randomly selected
neuron" are pretrained. So there is no need to build W'. With m the values of the columns, and m' = m / (1 - p),

    W' x = W (m * x) / (1 - p) + W_pre ((1 - m - p) * x) / (1 - p) = W (m' * x) + W_pre ((1 - m') * x):

the layer, or a kernel in its place, reads m' * x, and the other product is added. In mixconnect, as the authors call
it, each single weight has its own value in M. With M' = M / (1 - p),

    W' x = W x + ((M' - 1) * (W - W_pre)) x

The gradient of W has the factor 1 / (1 - p) of these formulas, as in dropout. (The authors' published backward pass
leaves it out; Adam, which divides by the size of gradients, hides that.)

Mixout takes the place of dropout in the paper, and published code sets all dropout to 0. Here a model keeps the dropout
that it has, as a BERT does; --dropout 0 takes it out below the head.

M is drawn whenever a layer runs, so the words of several tokens that `prompt-finetune` reads have another M than the
text before them.

The matrices of attention and feed-forward are mixed, but not biases, nor the head, which has no pretrained weights, nor
the embedding, which is the output matrix too. W_pre is a copy that is not saved.

Shapes: i input features   o output features
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from advanced.added import layers_named
from advanced.table import MATRICES
from engine.methods import Method


class Mixout(Method):
    """p: the probability that an input neuron's weights are the pretrained ones."""

    name = "mixout"

    def __init__(self, p: float = 0.7):
        super().__init__(p=p)
        self.p = p

    def prepare(self, model: nn.Module) -> None:
        for layer in self.layers(model):
            layer.register_forward_pre_hook(self.mix_input)
            layer.register_forward_hook(self.add_pretrained)

    def start(self, model: nn.Module) -> None:
        for layer in self.layers(model):  # a resume point is loaded later, so these are what the run began with
            layer.pretrained = layer.weight.detach().clone()  # o i; no parameter and no buffer

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The linear layers whose weights are mixed."""
        return layers_named(model, MATRICES)

    def mix_input(self, layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """inputs: x, ... i -> m' * x, ... i"""
        if not layer.training:
            return None
        (x,) = inputs
        mask = F.dropout(x.new_ones(x.shape[-1]), self.p)  # i: m', 0 or 1 / (1 - p), alike for all rows
        layer.mixed_in = F.linear((1 - mask) * x, whole(layer.pretrained).to(x.dtype))  # ... o
        return (mask * x,)

    def add_pretrained(self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """output: W (m' * x), ... o -> W' x, ... o"""
        return output + vars(layer).pop("mixed_in").to(output.dtype) if layer.training else output


class Mixconnect(Mixout):
    """p: the probability that a single weight is the pretrained one."""

    name = "mixconnect"

    def prepare(self, model: nn.Module) -> None:
        for layer in self.layers(model):
            layer.register_forward_hook(self.add_difference)

    def add_difference(self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """inputs: x, ... i; output: W x, ... o -> W' x, ... o"""
        if not layer.training:
            return output
        (x,) = inputs
        mask = F.dropout(torch.ones_like(layer.weight), self.p)  # o i: M'
        difference = (mask - 1) * (layer.weight - whole(layer.pretrained))  # o i: W' - W
        return output + F.linear(x, difference.to(x.dtype)).to(output.dtype)


def whole(weight: torch.Tensor) -> torch.Tensor:
    """The whole of a weight, of which this process may hold a piece."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight
