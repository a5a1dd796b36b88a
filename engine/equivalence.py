"""Whether a kernel computes what the code that it replaces computes, as that code stands in this process.

Students edit the root modules. A kernel or decoder may replace one of their functions only after both gave the same
in this process: results, and gradients if it trains, on small inputs that reach every line of the function.
`CallTrace` says which code a method may run, and whether it is still the same; `difference` compares two callables
and says how they differ; `EquivalenceCheck` keeps the answer until the code changes.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cache
from threading import RLock
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

UNTRACED = sys.stdlib_module_names | {"torch", "numpy"}  # their functions are not traced
NOT_COMPUTED = {"__init__", "__getstate__", "__repr__", "extra_repr"}  # methods that give no numbers
NOT_COMPUTED |= {"__eq__", "__hash__", "__setattr__", "__delattr__"}  # made by `dataclass`


class Link(NamedTuple):
    """A name that traced code looks up when it runs, and the object that it stands for."""

    holder: Any  # the globals of a module, or an object; a function for its own code, which an editor may exchange
    name: str
    value: Any

    def stands(self) -> bool:
        if isinstance(self.holder, FunctionType):
            return self.holder.__code__ is self.value
        holder = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        return holder.get(self.name) is self.value


class CallTrace:
    """All functions of this project (or of an editor of it) that some methods may run, found by names in their code."""

    def __init__(self, *roots: type | tuple[type, str]):
        """roots: classes, with all their methods, or a class and the name of one method.

        `links`: every name that is looked up. `reads`: attributes of `self` that no class defines.
        """
        self.links: list[Link] = []
        self.reads: set[str] = set()
        self._codes: list[CodeType] = []
        self._seen: set[int] = set()
        self._cached = 0  # functions on the way to the present one whose results are kept: their lines do not run again
        for root in roots:
            if isinstance(root, tuple):
                self._add_member(*root)
            else:
                self._visit(root)

    def stands(self) -> bool:
        """Whether every name still stands for the same object."""
        return all(link.stands() for link in self.links)

    def lines(self) -> set[tuple[str, int]]:
        """File and number of each line that computes something; not of those that only raise an error."""
        return {(code.co_filename, line) for code in self._codes for line in _computing_lines(code)}

    def _add_member(self, owner: type, name: str) -> None:
        """An attribute of `owner`'s objects: a member of the class or of its bases, else one of `reads`."""
        home = next((base for base in owner.__mro__ if name in vars(base)), None)
        if home is None:
            self.reads.add(name)
        elif not _is_of_library(home):
            value = vars(home)[name]
            self.links.append(Link(home, name, value))
            self._visit(_function_of(value), owner)

    def _visit(self, part: Any, owner: type | None = None) -> None:
        is_cached = hasattr(part, "cache_info")
        part = inspect.unwrap(part) if callable(part) else part
        if id(part) in self._seen or _is_of_library(part):
            return
        self._seen.add(id(part))
        if isinstance(part, type):
            for name, value in list(vars(part).items()):
                if isinstance(_function_of(value), FunctionType) and name not in NOT_COMPUTED:
                    self._add_member(part, name)
            for base in part.__bases__:
                self._visit(base)
        elif isinstance(part, FunctionType):
            self._cached += is_cached
            if not self._cached:
                self._codes.append(part.__code__)
            self._visit_function(part, owner)
            self._cached -= is_cached

    def _visit_function(self, function: FunctionType, owner: type | None) -> None:
        self.links.append(Link(function, "__code__", function.__code__))
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # of a name that has no value yet
                self._visit(cell.cell_contents)
        for code in _with_inner(function.__code__):
            self._follow(code.co_names, function.__globals__)
            if owner is not None:
                for name in _attributes_of_self(code, function.__code__):
                    self._add_member(owner, name)

    def _follow(self, names: tuple[str, ...], scope: dict[str, Any]) -> None:
        """Add the global variables among the names in a function's code, and the attributes of modules among these."""
        modules = [scope[name] for name in names if isinstance(scope.get(name), ModuleType)]
        for holder in (scope, *map(vars, modules)):
            for name in names:
                if name in holder:
                    self.links.append(Link(holder, name, holder[name]))
                    self._visit(holder[name])


def _is_of_library(part: Any) -> bool:
    """Whether a class or function belongs to Python or to an installed library."""
    file = getattr(getattr(part, "__code__", None), "co_filename", "")
    return (getattr(part, "__module__", None) or "torch").partition(".")[0] in UNTRACED or "site-packages" in file


def _function_of(member: Any) -> Any:
    """The function behind a property, a class method or a static method; else the member itself."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of functions defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _attributes_of_self(code: CodeType, method: CodeType) -> Iterator[str]:
    """The names that follow a method's first argument, as in `self.name`."""
    of_self = False
    for step in dis.get_instructions(code):
        if of_self and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield step.argval
        loaded = step.argval[-1:] if isinstance(step.argval, tuple) else (step.argval,)  # two at once from 3.13 on
        is_load = step.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
        of_self = is_load and method.co_argcount > 0 and loaded == method.co_varnames[:1]


def _computing_lines(code: CodeType) -> set[int]:
    """All lines but those of the blocks that end in an error."""
    lines = {line for part in _with_inner(code) for _, _, line in part.co_lines() if line}
    raising: set[int] = set()
    for part in _with_inner(code):
        line = part.co_firstlineno
        block: set[int] = set()
        for step in dis.get_instructions(part):
            line = _line_of(step) or line
            if step.is_jump_target:
                block = set()
            block.add(line)
            if step.opname == "RAISE_VARARGS":
                raising |= block
            if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
                block = set()
    return lines - raising - {code.co_firstlineno}


def _line_of(step: dis.Instruction) -> int | None:
    positions = getattr(step, "positions", None)  # from Python 3.11 on
    return positions.lineno if positions else step.starts_line


# ---------------------------------------------------------------------------------------------- comparing two callables

RELATIVE_TOLERANCE = 1e-4  # of the largest number: ten times the error of float32 sums in another order
ONE_AT_A_TIME = RLock()  # standard output, random numbers and tracing belong to the whole process


class Case(NamedTuple):
    """Inputs for both sides. Gradients of tensors that require them, and of `parameters`, are compared as well."""

    name: str
    inputs: tuple[Any, ...]
    parameters: tuple[torch.Tensor, ...] = ()


class Comparison(NamedTuple):
    """The code as it is written, its kernel, and the inputs of both. A side returns a tensor or a tuple of them."""

    plain: Callable[..., Any]
    kernel: Callable[..., Any]
    cases: Iterable[Case]


def difference(
    make: Callable[[], Comparison], lines: Set[tuple[str, int]] = frozenset(), tolerance: float = RELATIVE_TOLERANCE
) -> str | None:
    """How the kernel differs from the plain side, in words; None if they agree on every case.

    lines: of the plain side, as (file, line): a line that no case has reached is a difference too, because its result
    was not compared. Nothing that the plain side prints is shown, and PyTorch's random numbers stay what they were.
    """
    reached: set[tuple[str, int]] = set()
    with ONE_AT_A_TIME, _in_private():
        try:
            sides = make()
        except Exception as error:
            return f"it cannot be made: {type(error).__name__}: {_short(error)}"
        for case in sides.cases:
            try:
                with _noting_lines(reached, {file for file, _ in lines}):
                    expected = _answer(sides.plain, case)
            except Exception as error:
                return f"{case.name}: it raises {type(error).__name__}: {_short(error)}"
            try:
                actual = _answer(sides.kernel, case)
            except Exception as error:
                return f"{case.name}: the kernel raises {type(error).__name__}: {_short(error)}"
            found = _compare(actual, expected, tolerance)
            if found is not None:
                return f"{case.name}: {found}"
    unreached = sorted(lines - reached)
    if unreached:
        file, line = unreached[0]
        return f"line {line} of {os.path.basename(file)} is for a case that the kernel was not compared on"
    return None


def _answer(run: Callable[..., Any], case: Case) -> list[tuple[str, torch.Tensor]]:
    """What a side returns, and the gradients of a random projection of it."""
    torch.default_generator.manual_seed(0)  # both sides draw the same numbers, if they draw
    inputs = [_fresh(value) for value in case.inputs]
    results = run(*inputs)
    results = results if isinstance(results, (tuple, list)) else (results,)
    answers = [("results", result.detach().clone()) for result in results]
    wanted = [value for value in (*inputs, *case.parameters) if isinstance(value, torch.Tensor) and value.requires_grad]
    if wanted and any(result.requires_grad for result in results):
        draw = torch.Generator().manual_seed(0)
        loss = sum((result * torch.randn(result.shape, generator=draw).to(result)).sum() for result in results)
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        answers += [
            ("gradients", torch.zeros_like(value) if gradient is None else gradient)
            for value, gradient in zip(wanted, gradients, strict=True)
        ]
    return answers


def _fresh(value: Any) -> Any:
    """A copy of a tensor, because a side may write to its inputs."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _compare(actual: list, expected: list, tolerance: float) -> str | None:
    if len(actual) != len(expected):
        return f"{len(expected)} tensors, not {len(actual)}"
    for (what, mine), (_, its) in zip(actual, expected, strict=True):
        if mine.shape != its.shape or mine.dtype != its.dtype:
            kinds = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (its, mine))
            return f"{what} are {', not '.join(kinds)}"
        if torch.equal(mine, its):
            continue
        mine, its = mine.cpu().double(), its.cpu().double()  # MPS has no float64
        off, largest = (mine - its).abs().max().item(), its.abs().max().item()
        if not off <= tolerance * largest:  # spelled so that NaN is a difference
            return f"{what} differ by {off / largest if largest else off:.0e} of the largest"
    return None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:80] or "without a word"


@contextlib.contextmanager
def _in_private() -> Iterator[None]:
    """Print nothing, keep the random state, and compute on the CPU without autocast, with gradients.

    On one thread: small inputs gain nothing from more, which on a busy machine wait for one another.
    """
    nowhere, threads = io.StringIO(), torch.get_num_threads()
    with (
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),  # whatever the caller makes its models on
    ):
        torch.set_num_threads(1)
        torch.default_generator.manual_seed(0)  # the same cases in every process, so that luck decides nothing
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _noting_lines(reached: set[tuple[str, int]], files: set[str]) -> Iterator[None]:
    """Add each line of `files` that runs to `reached`."""

    def on_line(frame: FrameType, event: str, _: Any) -> Callable | None:
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Callable | None:
        return on_line(frame, event, None) if frame.f_code.co_filename in files else None

    before = sys.gettrace()  # a debugger's, or that of a coverage tool
    if files:
        sys.settrace(on_call)
    try:
        yield
    finally:
        if files:
            sys.settrace(before)


class EquivalenceCheck:
    """Compares one kernel when its answer is first needed, and again after the code that it replaces has changed.

    name: of that code, for messages. roots: the code, as `CallTrace` takes it. sides: makes the comparison, see
    `difference`. reads: the attributes of a module that the kernel takes into account; code that reads more may differ
    from module to module. None if the caller compares the modules. but: code, as roots, that both sides leave out.
    instead: what the notice of a difference says; "": that the code is computed as it is written; None: no notice.
    """

    def __init__(
        self,
        name: str,
        roots: tuple,
        sides: Callable[[], Comparison],
        reads: Set[str] | None = None,
        but: tuple = (),
        instead: str | None = "",
    ):
        self.name, self.roots, self.sides, self.reads, self.but = name, roots, sides, reads, but
        self.instead = f"{name} is computed as it is written, without its kernel" if instead == "" else instead
        self._verdict: tuple[CallTrace, str | None] | None = None
        self._is_running = False

    def difference(self) -> str | None:
        """Why the kernel may not compute; None if it may. A new difference gives a notice on standard error."""
        verdict = self._verdict
        if verdict is None or not verdict[0].stands():
            with ONE_AT_A_TIME:
                if self._is_running:  # the kernel itself asks, while it is being compared
                    return None
                if self._verdict is None or not self._verdict[0].stands():
                    self._verdict = self._compare_anew()
                verdict = self._verdict
        return verdict[1]

    def holds(self) -> bool:
        """Whether the kernel may compute."""
        return self.difference() is None

    def _compare_anew(self) -> tuple[CallTrace, str | None]:
        self._is_running = True
        found: str | None
        try:
            trace = CallTrace(*self.roots)
            more = trace.reads - self.reads if self.reads is not None else set()
            if more:
                found = f"it takes {', '.join(sorted(more))} of its module, which the kernel does not know"
            else:
                found = difference(self.sides, trace.lines() - CallTrace(*self.but).lines())
        finally:
            self._is_running = False
        if found is not None and self.instead is not None:
            notice(f"{self.instead}: {found}")
        return trace, found


@cache
def notice(message: str) -> None:
    """One line on standard error, the same one only once; of several processes only the first prints it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {message}", file=sys.stderr)
