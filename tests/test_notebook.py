"""The notebook is what its sources say, shows what the code computes, and tells its reader what is wrong."""

from __future__ import annotations

import importlib.util
import json
import linecache
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from page_parts import NUMBER

import llama
import rope
from classifier import LlamaEmbeddingClassifier, LlamaZeroShotClassifier
from notebooks import checks
from notebooks.__main__ import NOTEBOOK, NOTEBOOKS_FOLDER, executed, get_args, notebook_of, sources
from optimizer import AdamW
from utils import UserError

NEEDED = ("nbclient", "ipykernel", "matplotlib")
STORED = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
SOLVED, BLANK = notebook_of(sources()), notebook_of(sources(), is_blank=True)
CHECK_LINE = re.compile(r'^(?:\w+ = )?check(?:_small)?\("([^"]+)".*\)$', re.MULTILINE)


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def tags_of(cell: dict[str, Any]) -> list[str]:
    return cell["metadata"].get("tags", [])


def printed(cell: dict[str, Any]) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def shows_a_picture(cell: dict[str, Any]) -> bool:
    return any("image/png" in output.get("data", ()) for output in cell["outputs"])


EXERCISES = {
    CHECK_LINE.search(text_of(cell))[1]: text_of(cell) for cell in code_cells(SOLVED) if "exercise" in tags_of(cell)
}


# ------------------------------------------------------------------------------------------------ what is written


def test_the_notebook_is_made_of_its_sources():
    def bare(cell: dict[str, Any]) -> tuple:
        return cell["cell_type"], cell["id"], tags_of(cell), text_of(cell)

    assert [*map(bare, STORED["cells"])] == [*map(bare, SOLVED["cells"])], "python -m notebooks"


def test_it_is_small_and_was_run_from_top_to_bottom():
    cells = code_cells(STORED)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert NOTEBOOK.stat().st_size < 1_000_000
    assert sum(map(shows_a_picture, cells)) >= 5
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"}
    assert {output["name"] for cell in cells for output in cell["outputs"] if "name" in output} == {"stdout"}
    for path in NOTEBOOKS_FOLDER.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 320, path


def links_of(notebook: dict[str, Any]) -> list[str]:
    texts = [text_of(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    texts = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in texts]
    return [link for text in texts for link in re.findall(r"\]\(([^)\s]+)\)", text)]


def test_links_lead_somewhere(tmp_path: Path):
    assert len(links_of(STORED)) > 5
    assert all((NOTEBOOK.parent / link).exists() for link in links_of(STORED))
    elsewhere = notebook_of(sources(), is_blank=True, out=tmp_path / "mine.ipynb")
    assert all((tmp_path / link).resolve().exists() for link in links_of(elsewhere))


def test_on_github_links_are_absolute_and_one_cell_sets_colab_up():
    book = notebook_of(
        sources(), out=ROOT / "notebooks" / "c.ipynb", project="https://github.com/some-one/min.llama.git"
    )
    begin = "https://github.com/some-one/min.llama/blob/main/"
    *links, colab = sorted(links_of(book), key=lambda link: "colab" in link)
    assert colab == "https://colab.research.google.com/github/some-one/min.llama/blob/main/notebooks/c.ipynb"
    assert all(link.startswith(begin) and (ROOT / link.removeprefix(begin)).exists() for link in links)
    assert text_of(book["cells"][0]).endswith(f"({colab})")
    assert 'PROJECT = "https://github.com/some-one/min.llama"\n' in text_of(code_cells(book)[0])
    changed = [a for a, b in zip(code_cells(book), code_cells(SOLVED), strict=True) if text_of(a) != text_of(b)]
    assert changed == code_cells(book)[:1]


@pytest.mark.parametrize("is_on_colab", [True, False])
def test_the_first_cell_finds_the_project(is_on_colab: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        asked.append(command)
        (tmp_path / "min-llama").mkdir(exist_ok=True)
        (tmp_path / "min-llama" / "llama.py").touch()

    monkeypatch.chdir(tmp_path if is_on_colab else NOTEBOOKS_FOLDER)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "path", [*sys.path])
    if is_on_colab:
        monkeypatch.setitem(sys.modules, "google.colab", sys)
    address = "https://github.com/some/one"
    for _ in range(2):  # a reader may run the cell again
        exec(text_of(code_cells(notebook_of(sources(), project=address))[0]), {})
    assert [command[:2] for command in asked] == ([["git", "clone"], [sys.executable, "-m"]] if is_on_colab else [])
    assert Path.cwd() == (tmp_path / "min-llama" if is_on_colab else ROOT) and sys.path[0] == str(Path.cwd())


def test_a_notebook_that_is_written_elsewhere_finds_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    cell = text_of(code_cells(notebook_of(sources(), is_blank=True, out=tmp_path / "mine.ipynb"))[0])
    exec(cell, {})
    assert Path.cwd() == ROOT and sys.path[0] == str(ROOT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="name its folder in FOLDER"):
        exec(text_of(code_cells(SOLVED)[0]), {})


def test_no_path_of_a_machine_is_in_it():
    assert str(ROOT) not in json.dumps(STORED) and "/home/" not in json.dumps(STORED)


def test_every_exercise_has_a_gap_a_check_and_a_folded_solution():
    assert len(EXERCISES) == sum(tags_of(cell) == ["solution"] for cell in BLANK["cells"]) == 15
    for cell, following in zip(BLANK["cells"], [*BLANK["cells"][1:], {}], strict=True):
        if "exercise" in tags_of(cell):
            assert re.search(r"^ +# .+\n +\.\.\.$", text_of(cell), re.MULTILINE) and CHECK_LINE.search(text_of(cell))
            assert tags_of(following) == ["solution"] and text_of(following).startswith("<details>")
        assert ">>>" not in text_of(cell) and "<<<" not in text_of(cell)


def test_blank_with_its_solutions_filled_in_is_the_solved_one():
    filled: list[dict[str, Any]] = []
    for cell in BLANK["cells"]:
        if tags_of(cell) == ["solution"]:
            code = re.fullmatch(r"<details>.*?```python\n(.*)\n```\n\n</details>", text_of(cell), re.DOTALL)[1]
            filled[-1] = {**filled[-1], "source": code.splitlines(keepends=True)}
        else:
            filled.append(cell)
    assert filled == SOLVED["cells"]


# ------------------------------------------------------------------------------------------------ what checks say

MUTATIONS = [
    ("counts", "counts.index_put_((ids[:-1], ids[1:]), ones, accumulate=True)", "counts[ids[:-1], ids[1:]] += ones",
     "a pair that stands twice is counted once"),
    ("counts", "(ids[:-1], ids[1:])", "(ids[1:], ids[:-1])", "rows and columns are exchanged"),
    ("probabilities", "counts = counts + 1", "pass", "a pair that was never seen has probability 0"),
    ("probabilities", ", keepdim=True", "", "the sum lacks keepdim=True"),
    ("mean loss", "-p[", "p[", "the sign is missing"),
    ("mean loss", ".mean()", ".sum()", "losses are summed"),
    ("mean loss", ".mean()", "", "it returns [8] numbers, not []"),
    ("one head", " / math.sqrt(query.shape[-1])", "", "scores are not scaled"),
    ("one head", ".masked_fill(~visible, -math.inf)", "", "the causal mask is missing"),
    ("one head", "dim=-1", "dim=-2", "the softmax runs over the queries"),
    ("RMSNorm", ".pow(2)", "", "the mean is of x, not of its squares"),
    ("RMSNorm", "x.pow", "y.pow", "NameError"),
    ("rotary embedding", "x[..., 0::2], x[..., 1::2]", "x.chunk(2, dim=-1)", "halves of a head are paired and then"),
    ("rotary embedding", "/ head_dim", "/ head_dim / 2", "the exponent is -2i/d"),
    ("scores and softmax", "self.head_dim)", "self.head_dim**2)", "divided by d, not by sqrt(d)"),
    ("scores and softmax", "~mask", "mask", "the causal mask is inverted"),
    ("grouped queries", "repeat_interleave(self.n_rep, dim=1)", "repeat(1, self.n_rep, 1, 1)", "(repeat)"),
    ("grouped queries", "output.transpose(1, 2).flatten(-2)", "output.reshape(*x.shape[:2], -1)", "heads are joined"),
    ("feed-forward", "F.silu", "F.gelu", "the activation is GELU"),
    ("layer", "h = x + ", "h = ", "the residual around the attention is missing"),
    ("embedding and head", "h[:, [-1]]", "h[:, [0]]", "the logits are the first position's"),
    ("generate", "temperature == 0.0", "True", "the temperature is ignored"),
    ("zero-shot classifier", ".sum(dim=-1)", ".mean(dim=-1)", "a label's tokens are averaged"),
    ("embedding classifier", "self.dropout(last)", "last", "there is no dropout in training"),
    ("AdamW", "lr * group", "alpha * group", "the weight decay is scaled by alpha_t"),
    ("probabilities", "counts = counts + 1\n", "return counts + 1 / counts.sum(-1, keepdim=True)\n", "the parentheses"),
    ("probabilities", "counts / counts.sum(dim=-1, keepdim=True)", "counts.softmax(-1)", "softmax is for logits"),
    ("mean loss", ".log()", "", "the log is missing"),
    ("mean loss", ".mean()", ".sum() / len(ids)", "there are len(ids) - 1 pairs"),
    ("RMSNorm", "return ", "", "is a `return` missing?"),
    ("rotary embedding", "(-torch", "(torch", "the exponent lacks its minus"),
    ("feed-forward", "self.w1(x)) * self.w3(x)", "self.w3(x)) * self.w1(x)", "w1 and w3 are exchanged"),
    ("layer", "self.ffn_norm(h)", "self.ffn_norm(x)", "the feed-forward reads x, not h"),
    ("embedding and head", "h[:, [-1]]", "h[:, -1]", "are b v, not b 1 v"),
    ("generate", "keepdim=True", "keepdim=False", "RuntimeError at `idx = torch.cat((idx, idx_next), dim=1)`"),
    ("zero-shot classifier", "log_softmax(self", "softmax(self", "probabilities are summed"),
    ("embedding classifier", "F.log_softmax(self.classifier_head(self.dropout(last)), dim=-1)",
     "self.classifier_head(self.dropout(last))", "it returns logits, not log-probabilities"),
    ("embedding classifier", "return F", "F", "it returns None; is a `return` missing?"),
    ("AdamW", "beta2 * state[\"v\"] + (1 - beta2)", "beta1 * state[\"v\"] + (1 - beta1)", "it is beta2's"),
    ("AdamW", "p -= ", "p = p - ", "weights do not change"),
]  # fmt: skip


def run_exercise(part: str, code: str) -> None:
    """Run a cell up to the end of its check, as Jupyter does: its lines can be looked up."""
    code = code[: CHECK_LINE.search(code).end()]
    name = f"<ipykernel {part}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    names = dict(math=math, torch=torch, F=F, llama=llama, rope=rope, AdamW=AdamW)
    heads = dict(LlamaZeroShotClassifier=LlamaZeroShotClassifier, LlamaEmbeddingClassifier=LlamaEmbeddingClassifier)
    exec(compile(code, name, "exec"), {**names, **heads, "check": checks.check, "check_small": checks.check_small})


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[Any, str], Any]:
    """What an exercise may replace, which is put back after the test."""
    places = [
        (llama.RMSNorm, "_norm"), (rope, "apply_rotary_emb"), (llama, "apply_rotary_emb"),
        (llama.Attention, "compute_query_key_value_scores"), (llama.Attention, "forward"), (llama.Llama, "forward"),
        (llama.FeedForward, "forward"), (llama.LlamaLayer, "forward"), (llama.Llama, "generate"), (AdamW, "step"),
        (LlamaZeroShotClassifier, "forward"), (LlamaEmbeddingClassifier, "forward"),
    ]  # fmt: skip
    own = {(place, name): getattr(place, name) for place, name in places}
    for (place, name), function in own.items():
        monkeypatch.setattr(place, name, function)
    return own


@pytest.mark.parametrize("part", EXERCISES)
def test_a_solution_is_right_and_takes_its_place(part: str, package: dict, capsys: pytest.CaptureFixture):
    run_exercise(part, EXERCISES[part])
    assert capsys.readouterr().out == f"{part}: right\n"
    changed = [name for (place, name), own in package.items() if getattr(place, name) is not own]
    small = {*checks.SMALL_EXERCISES, "one head"}
    assert len(changed) == (0 if part in small else 2 if part == "rotary embedding" else 1)


def test_every_exercise_has_two_usual_mistakes():
    counts = Counter(part for part, *_ in MUTATIONS)
    assert {*counts} == {*EXERCISES} and min(counts.values()) >= 2


@pytest.mark.parametrize(
    ("part", "right", "other"),
    [
        ("mean loss", ".mean()", ".mean().item()"),  # "a number", says the exercise
        ("probabilities", "counts = counts + 1\n", "counts += 1\n"),  # the next check still has its own counts
        ("AdamW", "p -= alpha", "p.data = p - alpha"),
    ],
)
def test_another_way_is_right_too(part: str, right: str, other: str, package: dict, capsys: pytest.CaptureFixture):
    assert right in EXERCISES[part]
    for code in (EXERCISES[part].replace(right, other), EXERCISES[part]):
        run_exercise(part, code)
        assert capsys.readouterr().out == f"{part}: right\n"


@pytest.mark.parametrize(("part", "right", "wrong", "sentence"), MUTATIONS)
def test_a_usual_mistake_is_named(part, right, wrong, sentence, package: dict, capsys: pytest.CaptureFixture):
    assert right in EXERCISES[part]
    run_exercise(part, EXERCISES[part])
    before = {(place, name): getattr(place, name) for place, name in package}
    capsys.readouterr()
    run_exercise(part, EXERCISES[part].replace(right, wrong))
    said = capsys.readouterr().out
    assert f"{part}: WRONG: " in said and sentence in said
    assert all(getattr(place, name) is function for (place, name), function in before.items())


def test_an_exception_is_told_with_its_line(package: dict, capsys: pytest.CaptureFixture):
    run_exercise("RMSNorm", EXERCISES["RMSNorm"].replace("x.pow", "y.pow"))
    assert (
        "NameError at `return x / (y.pow(2).mean(dim=-1, keepdim=True) + self.eps).sqrt()`" in capsys.readouterr().out
    )


def test_a_gap_is_not_called_a_mistake(package: dict, capsys: pytest.CaptureFixture):
    for cell in code_cells(BLANK):
        if "exercise" in tags_of(cell):
            run_exercise("gap", text_of(cell))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EXERCISES) and all(": not written yet; " in line for line in lines)
    assert all(getattr(place, name) is own for (place, name), own in package.items())


# -------------------------------------------------------------------------------------------------- the whole runs


def needs_jupyter() -> None:
    if absent := [name for name in NEEDED if not importlib.util.find_spec(name)]:
        pytest.skip(f"the notebook needs {', '.join(absent)}: setup.sh --notebook")


@pytest.mark.slow
def test_every_cell_runs_and_shows_what_is_stored():
    needs_jupyter()
    fresh = executed(SOLVED)
    for stored, cell in zip(code_cells(STORED), code_cells(fresh), strict=True):
        assert shows_a_picture(stored) == shows_a_picture(cell)
        if "chance" not in tags_of(cell):
            assert is_similar(printed(stored), printed(cell)), (printed(stored), printed(cell))
        if "exercise" in tags_of(cell):
            assert ": right\n" in printed(cell)


@pytest.mark.slow
def test_the_exercises_run_with_nothing_filled_in():
    needs_jupyter()
    said = "".join(map(printed, code_cells(executed(BLANK))))
    assert said.count(": not written yet; ") == len(EXERCISES) and "WRONG" not in said


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


@pytest.mark.slow
def test_a_cell_that_fails_is_said_and_nothing_is_written(tmp_path: Path):
    if not importlib.util.find_spec("nbclient") or not importlib.util.find_spec("ipykernel"):
        pytest.skip("the notebook needs nbclient and ipykernel: setup.sh --notebook")
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "utils.py", tmp_path)
    for path in (tmp_path / "notebooks").glob("part_*.py"):
        path.unlink()
    shutil.copytree(ROOT / "engine", tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "notebooks" / "part_0.py").write_text("# %%\nraise ValueError('so it is')\n")
    before = (tmp_path / "notebooks" / "assignment.ipynb").read_bytes()
    done = subprocess.run([sys.executable, "-m", "notebooks"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "a cell fails with ValueError: so it is" in done.stderr
    assert (tmp_path / "notebooks" / "assignment.ipynb").read_bytes() == before


def test_without_nbclient_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    with pytest.raises(UserError, match=r'running the notebook needs ipykernel: pip install -e "\.\[notebook\]"'):
        executed(notebook_of("# %%\n1\n"))


def test_mistakes_in_the_arguments_are_told_before_a_cell_runs(tmp_path: Path):
    mine = tmp_path / "mine.ipynb"
    assert get_args(["--blank", "--out", str(mine)]).blank and not get_args([]).blank
    with pytest.raises(UserError, match="--blank needs --out FILE"):
        get_args(["--blank"])
    with pytest.raises(UserError, match="give an address like https://github.com/OWNER/NAME"):
        get_args(["--project", "github.com/some/one"])
    mine.write_text("what a student has filled in")
    with pytest.raises(UserError, match="mine.ipynb is there already; name another file"):
        get_args(["--blank", "--out", str(mine)])
