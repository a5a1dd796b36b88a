"""Lower layers are trained at lower rates (Howard & Ruder 2018, "ULMFiT", arXiv:1801.06146, section 3.2).

The final norm, a BERT's pooler, the head, and an output matrix that is not tied have the rate of the plan. Each layer
has `factor` times the rate of the layer above it (the paper divides by 2.6), and the embedding has the lowest rate: of
L layers, layer l = 0, ..., L - 1 has factor^(L - l) times the plan's rate, the embedding factor^(L + 1).

Tensors that other methods have added to a layer have the rate of the layer; tensors added elsewhere that of the head.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from advanced.added import split_groups
from engine.methods import Method, pretrained_of

IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# A Llama's tok_embeddings (an output matrix tied to it has no other name), a BERT's three tables and their norm.
EMBEDDING = re.compile(r"(?:^|\.)(?:tok_embeddings\.weight$|embeddings\.)")


class LayerDecay(Method):
    """factor: the rate of a layer divided by that of the layer above it."""

    name = "layer-decay"

    def __init__(self, factor: float = 0.9):
        super().__init__(factor=factor)
        self.factor = factor

    def parameter_groups(self, groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        """Split every group by the depth of its parameters, from the head to the embedding."""
        layers = pretrained_of(model).config.n_layers
        depths = {parameter: depth(name, layers) for name, parameter in model.named_parameters()}
        return split_groups(groups, depths, self.factor)


def depth(name: str, layers: int) -> int:
    """How many steps a parameter is below the head."""
    if found := IN_LAYER.search(name):
        return layers - int(found[1])
    return layers + 1 if EMBEDDING.search(name) else 0
