"""Figures of a training: they are right, written once for each step, and measured only with the flags."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import SENTENCES, drive_in, outputs, random_llama
from pages import FLAGS, Trained, trained  # noqa: F401

from classifier import LlamaEmbeddingClassifier
from engine import metrics, training
from engine.checkpointer import Checkpointer
from engine.data import Example
from engine.methods import EpochResult, Method
from engine.metrics import FILE, MetricsLog, read_records
from engine.tasks import LlamaDataset
from engine.training import StepMeasurement, Trainer, TrainingCallback
from explore.trained import page_of_log, thin
from optimizer import AdamW
from tokenizer import Tokenizer
from utils import UserError

STEP = StepMeasurement(0, 0, 1.5, [2e-5], 0.5, 8, 80, 0.25)
CPU = torch.device("cpu")


def result(epoch: int, **changes: object) -> EpochResult:
    return EpochResult(**{"epoch": epoch, "train_loss": 1.0, "train_score": math.nan, "dev_score": 0.5,
                          "seconds": 1.0, "improved": epoch == 0, **changes})  # fmt: skip


def steps_of(records: list[dict]) -> list[int]:
    return [record["step"] for record in records if record["kind"] == "step"]


# ----------------------------------------------------------------------------------------------- in the one loop


class Notes(TrainingCallback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepMeasurement] = []
        self.epochs: list[EpochResult] = []
        self.step, self.epoch = self.steps.append, self.epochs.append


def train(tokenizer: Tokenizer, folder: Path, **how: object) -> tuple[dict[str, torch.Tensor], list[EpochResult]]:
    """Two epochs of three steps, the last one of a short batch."""
    torch.manual_seed(3)
    config = SimpleNamespace(num_labels=2, hidden_dropout_prob=0.3, option="finetune")
    model = LlamaEmbeddingClassifier(config, llama=random_llama(attention="causal"))
    examples = [Example(f"film {index} " * (1 + index % 3), index % 2) for index in range(10)]
    dataset = LlamaDataset(examples, tokenizer)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    checkpointer = Checkpointer(folder / "m.pt", folder / "m.resume")
    loaders = dataset.loader(4, shuffle=True), dataset.loader(4)
    trainer = Trainer(model, optimizer, checkpointer=checkpointer, progress=False, **how)
    results = [*trainer.fit(*loaders, epochs=2)]
    return model.state_dict(), results


def test_watching_changes_no_bit(tokenizer: Tokenizer, tmp_path: Path):
    plain, watched = (train(tokenizer, tmp_path, callback=callback)[0] for callback in (None, Notes()))
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


class Rising(Method):
    def rate(self, number: int, total: int) -> float:
        return (number + 1) / total


def test_what_is_told_of_steps_and_epochs(tokenizer: Tokenizer, tmp_path: Path):
    notes = Notes()
    _, results = train(tokenizer, tmp_path, callback=notes, methods=[Rising()])
    assert notes.epochs == results
    told = [(each.number, each.epoch, each.rows, each.rates) for each in notes.steps]
    rows = [4, 4, 2] * 2
    assert told == [(step, step // 3, rows[step], [pytest.approx(1e-3 * (step + 1) / 6)]) for step in range(6)]
    for result in results:  # the loss of an epoch is the mean over its batches
        losses = [each.loss for each in notes.steps if each.epoch == result.epoch]
        assert sum(losses) / 3 == pytest.approx(result.train_loss, rel=1e-9)
    assert all(each.seconds > 0 and each.positions >= each.rows for each in notes.steps)


def test_a_step_is_timed_by_itself(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a clock that goes on by a second at each call."""
    clock = itertools.count()
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    notes = Notes()
    train(tokenizer, tmp_path, callback=notes)
    assert [each.seconds for each in notes.steps] == [1.0] * 6


def test_the_gradient_norm_is_that_before_clipping(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[float] = []
    step = AdamW.step

    def noting(self: AdamW) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        seen.append(float(sum(each.double().square().sum() for each in gradients).sqrt()))
        step(self)

    monkeypatch.setattr(AdamW, "step", noting)
    notes, clipped = Notes(), Notes()
    train(tokenizer, tmp_path, callback=notes)
    assert [each.gradient_norm for each in notes.steps] == pytest.approx(seen, rel=1e-5)
    seen.clear()
    train(tokenizer, tmp_path, callback=clipped, clip=0.01)
    assert seen == pytest.approx([0.01] * 6, rel=1e-3) and min(each.gradient_norm for each in clipped.steps) > 0.02


# ------------------------------------------------------------------------------------------------- the command


def test_a_run_leaves_its_figures(trained: Trained):
    records = read_records(trained.log)
    assert [record["kind"] for record in records] == [
        "run", *["step"] * 3, "epoch", *["step"] * 3, "epoch", "judged", "judged",
    ]  # fmt: skip
    assert steps_of(records) == [*range(6)]
    epochs, lines = [each for each in records if each["kind"] == "epoch"], trained.printed.split("epoch ")[1:3]
    for record, line in zip(epochs, lines, strict=True):
        assert f"train loss :: {record['train_loss']:.3f}" in line and f"dev acc :: {record['dev_score']:.3f}" in line
    assert records[1]["lr"] == 1e-4 and records[1]["memory_mb"] > 50 and records[1]["rows_per_second"] > 0
    judged = {record["split"]: record for record in records if record["kind"] == "judged"}
    lines = (trained.folder / "films-dev-finetuning-output.txt").read_text().splitlines()
    predicted = [int(line.split(" ||| ")[0]) for line in lines]
    gold = [index % 2 for index in range(10)]
    pairs = [*zip(gold, predicted, strict=True)]
    assert judged["dev"]["confusion"] == [[pairs.count((row, column)) for column in (0, 1)] for row in (0, 1)]
    wrong = [error["index"] for error in judged["dev"]["errors"]]
    assert wrong and sorted(wrong) == [index for index in range(10) if gold[index] != predicted[index]]
    assert all(error["probability"] >= error["gold_probability"] for error in judged["dev"]["errors"])


def test_without_the_flags_nothing_is_imported_and_the_outputs_are_the_same(
    trained: Trained, tmp_path: Path, classify_flags: Callable, monkeypatch: pytest.MonkeyPatch
):
    for name in ("explore.finetuned", "engine.metrics"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    drive_in(tmp_path, *classify_flags("finetune"), *FLAGS)
    assert outputs(tmp_path) == outputs(trained.folder)


def test_an_interrupted_run_goes_on_without_a_doubled_line(
    tmp_path: Path, classify_flags: Callable, monkeypatch: pytest.MonkeyPatch, trained: Trained
):
    flags = [*classify_flags("finetune"), *FLAGS, "--log_dir", "log"]
    whole = MetricsLog.step

    def stopping(self: MetricsLog, measured: StepMeasurement) -> None:
        whole(self, measured)
        if measured.number == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MetricsLog, "step", stopping)
        drive_in(tmp_path, *flags)
    assert steps_of(read_records(tmp_path / "log")) == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="add --resume"):
        drive_in(tmp_path, *flags)
    with open(tmp_path / "log" / FILE, "a") as file:
        file.write('{"kind": "st')  # as a kill leaves it
    drive_in(tmp_path, *flags, "--resume")
    resumed, undisturbed = read_records(tmp_path / "log"), read_records(trained.log)
    assert steps_of(resumed) == [*range(6)]
    losses = [[each["loss"] for each in records if each["kind"] == "step"] for records in (resumed, undisturbed)]
    assert losses[0] == losses[1]
    with pytest.raises(UserError, match="a run that has ended"):
        drive_in(tmp_path, *flags, "--resume")


# ------------------------------------------------------------------------------------------------------ the file


def log_steps(folder: Path | None, steps: Sequence[StepMeasurement], epochs: int = 0, **settings: Any) -> MetricsLog:
    """Write a log of steps, then of finished epochs."""
    log = MetricsLog(folder, settings.pop("identity", {}), CPU, **settings)
    for measured in steps:
        log.step(measured)
    for epoch in range(epochs):
        log.epoch(result(epoch))
    log.close()
    return log


def test_without_a_folder_the_figures_stay_in_memory(tmp_path: Path):
    logs = [log_steps(folder, [STEP], 1) for folder in (tmp_path / "log", None)]
    written, kept = ([each | {"memory_mb": 0} for each in log.all_records()] for log in logs)
    assert written == kept and [each["kind"] for each in kept] == ["run", "step", "epoch"]


def test_a_run_that_goes_on_keeps_the_steps_of_its_finished_epochs(tmp_path: Path):
    folder, identity = tmp_path / "log", {"seed": 1, "names": ("a", "b")}
    steps = [STEP._replace(number=number, epoch=number // 2) for number in range(4)]
    log_steps(folder, steps[:2], 1, identity=identity)
    log_steps(folder, steps[2:], history=[result(0)], identity=identity)
    log_steps(folder, steps[2:3], history=[result(0)], identity=identity)
    records = read_records(folder)
    assert steps_of(records) == [0, 1, 2] and [each["kind"] for each in records].count("epoch") == 1
    assert records[3]["train_score"] is None  # not measured: JSON has no NaN
    with pytest.raises(UserError, match="other data or settings"):
        MetricsLog(folder, identity | {"seed": 2}, CPU)


def test_a_line_has_the_pace_of_its_step_and_stands_there_at_once(tmp_path: Path):
    log = MetricsLog(tmp_path / "log", {}, CPU)
    log.step(STEP)  # 8 rows of 10 positions in a quarter of a second
    log.step(STEP._replace(number=1, rates=[1e-3, 1e-3]))
    log.step(STEP._replace(number=2, rates=[1e-3, 2e-3]))
    steps = read_records(tmp_path / "log")[1:]  # while the run goes on
    log.close()
    assert [(each["rows_per_second"], each["positions_per_second"]) for each in steps] == [(32.0, 320.0)] * 3
    assert [each["lr"] for each in steps] == [2e-5, 1e-3, [1e-3, 2e-3]]


def test_only_the_first_process_writes_and_tensorboard_is_no_condition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log_steps(tmp_path / "log", [STEP], 1, is_first=False)
    assert not (tmp_path / "log").exists()
    monkeypatch.setattr(metrics, "has_tensorboard", lambda: False)
    log_steps(tmp_path, [STEP])
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "does not begin"),
        ('{"kind": "judged", "split": "dev", "label_names": [], "count": 0}\n', "does not begin"),
        ('{"kind": "run", "identity": {}}\nnonsense\n{"kind": "step"}\n', "line 2"),
        ('[1]\n{"kind": "run"}\n', "line 1"),
        ('{"kind": "other"}\n{"kind": "run"}\n', "line 1"), ("[" * 100_000 + "\n{}\n", "line 1"),
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: str, why: str):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(UserError, match=why):
        read_records(tmp_path)


def test_a_folder_is_checked_before_anything_is_loaded(tmp_path: Path):
    (tmp_path / "file").touch()
    for path, why in (("file", "is a file"), ("absent/log", "does not exist")):
        with pytest.raises(UserError, match=why):
            metrics.check_folder(tmp_path / path, False)
    metrics.check_folder(tmp_path / "new", False)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_has_the_same_figures_also_after_going_on(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = [STEP._replace(number=number, epoch=number // 2, loss=number + 0.5) for number in range(4)]
    log_steps(tmp_path, steps, 1)
    log_steps(tmp_path, steps[2:], history=[result(0)])
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(n, n + 0.5) for n in range(4)]


def test_each_step_and_epoch_goes_to_its_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where tensorboard is absent, too."""
    shown = []

    class Writer:
        def __init__(self, folder: str, purge_step: int):
            self.flush, self.close = (lambda: None), (lambda: None)

        def add_scalar(self, chart: str, value: float, at: int) -> None:
            shown.append((chart, value, at))

    monkeypatch.setattr(metrics, "has_tensorboard", lambda: True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    log_steps(tmp_path, [STEP._replace(number=7, rates=[1e-3, 2e-3])], 1)
    memory = next(value for chart, value, _ in shown if chart == "pace/memory_mb")
    expected = [("train/loss", 1.5, 7), ("train/lr", 2e-3, 7), ("train/gradient_norm", 0.5, 7)]
    expected += [("pace/rows_per_second", 32.0, 7), ("pace/memory_mb", memory, 7), ("score/dev", 0.5, 0)]
    assert sorted(each for each in shown if each[0] != "score/train") == sorted(expected)
    assert [at for chart, _, at in shown if chart == "score/train"] == [0]


def test_a_long_run_is_thinned_and_keeps_its_last_step():
    records = [{"kind": "run", "identity": {"lr": 1.0}}]
    records += [
        {"kind": "step", "step": number, "epoch": 0, "loss": 1.0, "lr": [1e-3, 2e-3], "gradient_norm": None,
         "rows_per_second": 1.0, "memory_mb": 1} for number in range(10_001)
    ]  # fmt: skip
    assert len(thin(records[1:])) <= 1500
    (run,) = page_of_log(records, "log")["run"]["runs"]
    assert run["settings"] == {"lr": 1.0} and run["chosen_on"] == "dev"
    assert run["steps"] == 10_001 and run["curves"][0]["x"][-1] == 10_000
    assert run["curves"][1]["y"][0] == 2e-3  # the highest of several rates
    json.dumps(run, allow_nan=False)


def test_pretraining_keeps_figures_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from advanced.pretrain import main

    text = "\n\n".join(f"{SENTENCES[index]}\n{SENTENCES[index - 3]} ." for index in range(10))
    (tmp_path / "t.txt").write_text(text + "\n")
    shape = "--dim 32 --n_layers 2 --n_heads 4 --n_kv_heads 2 --vocab_size 380 --max_seq_len 32".split()
    pace = "--batch_size 4 --length 16 --every 5 --epochs 4 --held_out 0.2".split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["x", "--text", "t.txt", "--out", "n.pt", *shape, *pace, "--log_dir", "log"])
    main()
    records = read_records(tmp_path / "log")
    curve = json.loads((tmp_path / "n.json").read_text())
    assert "log_dir" not in curve["settings"] and steps_of(records) == [*range(curve["curve"][-1]["step"])]


def test_the_flags_are_for_training(drive: Callable, tmp_path: Path):
    for flag in (["--log_dir", "x"], ["--html", "x.html"]):
        with pytest.raises(UserError, match="is for --option finetune"):
            drive("--option", "generate", *flag)
