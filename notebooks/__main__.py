"""Make `assignment.ipynb` of `assignment.py`: run all cells from top to bottom, and keep what they show.

    python -m notebooks

In the source `# %%` begins a cell of code and `# %% [markdown]` one of text, whose lines are comments; "chance" after
it says that the cell may show another thing on another machine. Needs nbclient and ipykernel (the extra "notebook").
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from engine.programs import ArgumentParser, run_main
from utils import UserError, atomic_write

NOTEBOOKS_FOLDER = Path(__file__).resolve().parent
SOURCE, NOTEBOOK = NOTEBOOKS_FOLDER / "assignment.py", NOTEBOOKS_FOLDER / "assignment.ipynb"
CELL_MARK = re.compile(r"^# %%( \[markdown\])?( chance)?\n", re.MULTILINE)
CELL_SECONDS = 900  # seconds that a cell may take, on a busy machine too


def main() -> None:
    ArgumentParser(prog="python -m notebooks", description=__doc__.split("\n\n")[0]).parse_args()
    began = time.monotonic()
    notebook = executed(notebook_of(SOURCE.read_text(encoding="utf-8")))
    with atomic_write(NOTEBOOK) as file:
        file.write(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {NOTEBOOK}, {NOTEBOOK.stat().st_size / 1000:.0f} kB, after {time.monotonic() - began:.0f} s")


def notebook_of(source: str) -> dict[str, Any]:
    """The notebook without outputs, in nbformat 4.5."""
    _, *parts = CELL_MARK.split(source)
    cells = [cell_of(*parts[start : start + 3], start // 3) for start in range(0, len(parts), 3)]
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def cell_of(is_text: str | None, is_chance: str | None, body: str, number: int) -> dict[str, Any]:
    """One cell. chance: its output is random, and may differ on another machine."""
    lines = body.strip("\n").split("\n")
    if is_text:
        lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
    source = [f"{line}\n" for line in lines[:-1]] + lines[-1:]
    cell = {"cell_type": "markdown" if is_text else "code", "id": f"cell-{number:02}", "metadata": {}, "source": source}
    if is_chance:
        cell["metadata"] = {"tags": ["chance"]}
    return cell if is_text else {**cell, "execution_count": None, "outputs": []}


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
    for cell in book.cells:
        if "outputs" in cell:
            cell["outputs"] = _cleaned(cell["outputs"])
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
