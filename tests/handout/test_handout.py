"""The folder that an instructor hands out: its holes, what it leaks, and that it runs alone."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, asset
from error_helpers import check_one_error

from engine.programs import run_main
from grading import judge, parts, rotary, small_model
from grading.editions import EDITIONS
from grading.needs import Package, files_of, find_needs
from grading.student_process import Student
from handout import __main__ as program
from handout import holes as table
from handout import writing
from handout.editions import FIELDS, text_of
from handout.holes import HOLES, OPTIMIZER, ROPE, Hole, holes_of
from handout.writing import leaks, write_handout

CHANGED = {  # files that are not this package's own: other defaults, one norm, the course's arguments
    "ucsc": {"config.py", "rope.py", "optimizer.py", "base_llama.py", "llama.py"},
    "cmu2026": {"config.py", "rope.py", "llama.py", "grading/editions.py", "setup.sh"},
}


def ask(folder: Path, *command: str, status: int) -> str:
    """What a command prints in a folder, which is the only one of this package that it finds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_table_of_holes_is_that_of_the_page():
    page = (ROOT / "structure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\.py)` \| `([\w.]+)` \| .* \| (.*) ?\|$", page, re.MULTILINE)
    assert [row[:2] for row in rows] == [(hole.file, hole.name) for hole in holes_of("rms")]
    for hole, (*_, names) in zip(holes_of("rms"), rows, strict=True):
        assert re.findall("`(.*?)`", names) == list(hole.gone)
    for hole in HOLES:  # every name is one of its file
        table.blank((ROOT / hole.file).read_text(encoding="utf-8"), hole.file, [hole])


@pytest.mark.parametrize("edition", EDITIONS)
def test_nothing_in_the_folder_holds_an_answer(tmp_path: Path, edition: str):
    holes = write_handout(tmp_path / "out", edition)
    assert leaks(tmp_path / "out", edition, holes) == []
    answers = [line for hole in holes for line in table.removed(text_of(hole.file, edition), hole.file, [hole])]
    assert len(answers) > 40
    assert not [
        path for path in (tmp_path / "out").rglob("*") if path.name in ("naive.py", "docs", "notebooks", "fast")
    ]
    (tmp_path / "out/engine/notes.md").write_text("so: `weights = self.attn_dropout(scores.float().softmax(dim=-1)`")
    (tmp_path / "out/engine/README.md").write_text('    state["m"].lerp_(p.grad,   1 - beta1)\n')
    found = [line.partition(":")[0] for line in leaks(tmp_path / "out", edition, holes)]
    assert found == ["engine/README.md"]
    text = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "out").glob("*.md"))
    assert "{{" not in text and all(hole.name in text for hole in holes)
    outputs = [name for name in EDITIONS[edition].required if name.endswith("-output.txt")]
    assert all(f" {name}" in (tmp_path / "out/README.md").read_text(encoding="utf-8") for name in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("edition", ["ucsc", "cmu2025"])
def test_while_all_is_empty_every_program_says_so_in_one_line(tmp_path: Path, edition: str):
    holes = write_handout(tmp_path / "out", edition)
    said = ask(tmp_path / "out", "sanity_check.py", "--parts", status=1)
    for hole in holes:
        if hole.check not in (ROPE, OPTIMIZER):
            assert re.search(rf"{hole.part.format(EDITIONS[edition].attention)}: +not written yet", said), hole
    assert "FAILED: apply_rotary_emb: not written yet" in ask(tmp_path / "out", "rope_test.py", status=1)
    assert "FAILED: AdamW: not written yet" in ask(tmp_path / "out", "optimizer_test.py", status=1)
    said = ask(tmp_path / "out", "run_llama.py", status=2)
    assert said.splitlines()[-1] == "error: not written yet: Llama.generate in llama.py"
    said = ask(tmp_path / "out", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", status=1)
    assert "passed" not in said and len(re.findall(r"^not written yet: ", said, re.MULTILINE)) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("edition", [pytest.param("ucsc", marks=pytest.mark.slow), "cmu2026"])
def test_filled_with_our_functions_it_passes_alone_and_its_files_are_ours(tmp_path: Path, edition: str):
    write_handout(tmp_path / "out", edition, holes=[])
    for file in writing.files():
        is_own = (tmp_path / "out" / file).read_bytes() == (ROOT / file).read_bytes()
        assert is_own == (file not in CHANGED[edition]), file
    package, mine = Package(), files_of({file: tmp_path / "out" / file for file in writing.files()})
    assert all(judge._is_handed_out(file, mine, package) for file in mine.sizes)
    assert "correct!" in ask(tmp_path / "out", "sanity_check.py", "--parts", status=0)
    assert "passed!" in ask(tmp_path / "out", "rope_test.py", status=0)
    assert "passed!" in ask(tmp_path / "out", "optimizer_test.py", status=0)
    assert "Wrote" in ask(tmp_path / "out", "run_llama.py", "--max_new_tokens", "3", status=0)
    said = ask(tmp_path / "out", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", status=0)
    assert "failed" not in said
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'out')!r}]; from config import LlamaConfig; c = LlamaConfig(); "
    )
    said = ask(tmp_path, "-c", f"{code}print(c.norm, c.attention, c.sampling)", status=0)
    assert said.split() == [getattr(EDITIONS[edition], field) for field in FIELDS]


def test_a_submission_of_it_needs_no_file_that_is_not_handed_out(tmp_path: Path):
    """The instructor's package has these files; a student who hands in the whole folder loses nothing."""
    write_handout(tmp_path / "out", "ucsc")
    mine = files_of({file: tmp_path / "out" / file for file in writing.files()})
    required, others, _ = find_needs(mine, EDITIONS["ucsc"], Package())
    assert required.absent == {} and others.absent == {}


@pytest.mark.parametrize("edition", writing.FETCHED_LATER)
def test_set_up_fetches_the_tensors_of_the_edition(edition: str, assets: Path):
    path = asset(assets, f"editions/sanity_check.{edition}.data")
    text = writing.with_defaults((ROOT / "setup.sh").read_text(encoding="utf-8"), "setup.sh", edition)
    assert f'"sanity_check.data": "{hashlib.sha256(path.read_bytes()).hexdigest()}"' in text
    assert f'"sanity_check.data": {path.stat().st_size:_},' in text and "neubig/" not in text


@pytest.mark.slow
@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.name)
def test_each_hole_alone_fails_its_own_check(tmp_path: Path, hole: Hole, monkeypatch: pytest.MonkeyPatch):
    edition = "cmu2025" if hole.norm == "layer" else "ucsc"
    kind, norm = EDITIONS[edition].attention, EDITIONS[edition].norm
    write_handout(tmp_path / "out", edition, holes=[hole])
    if hole.check in (ROPE, OPTIMIZER):
        assert "not written yet" in ask(tmp_path / "out", hole.check, status=1)
        other = {ROPE: OPTIMIZER, OPTIMIZER: ROPE}[hole.check]
        ask(tmp_path / "out", other, status=0)
        return
    token = small_model.NORM.set(norm)
    try:
        mine = [part for part in parts.all_parts((kind,)) if part.name == hole.part.format(kind)]
        with Student(tmp_path / "out") as student:
            (finding,) = parts.judge_parts(student, mine, parts.stored_numbers(norm))
            assert finding.verdict == "not written yet" and hole.file in finding.sentence
            (rope,) = student.ask_all([rotary.published_case().question])
            assert not rope.trouble
    finally:
        small_model.NORM.reset(token)


def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["handout", str(tmp_path)])
    check_one_error(run_main(program.main), capsys.readouterr().err, "is not an empty folder")
    monkeypatch.setattr(sys, "argv", ["handout", str(tmp_path / "out"), "--edition", "cmu2023"])
    check_one_error(run_main(program.main), capsys.readouterr().err, "cmu2023")
    assert [path.name for path in tmp_path.iterdir()] == ["own.txt"]


def test_what_was_half_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "filled_in", fail)
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(OSError):
            write_handout(tmp_path / name, "ucsc")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_what_another_process_has_begun_to_write_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def holes_of(norm: str) -> list[Hole]:
        """Asked for between the look at the folder and the first file."""
        (tmp_path / "out/tests").mkdir(parents=True)
        (tmp_path / "out/llama.py").write_text("of another process")
        return []

    monkeypatch.setattr(writing, "holes_of", holes_of)
    with pytest.raises(FileExistsError):
        write_handout(tmp_path / "out", "ucsc")
    assert (tmp_path / "out/llama.py").read_text() == "of another process"


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["handout", str(tmp_path / "out"), "--edition", "cmu2025"])
    assert run_main(program.main) == 0
    assert re.search(
        r"^wrote hand-out [\d.]+ of cmu2025 to .*: \d+ files, 7 functions to write\n$", capsys.readouterr().out
    )


def test_code_with_another_structure_is_asked_by_way_of_its_adapters(tmp_path: Path):
    """Other names of the layer, the scores and the norm; without the adapters these parts would be wrong."""
    out = tmp_path / "out"
    write_handout(out, "cmu2025", holes=[])
    renamed = {"LlamaLayer": "Block", "compute_query_key_value_scores": "attend", "LayerNorm": "Norm"}
    for file in ("llama.py", "base_llama.py", "engine/torchrun.py", "tests/adapters.py"):
        text = (out / file).read_text(encoding="utf-8")
        for old, new in renamed.items():
            text = re.sub(rf"\b{old}\b", new, text)
        (out / file).write_text(text, encoding="utf-8")
    kind, token = "bidirectional", small_model.NORM.set("layer")
    try:
        names = ("LayerNorm", f"scores and softmax, {kind}", f"grouped queries, {kind}", f"layer, {kind}")
        mine = [part for part in parts.all_parts((kind,)) if part.name in names]
        for verdict, folder in (("ok", out), ("WRONG", out)):
            if verdict == "WRONG":
                (out / "tests/adapters.py").unlink()
            with Student(folder) as student:
                found = [*parts.judge_parts(student, mine, parts.stored_numbers("layer"))]
            assert found[0].verdict == verdict and {one.verdict for one in found} <= {verdict, "not judged"}, found
    finally:
        small_model.NORM.reset(token)
