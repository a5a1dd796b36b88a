"""(IA)^3: trained vectors that scale what layers compute (Liu et al. 2022, arXiv:2205.05638, section 3.3).

    softmax(q (l_k * K)^T / sqrt(d)) (l_v * V)        w2 (l_ff * u)

K and V are keys and values, u what the feed-forward's last matrix reads: silu(w1 x) * w3 x in a Llama, gelu(w1 x) in
a BERT. l_k, l_v and l_ff begin with ones, so the model begins as the base; all else but the head is frozen. In a Llama
l_k scales keys before they are rotated; with grouped queries l_k and l_v have a number for each number of the keys,
which are fewer than those of the queries.

Scaling is merged for evaluation and saving: l_k and l_v into the rows of the matrices that compute keys and values (and
into their biases), l_ff into the columns of w2.

So little is trained (about the width of five vectors in a layer) that the learning rate must be high: the paper's is
3e-3. The paper pre-trains the vectors on other tasks as well, and has two more terms in its loss, which are left out.

Shapes: i input features   o output features
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from advanced.added import State, layers_named, replaced
from engine.methods import Method

SCALED_OUTPUTS, SCALED_INPUTS = ("compute_key", "compute_value"), ("w2",)


class IA3(Method):
    """No arguments."""

    name = "ia3"
    freezes = True

    def __init__(self) -> None:
        super().__init__()
        self.is_merged = False

    def prepare(self, model: nn.Module) -> None:
        for layer in layers_named(model, SCALED_OUTPUTS):
            layer.ia3_scale = nn.Parameter(torch.ones(layer.out_features))  # o
            layer.register_forward_hook(self.scale_output)
        for layer in layers_named(model, SCALED_INPUTS):
            layer.ia3_scale = nn.Parameter(torch.ones(layer.in_features))  # i
            layer.register_forward_pre_hook(self.scale_input)

    def scale_output(self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """output: ... o -> ... o"""
        return output if self.is_merged else output * layer.ia3_scale.to(output.dtype)

    def scale_input(self, layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """inputs: x, ... i -> ... i"""
        return None if self.is_merged else (inputs[0] * layer.ia3_scale.to(inputs[0].dtype),)

    @contextmanager
    def evaluation_weights(self, model: nn.Module) -> Iterator[None]:
        with replaced(self.merged(model)):
            self.is_merged = True
            try:
                yield
            finally:
                self.is_merged = False

    def merged(self, model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """The weights that scaling changes, and what they become."""
        for layer in layers_named(model, SCALED_OUTPUTS):
            yield layer.weight, layer.ia3_scale[:, None] * layer.weight  # o i
            if layer.bias is not None:
                yield layer.bias, layer.ia3_scale * layer.bias
        for layer in layers_named(model, SCALED_INPUTS):
            yield layer.weight, layer.weight * layer.ia3_scale  # o i

    def export(self, state: State) -> tuple[State, State]:
        return {name: tensor for name, tensor in state.items() if not name.endswith(".ia3_scale")}, {}
