"""What a student's code returned, or a saved model holds: plain numbers, or a fault as a sentence.

Imported in the student's process.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import numpy
import torch

from grading import wire

# A central difference over this step, in float32, is within 1e-4 of right code's slope, of a hundred drawn models.
SLOPE_STEP, LARGEST_SLOPE_ERROR = 3e-3, 1e-3


class Wrong(Exception):
    """A fault of a student's code, as a sentence; the script prints it without the name of an exception."""


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


def check_gradients(returned: Any, wanted: dict[str, torch.Tensor]) -> None:
    """Raises `Wrong` unless gradients go from what a student's code returned to each of these tensors."""
    values = [one for one in (returned if isinstance(returned, (tuple, list)) else (returned,)) if is_float(one)]
    total = sum(one.sum() for one in values)
    ways = bool(values) and total.requires_grad and torch.autograd.grad(total, [*wanted.values()], allow_unused=True)
    for name, way in zip(wanted, ways or [None] * len(wanted), strict=True):
        if way is None:
            raise Wrong(f"no gradient goes back to {name}: is there a detach(), .data or torch.no_grad()?")


def check_slope(call: Callable[[dict[str, torch.Tensor]], Any], arguments: dict[str, Any]) -> None:
    """Raises `Wrong` unless gradients go to all inputs of a student's function, and say how what it returns changes.

    call: the function, of the arguments that are replaced. Where a part of it is detached, gradients go to the inputs
    by the other parts, and are not the slope.
    """
    inputs = {name: one.clone().requires_grad_() for name, one in arguments.items() if is_float(one)}
    check_gradients(call({name: one.clone() for name, one in inputs.items()}), inputs)
    with torch.enable_grad():
        total = _weighted(call({name: one.clone() for name, one in inputs.items()}))
    slopes = torch.autograd.grad(total, [*inputs.values()])
    ways = [torch.sin(torch.arange(1.0, one.numel() + 1)).view_as(one).to(one) for one in inputs.values()]
    with torch.no_grad():
        high, low = (
            _weighted(call({name: one + step * way for (name, one), way in zip(inputs.items(), ways, strict=True)}))
            for step in (SLOPE_STEP, -SLOPE_STEP)
        )
        error = sum((slope * way).double().sum() for slope, way in zip(slopes, ways, strict=True))
        error -= (high - low) / (2 * SLOPE_STEP)
        size = sum(slope.double().norm() * way.norm() for slope, way in zip(slopes, ways, strict=True))
    if not error.abs() <= LARGEST_SLOPE_ERROR * size:
        said = f"gradients that go back to {', '.join(inputs)} do not say how what it returns changes"
        raise Wrong(f"{said}: is a part of it under detach(), .data or torch.no_grad()?")


def _weighted(returned: Any) -> torch.Tensor:
    """One number of all that a student's code returned."""
    values = [one for one in (returned if isinstance(returned, (tuple, list)) else (returned,)) if is_float(one)]
    return sum((one.double() * torch.cos(torch.arange(one.numel())).view_as(one)).sum() for one in values)


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
