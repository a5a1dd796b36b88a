"""What each method costs beside plain fine-tuning: time, memory and trained parameters, in one run.

    python -m advanced.experiments.cost --pretrained-model-path CKPT [--data sst] [--methods NAME ...]
    python -m advanced.experiments.cost --pretrained-model-path CKPT --others CKPT ...

For every method one process trains a model with it and a plain one, in turn, on the same sentences; the ratio of their
times is the median over the rounds. Memory is the peak of a process that trains with the method, divided by the peak of
one that trains without. With `--others`, other models, Llamas or BERTs, are compared with this one, without methods.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from advanced import METHODS, choose
from advanced.experiments.models import Model, model_of
from advanced.experiments.rows import PLAN_SETTINGS, Trial, path_of, plan_of
from engine.data import Example, create_data
from engine.programs import ArgumentParser, Default, check_new, run_main
from utils import UserError, atomic_write

if TYPE_CHECKING:
    from engine.runs import Run

HEADS_OF_METHODS = "method", "trained", "time of a step / plain", "peak memory / plain"
HEADS_OF_MODELS = "model", "trained", "time of a step", "time of classification", "peak memory"
Turn = Callable[["Run", list[Example]], float]  # does the work of one turn and returns its seconds


def trained(family: str, attention: str) -> list[str]:
    """The methods that train a model of this kind, and need no other model and no further sentences."""
    entries = ((name, entry) for name, entry in METHODS.items() if "finetune" in entry.options and entry.is_enough)
    return [name for name, entry in entries if family in entry.families and entry.attention in (None, attention)]


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m advanced.experiments.cost", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--pretrained-model-path", default=Default("stories42M.pt"), help="checkpoint that is trained")
    add("--tokenizer", help="SentencePiece model; else the checkpoint's own .model, else tokenizer.model")
    add("--data", default="sst", help="data set whose training sentences are used")
    what = parser.add_mutually_exclusive_group()
    several = "which; several at once are joined by a comma; all of them if not given"
    what.add_argument("--methods", nargs="+", metavar="NAME", help=several)
    what.add_argument("--others", nargs="+", metavar="CKPT", help="models to compare it with, Llamas or BERTs")
    add("--attention", default="causal", choices=("causal", "bidirectional"))
    add("--batch_size", type=int, default=32, help="sentences in a batch")
    add("--steps", type=int, default=8, help="batches in a turn")
    add("--rounds", type=int, default=5, help="turns of each")
    add("--out", metavar="FILE", help="write the table there, too")
    return parser.parse_args(argv)


class Workload(NamedTuple):
    """A model, the methods that it is trained with, joined by a comma, and its data.

    steps: batches in a turn. rounds: turns that are counted.
    """

    model: Model
    data: str
    attention: str
    batch_size: int
    steps: int
    rounds: int
    methods: str = ""

    def sentences(self) -> list[Example]:
        examples = create_data(path_of(self.data, "train"))
        if len(examples) < self.batch_size * self.steps:
            raise UserError(f"{self.data} has {len(examples)} training sentences, too few for {self.steps} batches")
        return examples[: self.batch_size * self.steps]


def assemble(work: Workload) -> Run:
    import torch

    from engine.plan import ComputeSettings
    from engine.runs import assemble
    from utils import seed_everything

    seed_everything(0)
    own = {"attention": work.attention, "batch_size": work.batch_size, "epochs": 1, "lr": 1e-4, "hold_out": 0.0}
    settings = tuple((PLAN_SETTINGS | own).items())
    trial = Trial("", "", "finetune", work.methods, (), work.data, None, 0, "final", settings)
    return assemble(plan_of(trial, work.model), ComputeSettings(torch.device("cpu")), examples=work.sentences())


def seconds_of_a_turn(run: Run, examples: list[Example]) -> float:
    """Seconds of one pass over the sentences, as in `fit`, with an evaluation of one sentence."""
    from engine.families import encode_for
    from engine.runs import fine_tune

    train, dev = (encode_for(run.model, run.tokenizer, each) for each in (examples, examples[:1]))
    start = time.perf_counter()
    next(fine_tune(run, train, dev, None, progress=False))
    return time.perf_counter() - start


def seconds_of_classification(run: Run, examples: list[Example]) -> float:
    from engine.families import encode_for
    from engine.methods import pretrained_of
    from engine.runs import loader_of
    from engine.training import evaluate

    dataset, device = encode_for(run.model, run.tokenizer, examples), next(run.model.parameters()).device
    loader = loader_of(dataset, pretrained_of(run.model).config, run.plan.batch_size, device)
    start = time.perf_counter()
    evaluate(run.model, loader, progress=False)
    return time.perf_counter() - start


class CostRatio(NamedTuple):
    """The time divided by that of the plain model: median, least and most over the rounds; trained parameters."""

    middle: float
    least: float
    most: float
    trained: int

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.least:.2f}-{self.most:.2f})"


def measure_time(plain: Workload, other: Workload, turn: Turn = seconds_of_a_turn) -> CostRatio:
    """The first round is not counted."""
    from advanced.added import trainable_parameters

    examples, both = plain.sentences(), [assemble(plain), assemble(other)]
    turns: list[list[float]] = [[], []]
    for number in range(plain.rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            turns[which].append(turn(both[which], examples))
    ratios = sorted(theirs / ours for ours, theirs in zip(*(each[1:] for each in turns), strict=True))
    return CostRatio(median(ratios), ratios[0], ratios[-1], trainable_parameters(both[1].model))


def measure_memory(work: Workload) -> int:
    import torch

    from engine.programs import peak_memory

    seconds_of_a_turn(assemble(work), work.sentences())
    return peak_memory(torch.device("cpu"))


def apart(function: Any, *arguments: Any) -> Any:
    """Call a function in a new process and return its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def table_of(plain: Workload, compared: list[Workload], heads: Sequence[str], turns: Sequence[Turn]) -> list[str]:
    """The lines of the table: trained parameters, then the times of the turns and the peak memory beside `plain`.

    Each line is printed when it is measured. Work after the last epoch (the mixtures of wise-ft) is no part of a step.
    """
    from advanced.experiments.render import markdown_row, markdown_table

    rows, first = [], apart(measure_memory, plain)
    for other in compared:
        times = [apart(measure_time, plain, other, turn) for turn in turns]
        memory = apart(measure_memory, other) / first
        name = other.methods or other.model.name
        rows.append([name, f"{times[0].trained:,}", *map(str, times), f"{memory:.2f}"])
        expected = f"  expected: {METHODS[name.partition(',')[0]].cost}" if other.methods else ""
        print(f"{markdown_row(rows[-1])}{expected}", flush=True)
    return markdown_table(heads, rows)


def main() -> None:
    from advanced.experiments.trial import machine

    args = get_args()
    for name in ("batch_size", "steps", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.out is not None:
        check_new(args.out, "--out")
    model = model_of(args.pretrained_model_path, args.tokenizer, {})
    others = [model_of(other, None, {}) for other in args.others or ()]
    methods = args.methods or trained(model.family, args.attention)
    for names in () if others else methods:
        choose(names, family=model.family, attention=args.attention)
    work = Workload(model, args.data, args.attention, args.batch_size, args.steps, args.rounds)
    work.sentences()
    if others:
        models = [work._replace(model=each) for each in (model, *others)]
        lines = table_of(work, models, HEADS_OF_MODELS, [seconds_of_a_turn, seconds_of_classification])
        lines += ["", f"Each as a multiple of {model.name}'s."]
    else:
        trainings = [work._replace(methods=names) for names in methods]
        lines = table_of(work, trainings, HEADS_OF_METHODS, [seconds_of_a_turn])
    kind = f"{model.name}, {work.attention}" if model.family == "llama" else model.name
    about = f"{kind}, {work.steps} batches of {work.batch_size} sentences of {work.data}"
    text = "\n".join([f"{about}; {work.rounds} rounds; {machine()}.", "", *lines]) + "\n"
    print(text)
    if args.out is not None:
        with atomic_write(Path(args.out)) as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(run_main(main))
