"""The measurements behind the lines of the table, one function each. README.md here says what each line means."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks import epoch, memory, peers
from benchmarks.llama2c import BOS_ID, SPACE_ID, Llama2C
from benchmarks.measure import Contender, Ratio, Turns, ratio
from benchmarks.peers import Peers
from benchmarks.sentences import Sentences
from benchmarks.targets import COURSE, HF, HF_BF16, LINES, LLAMA2C, MEMORY_LINES, ONE_BY_ONE, OURS, PLAIN, Target
from config import LlamaConfig
from training import EncodingRules

Ids = list[int]
MAX_EPOCH_REPEATS = 3


class Sizes(NamedTuple):
    """How much work each measurement is. The names of the lines tell the full sizes."""

    prompt: int = 41
    new: int = 75
    together: int = 16
    forward: dict[str, tuple[int, int]] = {"10x45": (10, 45), "64x45": (64, 45)}
    train: dict[str, tuple[int, int]] = {"80x50": (80, 50), "10x300": (10, 300)}
    memory: tuple[int, int] = (80, 50)
    batch_size: int = 80
    every: int = 20
    contexts: tuple[int, ...] = (64, 128, 256, 512, 1024)
    lengths: tuple[int, ...] = (15, 45, 135)
    batches: tuple[int, ...] = (1, 8, 64)


QUICK = Sizes(
    prompt=5,
    new=8,
    together=3,
    forward={"10x45": (2, 7), "64x45": (3, 7)},
    train={"80x50": (3, 6), "10x300": (2, 12)},
    memory=(3, 6),
    batch_size=8,
    every=2,
    contexts=(16, 32),
    lengths=(5, 9),
    batches=(1, 3),
)


@dataclass
class Bench:
    """What every measurement is given."""

    config: LlamaConfig
    peers: Peers
    turns: Turns
    sizes: Sizes
    sentences: Sentences
    folder: Path
    threads: int
    seed: int
    llama2c: Llama2C | None
    has_hf: bool

    @property
    def device(self) -> torch.device:
        return self.peers.device

    def prompt(self, rows: int = 1) -> torch.Tensor:
        """Random prompts, each beginning with bos and a space. rows s"""
        draw = torch.Generator().manual_seed(self.seed)
        words = torch.randint(SPACE_ID + 1, self.config.vocab_size, (rows, self.sizes.prompt - 2), generator=draw)
        start = torch.tensor([[BOS_ID, SPACE_ID]]).expand(rows, -1)
        return torch.cat((start, words), dim=1).to(self.device)

    def batch(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random token ids without padding, rows x length, and labels."""
        draw = torch.Generator().manual_seed(self.seed)
        token_ids = torch.randint(SPACE_ID, self.config.vocab_size, (rows, length), generator=draw)
        labels = torch.randint(0, peers.NUM_LABELS, (rows,), generator=draw)
        return token_ids.to(self.device), labels.to(self.device)

    def why_missing(self, contender: str) -> str:
        if contender == LLAMA2C:
            return "not measured: it runs on the CPU" if self.device.type == "cuda" else "not measured: no --llama2c"
        return "not measured: transformers is not installed"


@dataclass
class Line:
    """One line of the table. `ours` and `theirs` are medians in `unit`; ratio is None where nothing was measured."""

    work: str
    against: str
    target: Target
    ratio: Ratio | None = None
    ours: float = 0.0
    theirs: float = 0.0
    unit: str = "s"
    note: str = ""
    detail: str = ""
    same_result: bool | None = None  # None where the results need not be the same, or none was measured
    lower_is_better: bool = False
    costs: dict[str, list[float]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """How the median stands to floor and goal."""
        floor, goal = self.target
        if self.ratio is None:
            return "not measured"
        if self.same_result is False:
            return "RESULTS DIFFER"
        if floor is None:
            return "-"
        sign = -1 if self.lower_is_better else 1
        if goal is not None and self.ratio.median * sign >= goal * sign:
            return "goal met"
        return "floor met" if self.ratio.median * sign >= floor * sign else "FLOOR MISSED"


def lines_of(
    bench: Bench,
    work: str,
    targets: dict[str, Target],
    costs: dict[str, list[float]],
    *,
    amount: float | None = None,
    unit: str = "s",
    notes: dict[str, str] | None = None,
    same: dict[str, bool] | None = None,
) -> list[Line]:
    """A line for each target, from the costs in seconds, ours first. amount: what a run makes, for rates in `unit`."""
    ours, *_ = costs
    medians = {name: statistics.median(seconds) for name, seconds in costs.items()}
    shown = {name: median if amount is None else amount / median for name, median in medians.items()}
    lines = []
    for against, target in targets.items():
        line = Line(work, against, target, unit=unit)
        if against in costs:
            line.ratio = ratio(costs[against], costs[ours])
            line.ours, line.theirs = shown[ours], shown[against]
            line.note = (notes or {}).get(against, "")
            line.same_result = (same or {}).get(against)
            line.costs = {OURS: costs[ours], against: costs[against]}
        else:
            line.note = bench.why_missing(against)
        lines.append(line)
    return lines


# ---------------------------------------------------------------------------------------------------- decoding


class Decoding:
    """Contenders that continue one prompt, and whether they say the same."""

    def __init__(self, bench: Bench, prompt: torch.Tensor, new: int):
        self.bench, self.prompt, self.new = bench, prompt, new
        self.contenders: list[Contender] = []
        self.ids: dict[str, list[Ids]] = {}

    def add(self, name: str, generate: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        def run() -> None:
            self.ids[name] = generate(self.prompt, self.new).tolist()

        self.contenders.append(Contender(name, run))

    def add_llama(self, name: str, model: nn.Module) -> None:
        self.add(name, lambda prompt, new: model.generate(prompt, new, temperature=0.0))

    def add_hf_and_course(self) -> None:
        course = self.bench.peers.naive()
        self.add(COURSE, course.generate)
        if self.bench.has_hf:
            hf = self.bench.peers.hf()
            self.add(HF, lambda prompt, new: peers.generate_with_hf(hf, prompt, new))

    def add_llama2c(self) -> None:
        program, prompt = self.bench.llama2c, self.prompt[0].tolist()
        if program is not None:
            self.contenders.append(Contender(LLAMA2C, lambda: program.generate(prompt, self.new) * self.new))

    def lines(self, work: str, targets: dict[str, Target], *, must_agree: bool) -> list[Line]:
        """Takes turns among all; the first contender is ours."""
        costs = self.bench.turns.take(self.contenders)
        rows = len(self.prompt)
        notes = {name: self._agreement(name) for name in costs}
        same = {name: notes[name].startswith("identical") for name in costs} if must_agree else None
        amount = float(self.new * rows)
        return lines_of(self.bench, work, targets, costs, amount=amount, unit="tok/s", notes=notes, same=same)

    def _agreement(self, name: str) -> str:
        ours = self.ids[self.contenders[0].name]
        if name == LLAMA2C:
            return self.bench.llama2c.compare(ours[0])
        theirs = self.ids[name]
        if ours == theirs:
            return "identical ids"
        start = self.prompt.shape[1]
        pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a[start:], b[start:], strict=True)]
        return f"{sum(a == b for a, b in pairs)} of {len(pairs)} ids equal"


def decode_fp32(bench: Bench) -> list[Line]:
    ((work, targets),) = LINES["decode-fp32"].items()
    decoding = Decoding(bench, bench.prompt(), bench.sizes.new)
    decoding.add_llama(OURS, bench.peers.ours("fp32"))
    decoding.add_llama(PLAIN, bench.peers.plain())
    decoding.add_llama2c()
    decoding.add_hf_and_course()
    return decoding.lines(work, targets, must_agree=True)


def decode_int8(bench: Bench) -> list[Line]:
    """int8 and bf16, whose ids may differ, against llama2.c in float32; the plain path of int8 is float32."""
    lines = []
    precisions = (("int8", torch.float32), ("bf16", torch.bfloat16))
    for (work, targets), (precision, dtype) in zip(LINES["decode-int8"].items(), precisions, strict=True):
        decoding = Decoding(bench, bench.prompt(), bench.sizes.new)
        decoding.add_llama(OURS, bench.peers.ours(precision))
        decoding.add_llama(PLAIN, bench.peers.plain(dtype=dtype))
        decoding.add_llama2c()
        lines += decoding.lines(work, targets, must_agree=False)
    return lines


def decode_together(bench: Bench) -> list[Line]:
    ((work, targets),) = LINES["decode-together"].items()
    model = bench.peers.ours("fp32")

    def one_by_one(prompts: torch.Tensor, new: int) -> torch.Tensor:
        return torch.cat([model.generate(prompt[None], new, temperature=0.0) for prompt in prompts])

    decoding = Decoding(bench, bench.prompt(bench.sizes.together), bench.sizes.new)
    decoding.add_llama(OURS, model)
    decoding.add(ONE_BY_ONE, one_by_one)
    decoding.add_llama(PLAIN, bench.peers.plain())
    return decoding.lines(work, targets, must_agree=True)


def generate_bidirectional(bench: Bench) -> list[Line]:
    ((work, targets),) = LINES["generate-bidirectional"].items()
    decoding = Decoding(bench, bench.prompt(), bench.sizes.new)
    decoding.add_llama(OURS, bench.peers.ours("fp32", "bidirectional"))
    decoding.add_llama(PLAIN, bench.peers.plain("bidirectional"))
    decoding.add(COURSE, bench.peers.naive("bidirectional").generate)
    return decoding.lines(work, targets, must_agree=True)


# ------------------------------------------------------------------------------------------- forward, training


def forward(bench: Bench) -> list[Line]:
    """Log-probabilities of the classifier, causal, each row read at its last token."""
    lines = []
    shapes = [*bench.sizes.forward.values()] * 2
    for (work, targets), (rows, length) in zip(LINES["forward"].items(), shapes, strict=True):
        precision, dtype = ("bf16", torch.bfloat16) if work.endswith("bf16") else ("fp32", torch.float32)
        models = {
            OURS: bench.peers.our_classifier(precision),
            PLAIN: bench.peers.our_classifier(None).to(dtype),
        }
        if bench.has_hf:
            models[HF] = bench.peers.hf_classifier()
        if bench.has_hf and HF_BF16 in targets:
            models[HF_BF16] = bench.peers.hf_classifier(torch.bfloat16)
        lines += _forward_lines(bench, work, targets, models, bench.batch(rows, length)[0])
    return lines


def _forward_lines(
    bench: Bench, work: str, targets: dict[str, Target], models: dict[str, nn.Module], token_ids: torch.Tensor
) -> list[Line]:
    answers: dict[str, torch.Tensor] = {}

    def contender(name: str, model: nn.Module) -> Contender:
        def run() -> None:
            answers[name] = peers.classify(model, token_ids).float()

        return Contender(name, run)

    costs = bench.turns.take([contender(name, model) for name, model in models.items()])
    errors = {name: (answer - answers[OURS]).abs().max().item() for name, answer in answers.items()}
    notes = {name: f"log-probabilities differ by at most {error:.0e}" for name, error in errors.items()}
    return lines_of(
        bench, work, targets, costs, amount=float(len(token_ids)), unit="sentences/s", notes=notes
    )


def _training_lines(
    bench: Bench, work: str, targets: dict[str, Target], shape: tuple[int, int], models: dict[str, nn.Module]
) -> list[Line]:
    token_ids, labels = bench.batch(*shape)
    makers = {COURSE: peers.naive_optimizer, HF: peers.hf_optimizer, HF_BF16: peers.hf_optimizer}

    def contender(name: str, model: nn.Module) -> Contender:
        optimizer = makers.get(name, peers.our_optimizer)(model)

        def run() -> None:
            peers.train_step(model, optimizer, token_ids, labels)

        return Contender(name, run)

    costs = bench.turns.take([contender(name, model) for name, model in models.items()])
    return lines_of(bench, work, targets, costs)


def train_fp32(bench: Bench) -> list[Line]:
    """Like with like: against the course's way bidirectional, against Hugging Face causal."""
    lines = []
    for (work, targets), shape in zip(LINES["train-fp32"].items(), bench.sizes.train.values(), strict=True):
        bidirectional = {
            OURS: bench.peers.our_classifier("fp32", "bidirectional", training=True),
            PLAIN: bench.peers.our_classifier(None, "bidirectional"),
            COURSE: bench.peers.naive_classifier("bidirectional"),
        }
        causal: dict[str, nn.Module] = {OURS: bench.peers.our_classifier("fp32", "causal", training=True)}
        if bench.has_hf:
            causal[HF] = bench.peers.hf_classifier()
        to_hf = {HF: targets[HF]}
        others = {against: target for against, target in targets.items() if against != HF}
        lines += _training_lines(bench, work, others, shape, bidirectional)
        lines += _training_lines(bench, work, to_hf, shape, causal)
    return lines


def train_bf16(bench: Bench) -> list[Line]:
    """Float32 weights, bfloat16 products; our plain path and Hugging Face's second one under autocast."""
    lines = []
    for (work, targets), shape in zip(LINES["train-bf16"].items(), bench.sizes.train.values(), strict=True):
        models: dict[str, nn.Module] = {
            OURS: bench.peers.our_classifier("bf16", training=True),
            PLAIN: peers.Autocast(bench.peers.our_classifier(None)),
        }
        if bench.has_hf:
            models[HF] = bench.peers.hf_classifier()
            models[HF_BF16] = peers.Autocast(bench.peers.hf_classifier())
        lines += _training_lines(bench, work, targets, shape, models)
    return lines


# ------------------------------------------------------------------------------------------------------ epochs


def _epoch_lines(
    bench: Bench, work: str, targets: dict[str, Target], epochs: dict[str, epoch.Epoch]
) -> list[Line]:
    """No warm-up round, which would take as long as a measured one: a step on one batch instead."""
    for contender in epochs.values():
        batch = next(iter(contender.dev_loader))
        rows = batch["token_ids"].to(bench.device), batch["labels"].to(bench.device)
        peers.train_step(contender.model, contender.optimizer, *rows)
    repeats = 1 if bench.sizes.every == 1 else min(bench.turns.repeats, MAX_EPOCH_REPEATS)
    turns = Turns(repeats, bench.turns.pause, bench.turns.synchronize)
    costs = turns.take([Contender(name, contender.run) for name, contender in epochs.items()], warm_up=0)
    how = "whole epochs" if bench.sizes.every == 1 else f"from one batch in {bench.sizes.every}"
    lines = lines_of(bench, work, targets, costs, notes=dict.fromkeys(epochs, how))
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
    ((work, targets),) = LINES["epoch-causal"].items()
    model = bench.peers.our_classifier("bf16", "causal", training=True)
    epochs = {OURS: _our_epoch(bench, model, is_causal=True, bucket=True), COURSE: _course_epoch(bench)}
    if bench.has_hf:
        hf = peers.Autocast(bench.peers.hf_classifier())
        epochs[HF] = _our_epoch(bench, hf, is_causal=True, bucket=False, hf=True)
    return _epoch_lines(bench, work, targets, epochs)


def epoch_bidirectional(bench: Bench) -> list[Line]:
    ((work, targets),) = LINES["epoch-bidirectional"].items()
    model = bench.peers.our_classifier("fp32", "bidirectional", training=True)
    ours = _our_epoch(bench, model, is_causal=False, bucket=False)
    return _epoch_lines(bench, work, targets, {OURS: ours, COURSE: _course_epoch(bench)})


# ------------------------------------------------------------------------------------------------------ memory


def peak_memory(bench: Bench) -> list[Line]:
    """Peak memory, ours / theirs."""
    checkpoint = bench.folder / "model.pt"
    torch.save({"model": bench.peers.state, "model_args": vars(bench.config)}, checkpoint)
    rows, length = bench.sizes.memory
    theirs = {COURSE: "naive"}
    if bench.has_hf:
        theirs[HF] = "hf-bf16"

    def peak(contender: str) -> float:
        return memory.peak_memory(contender, checkpoint, rows, length, bench.threads) / 1e6

    peaks = {against: peak(contender) for against, contender in theirs.items()}
    lines = []
    for (work, targets), ours in zip(MEMORY_LINES["memory"].items(), memory.OURS, strict=True):
        our_peak = peak(ours)
        for against, target in targets.items():
            line = Line(work, against, target, unit="MB", lower_is_better=True)
            if against in peaks:
                line.ratio = ratio([our_peak], [peaks[against]])
                line.ours, line.theirs = our_peak, peaks[against]
                line.costs = {OURS: [our_peak], against: [peaks[against]]}
            else:
                line.note = bench.why_missing(against)
            lines.append(line)
    return lines


def measurements() -> dict[str, Callable[[Bench], list[Line]]]:
    """The function behind each name of `targets.LINES` and `MEMORY_LINES`."""
    functions: Sequence[Callable[[Bench], list[Line]]] = (
        decode_fp32,
        decode_int8,
        decode_together,
        generate_bidirectional,
        forward,
        train_fp32,
        train_bf16,
        epoch_causal,
        epoch_bidirectional,
        peak_memory,
    )
    return dict(zip((*LINES, *MEMORY_LINES), functions, strict=True))
