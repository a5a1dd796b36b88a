"""What a Python file imports, by its syntax tree. Nothing is executed."""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from grading.archive import MAX_NAME, FormatError
from grading.programs import printable


class Import(NamedTuple):
    """One imported name. Of `from a import b` it is `a.b`, which may be a module or not."""

    line: int
    name: str
    is_optional: bool  # the code provides for the module's absence
    is_lazy: bool  # inside of a function

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def imports_of(source: bytes, package: list[str]) -> list[Import]:
    """The imports of a module in `package`. Raises `FormatError` where the source is not Python."""
    # Python's parser takes memory that grows with the square of a dotted name.
    if any(run.count(b".") > MAX_NAME for run in re.findall(rb"(?:[\w\x80-\xff.\t\f ]|\\\r?\n)+", source)):
        raise FormatError("line 1: not Python, or too deeply nested")
    try:
        tree = _parse(source)
    except SyntaxError as error:
        raise FormatError(f"line {error.lineno or 1}: not Python ({printable(error.msg)})") from None
    except (ValueError, LookupError, MemoryError, RecursionError):
        raise FormatError("line 1: not Python, or too deeply nested") from None
    return list(_imported(tree, package))


def _parse(source: bytes) -> ast.AST:
    """`ast.parse`, silently, and in a thread with a deep stack: Python 3.10 does not stop before its stack ends."""
    size = threading.stack_size(128 << 20)
    try:
        with warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
            warnings.simplefilter("ignore")
            return thread.submit(ast.parse, source).result()
    finally:
        threading.stack_size(size)


def _imported(tree: ast.AST, package: list[str]) -> Iterator[Import]:
    """Every import statement of a tree. What only a type checker reads is left out."""
    waiting = [(tree, False, False)]
    for node, is_optional, is_lazy in waiting:
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, is_optional, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package) + (node.level == 0):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])[:MAX_NAME]
            for alias in node.names:
                yield Import(node.lineno, f"{module}.{alias.name}", is_optional, is_lazy)
        inner = is_optional or _provides_for_absence(node)
        lazy = is_lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if not _is_for_type_checkers(node):
            waiting += [(statement, inner, lazy) for statement in _block(node, "body")]
        for part in ("handlers", "orelse", "finalbody", "cases"):
            waiting += [(statement, is_optional, lazy) for statement in _block(node, part)]


def _block(node: ast.AST, part: str) -> list[ast.AST]:
    """The statements in a part of a statement; a lambda's or a conditional expression's parts are no lists."""
    block = getattr(node, part, [])
    return block if isinstance(block, list) else []


def _provides_for_absence(node: ast.AST) -> bool:
    """Whether it is `with suppress(ImportError):`, or `try: ... except ImportError:` after which the code goes on."""
    if isinstance(node, ast.With):
        managers = [item.context_expr for item in node.items]
        return _is_about_absence([argument for manager in managers for argument in getattr(manager, "args", [])])
    handlers = getattr(node, "handlers", [])
    return any(_is_about_absence([handler.type]) and not _ends_the_program(handler.body[-1]) for handler in handlers)


def _is_about_absence(caught: list[ast.AST | None]) -> bool:
    """Whether an absent module is among the exceptions that are caught; None catches every exception."""
    names = {getattr(part, "id", getattr(part, "attr", "")) for kind in caught if kind for part in ast.walk(kind)}
    return None in caught or not names.isdisjoint({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def _ends_the_program(statement: ast.stmt) -> bool:
    """Whether a statement raises, exits or returns a status: the module's absence is then told, and not made up for."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        return getattr(called, "id", getattr(called, "attr", "")) in ("exit", "_exit", "quit")
    value = getattr(statement, "value", None)
    is_status = isinstance(value, ast.Constant) and type(value.value) is int and value.value != 0
    return isinstance(statement, ast.Raise) or (isinstance(statement, ast.Return) and is_status)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING"
