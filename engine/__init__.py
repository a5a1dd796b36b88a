"""The code of a run around the model: data, checkpoints, training, saved runs, the driver's flags. See README.md.

    from engine import load_llama, load_classifier, predict, generate

Importing this package imports nothing else; the first use of one of these names imports PyTorch.
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = {
    "load_llama": "families",
    "load_classifier": "runs",
    "predict": "runs",
    "generate": "inference",
}
__all__ = ["generate", "load_classifier", "load_llama", "predict"]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
