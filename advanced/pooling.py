"""Pooling: the head reads several positions of the last layer, or the last real token.

    mean         the mean of all tokens' states (Reimers & Gurevych 2019, "Sentence-BERT", arXiv:1908.10084, section 3)
    attention    sum_t a_t h_t with a = softmax_t(h_t . q / sqrt(D)), what a trained query q attends to (Yang et al.
                 2016, "Hierarchical attention networks", equations 6 and 7, without their hidden layer; the root is
                 that of Vaswani et al. 2017). q is zero at first, so that it begins as the mean
    last         the state of the last token

All of them leave out padding and include bos. Whether the layers below *see* padding is decided by padding-mask.

Shapes: t position   D model dim
"""

from __future__ import annotations

import torch
from torch import nn

from advanced.added import AddingMethod
from advanced.reading import reading_of
from advanced.table import READ_ANYWAY
from utils import UserError


class Pooling(AddingMethod):
    """kind: mean, attention or last."""

    name = "pooling"
    mark = "read.query"
    begins_as_base = False
    is_needed = True

    def __init__(self, kind: str = "mean"):
        super().__init__(kind=kind)
        self.kind = kind

    def prepare(self, model: nn.Module) -> None:
        """Raises `UserError` if pooling would read the same token as the base."""
        reading = reading_of(model)
        if self.kind == "last" and (model.llama.config.is_causal or reading.hides_padding):
            raise UserError(f"pooling: {READ_ANYWAY}")
        reading.pool = self.kind
        if self.kind == "attention":
            reading.query = nn.Parameter(torch.zeros_like(model.llama.norm.weight))  # D
