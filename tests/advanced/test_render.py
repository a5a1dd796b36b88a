"""What is made of the results of runs: tables, plots, the summary."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grids import Finished, finished, line_of, main, model, scores_of, table_of, tuning_runs  # noqa: F401 (fixtures)
from scipy import stats

from advanced.experiments import __main__ as program
from advanced.experiments import plots, report, summary
from advanced.experiments.grid import Table
from advanced.experiments.models import Model
from advanced.experiments.panel import panels_of
from advanced.experiments.render import across, plain, render
from advanced.experiments.results import append_result
from advanced.experiments.statistics import pooled, two_way
from engine.data import create_data
from utils import UserError, sha256_of

PRESETS_42M = Table.read(program.HERE / "tables" / "stories42M.json")


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
    assert plain.startswith("| plain | 2 | .600 ± .141 | .600 ± .141 | .")
    assert plain.endswith("|  |  |  |  | 1,234 | 7 |") and "| +0.300 |  |" in ema
    assert "| *majority class* |  | .500 | .500 | .333 |" in text and "| *a class at random* |  | .500 | .500 |" in text
    assert "Missing: 2 runs (FILMS: lora 2)." in text and "| lora" not in text
    assert "4 runs, 0.0 hours, 2026-01-02; a processor (a machine);\nPyTorch 2; kernels: plain." in text
    assert f"Weights (SHA-256): `tiny` {model.checksums[0][:12]}." in text
    assert "`python -m advanced.experiments trial --pretrained-model-path tiny.pt` does what is missing" in text


def test_seconds_are_those_of_the_processor_that_most_rows_ran_on(tmp_path: Path, model: Model, films: dict[str, Path]):
    labels = [each.label for each in create_data(films["dev"])]
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema"}, {"name": "lora", "method": "lora"}]
    table = table_of(tmp_path, rows=[*rows, {"name": "words", "option": "bag-of-words"}], shots=[None], seeds=[1, 2, 3])
    done = {}
    for row in table.rows:
        for one in table.final(row, "films", None, model, {}):
            figures = {"trainable": 1, "seconds": 5.0, "dev": scores_of(labels, 1), "test": scores_of(labels, 1)}
            if row.name == "words" or (row.name == "plain" and one.seed > 1):  # more runs, but fewer rows
                figures |= {"processor": "another", "seconds": 99.0}
            elif row.name == "lora" and one.seed == 2:
                figures["seconds"] = 999.0  # a run that stood still for a while
            elif row.name != "lora" and one.seed > 1:
                continue
            done[one.key(model)] = line_of(one, model, **figures)
    lines = render(table, model, done).splitlines()
    for name, seconds in (("plain", "5"), ("ema", "5"), ("lora", "5"), ("words", "-")):
        assert next(line for line in lines if line.startswith(f"| {name}")).endswith(f"| {seconds} |")
    (panel,) = panels_of(table, model, done)
    words = panel.cells[-1]._replace(runs={seed: {"processor": f"number {seed}"} for seed in range(9)})
    assert panel._replace(cells=[words]).processor == "number 0"  # of equals the first, in every process


def test_a_page_says_how_many_pairs_are_of_two_processors_and_where_a_fit_is_not_known(
    tmp_path: Path, model: Model, films: dict[str, Path]
):
    labels = [each.label for each in create_data(films["dev"])]
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema"}, {"name": "words", "option": "bag-of-words"}]
    table, done = table_of(tmp_path, rows=rows, shots=[None], seeds=[1, 2, 3]), {}
    for row in table.rows:
        for one in table.final(row, "films", None, model, {}):
            trained = {} if row.name == "words" else {"trainable": 1}
            line = line_of(one, model, seconds=1.0, dev=scores_of(labels, 1), test=scores_of(labels, 1), **trained)
            done[one.key(model)] = line
    unsaid, pairs = "not say whether each of their models fitted", "pairs of trained runs"
    text = render(table, model, done)
    assert unsaid not in text and pairs not in text
    lines = [line for line in done.values() if line["row"] != "plain"]
    lines[0]["processor"] = lines[-1]["processor"] = "another"  # of ema, and of the words, which nobody trains
    lines[1]["members"] = 3
    (panel,) = panels_of(table, model, done)
    twice = [*panel.cells, panel.cells[1]._replace(name="a soup of the same runs")]
    assert across(panel._replace(cells=twice)) == across(panel) != []
    assert across(panel._replace(baseline={})) == []  # nothing is compared
    text = render(table, model, done)
    assert f"Of 3 {pairs} 1 are of two kinds of processor" in text and unsaid in text
    lines[1] |= {"fit_loss": 0.1, "classes": 2}
    assert unsaid not in render(table, model, done)


def judged_table(tmp_path: Path, model: Model, test: list[int] | None, **more) -> Finished:
    """Three seeds each of plain, wrong on 4 and 2 of ten sentences of dev and test, and of ema, wrong on 0 and 3."""
    dev, rows, done = [0, 1] * 5, [{"name": "plain"}, {"name": "ema", "method": "ema"}], {}
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[1, 2, 3])
    for row, *wrong in zip(table.rows, (4, 0), (2, 3), strict=True):
        found = {"dev": scores_of(dev, wrong[0]), **({} if test is None else {"test": scores_of(test, wrong[1])})}
        for one in table.final(row, "films", None, model, {}):
            figures = {"trainable": 1, "seconds": 1.0, "epoch": 0, **found, **more.get(row.name, {})}
            done[one.key(model)] = line_of(one, model, **figures)
    return table, done


@pytest.mark.parametrize("test", [[0, 1, 1, 1, 1, 1, 1, 0, 1, 1], None])
def test_a_gain_is_of_dev_and_test_together(tmp_path: Path, model: Model, test: list[int] | None):
    """A test file without gold labels was not judged."""
    table, done = judged_table(tmp_path, model, test)
    text = render(table, model, done)
    ema = [cell.strip() for cell in next(line for line in text.splitlines() if line.startswith("| ema")).split("|")]
    values = np.array([1] * 4 + [0] * 6 + ([] if test is None else [0] * 2 + [-1] + [0] * 7))
    error = values.std(ddof=1) / math.sqrt(len(values))
    reach = stats.t.ppf(0.975, len(values) - 1) * error  # three equal seeds are one
    interval = f"{values.mean():+.3f} [{values.mean() - reach:+.3f}, {values.mean() + reach:+.3f}]"
    p = plain(2 * stats.t.sf(values.mean() / error, len(values) - 1))
    assert ema[3] == "1.000 ± .000" and ema[4] == ("-" if test is None else ".700 ± .000")
    assert ema[6:8] == [f"**{interval}**" if test is None else interval, p]
    said = report.text_of(table, model, done, ["python"])
    noise = "beyond" if test is None else "within"
    assert f"*ema* differs from *plain* by {interval}, p {p}, which is {noise} noise." in said
    assert "too few seeds" not in said and said.rindex("--method ema") > said.index("the best accuracy on dev")
    two = {key: run for key, run in done.items() if run["seed"] < 3}
    said_of_two = report.text_of(table, model, two, ["python"])
    words = f"*ema* differs from *plain* by {values.mean():+.3f}, of too few seeds to say more (3 are wanted)."
    assert words in said_of_two and "**" not in said_of_two.split("## Results")[1]
    row = next(line for line in render(table, model, two).splitlines() if line.startswith("| ema"))
    assert [cell.strip() for cell in row.split("|")][6:8] == [f"{values.mean():+.3f}", ""] and "[" not in row


def test_a_table_can_be_judged_on_test_alone(tmp_path: Path, model: Model):
    table, done = judged_table(tmp_path, model, [0, 1] * 5)
    text = render(replace(table, judges=("test",)), model, done)
    gain = next(line for line in text.splitlines() if line.startswith("| ema")).split("|")[6]
    error = math.sqrt(0.09 / 9)  # of one sentence in ten, where three equal seeds are one
    reach = stats.t.ppf(0.975, 9) * error
    assert gain.strip() == f"-0.100 [{-0.1 - reach:+.3f}, {-0.1 + reach:+.3f}]"
    assert "on test alone, with its 95 % interval" in text and "\nOn test (10 sentences), beyond noise" in text
    table, done = judged_table(tmp_path, model, None)  # without gold labels there is dev alone
    assert "\nOn dev (10 sentences), beyond noise" in render(replace(table, judges=("test",)), model, done)
    with pytest.raises(UserError, match="judges must be a list of dev and test, none of them twice"):
        table_of(tmp_path, judges=["train"])


def test_more_rows_widen_what_chance_may_do(tmp_path: Path, model: Model):
    """p of each row is corrected for all rows of its panel."""
    table, done = judged_table(tmp_path, model, None)
    (alone,) = panels_of(table, model, done)
    others = [alone.cells[1]._replace(name=name) for name in ("a", "b")]
    among = alone._replace(cells=[*alone.cells, *others])
    assert among.verdicts()["ema"].p == pytest.approx(3 * alone.verdicts()["ema"].p)
    assert alone.verdicts()["ema"].is_beyond_noise and not among.verdicts()["ema"].is_beyond_noise


def test_training_that_did_not_fit_has_no_verdict(tmp_path: Path, model: Model):
    table, done = judged_table(tmp_path, model, None, ema={"fit_loss": 0.69, "classes": 2})
    text = render(table, model, done)
    assert re.search(
        r"^\| ema \| 3 \| 1.000 ± .000 \| - \| .* \| did not fit \(3 of 3\) \|  \|  \|  \|", text, re.MULTILINE
    )
    assert "Above the bag of words" not in text and "differs" not in report.text_of(table, model, done, ["python"])
    assert "ema" not in panels_of(table, model, done)[0].above_majority()
    table, done = judged_table(tmp_path, model, None, plain={"fit_loss": 0.69, "classes": 2})
    text = render(table, model, done)
    assert "did not fit (3 of 3)" in text and re.search(r"^\| ema \|.* \|  \|  \|  \|  \| 1 \|", text, re.MULTILINE)


def test_what_beats_neither_the_majority_class_nor_the_bag_of_words_is_said(tmp_path: Path, model: Model):
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema"}, {"name": "words", "option": "bag-of-words"}]
    table, done = table_of(tmp_path, rows=rows, shots=[None], seeds=[1, 2, 3]), {}
    for row, wrong in zip(table.rows, (95, 20, 60), strict=True):
        for one in table.final(row, "films", None, model, {}):
            found = {"seconds": 1.0, "dev": scores_of([0, 1] * 100, wrong)} | (
                {} if row.option == "bag-of-words" else {"trainable": 1}
            )
            done[one.key(model)] = line_of(one, model, **found)
    text = render(table, model, done)
    assert "On dev (200 sentences), beyond noise, not above the majority class (.500): plain." in text
    assert "Above the bag of words: ema; below it: plain." in text


def test_a_row_of_members_is_a_line_for_each_way_of_combining(tmp_path: Path, model: Model):
    rows = [{"name": "plain"}, {"name": "plain models", "members": 3}]
    table, done = table_of(tmp_path, rows=rows, shots=[4], seeds=[1, 2, 3]), {}
    labels = [0, 1] * 5
    for one in table.final(table.rows[1], "films", 4, model, {}):
        each = {name: {"dev": scores_of(labels, wrong)} for name, wrong in (("vote", 1), ("uniform soup", 5))}
        done[one.key(model)] = line_of(one, model, trainable=1, seconds=1.0, combined=each, **each["vote"])
    text = render(table, model, done)
    assert "| vote of 3: plain models | 3 | .900 ± .000 |" in text
    assert "| uniform soup of 3: plain models | 3 | .500 ± .000 |" in text


def test_what_waits_for_a_choice_is_missing(tmp_path: Path, model: Model):
    words = "Missing: 5 runs (FILMS: plain 2, asked 1; FILMS, 4 a class: lora 2)."
    assert words in render(table_of(tmp_path, shots=[None]), model, {})
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema"}]
    assert "Missing: 4 runs (FILMS: 2 of each row)." in render(table_of(tmp_path, rows=rows, shots=[None]), model, {})


@pytest.mark.slow
def test_results_are_rendered_without_the_weights_that_they_come_from(
    tmp_path: Path, model: Model, finished: Finished, main: Callable, monkeypatch: pytest.MonkeyPatch
):
    table, done = finished
    away = Model(str(tmp_path / "gone.pt"), "", {"gone": model.checksums})
    moved = {key: {**result, "model": "gone"} for key, result in done.items()}
    text = render(table, away, moved)
    here = render(table, model, done).replace(f"`{model.name}`", "`gone`").replace(model.given_as, away.given_as)
    assert text == here and "| ema" in text
    with pytest.raises(UserError, match="gone.pt does not exist"):
        render(table, Model(away.checkpoint, ""), moved)
    with open(tmp_path / "r.jsonl", "w", encoding="utf-8") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in moved.values()))
    rendered = partial(main, "--render", "--results", tmp_path / "r.jsonl", checkpoint="gone.pt")
    monkeypatch.setattr(program, "draw", lambda *what: [])
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


def test_lines_that_were_exchanged_are_refused(model: Model, finished: Finished):
    table, done = finished
    first, second, *_ = done
    done[first], done[second] = done[second] | {"key": first}, done[first] | {"key": second}
    with pytest.raises(UserError, match=f"the result {first} has another 'seed' than the run with its key"):
        render(table, model, done)


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
        fresh = replace(model, keys={})
        keys.append(table.final(table.rows[0], "films", None, fresh, done)[0].key(fresh))
    assert keys[0] == keys[1] not in done
    lines = [{**result, "model": "base", "weights": str(number % 3)} for number, result in enumerate(done.values())]
    text = render(table, model, done | {str(number): line for number, line in enumerate(lines)})
    assert "`base` was made 3 times by the same command; pairs are of one make." in text


def test_what_was_tried_is_shown_and_can_be_all_that_is_run(
    tmp_path: Path, model: Model, main: Callable, capsys: pytest.CaptureFixture
):
    mixed = table_of(tmp_path, rows=[{"name": "a", "tune": {"attention": ["causal"], "max_sentence_len": [None, 9]}}])
    runs = [run for seed in (1, 2) for run in tuning_runs(mixed, model, seeds=[seed])]
    done = {each.key(model): line_of(each, model, selection=0.5) for each in runs}
    each = (f"attention causal, max_sentence_len {longest}: .500 ± .000 (2)" for longest in (None, 9))
    assert f"| a | films, 4 a class | {', '.join(each)} |" in render(mixed, model, done)
    table = table_of(tmp_path, tune_seeds=[5, 6], shots=[None])
    runs = tuning_runs(table, model, shots=None, seeds=[5, 6])
    done = {each.key(model): line_of(each, model, selection=40 * dict(each.settings)["lr"]) for each in runs}
    assert "| plain | films, all | lr 0.01: .400 ± .000 (2), lr 0.02: .800 ± .000 (2) |" in render(table, model, done)
    done.popitem()
    assert "| lr 0.01: .400 ± .000 (2), lr 0.02: .800 (1) |" in render(table, model, done).replace(
        "| plain | films, all ", ""
    )
    table_of(tmp_path, shots=[4])
    for flags, counted, word in ((["--tune"], 8, "tune"), (["--only", "asked", "--tune"], 4, "tune"), ([], 9, "")):
        main("--list", "--results", tmp_path / "r.jsonl", *flags)
        *lines, last = capsys.readouterr().out.splitlines()
        assert last == f"{counted} runs can be started now" and len(lines) == counted
        assert all(line.startswith(word) for line in lines)


def test_every_preset_says_where_it_comes_from_and_pages_do(model: Model, tmp_path: Path):
    known = re.compile(r"arXiv:\d{4}\.\d{5}|(cmu-l3|neubig|vaishdho1|Qihongfei-hub)/[\w-]+|GitHub|small steps")
    assert all(known.search(row.source) for row in PRESETS_42M.rows)
    rows = [{"name": "plain", "source": "a paper", "tune": {"lr": [0.1, 0.2]}}, {"name": "lora", "method": "lora"}]
    table = table_of(tmp_path, rows=rows)
    runs = tuning_runs(table, model, shots=None)
    done = {each.key(model): line_of(each, model, selection=0.5) for each in runs}
    page = "## Sources\n\n| method | source |\n|---|---|\n| plain | a paper |\n\n## What was tried"
    assert page in render(table, model, done)
    assert "Sources" not in render(table_of(tmp_path, rows=[{"name": "plain"}]), model, {})
    for source in ("a | b", "two\nlines", 3):
        with pytest.raises(UserError, match="row plain: source must be a text of one line, without |, not "):
            table_of(tmp_path, rows=[{"name": "plain", "source": source}])


def test_the_summary_has_one_pooled_gain_for_every_method(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
):
    """Of the panels in which plain training is above the majority class."""
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema"}, {"name": "words", "option": "bag-of-words"}]
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[1, 2, 3])
    folder = tmp_path / "all"
    (folder / "tables").mkdir(parents=True)
    (tmp_path / "trial.json").rename(folder / "tables" / "full.json")
    monkeypatch.setattr(summary, "HERE", folder)
    labels = [0, 1] * 200
    panels = {name: (100, 20, 80) for name in ("two", "unfit", "young")} | {
        "one": (100, 60, 80),
        "guesses": (200, 10, 80),
    }
    for name, wrongs in panels.items():
        for row, wrong in zip(table.rows, wrongs, strict=True):
            for one in table.final(row, "films", None, model, {})[: 2 if name == "young" else 3]:
                figures = {"trainable": 1, "seconds": 2.0 + (row.name == "ema"), "dev": scores_of(labels, wrong)}
                if row.name == "words":
                    del figures["trainable"], figures["seconds"]
                elif row.name == "plain" and one.seed == 3:  # times are compared on one processor
                    figures |= {"processor": "another", "seconds": 99.0}
                elif row.name == "ema" and one.seed == 3:  # stood still for a while
                    figures["seconds"] = 999.0
                elif (name, row.name, one.seed) == ("unfit", "plain", 2):
                    figures |= {"fit_loss": 0.69, "classes": 2}
                append_result(folder / f"full-{name}.jsonl", {**line_of(one, model, **figures), "model": name})
    (folder / "full-void.jsonl").touch()
    other = table.final(table.rows[0], "films", None, model, {})[0]
    append_result(folder / "full-moon-two.jsonl", {**line_of(other, model), "model": "two"})  # of a table full-moon
    (folder / "one").write_text("what is here now is not what was recorded", encoding="utf-8")
    found = [*summary.panels_in(folder, ["full"])]
    text = summary.render_summary(found)
    assert summary.render_summary(found * 2) == text  # what another table has of the same panels counts once
    name, panel = next(each for each in found if each[0] == "two")
    equal = panel._replace(cells=[cell._replace(runs={**panel.baseline}) for cell in panel.cells])
    assert [each.mean for each in summary.worths([(name, equal), (name, panel)])["ema"].gains] == [0]  # from the first
    head, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    assert head == "| method | panels | gain | p | over the bag of words | time |" and len(lines) == 2
    ema, words = (
        next(line for line in lines if line.startswith(f"| {name} ")).split(" | ") for name in ("ema", "words")
    )
    assert ema[1] == "2" and ema[2].startswith("**+0.150 [") and ema[4].startswith("+0.100 [") and ema[5] == "1.50 |"
    assert words[2].startswith("**+0.050 [") and words[4:] == ["", " |"]
    gains = [two_way(np.array([[1] * most + [0] * (400 - most)] * 3)) for most in (40, 80)]
    assert f"{pooled(gains).mean:+.3f} [{pooled(gains).low:+.3f}, {pooled(gains).high:+.3f}]" in ema[2]
    reasons = {"guesses": "is not above the majority class", "unfit": "did not fit", "young": "has fewer than 3 seeds"}
    for name, reason in reasons.items():
        assert f"- FILMS, all, {name}, judged on dev (.500); left out: plain training {reason}\n" in text
    assert text.count("- FILMS, all, two, judged on dev (") == 1


def test_a_summary_is_written_over_its_own_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["summary", "--results", str(tmp_path), "--out", str(tmp_path / "s.md")])
    with pytest.raises(UserError, match="there are no results of full-fresh or full or few-shot"):
        summary.main()
    monkeypatch.setattr(summary, "panels_in", lambda folder: ["a panel"])
    monkeypatch.setattr(summary, "render_summary", lambda panels: "# What\n")
    for _ in range(2):
        summary.main()
    (tmp_path / "s.md").write_text("# My notes\n", encoding="utf-8")
    with pytest.raises(UserError, match="s.md is there already"):
        summary.main()
    assert (tmp_path / "s.md").read_text() == "# My notes\n"
    monkeypatch.setattr("sys.argv", ["summary", "--out", str(tmp_path / "s.txt")])
    with pytest.raises(UserError, match="must end in .md"):
        summary.main()


def test_a_plot_is_drawn(tmp_path: Path, model: Model, finished: Finished):
    pytest.importorskip("matplotlib")
    table, done = finished
    (written,) = plots.draw(table, model, done, tmp_path / "trial")
    assert written.name == "trial-accuracy.png" and written.read_bytes().startswith(b"\x89PNG")
    assert plots.draw(table, model, {}, tmp_path / "t") == []


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
    few = panel.cells[1]._replace(runs=dict([*panel.cells[1].runs.items()][:2]))
    figure, axis = pyplot.subplots()
    plots._accuracy(axis, panel._replace(cells=[panel.cells[0], few]))  # of two seeds there is no interval
    assert all(len({*line.get_xdata()}) == 1 for line in axis.lines if line.get_marker() == "None")
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
