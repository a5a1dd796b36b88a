"""Modules that take the places of a model's own and share all that these hold.

A kernel and the module that it replaces have one `__dict__`: parameters, buffers, children, hooks, the mode, and every
attribute that is set later on either. So names and parameters stay what they are, also for an optimizer, and hooks of a
layer still run. A kernel's own settings and copies of weights lie in `__slots__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from engine.context import slots_of

OWN_SLOTS = "a kernel's own"  # the entry of a state that is no attribute of the module


class Kernel:
    """A module in the place of another one, `plain`, of the class `replaces`. A subclass derives from that as well."""

    __slots__ = ("plain",)
    replaces: ClassVar[type[nn.Module]]

    def __new__(cls, *_: Any, **__: Any) -> Kernel:
        kernel = super().__new__(cls)
        for name in slots_of(cls):
            object.__setattr__(kernel, name, None)
        return kernel

    @classmethod
    def sharing(cls, module: nn.Module) -> Any:
        """A kernel that holds everything that `module` holds. Its settings are None."""
        kernel = cls.__new__(cls)
        object.__setattr__(kernel, "plain", module)  # PyTorch's `__setattr__` would make it a child
        object.__setattr__(kernel, "__dict__", vars(module))
        return kernel

    def without_kernel(self) -> nn.Module:
        """The module that it replaces; for a kernel made by its constructor, a new one with the same `__dict__`."""
        plain = self.plain or self.replaces.__new__(self.replaces)
        plain.__dict__ = vars(self)  # a copied kernel and its `plain` have two
        object.__setattr__(self, "plain", plain)
        return plain

    def __getstate__(self) -> dict[str, Any]:
        """For `copy.deepcopy` and `torch.save`: without slots whose names begin with an underscore."""
        own = {name: getattr(self, name) for name in slots_of(type(self)) if not name.startswith("_")}
        return {**vars(self), OWN_SLOTS: own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = state[OWN_SLOTS]
        super().__setstate__({name: value for name, value in state.items() if name != OWN_SLOTS})
        for name, value in own.items():
            object.__setattr__(self, name, value)


def replace(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Put the value of each entry in the place of its key, wherever in `model` that stands."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in others:
                setattr(parent, name, others[child])


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook runs when a module computes, its own or one of all modules."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or bool(nn.modules.module._has_any_global_hook())


def own_methods(module: nn.Module) -> set[str]:
    """The names of methods that are set on the module itself, over those of its class."""
    return vars(module).keys() & _methods_of(type(module))


@cache
def _methods_of(kind: type) -> frozenset[str]:
    members = (item for base in kind.__mro__ for item in vars(base).items())
    return frozenset(name for name, value in members if isinstance(value, FunctionType))


# ---------------------------------------------------------------------------------------------------- writes to weights
# Whether a weight is still what it was when something was made of it.
#
# PyTorch counts the writes to a tensor, but not those to its `.data`, of NumPy or of fused optimizers. So some numbers
# of the weight are compared as well: what changes all numbers, such as a merged LoRA, is seen.

SAMPLE = 32  # numbers, spread over rows and columns: to compare them takes a microsecond
OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # NumPy has no bfloat16


class WeightState:
    """A matrix as it is now. It is kept, so that no other one can come to lie at its address."""

    def __init__(self, weight: torch.Tensor):
        self.weight, self.place = weight.detach(), _place_of(weight)
        self.numbers = _some_numbers(self.weight)  # not copied: what is written to the weight shows here
        self.before = self.numbers.tobytes()

    def stands(self, weight: torch.Tensor) -> bool:
        """Whether `weight` lies where it did, and no write to it is known of."""
        return _place_of(weight) == self.place and self.numbers.tobytes() == self.before


def _place_of(weight: torch.Tensor) -> tuple[object, ...]:
    # PyTorch does not count writes to an inference tensor, so its state is never the same
    return weight.data_ptr(), weight.stride(), object() if weight.is_inference() else weight._version


def _some_numbers(weight: torch.Tensor) -> np.ndarray:
    """A view of numbers of a matrix that lies in the CPU's memory as numbers; else nothing. weight: o i"""
    if type(weight) is not torch.Tensor or weight.device.type != "cpu" or weight.dim() != 2 or not weight.numel():
        return np.empty(0)
    rows, columns = (max(1, size // SAMPLE) for size in weight.shape)
    return weight[::rows, ::columns].diagonal().view(OF_SIZE[weight.element_size()]).numpy()
