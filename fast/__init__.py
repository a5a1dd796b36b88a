"""Kernels and precisions, applied to a model by one function that walks its modules.

`accelerate(model, precision)` changes where and in which number format a model is computed; its parameters keep their
names, shapes and float32 values (int8 rounds them), so that checkpoints stay what they are. `decoder(llama, precision)`
is an object that generates text with a model. Nothing here is needed: without this package the model computes the same,
slower.
"""

import importlib
from typing import Any

MODULES = {"Choice": "apply", "accelerate": "apply", "decoder": "decode", "is_small_job": "small_job"}
__all__ = sorted(MODULES)


def __getattr__(name: str) -> Any:
    """What the package offers, imported when it is asked for: `is_small_job` may say that nothing else is needed."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fast.{MODULES[name]}"), name)
