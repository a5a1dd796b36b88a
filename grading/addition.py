"""Pre-training on additions, the 2026 edition's second part: its folder of models, and what a model is worth.

A model learns to write `1249+7996=9245` from `1249+7996=`. Whoever runs the students' code gives the texts that a model
writes, and the numbers of its shape; everything that a student's JSON files claim is computed here again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from grading.editions import Edition
from grading.programs import few

CAPACITY_LIMIT = 5_808_844_800_000  # operations of a training: six for each parameter, problem and epoch
FEWEST_ABLATIONS, FEWEST_IMPERFECT = 5, 2
BEST, ABLATION = "best_model", re.compile(r"ablation_[0-9]+")
VOCAB_SIZE, MULTIPLE_OF = 13, 32  # of addition_run.py
PROBLEM = re.compile(r"([0-9]{4})\+([0-9]{4})=([0-9]+)")


class Experiment(NamedTuple):
    """One trained model: its size, the operations of its training, the share of the problems that it solves."""

    parameters: int
    capacity: int
    accuracy: float


def parameters_of(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, norm: str = "layer") -> int:
    """The number of parameters of a Llama with the vocabulary and the feed-forward of addition_run.py."""
    hidden = MULTIPLE_OF * math.ceil(8 * dim // 3 / MULTIPLE_OF)
    of_norm = 2 * dim if norm == "layer" else dim
    attention = 2 * dim * dim + 2 * dim * (dim // n_heads * n_kv_heads)
    return VOCAB_SIZE * dim + n_layers * (attention + 3 * dim * hidden + 2 * of_norm) + of_norm


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


def judge(experiments: Mapping[str, Experiment], tolerance: float = 0.01) -> list[str]:
    """What is wrong with the trained models of a submission, by the names of their folders; empty for an A.

    tolerance: by how much more than the limit a training may take: its number of problems is rounded up.
    """
    found, best = [], experiments.get(BEST)
    large = [name for name, one in experiments.items() if one.capacity > CAPACITY_LIMIT * (1 + tolerance)]
    if large:
        found.append(f"trained with more than {CAPACITY_LIMIT:,} operations: {few(sorted(large))}")
    if best is not None and best.accuracy < 1.0:
        found.append(f"{BEST} solves {best.accuracy:.2%} of the problems; all are asked for")
    solved = {name: one.parameters for name, one in experiments.items() if one.accuracy == 1.0}
    smaller = [name for name, size in solved.items() if best is not None and size < best.parameters]
    if smaller:
        found.append(f"{BEST} has {best.parameters:,} parameters, and smaller models solve all: {few(sorted(smaller))}")
    imperfect = sum(one.accuracy < 1.0 for name, one in experiments.items() if name != BEST)
    if imperfect < FEWEST_IMPERFECT:
        found.append(f"{imperfect} ablations miss a problem; at least {FEWEST_IMPERFECT} are to")
    return found


def folder_problems(files: Iterable[str], edition: Edition) -> list[str]:
    """What the folder of models lacks, by the names of a submission's files; nothing in other editions."""
    found = []
    for top in edition.folders:
        below = [name.split("/") for name in files if name.startswith(f"{top}/")]
        with_model = {parts[1] for parts in below if len(parts) > 2 and parts[-1].endswith(".pth")}
        ablations = {name for name in with_model if ABLATION.fullmatch(name)}
        if BEST not in with_model:
            found.append(f"{top}/{BEST}/ with its .pth file is missing")
        if len(ablations) < FEWEST_ABLATIONS:
            said = f"{top}/ has {len(ablations)} folders ablation_N with a .pth file"
            found.append(f"{said}; {FEWEST_ABLATIONS} are asked for")
    return found
