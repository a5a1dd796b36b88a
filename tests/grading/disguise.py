"""Copies of a source file that were made to look different, to see whether `grading.similar` finds them."""

from __future__ import annotations

import ast
import io
import random
import tokenize
from collections.abc import Callable


class _Renaming(ast.NodeTransformer):
    """Gives variables and arguments the names of a table."""

    def __init__(self, names: dict[str, str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.names.get(node.arg, node.arg)
        return node


def _rename(code: str, draw: random.Random) -> str:
    """Other names for all variables that are assigned; comments are dropped."""
    tree = ast.parse(code)
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    table = {name: f"my_{name[::-1]}_{draw.randrange(100)}" for name in sorted(stored)}
    return ast.unparse(_Renaming(table).visit(tree))


def _reformat(code: str, draw: random.Random) -> str:
    """A line break after every comma inside of brackets, comments and empty lines elsewhere."""
    lines = code.split("\n")
    depth, ends = 0, []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
            ends += [token.end] if token.string == "," and depth else []
        elif token.type == tokenize.NEWLINE:
            ends.append(token.end)
    for row, column in reversed(ends):
        line = lines[row - 1]
        lines[row - 1] = f"{line[:column]}{draw.choice(('  # as the paper says', ''))}\n{line[column:].lstrip()}"
    return "\n".join(lines)


def _reorder(code: str, draw: random.Random) -> str:
    """Classes, functions and methods in another order."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            places = [at for at, each in enumerate(node.body) if isinstance(each, (ast.ClassDef, ast.FunctionDef))]
            moved = draw.sample([node.body[at] for at in places], len(places))
            for at, each in zip(places, moved, strict=True):
                node.body[at] = each
    return ast.unparse(tree)


DISGUISES: dict[str, Callable[[str, random.Random], str]] = {
    "renamed": _rename, "reformatted": _reformat, "reordered": _reorder,
}  # fmt: skip


def disguised(code: str, kind: str, draw: random.Random) -> str:
    """A copy of one of the kinds of `DISGUISES`; the file itself if it is no Python."""
    try:
        return DISGUISES[kind](code, draw)
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        return code
