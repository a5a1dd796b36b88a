"""The top layers are drawn anew before training (Zhang et al. 2021, "Revisiting Few-sample BERT Fine-tuning",
arXiv:2006.05987, section 5): weights that predict words well may be a bad beginning for another task.

They get the random weights that a layer has before pre-training (`base_llama.py`, `bert/model.py`), and norms that
scale by 1. So does a BERT's pooler, as in the paper, which stands above the layers. A Llama's final norm and the
embedding, which is the output matrix too, stay. The head is always new; if it is zero, training begins with all classes
equally likely.
"""

from __future__ import annotations

from torch import nn

from advanced.table import NO_HEAD
from engine.methods import Method, pretrained_of
from llama import RMSNorm
from utils import UserError


class Reinit(Method):
    """layers: how many, from the top; 0 for the head alone. head: uniform, as PyTorch draws it, or zero."""

    name = "reinit"
    begins_as_base = False

    def __init__(self, layers: int = 1, head: str = "uniform"):
        super().__init__(layers=layers, head=head)
        self.layers, self.head = layers, head

    def prepare(self, model: nn.Module) -> None:
        pretrained = pretrained_of(model)
        if self.layers > (most := len(pretrained.layers)):
            raise UserError(f"{self.layers} layers cannot be drawn anew: the model has {most}")
        for layer in pretrained.layers[most - self.layers :]:
            pretrained.init_weights(layer)
            for norm in (part for part in layer.modules() if isinstance(part, (RMSNorm, nn.LayerNorm))):
                nn.init.ones_(norm.weight)
                if isinstance(norm, nn.LayerNorm):
                    nn.init.zeros_(norm.bias)
        if self.layers and getattr(pretrained, "pooler", None) is not None:
            pretrained.init_weights(pretrained.pooler)
        if self.head == "zero":
            head = getattr(model, "classifier_head", None)
            if head is None:
                raise UserError(NO_HEAD)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
