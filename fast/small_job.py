"""Whether a text is so short that choosing kernels would take longer than they save.

A module of its own, because importing the rest of this folder takes time as well.
"""

from __future__ import annotations

from torch import nn

LITTLE = 10**9  # tokens times weights: a text that takes some tenths of a second, as choosing kernels does


def is_small_job(model: nn.Module, tokens: int) -> bool:
    """Whether it takes little time to generate so many tokens with this model."""
    return tokens * sum(parameter.numel() for parameter in model.parameters()) < LITTLE
