"""Pooling: the head reads several positions of the last layer, or the last real token.

    mean         the mean of all tokens' states (Reimers & Gurevych 2019, "Sentence-BERT", arXiv:1908.10084, section 3)
    attention    sum_t a_t h_t with a = softmax_t(h_t . q / sqrt(D)), what a trained query q attends to (Yang et al.
                 2016, "Hierarchical attention networks", equations 6 and 7, without their hidden layer; the root is
                 that of Vaswani et al. 2017). q is zero at first, so that it begins as the mean
    last         the state of the last token

All of them leave out padding and include bos. Whether the layers below *see* padding is decided by padding-mask.

In a BERT, whose tokens never see padding, the vector takes the place of what the pooler makes of [CLS]; [CLS] and [SEP]
count as tokens, as in the paper. The pooler's weights then have no effect.

Shapes: b batch   s, t position   D model dim
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from advanced.added import AddingMethod
from advanced.reading import pooled, reading_of
from advanced.table import READ_ANYWAY
from engine.methods import pretrained_of
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
        pretrained = pretrained_of(model)
        if hasattr(model, "encoder"):
            model.read = reading = EncoderReading(self.kind)
            pretrained.register_forward_hook(reading)
        else:
            reading = reading_of(model)
            if self.kind == "last" and (pretrained.config.is_causal or reading.hides_padding):
                raise UserError(f"pooling: {READ_ANYWAY}")
            reading.pool = self.kind
        if self.kind == "attention":
            table = pretrained.tok_embeddings.weight
            reading.query = nn.Parameter(table.new_zeros(pretrained.config.dim))  # D


class EncoderReading(nn.Module):
    """A hook of an encoder, which replaces its vector of the whole text. query: D, as in `TextRepresentation`."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.register_parameter("query", None)

    def forward(
        self, encoder: nn.Module, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs: of `Bert.forward`; outputs: states b s D and a vector -> the states and another vector, b D"""
        token_ids, _, padding_mask = (*inputs, None, None)[:3]
        is_real = token_ids != encoder.config.pad_id if padding_mask is None else padding_mask.bool()  # b s
        return outputs[0], pooled(outputs[0], is_real, self.kind, self.query)
