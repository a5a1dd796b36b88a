"""Adapters: small bottlenecks behind or beside the frozen sub-layers of every layer (Houlsby et al. 2019,
arXiv:1902.00751; in the forms of He et al. 2022, "Towards a unified view", arXiv:2110.04366, section 3 and table 1).

With x the input of a sub-layer, after its norm, and h its output, which is added to the residual stream:

    sequential    h <- h + s f(h W_down) W_up        W_down: D r   W_up: r D   f: ReLU
    parallel      h <- h + s f(x W_down) W_up

Both layers have biases, and dropout comes before W_up, as in the authors' code; the norm that it may have in the
bottleneck is left out. Where norms come before a sub-layer, the authors' parallel adapter at the feed-forward reads the
residual stream before the norm; here it reads what the feed-forward reads. In a BERT, whose norms come after a
sub-layer, x is what the sub-layer reads, and h is added to it before the norm. The paper's best adapter is the parallel
one at the feed-forward with s = 4; its sequential one has s = 1 (`scale=1`). W_up and the biases begin at zero and
W_down as in LoRA, so the model begins as the base.

Shapes: b batch   s position   D model dim   r width of the bottleneck
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from advanced.added import AddingMethod
from engine.methods import pretrained_of


class Bottleneck(nn.Module):
    """The term that an adapter adds."""

    def __init__(self, dim: int, width: int, scale: float, dropout: float):
        super().__init__()
        self.scale = scale
        self.down, self.up = nn.Linear(dim, width), nn.Linear(width, dim)
        self.dropout = nn.Dropout(dropout)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: b s D -> b s D, through b s r"""
        x = x.to(self.down.weight.dtype)
        return self.scale * self.up(self.dropout(F.relu(self.down(x))))


class Adapter(AddingMethod):
    """width: r. form: sequential or parallel. scale: s. places: the sub-layers' names, joined by +."""

    name = "adapter"
    mark = ".adapter."
    freezes = True

    def __init__(
        self, width: int = 32, form: str = "parallel", scale: float = 4.0, places: str = "feed_forward",
        dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__(width=width, form=form, scale=scale, places=places, dropout=dropout)
        self.width, self.form, self.scale, self.dropout = width, form, scale, dropout
        self.places = tuple(places.split("+"))

    def prepare(self, model: nn.Module) -> None:
        for name, sublayer in model.named_modules():
            if name.rpartition(".")[2] in self.places:
                dim = pretrained_of(model).config.dim
                sublayer.adapter = Bottleneck(dim, self.width, self.scale, self.dropout)
                sublayer.register_forward_hook(self.add, with_kwargs=True)

    def add(
        self, sublayer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor:
        """inputs: x, b s D; output: h, b s D or b 1 D -> the same"""
        x = output
        if self.form == "parallel":
            context = getattr(sublayer, "context", None)  # attention may compute only the positions that it names
            x = inputs[0] if context is None else context.queries(inputs[0])
        return output + sublayer.adapter(x).to(output.dtype)
