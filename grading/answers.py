"""What a student's code returned, or a saved model holds: plain numbers, or a fault as a sentence.

Imported in the student's process. Code with another structure than the assignment is asked by way of its
`tests/adapters.py`; where a part is asked alone, simple functions stand in for those that it needs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch

from grading import wire
from grading.editions import ADAPTERS


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


def slopes_of(call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`slopes` of what a function returns by its inputs."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    with torch.enable_grad():
        return slopes(call(*(one.clone() for one in leaves)), leaves)  # a leaf cannot be changed in place


def slopes(outputs: Any, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a weighted sum of each output by each of these tensors; an empty tensor where there is none."""
    found: list[torch.Tensor] = []
    for one in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        total = (one.double() * torch.cos(torch.arange(one.numel())).view_as(one)).sum()
        ways = [None] * len(leaves)
        if total.requires_grad:
            ways = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
        found += [leaf.new_zeros(0) if way is None else way for leaf, way in zip(leaves, ways, strict=True)]
    return found


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


# ---------------------------------------------------------------------- stand-ins for the parts that another part needs
# Known to script and student's process. With them a part is asked alone, whatever the parts that it needs compute. They
# hold no right number of any part.


class Product(torch.nn.Module):
    """In the place of a module from states to states: the product with a matrix, whatever else it is given."""

    def __init__(self, matrix: torch.Tensor):
        super().__init__()
        self.matrix = matrix

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return x @ self.matrix.to(x)


def turned(query: torch.Tensor, key: torch.Tensor, *others: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of the rotation: position s is multiplied by s + 1 in queries, by s + 2 in keys. b s h d, b s g d"""
    places = torch.arange(1.0, query.shape[1] + 1)[:, None, None].to(query)
    return query * places, key * (places + 1)


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    """In the place of scores and softmax: a sum, in which every position is its own. All b h s d"""
    return query + 2 * key + 3 * value


def summed(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """In the place of the hidden states: rows of a table, summed up to each position. v D, b s -> b s D"""
    rows = table[tokens.masked_fill(tokens < 0, 0)]
    return (rows * torch.arange(1.0, tokens.shape[1] + 1)[:, None].to(rows)).cumsum(1)


def replace_parts(module: torch.nn.Module, matrices: dict[str, torch.Tensor]) -> None:
    """Put a `Product` in the place of each part with one of these names: "norm", or "layers.1" for one of a list."""
    for name, matrix in matrices.items():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, Product(matrix))


def replace_forward(model: torch.nn.Module, table: torch.Tensor) -> None:
    """Let a student's Llama return `summed` hidden states, and the logits that its head makes of them."""

    def forward(tokens: torch.Tensor, targets: Any = None, *others: Any, **named: Any) -> tuple:
        hidden = summed(table, tokens)
        return model.output(hidden if targets is not None else hidden[:, [-1]]), hidden

    model.forward = forward


# ------------------------------------------------------------------------------------------ code with another structure
# A question goes to the adapters only if the code lacks the module, name or argument that it needs; the hand-out's
# adapters call the assignment's own names, and so fail as the code itself.

STAND_INS = {"replaced", "table"}  # arguments of questions that adapters are not asked


def call(name: str, question: Callable, arguments: dict[str, Any]) -> Any:
    """The answer to a question, or that of the adapters. Raises the question's exception if they have none."""
    try:
        return question(**arguments)
    except (ImportError, AttributeError, TypeError) as error:
        path = Path(ADAPTERS).resolve()  # the process runs in the student's folder
        if name not in ADAPTED or STAND_INS & {*arguments} or not path.is_file():
            raise
        spec = importlib.util.spec_from_file_location("adapters", path)
        adapters = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(adapters)
        try:
            return ADAPTED[name](adapters, **arguments)
        except NotAdapted:
            raise error from None


class NotAdapted(Exception):
    """The adapters have no function for this form of a question."""


def norm(adapters: ModuleType, name: str, arguments: list, weights: dict, x: torch.Tensor) -> Any:
    if name == "FeedForward":
        raise NotAdapted
    return adapters.run_norm(weights, x, arguments[-1])


def rotate(adapters: ModuleType, theta: float | None = None, **inputs: Any) -> Any:
    return adapters.run_rope(**inputs, **({} if theta is None else {"theta": theta}))


def scores(adapters: ModuleType, mask: torch.Tensor | None = None, **inputs: Any) -> Any:
    """The mask is given as well where `run_scores` has an argument for it, and the function behind it takes it."""
    unmasked = adapters.run_scores(**inputs)
    if mask is not None and "mask" in inspect.signature(adapters.run_scores).parameters:
        with contextlib.suppress(TypeError):
            return unmasked, adapters.run_scores(**inputs, mask=mask.bool())
    return unmasked


def attention(adapters: ModuleType, **inputs: Any) -> Any:
    return adapters.run_attention(**inputs)


def layer(adapters: ModuleType, **inputs: Any) -> Any:
    return adapters.run_layer(**inputs)


def llama(adapters: ModuleType, config: dict, weights: dict, tokens: torch.Tensor) -> Any:
    logits, hidden = adapters.run_llama(config, weights, tokens)
    return logits, hidden, hidden @ weights["output.weight"].T


def generate(
    adapters: ModuleType, config: dict, weights: dict, tokens: torch.Tensor, new: int, hot: tuple = (1e-3, 1e4)
) -> Any:
    asked = [(row[None], 0.0) for row in tokens] + [(tokens[:1], temperature) for temperature in hot]
    return [adapters.run_generate(config, weights, text, new, temperature) for text, temperature in asked]


def few_steps(adapters: ModuleType, weights: torch.Tensor, gradients: torch.Tensor, **settings: Any) -> Any:
    if {"own", "late"} & {*settings}:
        raise NotAdapted
    return adapters.run_adamw(weights, gradients, settings)


def gradients(adapters: ModuleType, question: str, inputs: list[str], **arguments: Any) -> list[torch.Tensor]:
    def call(*given: torch.Tensor) -> Any:
        return ADAPTED[question](adapters, **arguments | dict(zip(inputs, given, strict=True)))

    return slopes_of(call, [arguments[name] for name in inputs])


ADAPTED: dict[str, Callable] = {
    "norm_or_feed_forward": norm, "rotate": rotate, "scores": scores, "attention": attention, "layer": layer,
    "llama": llama, "generate": generate, "few_steps": few_steps, "gradients": gradients,
}  # fmt: skip
