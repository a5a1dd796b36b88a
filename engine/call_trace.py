"""Which code a method may run, and whether it is still the same code: `CallTrace`."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

UNTRACED = sys.stdlib_module_names | {"torch", "numpy"}  # their functions are not traced
NOT_COMPUTED = {"__init__", "__getstate__", "__repr__", "extra_repr"}  # methods that give no numbers
NOT_COMPUTED |= {"__eq__", "__hash__", "__setattr__", "__delattr__"}  # made by `dataclass`


class Link(NamedTuple):
    """A name that traced code looks up when it runs, and the object that it stands for."""

    holder: Any  # the globals of a module, or an object
    name: str
    value: Any

    def stands(self) -> bool:
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
        self.links.append(Link(_CodeOf(function), "code", function.__code__))
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


class _CodeOf:
    """A view of a function whose dictionary holds its code, which an editor may exchange."""

    def __init__(self, function: FunctionType):
        self._function = function

    @property
    def __dict__(self) -> dict[str, Any]:
        return {"code": self._function.__code__}


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
