"""Statistics of runs, and what is made of them: tables, plots, the summary."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grids import Finished, finished, line_of, main, model, scored, scores_of, table_of  # noqa: F401 (fixtures)
from sklearn.metrics import f1_score

from advanced.experiments import __main__ as program
from advanced.experiments import plots, report, summary
from advanced.experiments.grid import Table
from advanced.experiments.models import Model
from advanced.experiments.render import difference_in_words, render
from advanced.experiments.results import (
    Difference,
    append_result,
    compare,
    interval,
    macro_f1_bootstrap,
    paired_bootstrap,
)
from engine.data import create_data, pack
from utils import UserError, sha256_of

PRESETS_42M = Table.read(program.HERE / "tables" / "stories42M.json")


def test_with_one_seed_the_bootstrap_has_the_standard_error_of_a_mean():
    drawing = np.random.default_rng(1)
    better, base = drawing.random((1, 900)) < 0.6, drawing.random((1, 900)) < 0.5
    difference = paired_bootstrap(better, base)
    values = better[0].astype(float) - base[0]
    error = values.std(ddof=1) / math.sqrt(900)
    assert difference.mean == pytest.approx(values.mean())
    assert difference.error == pytest.approx(error, rel=0.08)
    ends = values.mean() - 1.96 * error, values.mean() + 1.96 * error
    assert (difference.low, difference.high) == pytest.approx(ends, abs=0.15 * error)
    assert difference.is_beyond_noise


def test_seeds_that_differ_widen_the_interval_and_equal_methods_do_not_differ():
    drawing = np.random.default_rng(2)
    base = drawing.random((5, 400)) < 0.5
    steady = base | (drawing.random((5, 400)) < 0.1)
    moody = base.copy()
    moody[:2] |= drawing.random((2, 400)) < 0.25  # the same gain on average, in two seeds of five
    narrow, wide = paired_bootstrap(steady, base), paired_bootstrap(moody, base)
    assert wide.mean == pytest.approx(narrow.mean, abs=0.02) and wide.error > 1.5 * narrow.error
    same = paired_bootstrap(base, base)
    assert tuple(same[:4]) == (0, 0, 0, 0) and not same.is_beyond_noise


def test_macro_f1_knows_a_class_that_only_the_baseline_says():
    labels, twos = np.array([0, 1, 0, 1]), np.full((1, 4), 2)
    assert macro_f1_bootstrap(labels[None], twos, labels, draws=2).mean == pytest.approx(2 / 3)  # of three classes


def test_macro_f1_is_computed_anew_of_each_draw():
    """A slow version: sentences and seeds drawn as lists, scikit-learn's figure of each."""
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 3, 60)
    base = np.where(rng.random((3, 60)) < 0.5, labels, rng.integers(0, 3, (3, 60)))
    better = np.where(rng.random((3, 60)) < 0.8, labels, 2)
    score = partial(f1_score, average="macro", labels=[0, 1, 2], zero_division=0)
    for against in (base, None):
        found = macro_f1_bootstrap(better, against, labels, draws=50, seed=9)
        drawing, drawn = np.random.default_rng(9), []
        for _ in range(50):
            sentences, seeds = drawing.integers(0, 60, 60), drawing.integers(0, 3, 3)
            gains = [
                score(labels[sentences], better[seed][sentences])
                - (0 if against is None else score(labels[sentences], against[seed][sentences]))
                for seed in seeds
            ]
            drawn.append(np.mean(gains))
        means = [np.mean([score(labels, row) for row in rows]) for rows in (better, base)]
        assert found.mean == pytest.approx(means[0] - (0 if against is None else means[1]))
        assert found.error == pytest.approx(np.std(drawn, ddof=1))
        assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))))
    ours, theirs = (
        {seed: {"trainable": 1, "dev": {"predictions": pack(row.tolist())}} for seed, row in enumerate(rows)}
        for rows in (better, base)
    )
    assert compare(ours, theirs, "dev", labels, "macro_f1") == macro_f1_bootstrap(better, base, labels)
    assert interval(ours, "dev", labels, "macro_f1") == macro_f1_bootstrap(better, None, labels)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_class_that_nobody_predicts_counts_in_macro_f1(is_alone: bool):
    labels, better, base = np.array([0, 1, 2, 0]), np.array([[0, 1, 1, 0]]), np.array([[0, 0, 1, 0]])
    ours, theirs = (f1_score(labels, row[0], labels=[0, 1, 2], average="macro") for row in (better, base))
    found = macro_f1_bootstrap(better, None if is_alone else base, labels)
    assert found.mean == pytest.approx(ours if is_alone else ours - theirs)


def test_a_row_that_is_compared_with_none_has_an_interval_of_its_own():
    """Of what is not trained, the closed form of a share; of one or two seeds of what is trained, none."""
    labels = np.random.default_rng(3).integers(0, 2, 900)
    predictions = np.where(np.arange(900) < 540, labels, 1 - labels)  # .6 are right
    run = {"dev": {"predictions": pack(predictions.tolist())}}
    found, error = interval({1: run}, "dev", labels), math.sqrt(0.6 * 0.4 / 900)
    assert (found.low, found.high) == pytest.approx((0.6 - 1.96 * error, 0.6 + 1.96 * error), abs=0.15 * error)
    assert interval({1: run}, "test", labels) is None
    trained = {seed: {**run, "trainable": 7} for seed in (1, 2, 3)}
    assert interval(trained, "dev", labels).low == pytest.approx(found.low, abs=0.1 * error)
    assert interval({1: trained[1], 2: trained[2]}, "dev", labels) is None


def test_one_or_two_seeds_of_what_is_trained_are_never_beyond_noise():
    """Of what is not trained there is no other seed."""
    labels = [0, 1] * 100
    right, wrong = ({"dev": {"predictions": pack(answers)}} for answers in (labels, labels[::-1]))
    trained = [{**each, "trainable": 5} for each in (right, wrong)]
    assert compare({1: right}, {1: wrong}, "dev", labels).is_beyond_noise
    assert not compare({1: trained[0]}, {1: trained[1]}, "dev", labels).is_beyond_noise
    for seeds, is_beyond in ((2, False), (3, True)):
        several = [dict.fromkeys(range(seeds), each) for each in trained]
        assert compare(*several, "dev", labels).is_beyond_noise == is_beyond
    assert not compare(several[0], {2: trained[1]}, "dev", labels).is_beyond_noise
    for one, other in ((trained[0], wrong), (right, trained[1])):  # one side is trained, the other only asked
        assert not compare({1: one}, {1: other}, "dev", labels).is_beyond_noise


def test_methods_are_compared_on_the_seeds_that_both_have():
    labels = [0, 1, 0, 1]
    ours = {seed: {"dev": {"predictions": pack([0, 1, 0, 1])}} for seed in (1, 2)}
    theirs = {seed: {"dev": {"predictions": pack([0, 1, 1, 1])}} for seed in (2, 3)}
    assert compare(ours, theirs, "dev", labels).mean == pytest.approx(0.25)
    assert compare(ours, {}, "dev", labels) is None


def test_the_table_has_means_deviations_differences_and_says_what_is_missing(
    tmp_path: Path, model: Model, films: dict[str, Path]
):
    labels = [each.label for each in create_data(films["dev"])]
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema"}, {"name": "lora", "method": "lora"}]
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[1, 2])
    done = {}
    for row, wrong in ((table.rows[0], (3, 5)), (table.rows[1], (1, 1))):
        for one, count in zip(table.final(row, "films", None, model, {}), wrong, strict=True):
            scores = scores_of(labels, count)
            done[one.key(model)] = line_of(one, model, trainable=1234, seconds=7.4, dev=scores, test=scores)
    text = render(table, model, done)
    plain, ema = (line for line in text.splitlines() if line.startswith(("| plain", "| ema")))
    assert plain.startswith("| plain | 1,234 | 2 | .600 ± .141 | .500 ± .000 |  | .600 ± .141 |") and "| 7 |" in plain
    assert "| +0.300 [" in ema and "Majority class: dev .500, test .500." in text
    assert "Missing: 2 runs (lora 2)." in text and "| lora" not in text


@pytest.mark.parametrize("gold", [[0, 1, 1, 1, 1, 1, 1, 0, 1, 1], [0] * 10])
def test_figures_of_test_are_those_of_test(
    tmp_path: Path, model: Model, films: dict[str, Path], gold: list[int], monkeypatch: pytest.MonkeyPatch
):
    """A split whose labels are all 0 is one without gold labels, and has no majority class."""
    (test := tmp_path / "test.txt").write_text("".join(f"{label} ||| film {i}\n" for i, label in enumerate(gold)))
    paths = {**films, "test": test}
    for module in ("grid", "render", "report"):
        monkeypatch.setattr(f"advanced.experiments.{module}.path_of", lambda data, split: str(paths[split]))
    labels = {"dev": [each.label for each in create_data(films["dev"])], "test": gold}
    rows, done = [{"name": "plain"}, {"name": "ema", "method": "ema"}], {}
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[1, 2, 3])
    for row, *wrong in zip(table.rows, (4, 0), (2, 3), strict=True):
        scores = {split: scores_of(labels[split], count) for split, count in zip(labels, wrong, strict=True)}
        for one in table.final(row, "films", None, model, {}):
            done[one.key(model)] = line_of(one, model, trainable=1, seconds=1.0, weights="the same", **scores)
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


@pytest.mark.slow
def test_results_are_rendered_without_the_weights_that_they_come_from(
    tmp_path: Path, model: Model, finished: Finished, main: Callable, monkeypatch: pytest.MonkeyPatch
):
    table, done = finished
    away = Model(str(tmp_path / "gone.pt"), "", {"gone": model.checksums})
    text = render(table, away, done)
    assert text == render(table, model, done).replace(f"`{model.name}`", "`gone`") and "| ema" in text
    with pytest.raises(UserError, match="gone.pt does not exist"):
        render(table, Model(away.checkpoint, ""), done)
    with open(tmp_path / "r.jsonl", "w", encoding="utf-8") as file:
        lines = ({**result, "model": "gone", "checksums": model.checksums} for result in done.values())
        file.write("".join(f"{json.dumps(line)}\n" for line in lines))
    rendered = partial(main, "--render", "--results", tmp_path / "r.jsonl", checkpoint="gone.pt")
    monkeypatch.setattr(program, "can_plot", lambda: False)
    page, part = tmp_path / "r.md", tmp_path / "r-part.md"
    for _ in range(2):  # its own page is written anew
        rendered()
        assert page.read_text(encoding="utf-8") == text
    rendered("--only", "ema")
    assert "| mixed" not in part.read_text(encoding="utf-8") and page.read_text(encoding="utf-8") == text
    part.unlink()
    rendered("--baseline", "ema")
    compared = part.read_text(encoding="utf-8")
    assert re.search(r"^\| plain .*\*\*-0.400 ", compared, flags=re.MULTILINE)  # as much as ema is above plain
    assert "| mixed" in compared and page.read_text(encoding="utf-8") == text
    part.unlink()
    rendered("--data", "films")
    assert part.is_file()
    part.write_text("# My notes\n", encoding="utf-8")
    with pytest.raises(UserError, match="r-part.md is there already and has another title; .* another --results"):
        rendered("--data", "films")


def test_runs_of_a_model_that_was_made_again_are_not_done_again_and_the_table_says_so(model: Model, finished: Finished):
    table, done = finished
    assert "was made" not in render(table, model, done)
    path, settings = Path(model.checkpoint), {"lr": 0.1, "device": "cpu"}
    keys = []
    for settings["device"] in ("cpu", "cuda"):
        state = torch.load(path, weights_only=True)
        state["model"]["norm.weight"] += 1e-6
        torch.save(state, path)
        record = {"settings": settings, "made_of": {"text": ["1"]}, "weights": sha256_of(path)}
        path.with_suffix(".json").write_text(json.dumps(record), encoding="utf-8")
        keys.append(table.final(table.rows[0], "films", None, model, done)[0].key(model))
    assert keys[0] == keys[1] not in done
    lines = [{**result, "model": "base", "weights": str(number % 3)} for number, result in enumerate(done.values())]
    text = render(table, model, done | {str(number): line for number, line in enumerate(lines)})
    assert "`base` was made 3 times by the same command; weights differ by rounding." in text


def test_what_was_tried_is_shown_and_can_be_all_that_is_run(
    tmp_path: Path, model: Model, main: Callable, capsys: pytest.CaptureFixture
):
    table = table_of(tmp_path, tune_seeds=[5, 6], shots=[4])
    done = scored(table.tuning(table.rows[0], "films", 4), model, lambda each: 40 * dict(each.settings)["lr"])
    mixed = table_of(tmp_path, rows=[{"name": "a", "tune": {"attention": ["causal"], "max_sentence_len": [None, 9]}}])
    scores = scored(mixed.tuning(mixed.rows[0], "films", 4), model, lambda each: 0.5)
    assert "| attention causal, max_sentence_len None: .500, attention causal, max_sentence_len 9: .500 |" in render(
        mixed, model, scores
    )
    table = table_of(tmp_path, tune_seeds=[5, 6], shots=[4])
    assert "| plain | films, 4 a class | lr 0.01: .400 ± .000, lr 0.02: .800 ± .000 |" in render(table, model, done)
    done.popitem()
    assert "| lr 0.01: .400 ± .000, lr 0.02: .800 (1 of 2 seeds) |" in render(table, model, done)
    for flags, counted, word in ((["--tune"], 8, "tune"), (["--only", "asked", "--tune"], 4, "tune"), ([], 9, "")):
        main("--list", "--results", tmp_path / "r.jsonl", *flags)
        *lines, last = capsys.readouterr().out.splitlines()
        assert last == f"{counted} runs can be started now" and len(lines) == counted
        assert all(line.startswith(word) for line in lines)


def test_a_difference_beyond_noise_is_bold():
    assert difference_in_words(Difference(0.1, 0.01, 0.08, 0.12)) == "**+0.100 [+0.080, +0.120]**"
    assert difference_in_words(Difference(-0.1, 0.1, -0.3, 0.1)) == "-0.100 [-0.300, +0.100]"
    assert difference_in_words(Difference(-0.1, 0.01, -0.12, -0.08)).startswith("**-0.100")


def test_every_preset_says_where_it_comes_from_and_pages_do(model: Model, tmp_path: Path):
    known = re.compile(r"arXiv:\d{4}\.\d{5}|(cmu-l3|neubig|vaishdho1|Qihongfei-hub)/[\w-]+|GitHub|small steps")
    assert all(known.search(row.source) for row in PRESETS_42M.rows)
    rows = [{"name": "plain", "source": "a paper", "tune": {"lr": [0.1, 0.2]}}, {"name": "lora", "method": "lora"}]
    table = table_of(tmp_path, rows=rows)
    done = scored(table.tuning(table.rows[0], "films", None), model, lambda each: 0.5)
    page = "## Sources\n\n| method | source |\n|---|---|\n| plain | a paper |\n\n## What was tried"
    assert page in render(table, model, done)
    assert "Sources" not in render(table_of(tmp_path, rows=[{"name": "plain"}]), model, {})
    for source in ("a | b", "two\nlines", 3):
        with pytest.raises(UserError, match="row plain: source must be a text of one line, without |, not "):
            table_of(tmp_path, rows=[{"name": "plain", "source": source}])


def test_the_summary_has_a_gain_for_every_method_and_checkpoint(
    tmp_path: Path, model: Model, finished: Finished, monkeypatch: pytest.MonkeyPatch
):
    _, done = finished
    folder = tmp_path / "all"
    (folder / "tables").mkdir(parents=True)
    (tmp_path / "trial.json").rename(folder / "tables" / "full.json")
    monkeypatch.setattr(summary, "HERE", folder)
    for name, without in (("one", ()), ("two", [("ema", 3)]), ("none", [("ema", 1), ("ema", 2)])):
        for line in done.values():
            if (line["row"], line["seed"]) not in without:
                append_result(folder / f"full-{name}.jsonl", {**line, "model": name, "checksums": model.checksums})
        once = {**next(iter(done.values())), "model": "x", "checksums": model.checksums}
        append_result(folder / "full-some.jsonl", once)
    (folder / "full-void.jsonl").touch()
    (folder / "one").write_text("what is here now is not what was recorded", encoding="utf-8")
    text = summary.render_summary([*summary.columns_of(folder, ["full"])])
    head, _, majority, plain, *gains = text[text.index("## FILMS") :].splitlines()[2:]
    assert head == "|  | none, all | one, all | two, all |" and majority.count("| .500 ") == 3
    assert plain == "| plain: accuracy | .600 ± .000 | .600 ± .000 | .600 ± .000 |"
    (ema,) = (line.split(" | ") for line in gains if "ema" in line)
    assert ema[0] == "| ema" and ema[2].startswith("**+0.400 [+0.") and ema[1] == ema[3].rstrip(" |") == ""
    assert any(line.startswith("| mixed | +0.000 [+0.000, +0.000] |") for line in gains) and len(gains) == 2
    few = summary.summarize([*summary.columns_of(folder, ["full"])][:1])
    assert few[0] == "|  | none, all |" and not any("ema" in line for line in few)
    (column,) = (each for each in summary.columns_of(folder, ["full"]) if each.checkpoint == "one")
    ((cell, runs),) = ((each, each.runs) for each in column.panel.cells if each.row.name == "ema")
    shifted = cell._replace(runs={seed + 2: run for seed, run in runs.items()})  # of three seeds one is the baseline's
    panel = column.panel._replace(cells=[shifted])
    assert len(runs) == 3 and column.gain("ema") and column._replace(panel=panel).gain("ema") == ""
    for name in ("tables/{}.json", "{}-one.jsonl", "{}-two.jsonl"):
        shutil.copy(folder / name.format("full"), folder / name.format("few"))
    heads = summary.summarize([*summary.columns_of(folder, ["full", "few"])])[0]
    assert heads == "|  | none, all | one, all | one, all | two, all | two, all |"


def test_a_summary_is_written_over_its_own_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["summary", "--results", str(tmp_path), "--out", str(tmp_path / "s.md")])
    with pytest.raises(UserError, match="there are no results of full or few-shot"):
        summary.main()
    monkeypatch.setattr(summary, "columns_of", lambda folder: ["a column"])
    monkeypatch.setattr(summary, "render_summary", lambda columns: "# What\n")
    for _ in range(2):
        summary.main()
    (tmp_path / "s.md").write_text("# My notes\n", encoding="utf-8")
    with pytest.raises(UserError, match="s.md is there already"):
        summary.main()
    assert (tmp_path / "s.md").read_text() == "# My notes\n"
    monkeypatch.setattr("sys.argv", ["summary", "--out", str(tmp_path / "s.txt")])
    with pytest.raises(UserError, match="must end in .md"):
        summary.main()


def test_every_kind_of_plot_is_drawn_of_what_has_it(tmp_path: Path, model: Model, finished: Finished):
    pytest.importorskip("matplotlib")
    table, done = finished
    written = plots.draw(table, model, done, tmp_path / "trial")
    kinds = "accuracy", "trainable", "seconds", "wise-ft"
    assert [path.name for path in written] == [f"trial-{kind}.png" for kind in kinds]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    without = {key: result for key, result in done.items() if not result["figures"]}
    assert [path.name for path in plots.draw(table, model, without, tmp_path / "t")][-1] == "t-seconds.png"


def test_each_point_of_a_plot_has_the_name_of_its_row_and_lies_in_its_interval(model: Model, finished: Finished):
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


def test_a_page_of_the_runs_that_are_done_is_written(
    tmp_path: Path, model: Model, finished: Finished, monkeypatch: pytest.MonkeyPatch
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
