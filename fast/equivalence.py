"""Whether a stand-in computes what a piece of the page computes, as that piece now stands.

The root modules are there to be changed. A kernel or decoder may compute in the place of one of their functions only
where it was seen, in this process, to give the same: results, and gradients where it trains, on small inputs that reach
every line of the piece. `difference` compares two callables and says how they differ; it knows nothing of models or of
how a kernel is attached. `EquivalenceCheck` keeps a verdict for as long as the piece stays what it was.
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

TOLERANCE = 1e-4  # of the largest number: ten times what float32 sums in another order are off by
FOREIGN = sys.stdlib_module_names | {"torch", "numpy"}  # whose functions are taken for known
ONE_AT_A_TIME = RLock()  # what is printed, drawn and traced belongs to the whole process
NOT_COMPUTED = ("__init__", "__getstate__", "__repr__", "extra_repr")
NOT_COMPUTED += ("__eq__", "__hash__", "__setattr__", "__delattr__")  # which dataclasses are given


class Case(NamedTuple):
    """Inputs for both sides. Tensors that require gradients, and `parameters`, have theirs compared as well."""

    name: str
    inputs: tuple[Any, ...]
    parameters: tuple[torch.Tensor, ...] = ()


class Comparison(NamedTuple):
    """A piece, what stands in for it, and what both are asked."""

    piece: Callable[..., Any]
    stand_in: Callable[..., Any]
    cases: Iterable[Case]


def difference(
    make: Callable[[], Comparison], lines: Set[tuple[str, int]] = frozenset(), tolerance: float = TOLERANCE
) -> str | None:
    """How the stand-in differs from the piece, in words; None if they agree on every case.

    make: gives both sides, which return a tensor or a tuple of tensors. lines: of the piece, as (file, line): those
    that no case has reached are a difference too, because nobody saw what they compute. What the piece prints, and the
    random numbers it draws, are kept from the outside.
    """
    reached: set[tuple[str, int]] = set()
    with ONE_AT_A_TIME, _in_private():
        try:
            sides = make()
        except Exception as error:
            return f"it cannot be made: {type(error).__name__}: {_short(error)}"
        for case in sides.cases:
            try:
                with _watching(reached, {file for file, _ in lines}):
                    expected = _answer(sides.piece, case)
            except Exception as error:
                return f"{case.name}: it raises {type(error).__name__}: {_short(error)}"
            try:
                actual = _answer(sides.stand_in, case)
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
    torch.default_generator.manual_seed(0)  # both draw the same, if they draw
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
            its_kind, my_kind = ((str(t.dtype).removeprefix("torch."), list(t.shape)) for t in (its, mine))
            return f"{what} are {' '.join(map(str, its_kind))}, not {' '.join(map(str, my_kind))}"
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
    """Nothing is printed, no random generator moves, autocast and the mode of gradients are the default.

    One thread: small inputs gain nothing from more, which on a busy machine wait for one another.
    """
    nowhere, threads = io.StringIO(), torch.get_num_threads()
    with (
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.set_num_threads(1)
        torch.default_generator.manual_seed(0)  # the same cases in every process: no verdict is a matter of luck
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _watching(reached: set[tuple[str, int]], files: set[str]) -> Iterator[None]:
    """Note the lines of some files that run."""

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


# ------------------------------------------------------------------------------------------- what a piece is made of


class Link(NamedTuple):
    """A name that the piece looks up when it runs, and what stands there."""

    holder: Any  # the globals of a module, or an object
    name: str
    value: Any

    def stands(self) -> bool:
        holder = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        return holder.get(self.name) is self.value


class CallTrace:
    """All functions of the page that a piece may run, found by the names in their code."""

    def __init__(self, *roots: type | tuple[type, str]):
        """roots: classes of which all methods count, or a class and the name of one method.

        `reads`: what the methods take of their object that no class gives it.
        """
        self.links: list[Link] = []
        self.codes: list[CodeType] = []
        self.reads: set[str] = set()
        self._seen: set[int] = set()
        for root in roots:
            if isinstance(root, tuple):
                self._add_member(*root)
            else:
                self._visit(root)

    def stands(self) -> bool:
        """Whether every name still means what it meant."""
        return all(link.stands() for link in self.links)

    def lines(self) -> set[tuple[str, int]]:
        """The lines that compute something; not those that only raise an error."""
        return {(code.co_filename, line) for code in self.codes for line in _computing_lines(code)}

    def _add_member(self, owner: type, name: str) -> None:
        """A name that objects of a class have from it, or from a class that it is derived from, if any."""
        home = next((base for base in owner.__mro__ if name in vars(base)), None)
        if home is None:
            self.reads.add(name)
        elif not _is_foreign(home):
            value = vars(home)[name]
            self.links.append(Link(home, name, value))
            self._visit(_function_of(value), owner)

    def _visit(self, part: Any, owner: type | None = None) -> None:
        is_kept = hasattr(part, "cache_info")  # what it computed once does not run again
        part = inspect.unwrap(part) if callable(part) else part
        if id(part) in self._seen or _is_foreign(part):
            return
        self._seen.add(id(part))
        if isinstance(part, type):
            for name, value in list(vars(part).items()):
                if isinstance(_function_of(value), FunctionType) and name not in NOT_COMPUTED:
                    self._add_member(part, name)
            for base in part.__bases__:
                self._visit(base)
        elif isinstance(part, FunctionType):
            if not is_kept:
                self.codes.append(part.__code__)
            self.links.append(Link(_Code(part), "code", part.__code__))
            for cell in part.__closure__ or ():
                with contextlib.suppress(ValueError):  # of a name that has no value yet
                    self._visit(cell.cell_contents)
            for code in _with_inner(part.__code__):
                self._follow(code, part.__globals__)
                if owner is not None:
                    for name in _taken_of_self(code, part.__code__):
                        self._add_member(owner, name)

    def _follow(self, code: CodeType, names: dict[str, Any]) -> None:
        """Add what a function's global names mean, and the attributes that it takes of modules."""
        module = None
        for step in dis.get_instructions(code):
            if step.opname in ("CACHE", "PUSH_NULL"):
                continue
            if module is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in vars(module):
                self._add(module, step.argval, vars(module)[step.argval])
            module = None
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in names:
                value = names[step.argval]
                self._add(names, step.argval, value)
                module = value if isinstance(value, ModuleType) else None

    def _add(self, holder: Any, name: str, value: Any) -> None:
        self.links.append(Link(holder, name, value))
        self._visit(value)


def _is_foreign(part: Any) -> bool:
    """Whether a class or function is nobody's own: of Python, or of a library that is installed."""
    file = getattr(getattr(part, "__code__", None), "co_filename", "")
    return (getattr(part, "__module__", None) or "torch").partition(".")[0] in FOREIGN or "site-packages" in file


def _function_of(member: Any) -> Any:
    """The function behind a property, a class method or a static method; else the member itself."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


class _Code:
    """A view of a function whose dictionary holds its code, which somebody may exchange."""

    def __init__(self, function: FunctionType):
        self._function = function

    @property
    def __dict__(self) -> dict[str, Any]:
        return {"code": self._function.__code__}


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of what is defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _taken_of_self(code: CodeType, method: CodeType) -> Iterator[str]:
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
        line, block = part.co_firstlineno, set()
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


# ----------------------------------------------------------------------------------------------------------- verdicts


class EquivalenceCheck:
    """The verdict on one stand-in, made when it is first asked for and again when the piece has changed.

    name: of the piece, as people find it; roots: what it is made of, see `CallTrace`; sides: see `difference`; reads:
    what the stand-in takes of a module, where a piece that takes more may differ from module to module; None where
    whoever asks compares the modules; but: what the piece goes through and both sides leave out, as roots.
    """

    def __init__(
        self,
        name: str,
        roots: tuple,
        sides: Callable[[], Comparison],
        tolerance: float = TOLERANCE,
        reads: Set[str] | None = None,
        but: tuple = (),
    ):
        self.name, self.roots, self.sides, self.tolerance, self.reads = name, roots, sides, tolerance, reads
        self.but = but
        self._verdict: tuple[CallTrace, str | None] | None = None
        self._is_running = False

    def difference(self) -> str | None:
        """Why the stand-in may not compute; None if it may. A difference is said on standard error, once."""
        verdict = self._verdict
        if verdict is None or not verdict[0].stands():
            with ONE_AT_A_TIME:
                if self._is_running:  # this is the stand-in, asking while it is being compared
                    return None
                if self._verdict is None or not self._verdict[0].stands():
                    self._verdict = self._compare_anew()
                verdict = self._verdict
        return verdict[1]

    def _compare_anew(self) -> tuple[CallTrace, str | None]:
        self._is_running = True
        try:
            anatomy = CallTrace(*self.roots)
            more = anatomy.reads - self.reads if self.reads is not None else set()
            if more:
                found = f"it takes {', '.join(sorted(more))} of its module, which the kernel does not know"
            else:
                found = difference(self.sides, anatomy.lines() - CallTrace(*self.but).lines(), self.tolerance)
        finally:
            self._is_running = False
        if found is not None:
            notice(f"{self.name} is computed as it is written, without its kernel: {found}")
        return anatomy, found

    def holds(self) -> bool:
        return self.difference() is None


@cache
def notice(message: str) -> None:
    """One line on standard error, the same one only once; of several processes the first speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {message}", file=sys.stderr)
