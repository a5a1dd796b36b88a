"""One run of a table and what is made of many: what tells runs apart, what is chosen by, each figure in its place."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_llama, save_checkpoint
from test_experiments import PLACE, Threads, finished, model, table_of  # noqa: F401 (two fixtures)
from torch import nn

from advanced.experiments import __main__ as program
from advanced.experiments import cost, grid, plots, report, runner, trial
from advanced.experiments.grid import Table, Trial
from advanced.experiments.models import Model, model_of
from advanced.experiments.render import render
from advanced.experiments.report import _how
from advanced.experiments.results import paired_bootstrap, read_results
from engine import runs
from engine.data import create_data, pack
from engine.locks import NameLock
from engine.methods import EpochResult
from engine.plan import ComputeSettings
from fast.linear import Int8Linear, RoundedLinear
from tokenizer import Tokenizer
from utils import UserError

# ------------------------------------------------------------------------------------------- which runs there are


@pytest.fixture
def pair(tmp_path: Path, tiny_checkpoint: Path) -> Model:
    """`m.pt`, and beside it another model `o.pt` with a tokenizer of its own name."""
    for name in "mo":
        (tmp_path / f"{name}.model").write_bytes(tiny_checkpoint.with_suffix(".model").read_bytes())
    (tmp_path / "m.pt").write_bytes(tiny_checkpoint.read_bytes())
    save_checkpoint(tmp_path / "o.pt", random_llama(1))
    return Model(str(tmp_path / "m.pt"), str(tmp_path / "m.model"))


def test_a_checkpoint_beside_another_one_has_its_own_tokenizer_if_that_is_there(pair: Model, tmp_path: Path):
    assert pair.beside("o.pt").tokenizer == str(tmp_path / "o.model")
    assert pair.beside("p.pt").tokenizer == pair.tokenizer


def test_a_row_with_a_checkpoint_of_its_own_is_another_run_and_starts_from_it(
    tmp_path: Path,
    model: Model,
    pair: Model,
):
    table = table_of(tmp_path, rows=[{"name": "plain"}, {"name": "other", "checkpoint": "o.pt"}])
    plain, other = (table.final(row, "films", None, pair, {})[0] for row in table.rows)
    assert plain.key(pair) != other.key(pair)
    results = [trial.run_trial(each, pair, tmp_path, PLACE) for each in (plain, other)]
    assert [result["model"] for result in results] == ["m", "o"]
    assert results[0]["train_losses"] != results[1]["train_losses"]


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_other_data_is_another_run(
    tmp_path: Path,
    model: Model,
    films: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    split: str,
):
    table = table_of(tmp_path)
    (one, *_) = table.tuning(table.rows[0], "films", 4)
    before = one.key(model)
    (other := tmp_path / "other.txt").write_text("0 ||| another film\n", encoding="utf-8")
    monkeypatch.setattr(grid, "path_of", lambda data, name: str({**films, split: other}[name]))
    assert one.key(model) != before


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"rows": [{"name": "plain"}]}, "lr", 0.01),  # the table's
        ({"rows": [{"name": "plain"}], "data": {"films": {"lr": 0.5}}}, "lr", 0.5),
        ({"rows": [{"name": "plain", "settings": {"epochs": 3}}]}, "epochs", 3),
    ],
)
def test_a_row_decides_before_its_data_and_that_before_the_table(
    tmp_path: Path, changes: dict, name: str, value: float
):
    table = table_of(tmp_path, **changes)
    assert dict(table.trial(table.rows[0], "films", None, 1, "final", {}).settings)[name] == value


def test_a_row_is_run_on_its_data_sets_alone(tmp_path: Path):
    rows = [{"name": "plain"}, {"name": "other", "data": ["b"]}]
    table = table_of(tmp_path, data={"a": {}, "b": {}}, shots=[None], rows=rows)
    assert [(row.name, data) for row, data, _ in table.cells()] == [("plain", "a"), ("plain", "b"), ("other", "b")]


def test_what_is_tuned_is_started_first(tmp_path: Path, model: Model):
    rows = [{"name": "fixed"}, {"name": "plain", "tune": {"lr": [0.01, 0.02]}}]
    ready = table_of(tmp_path, rows=rows, shots=[4]).ready(model, {})
    assert [each.phase for each in ready] == ["tune"] * 2 + ["final"] * 2


# ------------------------------------------------------------------------------------------------ running them


@pytest.fixture
def running(tmp_path: Path, model: Model) -> runner.Runner:
    """Three runs for two workers."""
    table = table_of(tmp_path, rows=[{"name": "plain"}], shots=[4], seeds=[1, 2, 3])
    return runner.Runner(lambda: table.ready(model, {}), model, tmp_path / "r.jsonl", tmp_path, "cpu", 2)


def test_after_the_time_nothing_is_started(running: runner.Runner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(runner, "compute_trial", lambda *run: pytest.fail("started"))
    running.run(end=0.0)
    assert running.done == 0


def test_no_more_runs_are_started_than_there_are_workers(running: runner.Runner):
    assert len([*running.free()]) == 2


def test_a_run_that_another_process_has_taken_is_left_to_it(running: runner.Runner, model: Model, tmp_path: Path):
    key = running.left()[0].key(model)
    assert NameLock(tmp_path / f"{key}.lock").acquire() is None
    assert key not in [each.key(model) for each, _ in running.free()]


def test_a_run_that_another_process_has_ended_meanwhile_is_not_done_again(running: runner.Runner, tmp_path: Path):
    asked = iter([running.left()[:1], []])  # before its lock is taken, and after
    running.left = lambda: next(asked)
    assert not [*running.free()] and not [*tmp_path.glob("*.lock")]


def test_a_run_is_free_again_when_its_line_is_written_and_its_weights_go_then(
    running: runner.Runner,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    def compute(one: Trial, *where) -> dict:
        (tmp_path / f"{one.key(model)}.pt").touch()
        return {"key": one.key(model), "model": model.name, "checksums": model.checksums, "commit": where[-1]}

    def release(lock: NameLock) -> None:
        done = read_results([tmp_path / "r.jsonl"])
        assert lock.path.stem in done and not lock.path.with_suffix(".pt").exists()
        released.append(lock.path.stem)

    released: list[str] = []
    left = running.left
    running.left = lambda: [one for one in left() if one.key(model) not in read_results([tmp_path / "r.jsonl"])]
    running.commit = "as it was at the start"
    monkeypatch.setattr(runner, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(runner, "compute_trial", compute)
    monkeypatch.setattr(NameLock, "release", release)
    running.run()
    assert len(released) == 3
    assert {each["commit"] for each in read_results([tmp_path / "r.jsonl"]).values()} == {"as it was at the start"}


def test_the_rounding_and_the_length_of_a_row_that_is_only_asked_count(
    tmp_path: Path,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[Any] = []

    def evaluate(asked: nn.Module, tokenizer: Tokenizer, *how) -> SimpleNamespace:
        is_rounded = any(isinstance(module, RoundedLinear | Int8Linear) for module in asked.modules())
        seen.append((len(tokenizer.encode("a long film of many words", bos=False, eos=False)), is_rounded))
        return SimpleNamespace(labels=[0], predictions=[0], accuracy=1.0)

    monkeypatch.setattr(trial, "_evaluate", evaluate)
    for settings in ({}, {"max_sentence_len": 3}, {"precision": "int8"}):
        table = table_of(tmp_path, rows=[{"name": "asked", "option": "prompt", "settings": settings}], shots=[None])
        one = table.final(table.rows[0], "films", None, model, {})[0]
        trial.run_trial(one, model, tmp_path, ComputeSettings(torch.device("cpu")))
    (long, plain), (short, _), (_, rounded) = seen[::2]
    assert short == 3 < long and rounded and not plain


def test_what_was_trained_is_judged_with_the_rounding_of_its_row(
    tmp_path: Path,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[tuple[str, bool]] = []
    compute_fast = runs.compute_fast

    def watched(model: nn.Module, precision: str, compute: ComputeSettings, trains: bool = True) -> None:
        seen.append((precision, trains))
        compute_fast(model, precision, compute, trains=trains)

    monkeypatch.setattr(runs, "compute_fast", watched)
    table = table_of(tmp_path, rows=[{"name": "plain", "settings": {"precision": "bf16"}}], shots=[4])
    one = table.final(table.rows[0], "films", 4, model, {})[0]
    trial.run_trial(one, model, tmp_path, ComputeSettings(torch.device("cpu")))
    assert [precision for precision, trains in seen if not trains] == ["bf16"]


@pytest.mark.parametrize(("text", "threads"), [("3", 3), ("4,2", 4), (" 2 ", 2), ("", 8)])
def test_threads_are_those_of_the_environment(
    tmp_path: Path,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    threads: int,
):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 8)
    assert runner.Runner(list, model, tmp_path / "r.jsonl", tmp_path, "cpu", 1).threads == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(UserError, match="OMP_NUM_THREADS=many: not a number of threads"):
        runner.Runner(list, model, tmp_path / "r.jsonl", tmp_path, "cpu", 1)


def test_workers_share_the_processors(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 8)
    assert runner.Runner(list, model, tmp_path / "r.jsonl", tmp_path, "cpu", 2).threads == 4


def test_a_run_is_judged_by_its_best_epoch(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch):
    best, last = EpochResult(0, 1.0, 1.0, 0.9, 0.0, True), EpochResult(1, 1.0, 1.0, 0.1, 0.0, False)
    monkeypatch.setattr(runs, "fine_tune", lambda *run, **how: [best, last])
    table = table_of(tmp_path)
    result = trial.run_trial(table.tuning(table.rows[0], "films", 4)[0], model, tmp_path, PLACE)
    assert (result["selection"], result["epoch"], result["epoch_scores"]) == (0.9, 0, [0.9, 0.1])


def test_zero_shot_choices_are_made_by_macro_f1_on_a_sample_of_the_seed(
    tmp_path: Path,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[Any] = []
    monkeypatch.setattr(trial, "SAMPLE", 5)
    monkeypatch.setattr(trial, "_evaluate", lambda model, tokenizer, examples, *how: seen.append(examples))
    monkeypatch.setattr(trial, "_scores", lambda result: {"accuracy": 0.1, "macro_f1": 0.2})
    table = table_of(tmp_path)
    for seed in (1, 2):
        one = table.trial(table.rows[2], "films", None, seed, "tune", {})
        assert trial.run_trial(one, model, tmp_path, PLACE)["selection"] == 0.2
    assert len(seen[0]) == len(seen[1]) == 5 and seen[0] != seen[1]


def test_macro_f1_counts_each_class_alike():
    """F1 of the first class is 6/7, of the other, which is never predicted, 0."""
    result = SimpleNamespace(labels=[0, 0, 0, 1], predictions=[0, 0, 0, 0], accuracy=0.75)
    assert trial._scores(result) == {"accuracy": 0.75, "macro_f1": 0.42857}


# ------------------------------------------------------------------------------------------ statistics and tables


def test_an_interval_is_as_wide_above_as_below():
    drawing = np.random.default_rng(1)
    better, base = drawing.random((1, 900)) < 0.6, drawing.random((1, 900)) < 0.5
    values = better[0].astype(float) - base[0]
    error = values.std(ddof=1) / math.sqrt(900)
    difference = paired_bootstrap(better, base)
    assert difference.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def graded(
    folder: Path,
    model: Model,
    labels: dict[str, list[int]],
    wrong: dict[str, dict[str, int]],
) -> tuple[Table, dict[str, dict]]:
    """A table of two rows with three seeds, and its runs. wrong: by row and split, how many answers."""
    table = table_of(folder, rows=[{"name": "plain"}, {"name": "ema", "method": "ema"}], shots=[None], seeds=[1, 2, 3])
    done = {}
    for row in table.rows:
        for one in table.final(row, "films", None, model, {}):
            scores = {}
            for split, gold in labels.items():
                count = wrong[row.name][split]
                answers = [1 - label if index < count else label for index, label in enumerate(gold)]
                accuracy = 1 - count / len(gold)
                scores[split] = {"accuracy": accuracy, "macro_f1": 0.5, "predictions": pack(answers)}
            about = {"settings": dict(one.settings), "trainable": 1, "seconds": 1.0, "weights": "the same"}
            done[one.key(model)] = {"key": one.key(model), **trial.named(one, model), **about, **scores}
    return table, done


@pytest.mark.parametrize("gold", [[0, 1, 1, 1, 1, 1, 1, 0, 1, 1], [0] * 10])
def test_figures_of_test_are_those_of_test(
    tmp_path: Path,
    model: Model,
    films: dict[str, Path],
    gold: list[int],
    monkeypatch: pytest.MonkeyPatch,
):
    """A split whose labels are all 0 is one without gold labels, and has no majority class."""
    (test := tmp_path / "test.txt").write_text("".join(f"{label} ||| film {i}\n" for i, label in enumerate(gold)))
    paths = {**films, "test": test}
    for module in ("grid", "render", "report"):
        monkeypatch.setattr(f"advanced.experiments.{module}.path_of", lambda data, split: str(paths[split]))
    labels = {"dev": [each.label for each in create_data(films["dev"])], "test": gold}
    table, done = graded(tmp_path, model, labels, {"plain": {"dev": 4, "test": 2}, "ema": {"dev": 0, "test": 3}})
    text = render(table, model, done)
    ema = [cell.strip() for cell in next(line for line in text.splitlines() if line.startswith("| ema")).split("|")]
    assert ema[4] == "1.000 ± .000" and ema[6].startswith("**+0.400 [")
    assert ema[7] == ".700 ± .000" and ema[8] == ".500 ± .000" and ema[9].startswith("-0.100 [")
    assert ("Majority class: dev .500, test .800." if any(gold) else "Majority class: dev .500.") in text
    assert "Of plain: accuracy dev [" in text and "Of ema:" not in text
    alone = render(replace(table, rows=table.rows[1:]), model, done)
    assert "Of ema: accuracy dev [" in alone  # compared with nothing
    said = report.text_of(table, model, done, ["python"])
    assert "*ema* differs from *plain* by **+0.400 [" in said and ("on test by -0.100 [" in said) == any(gold)
    assert "too few seeds" not in said
    two = {key: run for key, run in done.items() if run["seed"] < 3}
    said_of_two = report.text_of(table, model, two, ["python"])
    assert "of too few seeds to say (3 are wanted)" in said_of_two and "noise" not in said_of_two
    assert "was made" not in said and said.rindex("--method ema") > said.index("the best accuracy on dev")


def test_what_waits_for_a_choice_is_missing(tmp_path: Path, model: Model):
    assert "Missing: 3 runs (plain 2, asked 1)." in render(table_of(tmp_path, shots=[None]), model, {})


def test_a_report_says_what_epochs_are_chosen_on_where_the_table_does_not(
    model: Model,
    finished: tuple[Table, dict[str, dict]],
):
    """The default holds out a part of train."""
    assert "held out of the training data" in "\n".join(_how(replace(finished[0], settings={}), model))


def test_each_point_of_a_plot_has_the_name_of_its_row_and_lies_in_its_interval(
    model: Model,
    finished: tuple[Table, dict[str, dict]],
):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    (panel,) = plots.panels_of(finished[0], model, finished[1])
    figure, axis = pyplot.subplots()
    plots._accuracy(axis, panel._replace(cells=panel.cells[:2]))
    points = {line.get_ydata()[0]: line.get_xdata()[0] for line in axis.lines if line.get_marker() == "o"}
    names = {
        compute: label.get_text() for compute, label in zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
    }
    assert {names[compute]: mean for compute, mean in points.items()} == pytest.approx({"plain": 0.6, "ema": 1.0})
    lines = [line.get_xdata() for line in axis.lines if line.get_marker() == "None"]
    (interval,) = [ends for ends in lines if len({*ends}) > 1]
    assert min(interval) < 1.0 < max(interval) and sum(interval) / 2 == pytest.approx(1.0, abs=0.05)
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------- the programs


def run_main(monkeypatch: pytest.MonkeyPatch, *flags: object) -> None:
    monkeypatch.setattr("sys.argv", ["experiments", *map(str, flags)])
    program.main()


def test_the_program_leaves_out_rows_whose_checkpoint_is_not_here(
    tmp_path: Path,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    table_of(tmp_path, rows=[{"name": "plain"}, {"name": "adapted", "checkpoint": "{model}-adapted.pt"}], shots=[None])
    flags = "--pretrained-model-path", model.checkpoint, "--results", tmp_path / "r.jsonl", "--list"
    run_main(monkeypatch, tmp_path / "trial.json", *flags)
    assert "2 runs can be started now" in capsys.readouterr().out
    table_of(tmp_path, rows=[{"name": "plain", "checkpoint": "nope.pt"}], shots=[None])
    for asked in ([], ["--list"], ["--render"], ["--report", tmp_path / "r.md"]):
        with pytest.raises(UserError, match=r"nope\.pt does not exist$"):
            run_main(monkeypatch, tmp_path / "trial.json", *flags[:4], *asked)


def test_a_tokenizer_can_be_named(tmp_path: Path, model: Model):
    (other := tmp_path / "other.model").write_bytes(Path(model.tokenizer).read_bytes())
    assert model_of(model.checkpoint, str(other), {}).tokenizer == str(other)
    with pytest.raises(UserError, match="--tokenizer absent.model does not exist"):
        model_of(model.checkpoint, "absent.model", {})


def test_a_report_has_the_rows_that_are_named(
    tmp_path: Path,
    model: Model,
    finished: tuple[Table, dict[str, dict]],
    monkeypatch: pytest.MonkeyPatch,
):
    lines = [json.dumps({**result, "checksums": model.checksums}) for result in finished[1].values()]
    (results := tmp_path / "r.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = "--pretrained-model-path", model.checkpoint, "--results", results, "--report", tmp_path / "o.md"
    run_main(monkeypatch, tmp_path / "trial.json", *flags, "--only", "ema")
    text = (tmp_path / "o.md").read_text(encoding="utf-8")
    assert "| ema" in text and "| mixed" not in text and "--only" in text


def test_the_program_computes_where_it_is_told_to(
    tmp_path: Path,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
):
    made: list[tuple] = []
    monkeypatch.setattr(program, "Runner", lambda *how: made.append(how) or SimpleNamespace(run=lambda minutes: None))
    table_of(tmp_path)
    flags = tmp_path / "trial.json", "--pretrained-model-path", model.checkpoint, "--results", tmp_path / "r.jsonl"
    run_main(monkeypatch, *flags, "--device", "mps", "--workers", 3)
    run_main(monkeypatch, *flags)
    assert [how[-2:] for how in made] == [("mps", 3), ("cpu", 1)]


def test_a_page_of_the_runs_that_are_done_is_written(
    tmp_path: Path,
    model: Model,
    finished: tuple[Table, dict[str, dict]],
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("explore.page")
    table, done = finished
    of_results: list[tuple] = []
    monkeypatch.setattr("explore.trained.page_of_results", lambda *what: of_results.append(what) or "content")
    monkeypatch.setattr("explore.page.write_page", lambda path, content: Path(path).write_text(content))
    program.write_html(SimpleNamespace(html=tmp_path / "p.html"), table, model, {**done, "other": {}})
    ((runs_shown, title),) = of_results
    assert (tmp_path / "p.html").read_text() == "content" and title == table.title
    assert {run["key"] for run in runs_shown} == done.keys()


def test_the_table_of_costs_has_a_line_for_each_method_that_trains_such_a_model(
    tmp_path: Path,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
):
    """Memory beside that of a process that trains the plain model."""
    memory = {"": 200, "ema": 500, "lora,ema": 100}

    def apart(function: Callable, work: cost.Workload, subject: cost.MeasuredMethod) -> Any:
        if function is cost.measure_memory:
            return memory.get(subject.methods, 300)
        return cost.CostRatio(2.0, 1.0, 3.0, 1234)

    monkeypatch.setattr(cost, "apart", apart)
    monkeypatch.setattr(cost, "path_of", trial.path_of)
    flags = "--pretrained-model-path", model.checkpoint, "--data", "films", "--batch_size", 4, "--steps", 2
    cases = [
        (["--methods", "ema", "lora,ema"], {"ema": "2.50", "lora,ema": "0.50"}),
        ([], {"r-drop": "1.50"}),
        (["--attention", "bidirectional"], {"padding-mask": "1.50"}),
    ]
    for number, (more, shares) in enumerate(cases):
        out = tmp_path / f"{number}.md"
        monkeypatch.setattr("sys.argv", ["cost", *map(str, flags), "--out", str(out), *more])
        cost.main()
        text = out.read_text(encoding="utf-8")
        assert all(f"\n| {name} | 1,234 | 2.00 (1.00-3.00) | {share} |\n" in text for name, share in shares.items())
        assert "2 batches of 4 sentences of films" in text and "| direct" not in text
        assert ("padding-mask" in text) == ("bidirectional" in more)
    monkeypatch.setattr("sys.argv", ["cost", *map(str, flags), "--methods", "padding-mask"])
    with pytest.raises(UserError, match="does nothing in a causal model"):
        cost.main()


def test_the_cost_of_a_method_is_its_time_over_that_of_plain_training(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
):
    """The first turn of each warms up and is not counted."""
    times = {"": [1.0, 1.0, 1.0, 1.0], "ema": [9.0, 2.0, 3.0, 4.0]}
    order: list[str] = []

    def assembled(work: cost.Workload, subject: cost.MeasuredMethod) -> SimpleNamespace:
        return SimpleNamespace(model=nn.Linear(1, 1), turn=iter(times[subject.methods]), of=subject.methods or "plain")

    def turn(run: SimpleNamespace, examples: list) -> float:
        order.append(run.of)
        return next(run.turn)

    monkeypatch.setattr(cost, "path_of", trial.path_of)
    monkeypatch.setattr(cost, "assemble", assembled)
    work = cost.Workload(model, "films", "causal", batch_size=4, steps=2, rounds=3)
    found = cost.measure_time(work, cost.MeasuredMethod(model, "ema"), turn)
    assert found == (3.0, 2.0, 4.0, 2) and str(found) == "3.00 (2.00-4.00)"
    assert order == ["ema", "plain", "plain", "ema"] * 2  # whatever slows the machine meanwhile meets both


def test_the_commit_is_marked_where_code_differs_from_it_and_not_for_new_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trial, "HERE", tmp_path)
    assert trial.commit_of_code() is None  # no repository
    files = {"model.py": "a = 1", "grid/tables/full.json": "{}", "grid/results/full.jsonl": "{}"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    clean = trial.commit_of_code()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    for name in files:
        (tmp_path / name).write_text("changed")
        assert trial.commit_of_code() == clean + "-dirty" * (not name.endswith("jsonl"))
        (tmp_path / name).write_text(files[name])
    monkeypatch.setenv("PATH", "")
    assert trial.commit_of_code() is None
