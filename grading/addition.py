"""Pre-training on additions, the 2026 edition's second part: its folder of models, and what a model is worth.

A model learns to write `1249+7996=9245` from `1249+7996=`. `grading.addition_models` reads the models and runs them;
everything that a student's JSON files claim is computed here again, as far as a model shows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from grading.editions import Edition
from grading.findings import Finding
from grading.programs import few, printable

CAPACITY_LIMIT = 5_808_844_800_000  # operations of a training: six for each parameter, problem and epoch
ROUNDED = 0.01  # by how much more than the limit a training may take: its number of problems is rounded up
FEWEST_ABLATIONS, FEWEST_IMPERFECT = 5, 2
BEST, ABLATION = "best_model", re.compile(r"ablation_[0-9]{1,9}")
PROBLEM = re.compile(r"([0-9]{4})\+([0-9]{4})=([0-9]+)")
# The share of 2,000 drawn problems that counts as all: a model that misses one in 3,000, and may well solve the 9,999
# of the course, misses more less than once in a thousand runs. SPREAD: 4.5 standard deviations of the difference of
# accuracies on 2,000 and on 9,999 problems, divided by the root of p (1 - p).
SOLVED, SPREAD = 0.998, 0.11


class Experiment(NamedTuple):
    """One trained model: its size, the operations of its training, the share of drawn problems that it solves.

    steps: of the optimizer that was saved with it.
    """

    parameters: int
    capacity: int
    accuracy: float
    steps: int = 0


def capacity_of(parameters: int, problems: int, epochs: int) -> int:
    """The operations of a training on `problems` additions, as the course counts them."""
    return 6 * parameters * problems * epochs


def accuracy_of(problems: Iterable[str], texts: Iterable[str]) -> float:
    """The share of problems `a+b=c` whose text is the same up to the first character after the digits of the sum.

    The course's own test trusts the numbers that a model writes: one that copies the question wrongly passes it. Raises
    `ValueError` if there are not as many texts as problems, or a problem is none.
    """
    rights = []
    for problem, text in zip(problems, texts, strict=True):
        match = PROBLEM.fullmatch(problem.strip())
        if match is None or int(match[1]) + int(match[2]) != int(match[3]):
            raise ValueError(f"{problem.strip()[:40]!r} is no problem with its sum")
        written = PROBLEM.match(text.strip())
        rights.append(written is not None and written[0] == match[0])
    return sum(rights) / len(rights) if rights else 0.0


def judge_experiments(experiments: Mapping[str, Experiment], unread: int = 0) -> Iterator[Finding]:
    """What is wrong with the trained models of a submission, by the names of their folders.

    unread: how many others there are, which may miss problems.
    """
    best = experiments.get(BEST)
    large = [name for name, one in experiments.items() if one.capacity > CAPACITY_LIMIT * (1 + ROUNDED)]
    if large:
        yield Finding(f"trained with more than {CAPACITY_LIMIT:,} operations: {few(large)}", "E084-capacity")
    if best is not None and best.accuracy < SOLVED:
        said = f"{BEST} solves {best.accuracy:.2%} of drawn problems; all of the course's are asked for"
        yield Finding(said, "E082-addition")
    solved = {name: one.parameters for name, one in experiments.items() if one.accuracy >= SOLVED}
    smaller = [name for name, size in solved.items() if best is not None and size < best.parameters]
    if smaller:
        said = f"{BEST} has {best.parameters:,} parameters, and smaller models solve all: {few(smaller)}"
        yield Finding(said, "E085-ablations")
    imperfect = sum(one.accuracy < 1.0 for name, one in experiments.items() if name != BEST)
    if imperfect + unread < FEWEST_IMPERFECT:
        said = f"{imperfect} ablations miss a problem; at least {FEWEST_IMPERFECT} are to"
        yield Finding(said, "E085-ablations")


def contradictions(one: Experiment, training: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[str]:
    """What a model's training_config.json and experiment_summary.json say and the model does not show.

    The problems and epochs of a training are theirs alone; the optimizer's steps show whether there were more.
    """
    band = 1 - SOLVED + SPREAD * math.sqrt(one.accuracy * (1 - one.accuracy))
    claims = (
        ("training_config.json", "model_parameters", training, one.parameters, 0),
        ("training_config.json", "capacity", training, one.capacity, ROUNDED * one.capacity),
        ("experiment_summary.json", "num_params", summary, one.parameters, 0),
        ("experiment_summary.json", "accuracy", summary, one.accuracy, band),
    )
    for file, name, said, right, far in claims:
        claimed = said.get(name, right)
        is_number = type(claimed) in (int, float) and abs(claimed) < 1e18  # no integer that is too large for a float
        if not (is_number and abs(claimed - right) <= far):
            yield f"{file} says {name} {printable(claimed, 40)}; it is {right:,}"
    most = training["n_epochs"] * math.ceil(training["train_samples"] / training["batch_size"])
    if one.steps > most:
        yield f"training_config.json means {most:,} steps; the optimizer made {one.steps:,}"


def check_folder(files: Iterable[str], edition: Edition) -> Iterator[Finding]:
    """What the folder of models lacks, by the names of a submission's files; nothing in other editions."""
    for top in edition.folders:
        below = [name.split("/") for name in files if name.startswith(f"{top}/")]
        with_model = {parts[1] for parts in below if len(parts) > 2 and parts[-1].endswith(".pth")}
        ablations = {name for name in with_model if ABLATION.fullmatch(name)}
        if BEST not in with_model:
            yield Finding(f"{top}/{BEST}/ with its .pth file is missing", "E026-models")
        if len(ablations) < FEWEST_ABLATIONS:
            said = f"{top}/ has {len(ablations)} folders ablation_N with a .pth file"
            yield Finding(f"{said}; {FEWEST_ABLATIONS} are asked for", "E026-models")
