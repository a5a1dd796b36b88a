"""The holes: what a student implements, in which edition, and what else goes with it; and cutting them out of a file.

The table of structure.md is this one, without the helpers; a test compares them.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

NOT_WRITTEN = "not written yet"  # engine.programs makes one line of an error that begins so
SANITY, ROPE, OPTIMIZER = "sanity_check.py", "rope_test.py", "optimizer_test.py"


class Hole(NamedTuple):
    """A function whose body a student writes.

    check: the script that fails without it; part: its name there, with the edition's kind of attention in the place of
    {}. norm: of the editions that have it; "": all. given: the body with the lines that the course gives, and TODO
    where the student's lines belong. gone: names that leave the hole's file, because they give the answer away.
    """

    file: str
    name: str
    check: str
    part: str = ""
    norm: str = ""
    given: str = "TODO"
    gone: tuple[str, ...] = ()


TODO = "TODO"
GENERATE_GIVEN = """\
for _ in range(max_new_tokens):
    TODO
    logits, _ = self(idx[:, -self.config.max_seq_len :])
    logits = logits[:, -1, :]  # b v: after the last token
    if temperature == 0.0:
        idx_next = None  # b 1: the likeliest token
    else:
        idx_next = None  # b 1: a token that is drawn
    idx = torch.cat((idx, idx_next), dim=1)
return idx"""
ROPE_GIVEN = """\
# a pair is one complex number: query_real holds q_1, q_3, q_5, ..., and query_imag holds q_2, q_4, q_6, ...
query_real, query_imag = query.float().unflatten(-1, (-1, 2)).unbind(-1)  # b s h d/2
key_real, key_imag = key.float().unflatten(-1, (-1, 2)).unbind(-1)  # b s g d/2
TODO"""
STEP_GIVEN = """\
loss = None
if closure is not None:
    with torch.enable_grad():
        loss = closure()
for group in self.param_groups:
    for p in group["params"]:
        if p.grad is None:
            continue
        if p.grad.is_sparse:
            raise RuntimeError("AdamW needs dense gradients; for sparse ones there is torch.optim.SparseAdam")
        state = self.state[p]  # what is kept from step to step
        TODO
return loss"""
HOLES = (
    Hole("llama.py", "RMSNorm._norm", SANITY, "RMSNorm", "rms"),
    Hole("base_llama.py", "LayerNorm._norm", SANITY, "LayerNorm", "layer"),
    Hole("llama.py", "Attention.compute_query_key_value_scores", SANITY, "scores and softmax, {}"),
    Hole("llama.py", "LlamaLayer.forward", SANITY, "layer, {}"),
    Hole("llama.py", "Llama.generate", SANITY, "generate, {}", given=GENERATE_GIVEN),
    Hole("rope.py", "apply_rotary_emb", ROPE, given=ROPE_GIVEN, gone=("table_rows", "rope_table", "frequencies")),
    Hole("optimizer.py", "AdamW.step", OPTIMIZER, given=STEP_GIVEN),
    Hole("classifier.py", "LlamaEmbeddingClassifier.forward", SANITY, "embedding classifier, {}"),
)  # fmt: skip


def holes_of(norm: str) -> list[Hole]:
    """The holes of an edition whose models have this norm."""
    return [hole for hole in HOLES if hole.norm in ("", norm)]


def blank(source: str, file: str, holes: list[Hole]) -> str:
    """A file of this package without the answers of these holes. Raises `KeyError` for a name that it does not have."""
    mine = [hole for hole in holes if hole.file == file]
    return _cut(source, file, mine) if mine else source


def removed(source: str, file: str, holes: list[Hole]) -> list[str]:
    """The lines of code that `blank` takes out of a file, without spaces around them."""
    kept = set(map(str.strip, blank(source, file, holes).splitlines()))
    lines = map(str.strip, source.splitlines())
    return [line for line in lines if line and not line.startswith("#") and line not in kept]


def without(source: str, names: Iterable[str]) -> str:
    """A file without these functions, classes and constants. Raises `KeyError` for a name that it does not have."""
    nodes, lines = _named(ast.parse(source)), source.splitlines(keepends=True)
    return _replaced(lines, [(*_whole(nodes[name], lines), "") for name in names])


def _cut(source: str, file: str, holes: list[Hole]) -> str:
    nodes, lines = _named(ast.parse(source)), source.splitlines(keepends=True)
    cuts = []
    for hole in holes:
        node = nodes[hole.name]
        first, *rest = node.body
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):  # the docstring stays
            first = rest[0]
        said = f'raise NotImplementedError("{NOT_WRITTEN}: {hole.name} in {file}")'
        body = textwrap.indent(hole.given.replace(TODO, said) + "\n", " " * first.col_offset)
        cuts.append((first.lineno - 1, node.end_lineno, body))
        cuts += [(*_whole(nodes[name], lines), "") for name in hole.gone]
    return _replaced(lines, cuts)


def _whole(node: ast.AST, lines: list[str]) -> tuple[int, int]:
    """Where a function, class or constant begins and ends, with its decorators and the empty lines before it."""
    start = min(each.lineno for each in (node, *getattr(node, "decorator_list", ()))) - 1
    while not lines[start - 1].strip():
        start -= 1
    return start, node.end_lineno


def _replaced(lines: list[str], cuts: list[tuple[int, int, str]]) -> str:
    for start, end, text in sorted(cuts, reverse=True):
        lines[start:end] = [text] if text else []
    return "".join(lines)


def _named(tree: ast.Module) -> dict[str, ast.AST]:
    """Functions, classes and constants by name, methods as `Class.method`."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        name = getattr(node, "name", "")
        found |= {name: node} if name else {}
        inner = node.body if isinstance(node, ast.ClassDef) else ()
        found |= {f"{name}.{each.name}": each for each in inner if isinstance(each, ast.FunctionDef)}
    return found
