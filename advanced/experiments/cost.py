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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from advanced import METHODS, choose
from advanced.experiments.models import Model, model_of
from advanced.experiments.rows import path_of
from engine.data import Example, create_data, read_label_names
from engine.programs import ArgumentParser, Default, check_new, run_main
from utils import UserError, atomic_write

if TYPE_CHECKING:
    from engine.runs import Run


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
    """The plain model and its data. steps: batches in a turn. rounds: turns that are counted."""

    model: Model
    data: str
    attention: str
    batch_size: int
    steps: int
    rounds: int

    def sentences(self) -> list[Example]:
        examples = create_data(path_of(self.data, "train"))
        if len(examples) < self.batch_size * self.steps:
            raise UserError(f"{self.data} has {len(examples)} training sentences, too few for {self.steps} batches")
        return examples[: self.batch_size * self.steps]


class MeasuredMethod(NamedTuple):
    """A model, and the methods that it is trained with, joined by a comma."""

    model: Model
    methods: str = ""


def assemble(work: Workload, measured_method: MeasuredMethod) -> Run:
    import torch

    from advanced.experiments.rows import checkpoint_of
    from engine.plan import ComputeSettings, InputFile, Plan
    from engine.runs import assemble
    from utils import seed_everything

    seed_everything(0)
    model, file = measured_method.model, InputFile.of(path_of(work.data, "train"))
    plan = Plan(
        family=model.family, checkpoint=checkpoint_of(model), tokenizer=InputFile.of(model.tokenizer),
        train=file, dev=file, epochs=1, batch_size=work.batch_size, train_eval=False, lr=1e-4,
        label_names=tuple(read_label_names(path_of(work.data, "label_names"))),
        attention=work.attention if model.family == "llama" else None,
        methods=choose(measured_method.methods, family=model.family) if measured_method.methods else (),
    )  # fmt: skip
    return assemble(plan, ComputeSettings(torch.device("cpu")), examples=work.sentences())


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


def measure_time(
    work: Workload, measured_method: MeasuredMethod, turn: Callable[[Run, list[Example]], float] = seconds_of_a_turn
) -> CostRatio:
    """turn: does one turn and returns its seconds. The first round is not counted."""
    from advanced.added import trainable_parameters

    examples, both = work.sentences(), [assemble(work, each) for each in (MeasuredMethod(work.model), measured_method)]
    turns: list[list[float]] = [[], []]
    for number in range(work.rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            turns[which].append(turn(both[which], examples))
    ratios = sorted(theirs / plain for plain, theirs in zip(*(each[1:] for each in turns), strict=True))
    return CostRatio(median(ratios), ratios[0], ratios[-1], trainable_parameters(both[1].model))


def measure_memory(work: Workload, measured_method: MeasuredMethod) -> int:
    import torch

    from engine.programs import peak_memory

    seconds_of_a_turn(assemble(work, measured_method), work.sentences())
    return peak_memory(torch.device("cpu"))


def apart(function: Any, *arguments: Any) -> Any:
    """Call a function in a new process and return its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def table_of_methods(work: Workload, methods: list[str]) -> list[str]:
    """The lines of the table. Work after the last epoch (the mixtures of wise-ft) is no part of a step."""
    plain = apart(measure_memory, work, MeasuredMethod(work.model))
    lines = ["| method | trained | time of a step / plain | peak memory / plain |", "|---|---|---|---|"]
    for names in methods:
        entry = METHODS[names.partition(",")[0]]
        found = apart(measure_time, work, MeasuredMethod(work.model, names))
        memory = apart(measure_memory, work, MeasuredMethod(work.model, names)) / plain
        lines.append(f"| {names} | {found.trained:,} | {found} | {memory:.2f} |")
        print(f"{lines[-1]}  expected: {entry.cost}", flush=True)
    return lines


def table_of_models(work: Workload, others: list[Model]) -> list[str]:
    first = apart(measure_memory, work, MeasuredMethod(work.model))
    turns = seconds_of_a_turn, seconds_of_classification
    lines = ["| model | trained | time of a step | time of classification | peak memory |", "|---|---|---|---|---|"]
    for model in (work.model, *others):
        step, classification = (apart(measure_time, work, MeasuredMethod(model), turn) for turn in turns)
        memory = apart(measure_memory, work, MeasuredMethod(model)) / first
        lines.append(f"| {model.name} | {step.trained:,} | {step} | {classification} | {memory:.2f} |")
        print(lines[-1], flush=True)
    return [*lines, "", f"Each as a multiple of {work.model.name}'s."]


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
    lines = table_of_models(work, others) if others else table_of_methods(work, methods)
    kind = f"{model.name}, {work.attention}" if model.family == "llama" else model.name
    about = f"{kind}, {work.steps} batches of {work.batch_size} sentences of {work.data}"
    text = "\n".join([f"{about}; {work.rounds} rounds; {machine()}.", "", *lines]) + "\n"
    print(text)
    if args.out is not None:
        with atomic_write(Path(args.out)) as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(run_main(main))
