"""A table of experiments: which runs it has, what tells them apart, what is chosen on what, what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from conftest import random_llama, save_checkpoint
from grids import PLAIN_CPU, Finished, finished, main, model, scored, table_of  # noqa: F401 (fixtures)

from advanced.experiments import __main__ as program
from advanced.experiments import grid, report, trial
from advanced.experiments.grid import Table, Trial
from advanced.experiments.models import Model, model_of
from advanced.experiments.render import render
from advanced.experiments.results import append_result
from advanced.experiments.schema import SETTING_CONDITIONS
from utils import UserError


def test_what_is_tuned_comes_first_and_the_best_on_held_out_data_is_taken(tmp_path: Path, model: Model):
    table = table_of(tmp_path)
    row = table.rows[0]
    tuning = table.tuning(row, "films", 4)
    assert [dict(each.settings)["lr"] for each in tuning] == [0.01, 0.02]
    assert {each.phase for each in tuning} == {"tune"}
    assert table.final(row, "films", 4, model, {}) is None
    done = scored(tuning, model, lambda each: dict(each.settings)["lr"])
    final = table.final(row, "films", 4, model, done)
    assert [each.seed for each in final] == [1, 2] and all(dict(each.settings)["lr"] == 0.02 for each in final)
    equal = scored(tuning, model, lambda each: 0.5)
    assert dict(table.final(row, "films", 4, model, equal)[0].settings)["lr"] == 0.01
    lora = table.rows[1]
    done = scored(table.tuning(lora, "films", 4), model, lambda each: 1.0 if "alpha=8" in each.arguments else 0.0)
    assert table.final(lora, "films", 4, model, done)[0].arguments == ("rank=2", "alpha=8")


def test_the_mean_over_tuning_seeds_decides(tmp_path: Path, model: Model):
    table = table_of(tmp_path, tune_seeds=[7, 8])
    row = table.rows[0]
    scores = {(0.01, 7): 0.9, (0.01, 8): 0.1, (0.02, 7): 0.6, (0.02, 8): 0.6}
    done = scored(table.tuning(row, "films", 4), model, lambda each: scores[dict(each.settings)["lr"], each.seed])
    assert dict(table.final(row, "films", 4, model, done)[0].settings)["lr"] == 0.02


def test_a_table_without_seeds_is_all_choice(tmp_path: Path, model: Model):
    rows = [{"name": "plain", "tune": {"lr": [0.01]}}, {"name": "ema", "method": "ema", "tune": {"lr": [0.01, 0.02]}}]
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[])
    wanted = table.ready(model, {})
    assert [(each.row, each.phase) for each in wanted] == [("plain", "tune"), ("ema", "tune"), ("ema", "tune")]
    done = scored(wanted, model, lambda each: 0.25)
    assert table.ready(model, done) == []
    text = render(table, model, done)
    assert "| ema | films, all | lr 0.01: .250, lr 0.02: .250 |" in text and "Majority" not in text
    with pytest.raises(UserError, match="none of these rows has a final run"):
        report.text_of(table, model, done, ["python"])


def test_a_single_value_is_measured_on_held_out_data_too_where_that_is_asked_for(tmp_path: Path, model: Model):
    """So that rows can be compared without a look at dev. The final runs do not wait for it."""
    one, none = {"name": "one", "tune": {"lr": [0.01]}}, {"name": "none"}
    table = table_of(tmp_path, rows=[one, none], shots=[None], baseline="none")
    wanted = table.ready(model, {}, only_tune=True)
    assert [(each.row, each.phase) for each in wanted] == [("one", "tune")]
    assert {(each.row, each.phase) for each in table.ready(model, {})} == {("one", "final"), ("none", "final")}
    assert not table.ready(model, scored(wanted, model, lambda each: 0.5), only_tune=True)


def test_ready_runs_are_those_that_are_not_done_seed_by_seed(tmp_path: Path, model: Model):
    table = table_of(tmp_path)
    ready = table.ready(model, {})
    kinds = [(each.row, each.phase) for each in ready]
    assert kinds.count(("plain", "tune")) == 4 and kinds.count(("lora", "tune")) == 2  # two sizes, and one
    assert kinds.count(("asked", "final")) == 1 and ("plain", "final") not in kinds
    done = scored(ready, model, lambda each: 0.5)
    after = table.ready(model, done)
    assert [each.seed for each in after] == [1, 1, 1, 2, 2, 2] and {each.phase for each in after} == {"final"}
    assert not table.ready(model, done | scored(after, model, lambda each: 0.5))


def test_what_is_tuned_is_started_first(tmp_path: Path, model: Model):
    rows = [{"name": "fixed"}, {"name": "plain", "tune": {"lr": [0.01, 0.02]}}]
    ready = table_of(tmp_path, rows=rows, shots=[4]).ready(model, {})
    assert [each.phase for each in ready] == ["tune"] * 2 + ["final"] * 2


def test_a_run_is_told_from_others_by_what_decides_it_and_by_nothing_else(
    tmp_path: Path, model: Model, films: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    table = table_of(tmp_path)
    (one, *_) = table.tuning(table.rows[0], "films", 4)
    same = {**vars(one)}
    assert Trial(**{**same, "table": "other", "row": "renamed"}).key(model) == one.key(model)
    changes = {"seed": 9, "shots": 5, "phase": "final", "settings": (*one.settings[:-1], ("precision", "bf16"))}
    changes |= {"method": "ema"}
    keys = {Trial(**{**same, name: value}).key(model) for name, value in changes.items()}
    assert len(keys | {one.key(model)}) == 1 + len(changes)
    assert one.key(Model(model.tokenizer, model.tokenizer)) != one.key(model)
    key, names = one.key(model), json.loads(films["label_names"].read_text())
    for written, is_same in ((json.dumps(names, indent=4), True), (json.dumps(names[::-1]), False)):
        (path := tmp_path / "names.json").write_text(written)
        monkeypatch.setattr(grid, "path_of", lambda _, split: str({**films, "label_names": path}[split]))  # noqa: B023
        assert (one.key(model) == key) == is_same


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_other_data_is_another_run(
    tmp_path: Path, model: Model, films: dict[str, Path], monkeypatch: pytest.MonkeyPatch, split: str
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


def test_data_can_be_named(
    tmp_path: Path, model: Model, main: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema", "data": ["films"]}]
    table = table_of(tmp_path, rows=rows, data={"films": {}, "sst": {"batch_size": 4}}, shots=[None], seeds=[1, 2])
    assert [(row.name, data) for row, data, _ in table.only(None, ["sst"]).cells()] == [("plain", "sst")]
    whole, part = (one.ready(model, {}) for one in (table, table.only(None, ["sst"])))
    assert part == [each for each in whole if each.data == "sst"] and len(part) == 2 and len(whole) == 6
    monkeypatch.setattr(program, "check_args", lambda args: None)
    main("--tokenizer", model.tokenizer, "--data", "sst", "--list")
    assert "2 runs can be started now" in capsys.readouterr().out


def test_rows_can_be_named_and_the_baseline_stays_beside_them(tmp_path: Path, model: Model, finished: Finished):
    table, done = finished
    assert table.only(None) == table and [row.name for row in table.only(["mixed"]).rows] == ["plain", "mixed"]
    text = render(table.only(["ema"]), model, done)
    assert "| ema" in text and "| plain" in text and "| mixed" not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": [{"name": "a"}, {"name": "a"}]}, "two rows have one name"),
        ({"rows": [{"name": "a", "method": "nothing"}]}, "no method 'nothing'"),
        ({"rows": [{"name": "a", "method": "lora", "tune": {"r": [1]}}]}, "no argument of that name"),
        ({"rows": [{"name": "a", "wrong": 1}]}, "row 'a': there is no 'wrong' here"),
        ({"rows": [{"method": "ema"}]}, "row 1: it has no name"),
        ({"rows": [1]}, "rows must be a list of rows"),
        ({"rows": []}, "rows must be a list of rows"),
        ({"rows": [{"name": "a", "tune": {"lr": 1}}]}, "row 'a': tune: lr must be a list of values"),
        ({"rows": [{"name": "a", "tune": {"lr": ["abc"]}}]}, "row 'a': tune: lr must be a number above 0, not 'abc'"),
        ({"rows": [{"name": "a", "tune": {"rank": [1]}}]}, "no setting rank, and no method that it could be of"),
        ({"rows": [{"name": "a", "arguments": ["rank=2"]}]}, "it has arguments, and no method"),
        ({"rows": [{"name": "a", "option": "prompt", "shots": [4]}]}, "shots are of training sentences"),
        ({"rows": [{"name": "a", "settings": {"precision": "int8"}}]}, "precision int8 rounds the weights"),
        ({"rows": [{"name": "a", "tune": {"precision": ["fp32", "int8"]}}]}, "precision int8 rounds the weights"),
        ({"data": {"films": {"precision": "int8"}}}, "row plain: precision int8 rounds the weights"),
        ({"rows": [{"name": "a", "data": ["other"]}]}, "row 'a': the table has no data set other"),
        ({"rows": [{"name": "a", "option": "generate"}]}, "option must be finetune or prompt"),
        ({"rows": [{"name": "a", "arguments": "rank=2"}]}, "arguments must be a list of texts"),
        ({"settings": {"lrr": 1}}, "settings: there is no 'lrr' here; there are lr, epochs"),
        ({"settings": {"epochs": "1"}}, "settings: epochs must be a whole number of at least 1, not '1'"),
        ({"settings": {"epochs": True}}, "settings: epochs must be a whole number"),
        ({"settings": {"lr": -1}}, "lr must be a number above 0"),
        ({"settings": {"lr": math.nan}}, "lr must be a number above 0"),
        ({"settings": {"lr": 10**400}}, "lr must be a number above 0"),
        ({"settings": {"hold_out": 2}}, "hold_out must be a number from 0 to below 1"),
        ({"settings": {"hold_out": 1}}, "hold_out must be a number from 0 to below 1"),
        ({"settings": {"hidden_dropout_prob": 1.0}}, "hidden_dropout_prob must be a number from 0 to below 1"),
        ({"settings": {"precision": "fp8"}}, "precision must be one of fp32"),
        ({"data": []}, "data must be an object"),
        ({"data": {}}, "it names no data set"),
        ({"data": {"films": {"batch_size": 2**31}}}, "data, films: batch_size must be a whole number of at least 1"),
        ({"data": {"films": {"batch_size": 0}}}, "data, films: batch_size must be a whole number of at least 1"),
        ({"data": {"films": 1}}, "data: films must be an object"),
        ({"seeds": 1}, "seeds must be a list of seeds"),
        ({"seeds": ["a"]}, "seeds must be a list of seeds"),
        ({"seeds": []}, "row 'asked': in a table without seeds a row has tune, and no seeds"),
        ({"seeds": [], "rows": [{"name": "plain"}]}, "row 'plain': in a table without seeds"),
        ({"seeds": [1, 1]}, "seeds must be a list of seeds from 0 to 2.32 - 1, none of them twice"),
        ({"shots": 4}, "shots must be a list"),
        ({"shots": [-1]}, "shots must be a list"),
        ({"baseline": "nothing"}, "no row nothing, which is the baseline"),
        ({"settings": {"hold_out": 0.0}}, "with hold_out 0 its tune would choose on dev"),
        (
            {"rows": [{"name": "a", "method": "lora, early-stopping", "settings": {"hold_out": 0}}]},
            "row a: with hold_out 0 early-stopping would choose on dev",
        ),
        ({"rows": [{"name": "a", "method": "padding-mask"}]}, "row a: padding-mask does nothing in a causal model"),
        (
            {
                "rows": [
                    {"name": "a", "method": "smart", "tune": {"attention": ["causal", "bidirectional"]}},
                    {"name": "b", "option": "prompt", "method": "pmi", "settings": {"attention": "bidirectional"}},
                ]
            },
            "row b: pmi reads likelihoods",
        ),
    ],
)
def test_a_wrong_table_is_refused_before_anything_is_run(tmp_path: Path, changes: dict, words: str):
    with pytest.raises(UserError, match=words):
        table_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[]", "no JSON object"), ("{}", "it has no title"), ("[" * 10**5, "is not JSON")],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str, words: str):
    (path := tmp_path / "table.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words) as error:
        Table.read(path)
    assert "\n" not in str(error.value)


def test_every_setting_of_a_run_is_checked():
    assert SETTING_CONDITIONS.keys() == grid.PLAN_SETTINGS.keys()
    assert all(SETTING_CONDITIONS[name].fits(value) for name, value in grid.PLAN_SETTINGS.items())


def test_the_tables_that_are_here_can_be_read():
    for path in (program.HERE / "tables").glob("*.json"):
        table = Table.read(path)
        assert table.baseline in {row.name for row in table.rows} and table.title


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
    tmp_path: Path, model: Model, pair: Model
):
    table = table_of(tmp_path, rows=[{"name": "plain"}, {"name": "other", "checkpoint": "o.pt"}])
    plain, other = (table.final(row, "films", None, pair, {})[0] for row in table.rows)
    assert plain.key(pair) != other.key(pair)
    results = [trial.run_trial(each, pair, tmp_path, PLAIN_CPU) for each in (plain, other)]
    assert [result["model"] for result in results] == ["m", "o"]
    assert results[0]["train_losses"] != results[1]["train_losses"]


def test_a_tokenizer_can_be_named(tmp_path: Path, model: Model):
    (other := tmp_path / "other.model").write_bytes(Path(model.tokenizer).read_bytes())
    assert model_of(model.checkpoint, str(other), {}).tokenizer == str(other)
    with pytest.raises(UserError, match="--tokenizer absent.model does not exist"):
        model_of(model.checkpoint, "absent.model", {})


def test_a_row_that_starts_from_an_absent_checkpoint_is_left_out(
    tmp_path: Path, model: Model, capsys: pytest.CaptureFixture
):
    rows = [{"name": "plain"}, {"name": "adapted", "checkpoint": "{model}-adapted.pt"}]
    table = table_of(tmp_path, rows=rows)
    assert [row.name for row in table.without_unknown(model).rows] == ["plain"]
    assert "left out: adapted" in capsys.readouterr().err
    known = Model(model.checkpoint, model.tokenizer, {f"{model.name}-adapted": model.checksums})
    assert table.without_unknown(known) == table
    assert [row.name for row in table.without_absent(known).rows] == ["plain"]


def test_the_program_leaves_out_rows_whose_checkpoint_is_not_here(
    tmp_path: Path, main: Callable, capsys: pytest.CaptureFixture
):
    table_of(tmp_path, rows=[{"name": "plain"}, {"name": "adapted", "checkpoint": "{model}-adapted.pt"}], shots=[None])
    main("--results", tmp_path / "r.jsonl", "--list")
    assert "2 runs can be started now" in capsys.readouterr().out
    table_of(tmp_path, rows=[{"name": "plain", "checkpoint": "nope.pt"}], shots=[None])
    for asked in ([], ["--list"], ["--render"], ["--report", tmp_path / "r.md"]):
        with pytest.raises(UserError, match=r"nope\.pt does not exist$"):
            main("--results", tmp_path / "r.jsonl", *asked)


def test_rows_of_a_checkpoint_that_is_here_are_run_without_the_tables_own(
    tmp_path: Path, model: Model, main: Callable, capsys: pytest.CaptureFixture
):
    """Where that one is known from results; from those of another table, too."""
    for name in (model.checkpoint, model.tokenizer):
        shutil.copy(name, tmp_path)
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema"}, {"name": "own", "checkpoint": f"{model.name}.pt"}]
    table, path = table_of(tmp_path, rows=rows, shots=[4]), tmp_path / "gone.pt"
    gone = Model(str(path), "", {"gone": model.checksums})
    assert [row.name for row in table.without_absent(gone).rows] == ["own"]
    assert re.search("left out: plain, ema, starting from .*gone.pt, which is not here", capsys.readouterr().err)
    with pytest.raises(UserError, match="gone.pt does not exist"):
        table.only(["ema"]).without_absent(gone)
    listed = partial(main, "--list", "--results", tmp_path / "trial-gone.jsonl", checkpoint=path)
    with pytest.raises(UserError, match="gone.pt does not exist"):
        listed()
    append_result(tmp_path / "other-gone.jsonl", {"key": "k", "model": "gone", "checksums": model.checksums})
    listed()
    assert "2 runs can be started now" in capsys.readouterr().out
    none = replace(table, rows=())
    assert none.without_absent(gone) == none
    (tmp_path / f"{model.name}.model").unlink()
    with pytest.raises(UserError, match=f"{model.name}.pt has no tokenizer beside it; name one with --tokenizer"):
        listed()
    listed("--tokenizer", model.tokenizer)
    assert "2 runs can be started now" in capsys.readouterr().out
    with pytest.raises(UserError, match="--tokenizer .*absent.model does not exist"):
        listed("--tokenizer", tmp_path / "absent.model")
