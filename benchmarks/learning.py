"""The lines that classify and train: forward passes, training steps, epochs, and the memory that fine-tuning takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from benchmarks import epoch, memory, peers
from benchmarks.apart import Apart, LibraryModel
from benchmarks.measure import Contender, Turns, ratio
from benchmarks.table import QUICK_SIZES, Bench, BenchmarkTask, Line, classification_lines, lines_of
from benchmarks.targets import (
    COMPILED,
    COURSE,
    HF,
    HF_BF16,
    LINES,
    NUM_LABELS,
    OPENVINO_TYPES,
    OURS,
    PLAIN_PATH,
)
from benchmarks.work import classifying, training
from engine.tasks import EncodingRules

MAX_EPOCH_REPEATS = 3
FP32_TOLERANCE = 1e-3  # between log-probabilities; sums in another order differ by up to 2e-5 here

# ------------------------------------------------------------------------------------------- forward, training


def forward(bench: Bench) -> list[Line]:
    """Log-probabilities of the classifier, causal, each row read at its last token."""
    lines = []
    shapes = [*bench.sizes.forward.values()] * 2
    for (work, contenders), (rows, length) in zip(LINES["forward"].items(), shapes, strict=True):
        precision, dtype = ("bf16", torch.bfloat16) if work.endswith("bf16") else ("fp32", torch.float32)
        models = {
            OURS: bench.peers.our_classifier(precision),
            PLAIN_PATH: bench.peers.our_classifier(None).to(dtype),
        }
        makers = {HF: bench.peers.hf_classifier, HF_BF16: partial(bench.peers.hf_classifier, torch.bfloat16)}
        _add_models(bench, models, {name: makers[name] for name in contenders if name in makers})
        token_ids = bench.batch(rows, length)[0]
        answers = {name: partial(peers.classify, model, token_ids) for name, model in models.items()}
        for name, number_format in {**OPENVINO_TYPES, COMPILED: precision}.items():
            if name in contenders and (library := _start(bench, name, number_format)):
                answers[name] = partial(library.classify, token_ids)
        task = BenchmarkTask(classifying(bench.config, rows, length, NUM_LABELS), precision)
        tolerance = FP32_TOLERANCE if precision == "fp32" else None
        lines += classification_lines(
            bench, work, contenders, answers, unit="sentences/s", task=task, tolerance=tolerance
        )
    return lines


def _add_models(bench: Bench, models: dict[str, nn.Module], makers: dict[str, Callable[[], nn.Module]]) -> None:
    """Models of contenders that may be absent, or fail."""
    for name in filter(bench.has, makers):
        with bench.attempt(name):
            models[name] = makers[name]()


def _start(bench: Bench, name: str, dtype: str) -> Apart | None:
    """A classifier in a process of its own until the next race is over; None where it does not start."""
    if not bench.has(name):
        return None
    compiled = "benchmarks.compiled.Traced" if bench.sizes == QUICK_SIZES else "benchmarks.compiled.Compiled"
    state, folder = bench.peers.our_classifier(None).state_dict(), bench.folder / "classifier"
    model = LibraryModel(folder, state, bench.config, bench.threads, dtype)
    return bench.start(name, compiled if name == COMPILED else "benchmarks.ov.OpenVino", model)


def _training_lines(
    bench: Bench,
    work: str,
    contenders: tuple[str, ...],
    shape: tuple[int, int],
    models: dict[str, nn.Module],
    precision: str,
) -> list[Line]:
    batch = bench.batch(*shape)
    makers = {PLAIN_PATH: peers.plain_optimizer, COURSE: peers.naive_optimizer}
    makers |= dict.fromkeys((HF, HF_BF16), peers.hf_optimizer)
    runs = []
    for name, model in models.items():
        optimizer = makers.get(name, peers.our_optimizer)(model)
        runs.append(Contender(name, partial(peers.train_step, model, optimizer, *batch)))
    number_format = "autocast" if precision == "bf16" else precision
    if COMPILED in contenders and (library := _start(bench, COMPILED, number_format)):
        runs.append(Contender(COMPILED, partial(library.train_step, *batch)))
    task = BenchmarkTask(training(models[OURS].llama.config, *shape, NUM_LABELS), precision)
    return lines_of(bench, work, contenders, bench.race(work, runs), task=task)


def train_fp32(bench: Bench) -> list[Line]:
    """Like with like: against the course's way bidirectional, against Hugging Face causal."""
    lines = []
    for (work, contenders), shape in zip(LINES["train-fp32"].items(), bench.sizes.train.values(), strict=True):
        bidirectional = {
            OURS: bench.peers.our_classifier("fp32", "bidirectional", training=True),
            PLAIN_PATH: bench.peers.our_classifier(None, "bidirectional"),
            COURSE: bench.peers.naive_classifier("bidirectional"),
        }
        causal: dict[str, nn.Module] = {OURS: bench.peers.our_classifier("fp32", "causal", training=True)}
        _add_models(bench, causal, {HF: bench.peers.hf_classifier})
        others = tuple(name for name in contenders if name not in (HF, COMPILED))
        lines += _training_lines(bench, work, others, shape, bidirectional, "fp32")
        lines += _training_lines(bench, work, (HF, COMPILED), shape, causal, "fp32")
    return lines


def train_bf16(bench: Bench) -> list[Line]:
    """Float32 weights, bfloat16 products; our plain path and Hugging Face's second one under autocast."""
    lines = []
    for (work, contenders), shape in zip(LINES["train-bf16"].items(), bench.sizes.train.values(), strict=True):
        models: dict[str, nn.Module] = {
            OURS: bench.peers.our_classifier("bf16", training=True),
            PLAIN_PATH: peers.Autocast(bench.peers.our_classifier(None)),
        }
        makers = {
            HF: bench.peers.hf_classifier,
            HF_BF16: lambda: peers.Autocast(bench.peers.hf_classifier()),
        }
        _add_models(bench, models, makers)
        lines += _training_lines(bench, work, contenders, shape, models, "bf16")
    return lines


# ------------------------------------------------------------------------------------------------------ epochs


def _epoch_lines(bench: Bench, name: str, epochs: dict[str, epoch.Epoch]) -> list[Line]:
    """No warm-up round, which would take as long as a measured one: a step on one batch instead."""
    ((work, contenders),) = LINES[name].items()
    for against, contender in epochs.items():
        batch = next(iter(contender.dev_loader))
        with nullcontext() if against == OURS else bench.attempt(against):
            peers.train_step(contender.model, contender.optimizer, batch["token_ids"], batch["labels"])
    is_whole = bench.sizes.every == 1
    repeats = 1 if is_whole else min(bench.turns.repeats, MAX_EPOCH_REPEATS)
    turns = Turns(repeats, bench.turns.pause)
    contending = [Contender(against, contender.run) for against, contender in epochs.items() if bench.has(against)]
    costs = turns.take(contending, warm_up=0, drop=bench.drop)
    how = "whole epochs" if is_whole else f"from one batch in {bench.sizes.every}"
    lines = lines_of(bench, work, contenders, costs, notes=dict.fromkeys(epochs, how))
    for line in lines:
        if line.ratio is not None:
            line.detail = f"ours {epochs[OURS].phases[-1]}; theirs {epochs[line.against].phases[-1]}"
    return lines


def _our_epoch(bench: Bench, model: nn.Module, *, is_causal: bool, bucket: bool) -> epoch.Epoch:
    """The package's loop around our model, or around Hugging Face's with the optimizer that suits it."""
    make_optimizer = peers.hf_optimizer if isinstance(model, peers.Autocast) else peers.our_optimizer
    rules = EncodingRules(None, bench.config.max_seq_len, is_causal)
    return epoch.our_epoch(model, make_optimizer(model), bench.sentences, bench.sample, rules, bucket=bucket)


def _course_epoch(bench: Bench) -> epoch.Epoch:
    model = bench.peers.naive_classifier()
    return epoch.naive_epoch(model, peers.naive_optimizer(model), bench.sentences, bench.sample)


def epoch_causal(bench: Bench) -> list[Line]:
    model = bench.peers.our_classifier("bf16", "causal", training=True)
    epochs = {OURS: _our_epoch(bench, model, is_causal=True, bucket=True), COURSE: _course_epoch(bench)}
    if bench.has(HF):
        with bench.attempt(HF):
            hf = peers.Autocast(bench.peers.hf_classifier())
            epochs[HF] = _our_epoch(bench, hf, is_causal=True, bucket=False)
    return _epoch_lines(bench, "epoch-causal", epochs)


def epoch_bidirectional(bench: Bench) -> list[Line]:
    model = bench.peers.our_classifier("fp32", "bidirectional", training=True)
    ours = _our_epoch(bench, model, is_causal=False, bucket=False)
    return _epoch_lines(bench, "epoch-bidirectional", {OURS: ours, COURSE: _course_epoch(bench)})


# ------------------------------------------------------------------------------------------------------ memory


def peak_memory(bench: Bench) -> list[Line]:
    """Peak memory, ours / theirs."""
    checkpoint = bench.folder / "model.pt"
    torch.save({"model": bench.peers.state, "model_args": vars(bench.config)}, checkpoint)

    def peak(contender: str) -> float:
        return memory.peak_memory(contender, checkpoint, *bench.sizes.memory, bench.threads) / 1e6

    peaks = {}
    for against, contender in {COURSE: "naive", HF: "hf-bf16"}.items():
        if bench.has(against):
            with bench.attempt(against):
                peaks[against] = peak(contender)
    lines = []
    for (work, contenders), contender in zip(LINES["memory"].items(), memory.OUR_CONTENDERS, strict=True):
        ours = peak(contender)
        for against in contenders:
            lines.append(memory_line(bench, work, against, ours, peaks))
    return lines


def memory_line(bench: Bench, work: str, against: str, ours: float, peaks: dict[str, float]) -> Line:
    """Ours / theirs, in MB. peaks: of each contender that was measured."""
    line = Line(work, against, unit="MB", lower_is_better=True)
    if against in peaks:
        line.ratio = ratio([ours], [peaks[against]])
        line.ours, line.theirs = ours, peaks[against]
        line.costs = {OURS: [ours], against: [peaks[against]]}
        line.note = "lower is better"
    else:
        line.note, line.failed = bench.missing[against], against in bench.failed
    return line
