"""Kernels and precisions, applied to a model by one function that walks its modules.

`accelerate(model, precision)` changes where and in which number format a model is computed; its parameters keep their
names, shapes and float32 values (int8 rounds them), so that checkpoints stay what they are. Nothing here is needed:
without this package the model computes the same, slower.
"""

from fast.apply import Choice, accelerate

__all__ = ["Choice", "accelerate"]
