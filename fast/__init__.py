"""Kernels and precisions, applied to a model by one function that walks its modules.

`accelerate(model, precision)` changes how and in which number format a model is computed; its parameters keep their
names, shapes and float32 values (int8 and int4 round them), so that checkpoints do not change. `decoder(llama,
precision)` makes an object that generates text with a model; `accelerate_optimizer(optimizer)` lets a kernel compute
AdamW's updates. Without this package models compute the same, more slowly.
"""

import importlib
from typing import Any

MODULES = {
    "Choice": "apply",
    "accelerate": "apply",
    "accelerate_optimizer": "adamw",
    "decoder": "decode",
    "is_small_job": "small_job",
}
__all__ = sorted(MODULES)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: after `is_small_job` nothing else may be needed."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fast.{MODULES[name]}"), name)
