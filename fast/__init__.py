"""Kernels and precisions, applied to a model by one function that walks its modules.

`accelerate(model, precision)` changes how and in which number format a model is computed; its parameters keep their
names, shapes and float32 values (int8 and int4 round them), so that checkpoints do not change. `decoder(llama,
precision)` makes an object that generates text with a model; `accelerate_optimizer(optimizer)` lets a kernel compute
AdamW's updates. Without this package models compute the same, more slowly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

LITTLE = 10**9  # tokens times weights: a text that takes some tenths of a second, as choosing kernels does
MODULES = {
    "Choice": "apply",
    "accelerate": "apply",
    "accelerate_optimizer": "adamw",
    "decoder": "decode",
}
__all__ = sorted({*MODULES, "is_small_job"})


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: after `is_small_job` nothing else may be needed."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fast.{MODULES[name]}"), name)


def is_small_job(model: nn.Module, tokens: int) -> bool:
    """Whether it takes so little time to generate so many tokens that choosing kernels would take longer."""
    return tokens * sum(parameter.numel() for parameter in model.parameters()) < LITTLE
