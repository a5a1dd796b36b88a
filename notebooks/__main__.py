"""Make the notebook of its parts, `part_*.py`: run all cells from top to bottom, and keep what they show.

    python -m notebooks                                       # notebooks/assignment.ipynb, solved and run
    python -m notebooks --blank --out notebooks/mine.ipynb    # the exercises, with folded solutions, not run
    python -m notebooks --project https://github.com/OWNER/NAME --out notebooks/colab.ipynb    # links for Colab

In the sources `# %%` begins a cell of code and `# %% [markdown]` one of text, whose lines are comments; links in it
begin at the project's root. Words after `# %%`: "chance", the cell may show another thing on another machine;
"exercise", `# >>> HINT` and `# <<<` stand around lines that the reader is to write.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.programs import ArgumentParser, check_new, run_main
from utils import UserError, atomic_write, short_repr

NOTEBOOKS_FOLDER = Path(__file__).resolve().parent
ROOT = NOTEBOOKS_FOLDER.parent
NOTEBOOK = NOTEBOOKS_FOLDER / "assignment.ipynb"
CELL_MARK = re.compile(r"^# %%( \[markdown\])?( chance)?( exercise)?\n", re.MULTILINE)
TO_WRITE = re.compile(r"^( *)# >>> (.*)\n((?:.*\n)*?) *# <<<(?:\n|\Z)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)]+)\)")
GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?")
COLAB = "https://colab.research.google.com/github"
CELL_SECONDS = 900  # seconds that a cell may take, on a busy machine too


def main() -> None:
    args = get_args()
    began = time.monotonic()
    out = NOTEBOOK if args.out is None else Path(args.out).resolve()
    notebook = notebook_of(sources(), args.blank, out, args.project)
    if not args.blank:
        notebook = executed(notebook)
    with atomic_write(out) as file:
        file.write(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {out}, {out.stat().st_size / 1000:.0f} kB, after {time.monotonic() - began:.0f} s")


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Raises `UserError` for a mistake, before a cell runs."""
    parser = ArgumentParser(prog="python -m notebooks", description=__doc__.split("\n\n")[0])
    add, default = parser.add_argument, argparse.SUPPRESS
    add("--blank", action="store_true", default=default, help="exercises to fill in, with folded solutions; not run")
    add("--out", metavar="FILE", help="a new file in the place of notebooks/assignment.ipynb")
    add("--project", metavar="URL", help="where this project is published on GitHub, for absolute links and for Colab")
    args = parser.parse_args(argv, argparse.Namespace(blank=False))
    if args.blank and args.out is None:
        raise UserError("--blank needs --out FILE: notebooks/assignment.ipynb stays the solved notebook")
    if args.out is not None:
        check_new(args.out, "--out")  # it may be a notebook that somebody has filled in
    if args.project is not None and not GITHUB.fullmatch(args.project):
        raise UserError(f"--project {short_repr(args.project)}: give an address like https://github.com/OWNER/NAME")
    return args


def sources() -> str:
    """The parts, one after the other."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(NOTEBOOKS_FOLDER.glob("part_*.py")))


# ------------------------------------------------------------------------------------------------ from source to cells


def notebook_of(
    source: str, is_blank: bool = False, out: Path = NOTEBOOK, project: str | None = None
) -> dict[str, Any]:
    """The notebook without outputs, in nbformat 4.5. out: where it will lie; project: its address on GitHub."""
    _, *parts = CELL_MARK.split(source)
    cells = []
    for number, start in enumerate(range(0, len(parts), 4)):
        is_text, is_chance, is_exercise, body = parts[start : start + 4]
        tags = [word.strip() for word in (is_chance, is_exercise) if word]
        cells += cells_of(f"cell-{number:02}", body.strip("\n"), bool(is_text), tags, is_blank)
    if project:
        address = GITHUB.fullmatch(project)
        _put_on_github(cells, address[1], out)
    else:
        _set_links(cells, f"{Path(os.path.relpath(ROOT, out.parent)).as_posix()}/")
        if not out.is_relative_to(ROOT):
            _set_up(cells, 'FOLDER = "."', f"FOLDER = {str(ROOT)!r}")
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def cells_of(name: str, body: str, is_text: bool, tags: list[str], is_blank: bool) -> Iterator[dict[str, Any]]:
    """The cell of a part of the source; of an exercise that is to be filled in, also its folded solution."""
    if is_text:
        yield cell(name, "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.split("\n")), [], False)
        return
    solved = TO_WRITE.sub(r"\1# \2\n\3", body).rstrip("\n")
    if not is_blank or "exercise" not in tags:
        yield cell(name, solved, tags, True)
        return
    yield cell(name, TO_WRITE.sub(r"\1# \2\n\1...\n", body).rstrip("\n"), tags, True)
    folded = f"<details><summary>Solution</summary>\n\n```python\n{solved}\n```\n\n</details>"
    yield cell(f"{name}-solution", folded, ["solution"], False)


def cell(name: str, text: str, tags: list[str], is_code: bool) -> dict[str, Any]:
    *lines, last = text.split("\n")
    kind = {"cell_type": "code", "execution_count": None, "outputs": []} if is_code else {"cell_type": "markdown"}
    return {
        **kind,
        "id": name,
        "metadata": {"tags": tags} if tags else {},
        "source": [f"{x}\n" for x in lines] + [last],
    }


def _set_links(cells: list[dict[str, Any]], begin: str) -> None:
    """Put `begin` before all links of the text cells that lead into the project."""
    for each in cells:
        if each["cell_type"] == "markdown" and "solution" not in each["metadata"].get("tags", ()):
            each["source"] = [LINK.sub(rf"]({begin}\1)", line) for line in each["source"]]


def _put_on_github(cells: list[dict[str, Any]], name: str, out: Path) -> None:
    """Absolute links, a link to Colab in the first cell, and the address in the cell that sets Colab up."""
    _set_links(cells, f"https://github.com/{name}/blob/main/")
    path = out.relative_to(ROOT).as_posix() if out.is_relative_to(ROOT) else f"notebooks/{out.name}"
    cells[0]["source"] += [f"\n\n[Open in Colab]({COLAB}/{name}/blob/main/{path})"]
    _set_up(cells, 'PROJECT = ""', f'PROJECT = "https://github.com/{name}"')


def _set_up(cells: list[dict[str, Any]], begin: str, line: str) -> None:
    """Put `line` in the place of the line that begins so, in the cell that sets the notebook up."""
    for each in cells:
        each["source"] = [f"{line}\n" if old.startswith(begin) else old for old in each["source"]]


# ------------------------------------------------------------------------------------------------------------- running


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The same with outputs. A cell that fails is an error. Raises `UserError` without nbclient or ipykernel."""
    try:
        import ipykernel  # noqa: F401  # what the kernel is
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
    except ImportError as error:
        raise UserError(f'running the notebook needs {error.name}: pip install -e ".[notebook]"') from None
    book = nbformat.reads(json.dumps(notebook), as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOKS_FOLDER)}}  # where it runs, as in Jupyter
    client = NotebookClient(book, timeout=CELL_SECONDS, kernel_name="python3", resources=resources, record_timing=False)
    try:
        client.execute()
    except CellExecutionError as error:
        raise UserError(f"a cell fails with {error.ename}: {error.evalue}") from None
    for each in book.cells:
        if "outputs" in each:
            each["outputs"] = _cleaned(each["outputs"])
    return json.loads(nbformat.writes(book))


def _cleaned(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Printed lines in one piece, however they arrived; pictures without what they say of their size in words."""
    kept: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] == "display_data":
            output["data"].pop("text/plain", None)
        is_more = kept and output["output_type"] == kept[-1]["output_type"] == "stream"
        if is_more and output["name"] == kept[-1]["name"]:
            kept[-1]["text"] += output["text"]
        else:
            kept.append(output)
    return kept


if __name__ == "__main__":
    sys.exit(run_main(main))
