"""Modules that take the places of a model's own and share all that these hold.

A kernel and the module that it stands in for have one `__dict__`: parameters, buffers, children, hooks, the mode, and
whatever somebody sets or registers on either. So names and parameters stay what they are, to an optimizer too, and what
hangs on a layer is computed on. What a kernel has of its own, its settings and copies of weights, lies in `__slots__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import FunctionType
from typing import Any, ClassVar

from torch import nn

OWN = "a kernel's own"  # the entry of a state that is no attribute of the module


class Kernel:
    """A module in the place of another, `plain`. Beside the class `replaces`, which it computes as."""

    __slots__ = ("plain",)
    replaces: ClassVar[type[nn.Module]]

    def __new__(cls, *_: Any, **__: Any) -> Kernel:
        kernel = super().__new__(cls)
        for name in _slots(cls):
            object.__setattr__(kernel, name, None)
        return kernel

    @classmethod
    def sharing(cls, module: nn.Module) -> Any:
        """A kernel, without settings so far, that holds what `module` holds."""
        kernel = cls.__new__(cls)
        object.__setattr__(kernel, "plain", module)  # which PyTorch would make a child of it
        object.__setattr__(kernel, "__dict__", vars(module))
        return kernel

    def without_kernel(self) -> nn.Module:
        """What it stands in for; of one that was made by itself, a module of that class."""
        plain = self.plain or self.replaces.__new__(self.replaces)
        plain.__dict__ = vars(self)  # which that of a copy is not
        object.__setattr__(self, "plain", plain)
        return plain

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and `torch.save` take along: no slot whose name begins with an underscore."""
        own = {name: getattr(self, name) for name in _slots(type(self)) if not name.startswith("_")}
        return {**vars(self), OWN: own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = state[OWN]
        super().__setstate__({name: value for name, value in state.items() if name != OWN})
        for name, value in own.items():
            object.__setattr__(self, name, value)


@cache
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for base in kind.__mro__ for name in vars(base).get("__slots__", ()))


def replace(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Put other modules in the places of some, wherever in `model` these stand."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in others:
                setattr(parent, name, others[child])


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to be told when a module computes."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or bool(nn.modules.module._has_any_global_hook())


def own_methods(module: nn.Module) -> set[str]:
    """The methods of its class that a module has been given others for."""
    return vars(module).keys() & _methods_of(type(module))


@cache
def _methods_of(kind: type) -> frozenset[str]:
    members = (item for base in kind.__mro__ for item in vars(base).items())
    return frozenset(name for name, value in members if isinstance(value, FunctionType))
