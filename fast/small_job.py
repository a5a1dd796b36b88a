"""Whether so little is to be computed that choosing kernels, and proving them, would take longer than it saves.

It is asked before the rest of this folder is imported, which takes a while as well.
"""

from __future__ import annotations

from torch import nn

LITTLE = 10**9  # tokens times weights: a text that takes some tenths of a second, as choosing and proving kernels does


def is_small_job(model: nn.Module, tokens: int) -> bool:
    """Whether `tokens` that are to be generated are few for a model so small."""
    return tokens * sum(parameter.numel() for parameter in model.parameters()) < LITTLE
