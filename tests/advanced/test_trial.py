"""One run of a table: its figures, what is chosen by, how it goes on after a stop."""

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
from conftest import FIGURES, asset, save_checkpoint
from grids import PLAIN_CPU, first_of, model, table_of, tuning_runs  # noqa: F401 (fixtures)
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler
from torch import nn

from advanced.experiments import __main__ as program
from advanced.experiments import cost, judging, panel, rows, trial
from advanced.experiments.grid import Table
from advanced.experiments.models import Model
from advanced.experiments.results import fits
from advanced.experiments.rows import Row
from config import PRESETS, LlamaConfig
from engine import runs
from engine.data import Example, create_data, unpack
from engine.families import load_llama
from engine.methods import EpochResult
from engine.plan import ComputeSettings
from engine.runs import load_classifier, predict
from engine.training import Diverged
from fast.linear import Int8Linear, RoundedLinear
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError, sha256_of

PRESETS_42M = Table.read(program.HERE / "tables" / "stories42M.json")


@pytest.mark.parametrize("method", ["", "lora"])
def test_a_run_has_the_figures_that_the_driver_prints(
    tmp_path: Path, model: Model, drive: Callable, classify_flags: Callable, method: str
):
    rows = [{"name": "row", "method": method, "arguments": ["rank=2"] if method else []}]
    table = table_of(tmp_path, rows=rows, data={"films": {"epochs": 3, "batch_size": 4}})
    one = first_of(table, model)
    result = trial.run_trial(one, model, tmp_path, PLAIN_CPU)
    kind = "advanced" if method else "finetuning"
    flags = ["--dev_out", f"films-dev-{kind}-output.txt", "--test_out", f"films-test-{kind}-output.txt"]
    flags += ["--method", method, "--method-args", "rank=2"] if method else []
    flags += ["--hold_out", 0.25, "--seed", 1, "--lr", 0.01, "--epochs", 3, "--batch_size", 4, "--attention", "causal"]
    out = drive(*classify_flags("finetune"), *flags, "--no_train_eval", "--kernels", "plain")
    scores = [line.rpartition(":: ")[2] for line in out.splitlines() if line.startswith("epoch ") and "::" in line]
    assert [f"{score:.3f}" for score in result["epoch_scores"]] == scores and "held-out acc" in out
    assert f"dev acc :: {result['dev']['accuracy']:.3f}" in FIGURES.findall(out)
    (macro,) = re.findall(r"dev macro-F1 :: (.*)", out)
    assert f"{result['dev']['macro_f1']:.3f}" == macro
    written = (tmp_path / f"films-dev-{kind}-output.txt").read_text(encoding="utf-8").splitlines()
    assert tuple(result["checksums"]) == model.checksums and result["weights"] == sha256_of(model.checkpoint)
    assert unpack(result["dev"]["predictions"]) == [int(line[0]) for line in written]
    assert len([*tmp_path.glob(f"{result['key']}*")]) == 2
    trial.clear(one, model, tmp_path, kept=[result["key"]])
    assert len([*tmp_path.glob(f"{result['key']}*")]) == 2  # another run will combine this model
    trial.clear(one, model, tmp_path)
    assert not [*tmp_path.glob(f"{result['key']}*")]  # weights do not stay when the figures are kept
    found = result.pop(trial.PROBABILITIES, None)
    assert (found is None) == bool(method)
    if found is not None:
        assert found["dev"].argmax(1).tolist() == unpack(result["dev"]["predictions"])
        assert found["dev"].sum(1) == pytest.approx(1, abs=1e-6)
    assert unpack(result["dev"]["labels"]) == [each.label for each in create_data(judging.path_of("films", "dev"))]
    json.dumps(result)


def test_a_run_that_was_stopped_goes_on_from_its_last_epoch(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
):
    table = table_of(tmp_path, rows=[{"name": "plain"}], data={"films": {"epochs": 3, "batch_size": 4}})
    one = first_of(table, model)
    monkeypatch.setattr(trial, "RESUME_SECONDS", 0.0)
    undisturbed = trial.run_trial(one, model, tmp_path, PLAIN_CPU)
    trial.clear(one, model, tmp_path)
    fine_tune, begun = runs.fine_tune, []

    def stopping(*inputs, history, **named):
        begun.append(len(history))
        for result in fine_tune(*inputs, history=history, **named):
            yield result
            if len(begun) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(runs, "fine_tune", stopping)
    with pytest.raises(KeyboardInterrupt):
        trial.run_trial(one, model, tmp_path, PLAIN_CPU)
    resumed = trial.run_trial(one, model, tmp_path, PLAIN_CPU)
    assert begun == [0, 1]
    for figures in (resumed, undisturbed):
        for changing in ("seconds", "wall_seconds", "peak_mb"):
            del figures[changing]
        figures["probabilities"] = {split: found.tolist() for split, found in figures["probabilities"].items()}
    assert resumed == undisturbed


def test_what_another_version_left_is_not_gone_on_from(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """The identity of a run has entries that an older version did not write, or had others: the run starts anew."""
    table = table_of(tmp_path, rows=[{"name": "plain"}], data={"films": {"epochs": 2, "batch_size": 4}})
    one = first_of(table, model)
    undisturbed = trial.run_trial(one, model, tmp_path, PLAIN_CPU)
    (point,) = tmp_path.glob("*.resume")
    content = torch.load(point)
    content["identity"]["a setting of old"] = 1
    torch.save(content, point)
    capsys.readouterr()
    anew = trial.run_trial(one, model, tmp_path, PLAIN_CPU)
    assert "belongs to a run with another a setting of old; this one starts anew" in capsys.readouterr().err
    assert anew["train_losses"] == undisturbed["train_losses"] and len(anew["train_losses"]) == 2


def test_tuning_does_not_look_at_dev_and_test(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch):
    table = table_of(tmp_path)
    asked = table.trial(table.rows[2], "films", None, 1, "tune", {})
    for one in (tuning_runs(table, model)[0], asked):
        result = trial.run_trial(one, model, tmp_path, PLAIN_CPU)
        assert "selection" in result and not {"dev", "test"} & result.keys()


def test_a_test_file_without_gold_labels_is_not_classified(
    tmp_path: Path, model: Model, films: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    placeholders = tmp_path / "placeholders.txt"
    lines = (f"0 ||| {example.sentence}\n" for example in create_data(films["test"]))
    placeholders.write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr(judging, "path_of", lambda data, split: str({**films, "test": placeholders}[split]))
    result = trial.run_trial(first_of(table_of(tmp_path), model, row=2), model, tmp_path, PLAIN_CPU)
    assert "dev" in result and "test" not in result


def test_the_rounding_and_the_length_of_a_row_that_is_only_asked_count(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []

    def ask(asked: nn.Module, tokenizer: Tokenizer, examples: list, **how: Any) -> np.ndarray:
        is_rounded = any(isinstance(module, RoundedLinear | Int8Linear) for module in asked.modules())
        seen.append((len(tokenizer.encode("a long film of many words", bos=False, eos=False)), is_rounded))
        return np.eye(2)[[example.label for example in examples]]

    monkeypatch.setattr(trial, "probabilities", ask)
    for settings in ({}, {"max_sentence_len": 3}, {"precision": "int8"}):
        table = table_of(tmp_path, rows=[{"name": "asked", "option": "prompt", "settings": settings}], shots=[None])
        trial.run_trial(first_of(table, model), model, tmp_path, ComputeSettings(torch.device("cpu")))
    (long, plain), (short, _), (_, rounded) = seen[::2]
    assert short == 3 < long and rounded and not plain


def test_what_was_trained_is_judged_with_the_rounding_of_its_row(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[str, bool]] = []
    compute_fast = runs.compute_fast

    def watched(model: nn.Module, compute: ComputeSettings, trains: bool = True) -> None:
        seen.append((compute.precision, trains))
        compute_fast(model, compute, trains=trains)

    monkeypatch.setattr(runs, "compute_fast", watched)
    table = table_of(tmp_path, rows=[{"name": "plain", "settings": {"precision": "bf16"}}], shots=[4])
    trial.run_trial(first_of(table, model, shots=4), model, tmp_path, ComputeSettings(torch.device("cpu")))
    assert [precision for precision, trains in seen if not trains] == ["bf16"]


def test_a_run_is_judged_by_its_best_epoch(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch):
    best, last = EpochResult(0, 1.0, 1.0, 0.9, 0.0, True), EpochResult(1, 1.0, 1.0, 0.1, 0.0, False)
    monkeypatch.setattr(runs, "fine_tune", lambda *run, **how: [best, last])
    table = table_of(tmp_path)
    result = trial.run_trial(tuning_runs(table, model)[0], model, tmp_path, PLAIN_CPU)
    assert (result["selection"], result["epoch"], result["epoch_scores"]) == (0.9, 0, [0.9, 0.1])


def test_zero_shot_choices_are_made_by_macro_f1_on_a_sample_of_the_seed(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []
    monkeypatch.setattr(trial, "TUNING_SAMPLE", 5)
    monkeypatch.setattr(trial, "probabilities", lambda model, tokenizer, examples, **how: seen.append(examples))
    monkeypatch.setattr(trial, "judged", lambda found, examples: {"accuracy": 0.1, "macro_f1": 0.2})
    table = table_of(tmp_path)
    for seed in (1, 2):
        one = table.trial(table.rows[2], "films", None, seed, "tune", {})
        assert trial.run_trial(one, model, tmp_path, PLAIN_CPU)["selection"] == 0.2
    assert len(seen[0]) == len(seen[1]) == 5 and seen[0] != seen[1]


def test_macro_f1_counts_each_class_alike():
    """F1 of the first class is 6/7, of the other, which is never predicted, 0."""
    found = judging.judged(np.eye(2)[[0, 0, 0, 0]], [Example("a film", label) for label in (0, 0, 0, 1)])
    assert (found["accuracy"], found["macro_f1"]) == (0.75, 0.42857)


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


def test_members_are_trained_once_and_put_together(tmp_path: Path, model: Model):
    """Against the files of the members, opened one by one."""
    rows = [{"name": "plain"}, {"name": "of three", "members": 3}]
    table = table_of(tmp_path, rows=rows, data={"films": {"epochs": 2, "batch_size": 4}}, shots=[4])
    three = table.final(table.rows[1], "films", 4, model, {})[0]
    result = trial.run_trial(three, model, tmp_path, PLAIN_CPU)
    opened = [load_classifier(tmp_path / f"{one.key(model)}.pt") for one in three.each_member()]
    dev = create_data(judging.path_of("films", "dev"))
    texts = [each.sentence for each in dev]
    each = np.array([[one.probabilities for one in predict(*pair, texts)] for pair in opened])  # m n c
    assert len({*map(str, each.round(6).tolist())}) == 3  # other seeds, other models
    voted = each.mean(axis=0).argmax(axis=1).tolist()
    assert unpack(result["dev"]["predictions"]) == unpack(result["combined"]["vote"]["dev"]["predictions"]) == voted
    train = judging.Splits.of(three).train  # fewer than the sample that is measured
    gold = [each.label for each in train]
    known = [[one.probabilities for one in predict(*pair, [each.sentence for each in train])] for pair in opened]
    losses = [log_loss(gold, found / found.sum(1, keepdims=True)) for found in np.array(known, dtype=np.float64)]
    assert result["fit_loss"] == pytest.approx(max(losses), abs=1e-3) and result["classes"] == 2
    states = [one.state_dict() for one, _ in opened]
    first, about = opened[0]
    first.load_state_dict({name: sum(state[name] for state in states) / 3 for name in states[0]})
    mixed = [one.label for one in predict(first, about, texts)]
    assert unpack(result["combined"]["uniform soup"]["dev"]["predictions"]) == mixed
    trial.clear(three, model, tmp_path)
    assert not [*tmp_path.glob("*.pt")]


@pytest.mark.parametrize("size", [None, 5])
def test_a_bag_of_words_is_what_scikit_learn_makes_of_it(tmp_path: Path, model: Model, size: int | None):
    table = table_of(tmp_path, rows=[{"name": "plain"}, {"name": "words", "option": "bag-of-words"}], shots=[size])
    one = first_of(table, model, row=1, shots=size)
    result = trial.run_trial(one, model, tmp_path, PLAIN_CPU)
    splits, settings = judging.Splits.of(one), result["figures"]["regression"]
    counts = TfidfVectorizer(ngram_range=tuple(settings["words"]), sublinear_tf=True, token_pattern=r"[^\s]+")
    texts = {name: [each.sentence.lower() for each in getattr(splits, name)] for name in splits._fields}
    labels = {name: [each.label for each in getattr(splits, name)] for name in splits._fields}
    fitted = LogisticRegression(C=settings["C"], max_iter=5000).fit(
        counts.fit_transform(texts["train"]), labels["train"]
    )
    assert unpack(result["test"]["predictions"]) == fitted.predict(counts.transform(texts["test"])).tolist()
    assert result["selection"] == fitted.score(counts.transform(texts["held_out"]), labels["held_out"])


def test_a_regression_on_frozen_states_is_what_scikit_learn_makes_of_them(tmp_path: Path, model: Model):
    """Of the last real token's state, computed sentence by sentence."""
    table = table_of(tmp_path, rows=[{"name": "plain"}, {"name": "states", "option": "frozen-states"}], shots=[5])
    one = first_of(table, model, row=1, shots=5)
    result, splits = trial.run_trial(one, model, tmp_path, PLAIN_CPU), judging.Splits.of(one)
    llama, tokenizer = load_llama(model.checkpoint, model.tokenizer, "causal")

    def states(examples: list) -> np.ndarray:
        ids = (tokenizer.encode(each.sentence, bos=True, eos=False) for each in examples)
        with torch.no_grad():
            return np.stack([llama(torch.tensor([each]))[1][0, -1].numpy() for each in ids])

    scale = StandardScaler().fit(states(splits.train))
    fitted = LogisticRegression(C=result["figures"]["regression"]["C"], max_iter=5000)
    fitted.fit(scale.transform(states(splits.train)), [each.label for each in splits.train])
    assert unpack(result["test"]["predictions"]) == fitted.predict(scale.transform(states(splits.test))).tolist()


def test_a_second_test_is_the_same_in_all_runs_and_nothing_is_trained_on_it(tmp_path: Path, model: Model):
    table = table_of(tmp_path, rows=[{"name": "plain"}], data={"films": {"second_test": 6}}, shots=[None])
    each = [judging.Splits.of(one) for one in table.final(table.rows[0], "films", None, model, {})]
    whole = create_data(judging.path_of("films", "train"))
    for splits in each:
        assert splits.test == each[0].test and len(splits.test) == 6
        assert sorted(splits.train + splits.held_out + splits.test) == sorted(whole)
    assert each[0].held_out != each[1].held_out


@pytest.fixture
def others(model: Model, films: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The files of a data set `others`, which has no labels in its test; all other names are films."""
    files = {split: tmp_path / f"others-{split}" for split in films}
    files["label_names"].write_text('["bad", "good"]', encoding="utf-8")
    for split in ("train", "dev"):
        files[split].write_text(f"0 ||| another {split}\n1 ||| one more {split}\n", encoding="utf-8")
    files["test"].write_text("-1 ||| nobody knows\n", encoding="utf-8")
    for module in (rows, judging):
        monkeypatch.setattr(module, "path_of", lambda data, split: str((files if data == "others" else films)[split]))
    return files


def test_what_is_judged_on_another_data_set_learns_nothing_of_it(
    tmp_path: Path, model: Model, others: dict[str, Path], films: dict[str, Path]
):
    plain, judged = (
        table_of(tmp_path, rows=[{"name": "plain", "tune": {"lr": [0.01]}}], data={"films": settings}, shots=[4])
        for settings in ({}, {"judged_on": "others"})
    )
    one, other = first_of(plain, model, shots=4), first_of(judged, model, shots=4)
    at_home, away = judging.Splits.of(one), judging.Splits.of(other)
    assert (away.train, away.held_out) == (at_home.train, at_home.held_out)
    assert [each.sentence for each in away.dev + away.test] == [
        f"{words} {split}" for split in ("dev", "train") for words in ("another", "one more")
    ]
    assert other.key(model) != one.key(model)
    assert tuning_runs(plain, model, shots=4)[0].key(model) == tuning_runs(judged, model, shots=4)[0].key(model)
    others["dev"].write_text("0 ||| changed\n", encoding="utf-8")
    assert other.key(replace(model, keys={})) != other.key(model)
    others["label_names"].write_text('["bad", "average", "good"]', encoding="utf-8")
    with pytest.raises(UserError, match="others has not as many classes as films, so it cannot judge"):
        judging.Splits.of(other)
    assert panel.title_of(judged, "films", "4 a class") == "FILMS, 4 a class, judged on OTHERS"


def test_nothing_is_chosen_on_the_data_set_that_only_judges(tmp_path: Path):
    with pytest.raises(UserError, match="with hold_out 0 its epoch would choose on dev"):
        table_of(tmp_path, rows=[{"name": "plain"}], settings={"hold_out": 0, "judged_on": "others"})


def test_a_rate_that_is_too_large_is_not_chosen_and_ends_no_grid(tmp_path: Path, model: Model):
    table = table_of(tmp_path, rows=[{"name": "plain", "tune": {"lr": [1e25, 1e30]}}], shots=[4])
    one = tuning_runs(table, model)[0]
    result = trial.run_trial(one, model, tmp_path, PLAIN_CPU)
    assert result["selection"] == 0.0 and "training stops" in result["diverged"]
    with pytest.raises(Diverged):
        trial.run_trial(replace(one, phase="final"), model, tmp_path, PLAIN_CPU)


def test_whether_training_fitted_is_measured_on_its_sentences(tmp_path: Path, model: Model):
    losses = []
    for epochs, lr in ((1, 1e-9), (30, 0.01)):
        short = table_of(tmp_path, rows=[{"name": "plain", "settings": {"epochs": epochs, "lr": lr}}], shots=[4])
        losses.append(trial.run_trial(first_of(short, model, shots=4), model, tmp_path, PLAIN_CPU))
    assert [fits(result) for result in losses] == [False, True]
    assert losses[0]["fit_loss"] == pytest.approx(math.log(2), abs=0.3) and losses[0]["classes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("row", PRESETS_42M.rows, ids=lambda row: row.name)
def test_a_preset_for_stories42m_runs_on_a_random_model_of_that_shape(
    tmp_path: Path, assets: Path, films: dict[str, Path], model: Model, row: Row
):
    """A few steps; no test measures how good the presets are."""
    torch.manual_seed(0)
    path = tmp_path / "stories42M.pt"
    save_checkpoint(path, Llama(LlamaConfig.from_preset("stories42M")), **PRESETS["stories42M"])
    big = Model(str(path), str(asset(assets, "tokenizer.model")))
    short = replace(row, checkpoint="", settings=row.settings | {"epochs": 2, "batch_size": 2})
    one = PRESETS_42M.trial(short, "sst", 2, 1, "final", row.combinations()[0])
    result = trial.run_trial(replace(one, data="films"), big, tmp_path, PLAIN_CPU)
    assert 0 <= result["dev"]["accuracy"] <= 1 and result.get("trainable", 1) > 0


def test_what_a_method_costs_is_measured_beside_plain_training(model: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cost, "path_of", judging.path_of)
    work = cost.Workload(model, "films", "causal", batch_size=4, steps=2, rounds=2)
    found = cost.measure_time(work, work._replace(methods="r-drop"))
    assert 0 < found.least <= found.middle <= found.most
    assert cost.measure_time(work, work._replace(methods="linear-probe")).trained == 2 * 32 + 2
    with pytest.raises(UserError, match="too few for 9 batches"):
        work._replace(steps=9).sentences()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", 0], "--steps 0: must be at least 1"),
        (["--rounds", -1], "--rounds -1: must be at least 1"),
        (["--batch_size", 0], "--batch_size 0: must be at least 1"),
        (["--out", "."], "is a folder"),
        (["--out", "there.md"], "there.md is there already"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused_first(
    tmp_path: Path, flags: list, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.md").write_text("mine", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["cost", "--pretrained-model-path", "absent.pt", *map(str, flags)])
    with pytest.raises(UserError, match=words):
        cost.main()


def test_the_table_of_costs_has_a_line_for_each_method_that_trains_such_a_model(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
):
    """Memory beside that of a process that trains the plain model."""
    memory = {"": 200, "ema": 500, "lora,ema": 100}

    def apart(function: Callable, work: cost.Workload, *others: Any) -> Any:
        if function is cost.measure_memory:
            return memory.get(work.methods, 300)
        return cost.CostRatio(2.0, 1.0, 3.0, 1234)

    monkeypatch.setattr(cost, "apart", apart)
    monkeypatch.setattr(cost, "path_of", judging.path_of)
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


def test_the_cost_of_a_method_is_its_time_over_that_of_plain_training(model: Model, monkeypatch: pytest.MonkeyPatch):
    """The first turn of each warms up and is not counted."""
    times = {"": [1.0, 1.0, 1.0, 1.0], "ema": [9.0, 2.0, 3.0, 4.0]}
    order: list[str] = []

    def assembled(work: cost.Workload) -> SimpleNamespace:
        return SimpleNamespace(model=nn.Linear(1, 1), turn=iter(times[work.methods]), of=work.methods or "plain")

    def turn(run: SimpleNamespace, examples: list) -> float:
        order.append(run.of)
        return next(run.turn)

    monkeypatch.setattr(cost, "path_of", judging.path_of)
    monkeypatch.setattr(cost, "assemble", assembled)
    work = cost.Workload(model, "films", "causal", batch_size=4, steps=2, rounds=3)
    found = cost.measure_time(work, work._replace(methods="ema"), turn)
    assert found == (3.0, 2.0, 4.0, 2) and str(found) == "3.00 (2.00-4.00)"
    assert order == ["ema", "plain", "plain", "ema"] * 2  # whatever slows the machine meanwhile meets both
