"""BitFit: nothing but biases is trained, and the head (Ben Zaken et al. 2022, arXiv:2106.10199, section 3).

    h = W x + b        W frozen    b: o, trained

The paper trains the biases that BERT was pretrained with: of queries, keys, values, the attention's output, both
layers of the feed-forward, and the norms; in the authors' code the pooler's as well. A BERT's are thawed, all of them,
and what is saved is a plain model. A Llama has none, so they are added to the seven matrices and the two norms of a
layer. They begin at zero, so the model begins as the base.

The norms' biases add nothing to those of the matrices behind them (W (n + b) = W n + W b); they are here because the
paper trains them. The bias of the keys matters because of rotary positions; without them softmax would cancel it.

Shapes: o output features
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from advanced.added import AddingMethod
from advanced.table import MATRICES
from engine.methods import pretrained_of

BIASED_PLACES = (*MATRICES, "attention_norm", "ffn_norm")


class BitFit(AddingMethod):
    """No arguments. A plain Llama has no biases, so a saved one needs the method."""

    name = "bitfit"
    mark = ".bitfit_bias"
    freezes = True

    def prepare(self, model: nn.Module) -> None:
        for name, layer in pretrained_of(model).named_modules():
            if isinstance(getattr(layer, "bias", None), nn.Parameter):
                layer.bias.requires_grad_()
            elif name.rpartition(".")[2] in BIASED_PLACES:
                # not `bias`: kernels compute layers without one
                layer.bitfit_bias = nn.Parameter(layer.weight.new_zeros(len(layer.weight)))  # o
                layer.register_forward_hook(self.add_bias)

    def add_bias(self, layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """output: ... o -> ... o"""
        return output + layer.bitfit_bias.to(output.dtype)
