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
from grids import (  # noqa: F401 (fixtures)
    PLAIN_CPU,
    Finished,
    finished,
    first_of,
    line_of,
    main,
    model,
    scored,
    table_of,
    tuning_runs,
)

from advanced.experiments import __main__ as program
from advanced.experiments import report, rows, trial
from advanced.experiments.grid import Table
from advanced.experiments.models import Model, model_of
from advanced.experiments.render import render
from advanced.experiments.results import append_result
from advanced.experiments.rows import Trial
from advanced.experiments.schema import SETTING_CONDITIONS
from utils import UserError


def lr_of(one: Trial) -> float:
    return dict(one.settings)["lr"]


def test_what_is_tuned_comes_first_and_the_best_on_held_out_data_is_taken(tmp_path: Path, model: Model):
    table = table_of(tmp_path)
    row, runs = table.rows[0], tuning_runs(table_of(tmp_path), model, seeds=[1])
    assert [lr_of(each) for each in runs] == [0.01, 0.02] and {each.phase for each in runs} == {"tune"}
    assert table.final(row, "films", 4, model, {}) == []
    done = scored(tuning_runs(table, model, row=1, seeds=[1]), model, lambda each: float("alpha=8" in each.arguments))
    (final,) = table.final(table.rows[1], "films", 4, model, done)
    assert final.arguments == ("rank=2", "alpha=8") and (final.seed, final.phase) == (1, "final")


def chosen_rate(table: Table, model: Model, score: Callable[[Trial], float], shots: int | None = None) -> list[float]:
    """The rates of the final runs after all runs that choose them, of which the last are known by `score`."""
    done: dict[str, dict] = {}
    while waiting := [each for each in table.ready(model, done) if each.phase == "tune" and each.row == "plain"]:
        done |= scored(waiting, model, score)
    return [lr_of(each) for each in table.final(table.rows[0], "films", shots, model, done)]


@pytest.mark.parametrize(
    ("best", "tried", "taken"),
    [
        (0.02, {0.01, 0.02, 0.04}, 0.02),  # the best of the row is its largest, one beyond it is worse
        (0.01, {0.005, 0.01, 0.02}, 0.01),
        (0.08, {0.01, 0.02, 0.04, 0.08, 0.16}, 0.08),
        (9.0, {0.01, 0.02, 0.04, 0.08, 0.16}, 0.16),  # no more than three are added
        (1e-9, {0.01, 0.02, 0.005, 0.0025, 0.0013}, 0.0013),
    ],
)
def test_rates_are_added_until_the_best_one_lies_between_others(
    tmp_path: Path, model: Model, best: float, tried: set[float], taken: float
):
    seen = set()

    def score(each: Trial) -> float:
        seen.add(lr_of(each))
        return 1 - abs(math.log(lr_of(each) / best)) / 100

    assert chosen_rate(table_of(tmp_path), model, score) == [taken, taken] and seen == tried


def test_of_equal_rates_the_smallest_is_taken(tmp_path: Path, model: Model):
    """As small as rates are added."""
    assert chosen_rate(table_of(tmp_path), model, lambda each: 0.5) == [0.0013] * 2
    assert chosen_rate(table_of(tmp_path), model, lambda each: 0.5 - (lr_of(each) < 0.01)) == [0.01] * 2


def test_the_mean_over_tuning_seeds_decides(tmp_path: Path, model: Model):
    scores = {(0.01, 7): 0.9, (0.01, 8): 0.1, (0.02, 7): 0.6, (0.02, 8): 0.6}

    def score(each: Trial) -> float:
        return scores.get((lr_of(each), each.seed), 0.0)

    assert chosen_rate(table_of(tmp_path, tune_seeds=[7, 8]), model, score) == [0.02, 0.02]


def test_of_a_few_sentences_each_seed_chooses_for_itself(tmp_path: Path, model: Model):
    """On the sentences that it draws; with all sentences the seeds of the table choose for all."""

    def score(each: Trial) -> float:
        return float(lr_of(each) == {1: 0.01, 2: 0.02}.get(each.seed, 0.02))

    assert chosen_rate(table_of(tmp_path), model, score, shots=4) == [0.01, 0.02]
    assert chosen_rate(table_of(tmp_path), model, score) == [0.02, 0.02]


def test_members_are_draws_of_one_division(tmp_path: Path, model: Model):
    table = table_of(tmp_path, rows=[{"name": "plain"}, {"name": "of three", "members": 3}], shots=[4])
    plain, three = (table.final(row, "films", 4, model, {})[1] for row in table.rows)
    assert (three.members, [one.training_seed for one in three.each_member()]) == (3, [2, 1002, 2002])
    keys = [one.key(model) for one in three.each_member()]
    assert keys[0] == plain.key(model) and len({*keys, three.key(model)}) == 4


def test_a_table_without_seeds_is_all_choice(tmp_path: Path, model: Model):
    rows = [{"name": "plain", "tune": {"lr": [0.01]}}, {"name": "ema", "method": "ema", "tune": {"decay": [0.5, 0.9]}}]
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[], tune_seeds=[0])
    wanted = table.ready(model, {})
    assert [(each.row, each.phase) for each in wanted] == [("plain", "tune"), ("ema", "tune"), ("ema", "tune")]
    done = {each.key(model): line_of(each, model, selection=0.25) for each in wanted}
    assert table.ready(model, done) == []
    text = render(table, model, done)
    assert "| ema | films, all | decay=0.5: .250 (1), decay=0.9: .250 (1) |" in text and "majority" not in text
    with pytest.raises(UserError, match="none of these rows has a final run"):
        report.text_of(table, model, done, ["python"])


def test_a_single_value_is_measured_on_held_out_data_too_where_that_is_asked_for(tmp_path: Path, model: Model):
    """So that rows can be compared without a look at dev. The final runs do not wait for it."""
    one, none = {"name": "one", "tune": {"lr": [0.01]}}, {"name": "none"}
    table = table_of(tmp_path, rows=[one, none], shots=[None], baseline="none")
    wanted = table.ready(model, {}, only_tune=True)
    assert [(each.row, each.phase, each.seed) for each in wanted] == [("one", "tune", 0), ("one", "tune", 11)]
    assert {(each.row, each.phase) for each in table.ready(model, {})} == {("one", "final"), ("none", "final")}
    assert not table.ready(model, scored(wanted, model, lambda each: 0.5), only_tune=True)


def test_ready_runs_are_those_that_are_not_done_seed_by_seed(tmp_path: Path, model: Model):
    table = table_of(tmp_path)
    ready = table.ready(model, {})
    kinds = [(each.row, each.phase, each.shots, each.seed) for each in ready]
    assert [kind for kind in kinds if kind[2] is None and kind[0] == "plain"] == kinds[:4]  # two rates, two seeds
    assert [seed for row, phase, shots, seed in kinds if (row, shots) == ("lora", 4)] == [1, 1, 2, 2]
    assert kinds.index(("asked", "final", None, 1)) < kinds.index(("plain", "tune", 4, 2))
    done: dict[str, dict] = {}
    while waiting := table.ready(model, done):
        done |= scored(waiting[:1], model, lambda each: 0.5 if lr_of(each) == 0.01 else 0.1)
    finals = [one for row, data, shots in table.cells() for one in table.final(row, data, shots, model, done)]
    assert len(finals) == 7 and all(each.key(model) in done for each in finals)


def test_what_is_tuned_with_all_sentences_is_started_first(tmp_path: Path, model: Model):
    rows = [{"name": "fixed"}, {"name": "plain", "tune": {"lr": [0.01, 0.02]}}]
    ready = table_of(tmp_path, rows=rows, shots=[None]).ready(model, {})
    assert [each.phase for each in ready] == ["tune"] * 4 + ["final"] * 2


def test_a_run_is_told_from_others_by_what_decides_it_and_by_nothing_else(
    tmp_path: Path, model: Model, films: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    table = table_of(tmp_path)
    (one, *_) = tuning_runs(table, model)
    same = {**vars(one)}
    assert Trial(**{**same, "table": "other", "row": "renamed"}).key(model) == one.key(model)
    changes = {"seed": 9, "shots": 5, "phase": "final", "settings": (*one.settings[:-1], ("precision", "bf16"))}
    changes |= {"method": "ema", "draw": 1, "members": 2}
    keys = {Trial(**{**same, name: value}).key(model) for name, value in changes.items()}
    assert len(keys | {one.key(model)}) == 1 + len(changes)
    assert one.key(Model(model.tokenizer, model.tokenizer)) != one.key(model)
    key, names = one.key(model), json.loads(films["label_names"].read_text())
    for written, is_same in ((json.dumps(names, indent=4), True), (json.dumps(names[::-1]), False)):
        (path := tmp_path / "names.json").write_text(written)
        monkeypatch.setattr(rows, "path_of", lambda _, split: str({**films, "label_names": path}[split]))  # noqa: B023
        assert (one.key(replace(model, keys={})) == key) == is_same


def test_a_teacher_is_known_by_what_is_in_its_file(tmp_path: Path, model: Model):
    one, keys = first_of(table_of(tmp_path, rows=[{"name": "plain"}]), model), []
    for name, content in (("a.pt", "a teacher"), ("b.pt", "a teacher"), ("a.pt", "another")):
        (tmp_path / name).write_text(content)
        taught = replace(one, method="distill", arguments=(f"teacher={tmp_path / name}",))
        keys.append(taught.key(replace(model, keys={})))
    (tmp_path / "a.pt").unlink()
    keys.append(taught.key(replace(model, keys={})))  # so that a page can be written without it
    assert keys[0] == keys[1] and len({*keys}) == 3


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_other_data_is_another_run(
    tmp_path: Path, model: Model, films: dict[str, Path], monkeypatch: pytest.MonkeyPatch, split: str
):
    table = table_of(tmp_path)
    (one, *_) = tuning_runs(table, model)
    before = one.key(model)
    (other := tmp_path / "other.txt").write_text("0 ||| another film\n", encoding="utf-8")
    monkeypatch.setattr(rows, "path_of", lambda data, name: str({**films, split: other}[name]))
    assert one.key(model) == before  # read once for a grid
    assert one.key(replace(model, keys={})) != before


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
        ({"rows": [{"name": "a", "option": "generate"}]}, "option must be one of finetune, prompt, bag-of-words"),
        ({"rows": [{"name": "a", "option": "frozen-states", "tune": {"lr": [1]}}]}, "what is solved has no tune"),
        ({"rows": [{"name": "a", "option": "prompt", "members": 2}]}, "members are trained"),
        ({"rows": [{"name": "a", "members": 1}]}, "members must be a whole number above 1"),
        ({"rows": [{"name": "a", "option": "bag-of-words", "settings": {"hold_out": 0}}]}, "its C would choose on dev"),
        ({"settings": {"clip": 0}}, "clip must be a number above 0, or null"),
        ({"settings": {"second_test": -1}}, "second_test must be a number of sentences"),
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
    settings = rows.PLAN_SETTINGS | rows.DATA_SETTINGS
    assert SETTING_CONDITIONS.keys() == settings.keys()
    assert all(SETTING_CONDITIONS[name].fits(value) for name, value in settings.items())


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
