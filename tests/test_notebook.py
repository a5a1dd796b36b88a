"""The notebook is what its source says, and shows what the code computes."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from page_parts import NUMBER

from notebooks.__main__ import NOTEBOOK, SOURCE, executed, notebook_of
from utils import UserError

NEEDED = ("nbclient", "ipykernel", "matplotlib")
STORED = json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def shows_a_picture(cell: dict[str, Any]) -> bool:
    return any("image/png" in output.get("data", ()) for output in cell["outputs"])


def test_the_notebook_is_made_of_its_source():
    def bare(cell: dict[str, Any]) -> tuple:
        return cell["cell_type"], cell["id"], cell["metadata"].get("tags"), "".join(cell["source"])

    made = notebook_of(SOURCE.read_text(encoding="utf-8"))
    assert [*map(bare, STORED["cells"])] == [*map(bare, made["cells"])], "python -m notebooks"


def test_it_is_short_small_and_was_run_from_top_to_bottom():
    cells = code_cells(STORED)
    assert 15 <= len(cells) <= 22
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert NOTEBOOK.stat().st_size < 1_000_000
    assert sum(map(shows_a_picture, cells)) >= 5
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"}
    assert {output["name"] for cell in cells for output in cell["outputs"] if "name" in output} == {"stdout"}


def test_links_lead_somewhere():
    text = "".join("".join(cell["source"]) for cell in STORED["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 5 and all((NOTEBOOK.parent / link).is_file() for link in links)


def test_no_path_of_a_machine_is_in_it():
    assert str(ROOT) not in json.dumps(STORED) and "/home/" not in json.dumps(STORED)


@pytest.mark.slow
def test_every_cell_runs_and_shows_what_is_stored():
    if absent := [name for name in NEEDED if not importlib.util.find_spec(name)]:
        pytest.skip(f"the notebook needs {', '.join(absent)}: setup.sh --notebook")
    fresh = executed(notebook_of(SOURCE.read_text(encoding="utf-8")))
    for stored, cell in zip(code_cells(STORED), code_cells(fresh), strict=True):
        assert shows_a_picture(stored) == shows_a_picture(cell)
        if "chance" not in cell["metadata"].get("tags", ()):
            assert is_similar(printed(stored), printed(cell)), (printed(stored), printed(cell))


def is_similar(one: str, other: str) -> bool:
    """The same words; figures of training, which rounding moves, up to 0.03 or a twentieth."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(map(float, NUMBER.findall(one)), map(float, NUMBER.findall(other)), strict=True)
    return all(abs(a - b) <= max(0.03, abs(a) / 20) for a, b in pairs)


def test_what_counts_as_similar():
    assert is_similar("epoch 0: dev acc 0.987", "epoch 0: dev acc 0.970")
    assert not is_similar("epoch 0: dev acc 0.987", "epoch 0: dev acc 0.890")
    assert not is_similar("epoch 0: dev acc 0.987", "epoch 1: dev acc 0.987")


def test_a_cell_that_fails_is_said_and_nothing_is_written(tmp_path: Path):
    if not importlib.util.find_spec("nbclient") or not importlib.util.find_spec("ipykernel"):
        pytest.skip("the notebook needs nbclient and ipykernel: setup.sh --notebook")
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "utils.py", tmp_path)
    shutil.copytree(ROOT / "engine", tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "notebooks" / "assignment.py").write_text("# %%\nraise ValueError('so it is')\n")
    before = (tmp_path / "notebooks" / "assignment.ipynb").read_bytes()
    done = subprocess.run([sys.executable, "-m", "notebooks"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "a cell fails with ValueError: so it is" in done.stderr
    assert (tmp_path / "notebooks" / "assignment.ipynb").read_bytes() == before


def test_without_nbclient_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    with pytest.raises(UserError, match=r'running the notebook needs ipykernel: pip install -e "\.\[notebook\]"'):
        executed(notebook_of("# %%\n1\n"))
