"""The holes: what a student implements, in which edition, and what else goes with it; and cutting them out of a file.

The table of structure.md is this one, without the helpers; a test compares them.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

NOT_WRITTEN = "not written yet"  # engine.programs makes one line of an error that begins so
SANITY, ROPE, OPTIMIZER = "sanity_check.py", "rope_test.py", "optimizer_test.py"


class Hole(NamedTuple):
    """A function whose body a student writes.

    check: the script that fails without it; part: its name there, with the edition's kind of attention in the place of
    {}. norm, sampling: the editions that have it; "": all. emptied: other functions, as `file:name`, whose bodies go as
    well, because they are the answer or give it away. gone: names that leave the hole's file.
    """

    file: str
    name: str
    check: str
    part: str = ""
    norm: str = ""
    emptied: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


HOLES = (
    Hole("llama.py", "RMSNorm._norm", SANITY, "RMSNorm", "rms", ("base_llama.py:LayerNorm._norm",)),
    Hole("base_llama.py", "LayerNorm._norm", SANITY, "LayerNorm", "layer", ("llama.py:RMSNorm._norm",)),
    Hole("llama.py", "Attention.compute_query_key_value_scores", SANITY, "scores and softmax, {}"),
    Hole("llama.py", "LlamaLayer.forward", SANITY, "layer, {}"),
    Hole("llama.py", "Llama.generate", SANITY, "generate, {}", emptied=(
        "llama.py:sample_next", "base_llama.py:LlamaPreTrainedModel.kept", "base_llama.py:truncate",
        "engine/sampling.py:drop")),
    Hole("rope.py", "apply_rotary_emb", ROPE, gone=(
        "rope_table", "_angles", "frequencies", "_closer", "_slow_ones_closer", "SCALINGS", "rotate", "_rotate_pairs")),
    Hole("optimizer.py", "AdamW.step", OPTIMIZER, gone=(
        "AdamW._by_step", "AdamW._pieces", "AdamW._update", "_local", "_split", "CACHE_PIECE", "Tensors")),
    Hole("classifier.py", "LlamaEmbeddingClassifier.forward", SANITY, "embedding classifier, {}"),
)  # fmt: skip


def holes_of(norm: str) -> list[Hole]:
    """The holes of an edition whose models have this norm."""
    return [hole for hole in HOLES if hole.norm in ("", norm)]


def blank(source: str, file: str, holes: list[Hole]) -> str:
    """A file of this package without the answers of these holes. Raises `KeyError` for a name that it does not have."""
    named = [f"{hole.file}:{hole.name}" for hole in holes] + [name for hole in holes for name in hole.emptied]
    empty = {name.partition(":")[2] for name in named if name.startswith(f"{file}:")}
    gone = {name for hole in holes if hole.file == file for name in hole.gone}
    return _cut(source, file, empty, gone) if empty or gone else source


def removed(source: str, file: str, holes: list[Hole]) -> list[str]:
    """The lines of code that `blank` takes out of a file, without spaces around them."""
    kept = set(map(str.strip, blank(source, file, holes).splitlines()))
    lines = map(str.strip, source.splitlines())
    return [line for line in lines if line and not line.startswith("#") and line not in kept]


def _cut(source: str, file: str, empty: set[str], gone: set[str]) -> str:
    nodes, lines = _named(ast.parse(source)), source.splitlines(keepends=True)
    cuts = []
    for name in empty:
        first, *rest = nodes[name].body
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):  # the docstring stays
            first = rest[0]
        said = f'{" " * first.col_offset}raise NotImplementedError("{NOT_WRITTEN}: {name} in {file}")\n'
        cuts.append((first.lineno - 1, nodes[name].end_lineno, said))
    for name in gone:
        start = min(node.lineno for node in (nodes[name], *getattr(nodes[name], "decorator_list", ()))) - 1
        while not lines[start - 1].strip():  # the empty lines before it go as well
            start -= 1
        cuts.append((start, nodes[name].end_lineno, ""))
    for start, end, said in sorted(cuts, reverse=True):
        lines[start:end] = [said] if said else []
    return "".join(lines)


def _named(tree: ast.Module) -> dict[str, ast.AST]:
    """Functions, classes and constants by name, methods as `Class.method`."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        name = getattr(node, "name", "")
        found |= {name: node} if name else {}
        inner = node.body if isinstance(node, ast.ClassDef) else ()
        found |= {f"{name}.{each.name}": each for each in inner if isinstance(each, ast.FunctionDef)}
    return found
