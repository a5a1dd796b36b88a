"""The lines that classify and train: forward passes, training steps, epochs, and the memory that fine-tuning takes."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks import epoch, memory, peers
from benchmarks.measure import Contender, Turns, ratio
from benchmarks.table import Bench, BenchmarkTask, Line, lines_of
from benchmarks.targets import COURSE, HF, HF_BF16, LINES, OURS, PLAIN
from benchmarks.work import classifying, training
from engine.batches import EncodingRules

MAX_EPOCH_REPEATS = 3

# ------------------------------------------------------------------------------------------- forward, training


def forward(bench: Bench) -> list[Line]:
    """Log-probabilities of the classifier, causal, each row read at its last token."""
    lines = []
    shapes = [*bench.sizes.forward.values()] * 2
    for (work, contenders), (rows, length) in zip(LINES["forward"].items(), shapes, strict=True):
        precision, dtype = ("bf16", torch.bfloat16) if work.endswith("bf16") else ("fp32", torch.float32)
        models = {
            OURS: bench.peers.our_classifier(precision),
            PLAIN: bench.peers.our_classifier(None).to(dtype),
        }
        if bench.has(HF):
            models[HF] = bench.peers.hf_classifier()
        if bench.has(HF) and HF_BF16 in contenders:
            models[HF_BF16] = bench.peers.hf_classifier(torch.bfloat16)
        task = BenchmarkTask(classifying(bench.config, rows, length, peers.NUM_LABELS), precision)
        lines += _forward_lines(bench, work, contenders, models, bench.batch(rows, length)[0], task)
    return lines


def _forward_lines(
    bench: Bench,
    work: str,
    contenders: tuple[str, ...],
    models: dict[str, nn.Module],
    token_ids: torch.Tensor,
    task: BenchmarkTask,
) -> list[Line]:
    answers: dict[str, torch.Tensor] = {}

    def contender(name: str, model: nn.Module) -> Contender:
        def run() -> None:
            answers[name] = peers.classify(model, token_ids).float()

        return Contender(name, run)

    costs = bench.race(work, [contender(name, model) for name, model in models.items()])
    errors = {name: (answer - answers[OURS]).abs().max().item() for name, answer in answers.items()}
    notes = {name: f"log-probabilities differ by at most {error:.0e}" for name, error in errors.items()}
    return lines_of(
        bench, work, contenders, costs, amount=float(len(token_ids)), unit="sentences/s", notes=notes, task=task
    )


def _training_lines(
    bench: Bench,
    work: str,
    contenders: tuple[str, ...],
    shape: tuple[int, int],
    models: dict[str, nn.Module],
    precision: str,
) -> list[Line]:
    token_ids, labels = bench.batch(*shape)
    makers = {COURSE: peers.naive_optimizer, HF: peers.hf_optimizer, HF_BF16: peers.hf_optimizer}

    def contender(name: str, model: nn.Module) -> Contender:
        optimizer = makers.get(name, peers.our_optimizer)(model)

        def run() -> None:
            peers.train_step(model, optimizer, token_ids, labels)

        return Contender(name, run)

    costs = bench.race(work, [contender(name, model) for name, model in models.items()])
    config = models[OURS].llama.config
    task = BenchmarkTask(training(config, *shape, peers.NUM_LABELS), precision)
    return lines_of(bench, work, contenders, costs, task=task)


def train_fp32(bench: Bench) -> list[Line]:
    """Like with like: against the course's way bidirectional, against Hugging Face causal."""
    lines = []
    for (work, contenders), shape in zip(LINES["train-fp32"].items(), bench.sizes.train.values(), strict=True):
        bidirectional = {
            OURS: bench.peers.our_classifier("fp32", "bidirectional", training=True),
            PLAIN: bench.peers.our_classifier(None, "bidirectional"),
            COURSE: bench.peers.naive_classifier("bidirectional"),
        }
        causal: dict[str, nn.Module] = {OURS: bench.peers.our_classifier("fp32", "causal", training=True)}
        if bench.has(HF):
            causal[HF] = bench.peers.hf_classifier()
        others = tuple(name for name in contenders if name != HF)
        lines += _training_lines(bench, work, others, shape, bidirectional, "fp32")
        lines += _training_lines(bench, work, (HF,), shape, causal, "fp32")
    return lines


def train_bf16(bench: Bench) -> list[Line]:
    """Float32 weights, bfloat16 products; our plain path and Hugging Face's second one under autocast."""
    lines = []
    for (work, contenders), shape in zip(LINES["train-bf16"].items(), bench.sizes.train.values(), strict=True):
        models: dict[str, nn.Module] = {
            OURS: bench.peers.our_classifier("bf16", training=True),
            PLAIN: peers.Autocast(bench.peers.our_classifier(None)),
        }
        if bench.has(HF):
            models[HF] = bench.peers.hf_classifier()
            models[HF_BF16] = peers.Autocast(bench.peers.hf_classifier())
        lines += _training_lines(bench, work, contenders, shape, models, "bf16")
    return lines


# ------------------------------------------------------------------------------------------------------ epochs


def _epoch_lines(bench: Bench, work: str, contenders: tuple[str, ...], epochs: dict[str, epoch.Epoch]) -> list[Line]:
    """No warm-up round, which would take as long as a measured one: a step on one batch instead."""
    for contender in epochs.values():
        batch = next(iter(contender.dev_loader))
        rows = batch["token_ids"].to(bench.device), batch["labels"].to(bench.device)
        peers.train_step(contender.model, contender.optimizer, *rows)
    repeats = 1 if bench.sizes.every == 1 else min(bench.turns.repeats, MAX_EPOCH_REPEATS)
    turns = Turns(repeats, bench.turns.pause, bench.turns.synchronize)
    costs = turns.take([Contender(name, contender.run) for name, contender in epochs.items()], warm_up=0)
    how = "whole epochs" if bench.sizes.every == 1 else f"from one batch in {bench.sizes.every}"
    lines = lines_of(bench, work, contenders, costs, notes=dict.fromkeys(epochs, how))
    for line in lines:
        if line.ratio is not None:
            line.detail = f"ours {epochs[OURS].phases[-1]}; theirs {epochs[line.against].phases[-1]}"
    return lines


def _our_epoch(bench: Bench, model: nn.Module, *, is_causal: bool, bucket: bool, hf: bool = False) -> epoch.Epoch:
    make = peers.hf_optimizer if hf else peers.our_optimizer
    rules = EncodingRules(None, bench.config.max_seq_len, is_causal)
    sizes = bench.sizes
    return epoch.our_epoch(
        model, make, bench.sentences, sizes.batch_size, sizes.every, bench.seed, rules=rules, bucket=bucket
    )


def _course_epoch(bench: Bench) -> epoch.Epoch:
    model, sizes = bench.peers.naive_classifier(), bench.sizes
    optimizer = peers.naive_optimizer(model)
    return epoch.naive_epoch(model, optimizer, bench.sentences, sizes.batch_size, sizes.every, bench.seed)


def epoch_causal(bench: Bench) -> list[Line]:
    ((work, contenders),) = LINES["epoch-causal"].items()
    model = bench.peers.our_classifier("bf16", "causal", training=True)
    epochs = {OURS: _our_epoch(bench, model, is_causal=True, bucket=True), COURSE: _course_epoch(bench)}
    if bench.has(HF):
        hf = peers.Autocast(bench.peers.hf_classifier())
        epochs[HF] = _our_epoch(bench, hf, is_causal=True, bucket=False, hf=True)
    return _epoch_lines(bench, work, contenders, epochs)


def epoch_bidirectional(bench: Bench) -> list[Line]:
    ((work, contenders),) = LINES["epoch-bidirectional"].items()
    model = bench.peers.our_classifier("fp32", "bidirectional", training=True)
    ours = _our_epoch(bench, model, is_causal=False, bucket=False)
    return _epoch_lines(bench, work, contenders, {OURS: ours, COURSE: _course_epoch(bench)})


# ------------------------------------------------------------------------------------------------------ memory


def peak_memory(bench: Bench) -> list[Line]:
    """Peak memory, ours / theirs."""
    checkpoint = bench.folder / "model.pt"
    torch.save({"model": bench.peers.state, "model_args": vars(bench.config)}, checkpoint)
    rows, length = bench.sizes.memory
    theirs = {COURSE: "naive"}
    if bench.has(HF):
        theirs[HF] = "hf-bf16"

    def peak(contender: str) -> float:
        return memory.peak_memory(contender, checkpoint, rows, length, bench.threads) / 1e6

    peaks = {against: peak(contender) for against, contender in theirs.items()}
    lines = []
    for (work, contenders), ours in zip(LINES["memory"].items(), memory.OURS, strict=True):
        our_peak = peak(ours)
        for against in contenders:
            line = Line(work, against, unit="MB", lower_is_better=True)
            if against in peaks:
                line.ratio = ratio([our_peak], [peaks[against]])
                line.ours, line.theirs = our_peak, peaks[against]
                line.costs = {OURS: [our_peak], against: [peaks[against]]}
                line.note = "lower is better"
            else:
                line.note = bench.missing[against]
            lines.append(line)
    return lines
