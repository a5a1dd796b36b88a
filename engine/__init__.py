"""What a run needs around the model: data, checkpoints, training, saved runs, the driver's flags. See README.md.

    from engine import load_llama, load_classifier, predict, generate

These names import PyTorch when they are first asked for; importing this package imports nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = {
    "load_llama": "families",
    "load_classifier": "saved",
    "predict": "saved",
    "generate": "generation",
}
__all__ = ["generate", "load_classifier", "load_llama", "predict"]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
