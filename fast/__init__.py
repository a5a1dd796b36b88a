"""Kernels and precisions, applied to a model by one function that walks its modules.

`accelerate(model, precision)` changes where and in which number format a model is computed; its parameters keep their
names, shapes and float32 values (int8 rounds them), so that checkpoints stay what they are. `decoder(llama, precision)`
is an object that generates text with a model. Nothing here is needed: without this package the model computes the same,
slower.
"""

from typing import Any

__all__ = ["Choice", "accelerate", "decoder"]


def __getattr__(name: str) -> Any:
    """What the package offers, imported when it is asked for: `fast.little` may say that it is not needed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fast import apply, decode

    return getattr(decode if name == "decoder" else apply, name)
