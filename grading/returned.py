"""What a student's code returned, or a saved model holds: plain numbers, or a fault as a sentence.

Imported in the student's process.
"""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable
from typing import Any

import numpy
import torch

from grading import wire


class Wrong(Exception):
    """A fault of a student's code, as a sentence; the script prints it without the name of an exception."""


class Lacks(Wrong):
    """A function without an argument that the model gives it."""


class StateDict(dict):
    """Tensors by name. A plain dictionary would be a student's mistake: returned in the place of a tensor."""


def is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def numbers_of(value: object, dtype: torch.dtype | None) -> torch.Tensor:
    """A student's tensor as a plain one on the CPU, float64. Raises `Wrong` if it has no such numbers.

    dtype: of the inputs, which floating point numbers must have, too; None: any.
    """
    if not isinstance(value, torch.Tensor):
        hint = "; is a `return` missing?" if value is None else ", not a tensor"
        raise Wrong(f"it returns {'None' if value is None else type(value).__name__}{hint}")
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise Wrong("it returns a sparse, nested or quantized tensor, not a plain one")
    if value.device.type == "meta":
        raise Wrong("it returns a tensor of the device meta, which holds no numbers")
    if value.is_complex():
        raise Wrong("it returns complex numbers, not real ones")
    if dtype and is_float(value) and value.dtype != dtype:
        raise Wrong(f"it returns {value.dtype} for inputs of {dtype}".replace("torch.", ""))
    if value.numel() > wire.MAX_NUMBERS:
        raise Wrong(f"it returns {value.numel():,} numbers, far too many")
    return value.detach().cpu().double().as_subclass(torch.Tensor)


def check_takes(function: Callable, what: str, *arguments: Any, **named: Any) -> None:
    """Raises `Lacks` unless a student's function can be called with these arguments, the last of which are `what`."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        raise Lacks(f"it does not take {what}, which the model gives it") from None


def check_gradients(returned: Any, wanted: dict[str, torch.Tensor]) -> None:
    """Raises `Wrong` unless gradients go from what a student's code returned to each of these tensors."""
    values = [one for one in (returned if isinstance(returned, (tuple, list)) else (returned,)) if is_float(one)]
    total = sum(one.sum() for one in values)
    ways = bool(values) and total.requires_grad and torch.autograd.grad(total, [*wanted.values()], allow_unused=True)
    for name, way in zip(wanted, ways or [None] * len(wanted), strict=True):
        if way is None:
            raise Wrong(f"no gradient goes back to {name}: is there a detach(), .data or torch.no_grad()?")


def saved_model(file: torch.Tensor, size: int) -> StateDict:
    """The weights in a .pth file of addition_run.py, and the steps of its optimizer. file: its bytes, as whole numbers.

    No code in it is run: allowed are tensors, plain values and, as the course saves NumPy's random state, its arrays.
    """
    make_array = numpy.random.get_state()[1].__reduce__()[0]
    names = [(make_array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]  # of NumPy 1, 2
    with torch.serialization.safe_globals([*names, numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32"))]):
        try:
            found = torch.load(io.BytesIO(file.numpy().tobytes()[:size]), map_location="cpu", weights_only=True)
        except Exception as error:  # many kinds; PyTorch's sentence advises to load the file nevertheless
            asked = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise Wrong(f"it would call {asked[1]}" if asked else "it is no file of torch.save, or damaged") from None
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in found["model"].items()}
    steps = [int(each.get("step", 0)) for each in found.get("optim", {}).get("state", {}).values()]
    return StateDict(weights, steps=torch.tensor(max(steps, default=0)))
