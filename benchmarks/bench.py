"""What every measurement is given, `Bench`, and what it fills: lines of the table, and how cost grows."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.apart import Apart, LibraryModel, reason_of
from benchmarks.decoders import Llama2C
from benchmarks.limits import Pass, Rates, limit_seconds
from benchmarks.measure import Ratio, Share, Turns, ratio, shares
from benchmarks.peers import Peers
from benchmarks.table import CONTENDERS, LIMIT, OURS, PLAIN_PATH, Work
from config import LlamaConfig

if TYPE_CHECKING:
    from benchmarks.sentences import MeasuredSentences

FASTER = 1.2  # what fewer bits must win over float32 by this machine's limits before a line of them has a goal
LARGEST = 3  # sizes that the verdict on growth looks at
GROWTH_NOISE = 0.2  # what an exponent may lie above the algorithm's
NOISE = 0.97  # a median below it is slower, also where some round was not


class Sizes(NamedTuple):
    """How much work each measurement is. shapes: in the place of those that the lines name, rows and length."""

    prompt: int = 41
    new: int = 75
    together: int = 16
    shapes: dict[str, tuple[int, int]] = {}
    batch_size: int = 80
    every: int = 20  # one batch in so many of an epoch is measured
    turn: float = 0.5  # seconds of a turn, at least
    large_models: int = 4  # rounds at most, which take minutes; as many forth as back
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)  # of a text, for how cost grows; and so on
    layers: tuple[int, ...] = (2, 4, 8, 16)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    predicted: tuple[int, ...] = (10**3, 10**4, 10**5, 10**6)  # lines

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and length of the shape `name`, "rows x length"."""
        rows, _, length = name.partition("x")
        return self.shapes.get(name) or (int(rows), int(length))


QUICK_SIZES = Sizes(
    prompt=5,
    new=8,
    together=3,
    shapes={
        "10x45": (2, 7),
        "64x45": (3, 7),
        "80x50": (3, 6),
        "10x300": (2, 12),
        "32x40": (3, 9),
        "8x256": (9, 40),
        "4x512": (2, 200),
    },
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
    same_result: bool | None = None  # None where the results need not be the same, or none was measured
    failed: bool = False  # whether theirs broke; `note` has the reason
    precision: str = "fp32"
    goal: float | None = None  # the fraction of the machine's limit aimed at
    amount: float | None = None  # what a run makes, where `unit` is a rate
    passes: list[Pass] = field(default_factory=list)  # what the machine's limit follows from
    costs: dict[str, list[float]] = field(default_factory=dict)

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
            return f"{reached}, {self.precision} is not faster here"
        return f"{reached}, goal {self.goal:g} {'met' if self.ratio.median >= self.goal else 'missed'}"

    def fill(self, ours: list[float], theirs: list[float]) -> None:
        """Compare two contenders' costs in seconds, round by round."""
        self.ratio = ratio(theirs, ours)
        self.ours, self.theirs = (self.shown(statistics.median(seconds)) for seconds in (ours, theirs))
        self.costs = {OURS: ours, self.against: theirs}

    def shown(self, seconds: float) -> float:
        return seconds if self.amount is None else self.amount / seconds

    def compare_with_limit(self, rates: Rates) -> None:
        """Fill a line against the machine's limit, whose `costs` are ours, once its rates are known.

        There is no goal where this machine does not gain by the precision of the line.
        """
        seconds = limit_seconds(self.passes, self.precision, rates)
        if self.precision != "fp32" and limit_seconds(self.passes, "fp32", rates) / seconds < FASTER:
            self.goal = None
        self.fill(self.costs[OURS], [seconds] * len(self.costs[OURS]))


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of the line through (log size, log cost), by least squares."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs]).slope


@dataclass
class Growth:
    """How the cost of one kind of work grows with its size, beside that of its algorithm.

    Cost = c * size ** exponent is a line in logarithms, fitted by least squares. The algorithm takes the operations
    of its products, counted by limits.py: linear in texts and layers, with a quadratic part (attention) in the text's
    length. Fixed costs lower an exponent, most of all at small sizes, so the verdict looks at the largest sizes alone.

    costs: of each size, in each round, seconds or MB. expected: of each size, any unit.
    """

    work: str
    sizes: Sequence[int]
    costs: Sequence[Sequence[float]]
    expected: Sequence[float]
    unit: str = "s"

    @property
    def medians(self) -> list[float]:
        return [statistics.median(rounds) for rounds in self.costs]

    @property
    def fitted(self) -> float:
        return exponent(self.sizes, self.medians)

    @property
    def local(self) -> tuple[float, float]:
        """The lowest and the highest exponent between neighbouring sizes."""
        pairs = zip(self.sizes, self.sizes[1:], self.medians, self.medians[1:], strict=False)
        slopes = [math.log(b / a) / math.log(larger / smaller) for smaller, larger, a, b in pairs]
        return min(slopes), max(slopes)

    @property
    def is_faster(self) -> bool:
        """Whether cost grows faster than the algorithm's, beyond noise: at the largest sizes, in every round."""
        sizes, allowed = self.sizes[-LARGEST:], exponent(self.sizes[-LARGEST:], self.expected[-LARGEST:]) + GROWTH_NOISE
        return all(exponent(sizes, costs[-LARGEST:]) > allowed for costs in zip(*self.costs, strict=True))

    @property
    def verdict(self) -> str:
        return "GROWS FASTER than its algorithm" if self.is_faster else "not faster than its algorithm"


@dataclass
class Bench:
    """Models, turns, sizes and data of a run.

    absent: contenders that cannot take part, each with the reason. failed: those that broke, with the reason.
    libraries: the processes that the next race ends.
    """

    config: LlamaConfig
    peers: Peers
    turns: Turns
    sizes: Sizes
    sentences: MeasuredSentences
    folder: Path
    threads: int
    llama2c: Llama2C | None
    absent: dict[str, str]
    failed: dict[str, str] = field(default_factory=dict)
    profiles: dict[str, list[Share]] = field(default_factory=dict)  # by line: where our own time goes
    libraries: list[Apart] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)

    @property
    def is_quick(self) -> bool:
        return self.sizes == QUICK_SIZES

    def race(self, work: Work, runs: dict[str, Callable[[], object]], **settings: int) -> dict[str, list[float]]:
        """The costs of `runs`, ours first, in turns. settings: of `Turns.take`.

        Where a line is compared with the machine's limit, ours runs once more under the profiler.
        """
        costs = self.turns.take(runs, least=self.sizes.turn, drop=self.drop, **settings)
        for library in self.libraries:
            library.close()
        self.libraries.clear()
        if LIMIT in work.against:
            self.profiles[work.title] = shares(runs[OURS])
        return costs

    def lines(
        self,
        work: Work,
        costs: dict[str, list[float]],
        *,
        amount: float | None = None,
        unit: str = "s",
        notes: dict[str, str] | None = None,
        same: dict[str, bool] | None = None,
        passes: list[Pass] | None = None,
    ) -> list[Line]:
        """A line against each contender of `work`, from the costs in seconds, ours first.

        amount: what a run makes, for rates in `unit`. passes: what the machine's limit follows from.
        """
        ours, *_ = costs
        lines = []
        for against in work.against:
            line = Line(work.title, against, unit=unit, amount=amount, precision=work.precision)
            if against == LIMIT:
                line.goal, line.passes, line.costs = work.goal, passes or [], {OURS: costs[ours]}
            elif against in costs:
                line.fill(costs[ours], costs[against])
                line.note, line.same_result = (notes or {}).get(against, ""), (same or {}).get(against)
            else:
                self.explain(line)
            lines.append(line)
        return lines

    def explain(self, line: Line) -> None:
        """Why the contender of a line was not measured."""
        line.failed = line.against in self.failed
        line.note = (self.failed if line.failed else self.absent)[line.against]

    def drop(self, contender: str, error: Exception) -> None:
        """It has broken: it takes part no longer, and the run ends with status 1. Raises the error if it is ours."""
        if contender.startswith(OURS):
            raise error
        self.failed[contender] = reason_of(error)
        print(f"error: {contender} failed: {self.failed[contender]}", file=sys.stderr, flush=True)

    @contextmanager
    def attempt(self, contender: str) -> Iterator[None]:
        """A block that makes this contender; an error drops it."""
        try:
            yield
        except Exception as error:  # whatever a library meets on this machine
            self.drop(contender, error)

    def start(self, contender: str, model: LibraryModel) -> Apart:
        """A library in a process of its own until the next race is over."""
        library = Apart(CONTENDERS[contender].kind, model)
        self.libraries.append(library)
        return library

    def has(self, contender: str) -> bool:
        return contender not in self.absent and contender not in self.failed

    def able(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that take part; the machine's limit is no contender."""
        return [name for name in names if name != LIMIT and self.has(name)]


def absent_contenders(config: LlamaConfig, *, has_llama2c: bool) -> dict[str, str]:
    """The contenders that cannot take part, each with the reason."""
    absent, compiler = {}, os.environ.get("CXX", "g++")
    for name, info in CONTENDERS.items():
        missing = [package for module, package in info.packages.items() if importlib.util.find_spec(module) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            absent[name] = f"{' and '.join(missing)} {verb} not installed: pip install {' '.join(missing)}"
        elif info.program == "c++" and shutil.which(compiler) is None:
            absent[name] = f"no C++ compiler ({compiler})"
        elif info.program == "--llama2c" and not has_llama2c:
            absent[name] = "no --llama2c"
        elif config.head_dim % info.head_multiple:
            absent[name] = f"it needs heads of a multiple of {info.head_multiple}, not of {config.head_dim}"
    return absent
