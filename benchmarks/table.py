"""The argument of every measurement, `Bench`, and the lines of the table that it fills."""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.apart import Apart, LibraryModel
from benchmarks.epoch import Sample
from benchmarks.faults import is_own_fault, reason_of
from benchmarks.growth import Growth
from benchmarks.llama2c import BOS_ID, SPACE_ID, Llama2C
from benchmarks.measure import Contender, Ratio, Turns, ratio
from benchmarks.operations import Share, shares
from benchmarks.peers import Peers, finite
from benchmarks.sentences import MeasuredSentences
from benchmarks.targets import (
    COMPILED,
    CT2_TYPES,
    FASTER,
    GOALS,
    HF,
    HF_BF16,
    LIMIT,
    LLAMA2C,
    LLAMACPP_DTYPES,
    NOISE,
    NUM_LABELS,
    OPENVINO_TYPES,
    ORT_GENAI,
    OURS,
    PLAIN_PATH,
)
from benchmarks.work import Pass, Rates, limit_seconds
from config import LlamaConfig

CONTENDER_PACKAGES: dict[str, dict[str, str]] = {  # the modules that a contender needs, and what installs them
    **dict.fromkeys((HF, HF_BF16, COMPILED), {"transformers": "transformers"}),
    **dict.fromkeys(LLAMACPP_DTYPES, {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}),
    **dict.fromkeys(CT2_TYPES, {"ctranslate2": "ctranslate2"}),
    **dict.fromkeys(OPENVINO_TYPES, {"openvino": "openvino"}),
    ORT_GENAI: {
        name: name.replace("_", "-") for name in ("onnxruntime_genai", "onnx_ir", "transformers", "tokenizers")
    },
}


class Sizes(NamedTuple):
    """How much work each measurement is. The names of the lines tell the full sizes."""

    prompt: int = 41
    new: int = 75
    together: int = 16
    forward: dict[str, tuple[int, int]] = {"10x45": (10, 45), "64x45": (64, 45)}
    train: dict[str, tuple[int, int]] = {"80x50": (80, 50), "10x300": (10, 300)}
    memory: tuple[int, int] = (80, 50)
    bert: dict[str, tuple[int, int]] = {"32x40": (32, 40), "8x256": (8, 256), "4x512": (4, 512)}
    batch_size: int = 80
    every: int = 20
    turn: float = 0.5  # seconds of a turn, at least
    large_models: int = 4  # rounds at most, which take minutes; as many forth as back
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)  # of a text, for how cost grows; and so on
    layers: tuple[int, ...] = (2, 4, 8, 16)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    predicted: tuple[int, ...] = (10**3, 10**4, 10**5, 10**6)  # lines


QUICK_SIZES = Sizes(
    prompt=5,
    new=8,
    together=3,
    forward={"10x45": (2, 7), "64x45": (3, 7)},
    train={"80x50": (3, 6), "10x300": (2, 12)},
    memory=(3, 6),
    bert={"32x40": (3, 9), "8x256": (9, 40), "4x512": (2, 200)},
    batch_size=8,
    every=2,
    turn=0.0,
    large_models=1,
    lengths=(16, 32, 64, 128),
    layers=(1, 2, 4),
    batches=(1, 2, 4),
    predicted=(10**3, 10**4, 10**5),
)


@dataclass
class Bench:
    """Models, turns, sizes and data of a run.

    missing: contenders that cannot take part, each with the reason. failed: those of them that fail by our own fault.
    libraries: the processes that the next race ends.
    """

    config: LlamaConfig
    peers: Peers
    turns: Turns
    sizes: Sizes
    sentences: MeasuredSentences
    folder: Path
    threads: int
    seed: int
    llama2c: Llama2C | None
    missing: dict[str, str]
    profiles: dict[str, list[Share]] = field(default_factory=dict)  # by line: where our own time goes
    failed: set[str] = field(default_factory=set)
    libraries: list[Apart] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)

    def race(self, work: str, contenders: Sequence[Contender], *, is_watched: bool = True) -> dict[str, list[float]]:
        """Their costs in turns. is_watched: the first, ours, runs once more under the profiler."""
        costs = self.turns.take(contenders, least=self.sizes.turn, drop=self.drop)
        for library in self.libraries:
            library.close()
        self.libraries.clear()
        if is_watched and work not in self.profiles:
            self.profiles[work] = shares(contenders[0].run)
        return costs

    @property
    def sample(self) -> Sample:
        return Sample(self.sizes.batch_size, self.sizes.every, self.seed)

    def drop(self, contender: str, error: Exception) -> None:
        """It takes part no longer."""
        self.missing[contender] = reason_of(error)
        if is_own_fault(error):
            self.failed.add(contender)

    @contextmanager
    def attempt(self, contender: str) -> Iterator[None]:
        """A block that makes this contender; an error drops it."""
        try:
            yield
        except Exception as error:  # whatever a library meets on this machine
            self.drop(contender, error)

    def start(self, contender: str, kind: str, model: LibraryModel) -> Apart | None:
        """A library in a process of its own until the next race is over; None where it does not start."""
        library = None
        with self.attempt(contender):
            library = Apart(kind, model)
            self.libraries.append(library)
        return library

    def has(self, contender: str) -> bool:
        return contender not in self.missing

    def prompt(self, rows: int = 1) -> torch.Tensor:
        """Random prompts, each beginning with bos and a space. rows s"""
        draw = torch.Generator().manual_seed(self.seed)
        words = torch.randint(SPACE_ID + 1, self.config.vocab_size, (rows, self.sizes.prompt - 2), generator=draw)
        start = torch.tensor([[BOS_ID, SPACE_ID]]).expand(rows, -1)
        return torch.cat((start, words), dim=1)

    def batch(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random token ids without padding, rows x length, and labels."""
        draw = torch.Generator().manual_seed(self.seed)
        token_ids = torch.randint(SPACE_ID, self.config.vocab_size, (rows, length), generator=draw)
        labels = torch.randint(0, NUM_LABELS, (rows,), generator=draw)
        return token_ids, labels


class BenchmarkTask(NamedTuple):
    """The least work that a line takes, and the precision of its products."""

    passes: list[Pass]
    precision: str


@dataclass
class Line:
    """One line of the table. `ours` and `theirs` are medians in `unit`; ratio is None where nothing was measured.

    ratio: how many times as fast as theirs ours is; for memory ours / theirs. Against the machine's limit, which no
    program can pass, it is the fraction of it that ours reaches.
    """

    work: str
    against: str
    ratio: Ratio | None = None
    ours: float = 0.0
    theirs: float = 0.0
    unit: str = "s"
    note: str = ""
    detail: str = ""
    same_result: bool | None = None  # None where the results need not be the same, or none was measured
    failed: bool = False  # whether theirs failed by our own fault; `note` has the reason
    lower_is_better: bool = False
    is_faster_here: bool = True  # whether this machine gains by the precision of the line
    amount: float | None = None  # what a run makes, where `unit` is a rate
    task: BenchmarkTask | None = None
    costs: dict[str, list[float]] = field(default_factory=dict)

    @property
    def goal(self) -> float | None:
        """The fraction of the machine's limit aimed at."""
        return GOALS[self.work] if self.against == LIMIT and self.is_faster_here else None

    @property
    def verdict(self) -> str:
        """What the ratio means where something is aimed at; nothing beside the others."""
        if self.ratio is None:
            return "FAILED" if self.failed else "not measured"
        if self.same_result is False:
            return "RESULTS DIFFER"
        if self.against == PLAIN_PATH:
            # beyond noise: in every round, or clearly in the middle one
            return "SLOWER" if self.ratio.high < 1.0 or self.ratio.median < NOISE else "not slower"
        if self.against != LIMIT:
            return ""
        reached = f"{self.ratio.median:.2f} of the limit"
        if self.goal is None:
            return f"{reached}, {self.task.precision} is not faster here"
        return f"{reached}, goal {self.goal:g} {'met' if self.ratio.median >= self.goal else 'missed'}"

    def fill(self, ours: list[float], theirs: list[float]) -> None:
        """Compare two contenders' costs in seconds, round by round."""
        self.ratio = ratio(theirs, ours)
        self.ours, self.theirs = (self.shown(statistics.median(seconds)) for seconds in (ours, theirs))
        self.costs = {OURS: ours, self.against: theirs}

    def shown(self, seconds: float) -> float:
        return seconds if self.amount is None else self.amount / seconds

    def compare_with_limit(self, rates: Rates) -> None:
        """Fill a line against the machine's limit, whose `costs` are ours, once its rates are known."""
        passes, precision = self.task
        seconds = limit_seconds(passes, precision, rates)
        self.is_faster_here = precision == "fp32" or limit_seconds(passes, "fp32", rates) / seconds >= FASTER
        self.fill(self.costs[OURS], [seconds] * len(self.costs[OURS]))


def lines_of(
    bench: Bench,
    work: str,
    contenders: Sequence[str],
    costs: dict[str, list[float]],
    *,
    amount: float | None = None,
    unit: str = "s",
    notes: dict[str, str] | None = None,
    same: dict[str, bool] | None = None,
    task: BenchmarkTask | None = None,
) -> list[Line]:
    """A line against each of `contenders`, from the costs in seconds, ours first.

    amount: what a run makes, for rates in `unit`. task: what the machine's limit follows from.
    """
    ours, *_ = costs
    lines = []
    for against in contenders:
        line = Line(work, against, unit=unit, amount=amount)
        if against == LIMIT:
            line.task, line.costs = task, {OURS: costs[ours]}
        elif against in costs:
            line.fill(costs[ours], costs[against])
            line.note = (notes or {}).get(against, "")
            line.same_result = (same or {}).get(against)
        else:
            line.note, line.failed = bench.missing[against], against in bench.failed
        lines.append(line)
    return lines


def classification_lines(
    bench: Bench,
    work: str,
    contenders: Sequence[str],
    classify: dict[str, Callable[[], torch.Tensor]],
    *,
    unit: str,
    task: BenchmarkTask | None = None,
    tolerance: float | None = None,
    rounded: Sequence[str] = (),
) -> list[Line]:
    """Lines of models that give log-probabilities (b c), with the largest difference to ours.

    tolerance: the difference that is allowed; None: any, as between precisions. rounded: contenders that may differ
    more. task: as for `lines_of`; a line with a task is profiled, too.
    """
    answers: dict[str, torch.Tensor] = {}

    def run(name: str) -> None:
        answers[name] = finite(classify[name]().float())

    runs = [Contender(name, partial(run, name)) for name in classify]
    costs = bench.race(work, runs, is_watched=task is not None)
    errors = {name: (answer - answers[OURS]).abs().max().item() for name, answer in answers.items()}
    notes = {name: f"log-probabilities differ by at most {error:.0e}" for name, error in errors.items()}
    exact = errors.keys() - rounded if tolerance is not None else ()
    same = {name: errors[name] < tolerance for name in exact}
    amount = float(len(answers[OURS]))
    return lines_of(bench, work, contenders, costs, amount=amount, unit=unit, notes=notes, same=same, task=task)


def missing_contenders(*, has_llama2c: bool) -> dict[str, str]:
    """The contenders that cannot take part, each with the reason."""
    missing = {}
    for name, packages in CONTENDER_PACKAGES.items():
        absent = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
        if absent:
            missing[name] = f"pip install {' '.join(absent)}"
    compiler = os.environ.get("CXX", "g++")
    if COMPILED not in missing and shutil.which(compiler) is None:
        missing[COMPILED] = f"no C++ compiler ({compiler})"
    if not has_llama2c:
        missing[LLAMA2C] = "no --llama2c"
    return missing
