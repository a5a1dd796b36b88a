"""The figures of every run, one JSON line each; means, differences and their intervals.

Shapes: S seeds, n sentences.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.data import unpack
from engine.figures import SETTINGS, entry_of, error_of_result, read_figures
from engine.json_text import parse_json
from utils import UserError

FEWEST_SEEDS = 3  # fewer seeds of a trained method give no interval
RESULT_KINDS = {"key": str, "model": str, "checksums": [str]}  # in every line
KINDS_OF_TRIAL = {  # in the line of every run of a table
    "row": str, "option": str, "method": str, "data": str, "phase": str, "shots": (int, None), "seed": int,
    "arguments": [str], "settings?": {"attention": (str, None), "precision": str, "batch_size": int, **SETTINGS},
}  # fmt: skip


def read_results(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Results by key. A last line that is cut, as after a kill, is left out, so that its run is done again.

    Raises `UserError` for any other line that is no result, and for two lines of one run that differ.
    """
    each = (read_figures(path, result_error, itemgetter("key"), "a result") for path in paths if path.is_file())
    return {result["key"]: result for results in each for result in results}


def results_beside(path: Path, name: str) -> dict[str, dict[str, Any]]:
    """Results of a checkpoint's other tables by key, from the files TABLE-NAME.jsonl beside `path`.

    A line that is no result is skipped: another process may be writing to the file.
    """
    found: dict[str, dict[str, Any]] = {}
    for other in sorted(path.parent.glob(f"*-{glob.escape(name)}.jsonl")):
        if other != path and other.is_file():
            results = map(_result_in, other.read_text(encoding="utf-8", errors="replace").split("\n"))
            found |= {result["key"]: result for result in results if result is not None}
    return found


def result_error(result: Any) -> str:
    """Why a value is no result, or ""."""
    is_of_table = isinstance(result, dict) and ("phase" in result or "settings" in result)
    return error_of_result(result, **RESULT_KINDS, **(KINDS_OF_TRIAL if is_of_table else {}))


def _result_in(line: str) -> dict[str, Any] | None:
    try:
        result = parse_json(line, is_line=True)
    except ValueError:
        return None
    return None if result_error(result) else result


def append_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write one line, to the disk, on a line of its own even after a line that was cut."""
    with open(path, "ab+") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write((json.dumps(result) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


class Difference(NamedTuple):
    """The difference of two methods' figures: mean, standard error, and 95 % interval.

    has_few_seeds: it is of one or two seeds of a trained method, so the interval says how much another choice of
    sentences would change, but too little about other seeds.
    """

    mean: float
    error: float
    low: float
    high: float
    has_few_seeds: bool = False

    @property
    def is_beyond_noise(self) -> bool:
        return not self.has_few_seeds and (self.low > 0 or self.high < 0)


def paired_bootstrap(better: np.ndarray, base: np.ndarray, draws: int = 4000, seed: int = 0) -> Difference:
    """How much higher the accuracy of one method is than another's, on the same sentences with the same seeds.

    better, base: S n, whether a sentence was classified rightly. For the method see `_bootstrap`.
    """
    differences = better.astype(np.float64) - base.astype(np.float64)  # S n

    def mean(rows: np.ndarray, weights: np.ndarray) -> float:
        return float((differences[rows] @ (weights / len(weights))).mean())

    return _bootstrap(mean, float(differences.mean()), differences.shape, draws, seed)


def macro_f1_bootstrap(
    better: np.ndarray, base: np.ndarray | None, labels: np.ndarray, draws: int = 1000, seed: int = 0
) -> Difference:
    """How much higher the macro-F1 of one method is than another's; with base None, its macro-F1 itself.

    better, base: S n, predicted classes. labels: n. Unlike accuracy it is no mean over sentences, so each draw computes
    it anew. A class that is neither in the draw nor predicted counts 0, like a class that is never predicted rightly.
    """
    classes = 1 + max(int(each.max()) for each in (better, labels, base) if each is not None)

    def macro_f1(predictions: np.ndarray, weights: np.ndarray | None) -> float:
        counts = [np.bincount(row, weights, classes**2) for row in labels * classes + predictions]
        table = np.reshape(counts, (-1, classes, classes))  # S gold predicted
        found = table.sum(1) + table.sum(2)
        f1 = 2 * np.diagonal(table, axis1=1, axis2=2) / np.where(found > 0, found, 1)  # S classes
        return float(f1.mean())

    def difference(rows: Sequence[int] | np.ndarray, weights: np.ndarray | None) -> float:
        return macro_f1(better[rows], weights) - (0.0 if base is None else macro_f1(base[rows], weights))

    return _bootstrap(difference, difference(range(len(better)), None), better.shape, draws, seed)


def _bootstrap(
    figure: Callable[[np.ndarray, np.ndarray], float], value: float, shape: tuple[int, ...], draws: int, seed: int
) -> Difference:
    """The interval of a figure by the bootstrap. value: the figure of these seeds and sentences. shape: S n.

    Seeds and sentences are drawn with replacement, the same ones for all methods (Efron & Tibshirani 1993, chapter 8).
    figure: a function of rows, the S seeds that were drawn, and of weights, n, how often each sentence was drawn.
    """
    seeds, sentences = shape
    drawing = np.random.default_rng(seed)
    drawn = np.empty(draws)
    for draw in range(draws):
        weights = np.bincount(drawing.integers(0, sentences, sentences), minlength=sentences)  # n
        drawn[draw] = figure(drawing.integers(0, seeds, seeds), weights)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Difference(value, float(drawn.std(ddof=1)), float(low), float(high))


def interval(
    runs: Mapping[int, Mapping[str, Any]], split: str, labels: Sequence[int], figure: str = "accuracy"
) -> Difference | None:
    """The interval of accuracy or macro_f1 of results by seed; None without results of `split`, or for few seeds."""
    results = [*runs.values()]
    if not any(split in result for result in results) or has_few_seeds(results):
        return None
    found = predictions_of(results, split, len(labels))  # S n
    if figure == "macro_f1":
        return macro_f1_bootstrap(found, None, np.array(labels))
    right = found == np.array(labels)
    return paired_bootstrap(right, np.zeros_like(right))


def has_few_seeds(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a trained method has fewer than three results; a zero-shot method has no seeds."""
    return len(results) < FEWEST_SEEDS and any("trainable" in result for result in results)


def predictions_of(results: Sequence[Mapping[str, Any]], split: str, count: int) -> np.ndarray:
    """results: one for each seed. Returns the classes, S n. Raises `UserError` unless n is `count`."""
    found = [unpack(entry_of(result, split)["predictions"]) for result in results]
    for result, predictions in zip(results, found, strict=True):
        if len(predictions) != count:
            of = f"of the result {result['key']} has {len(predictions)} predictions"
            raise UserError(f"{split} {of}, where {result.get('data')} has {count} sentences")
    return np.array(found)


def compare(
    ours: Mapping[int, Mapping[str, Any]],
    theirs: Mapping[int, Mapping[str, Any]],
    split: str,
    labels: Sequence[int],
    figure: str = "accuracy",
) -> Difference | None:
    """The difference of results by seed, over the seeds that both have; None if they share no seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    results = [[each[seed] for seed in seeds] for each in (ours, theirs)]
    gold, sides = np.array(labels), [predictions_of(each, split, len(labels)) for each in results]
    if figure == "macro_f1":
        found = macro_f1_bootstrap(*sides, gold)
    else:
        found = paired_bootstrap(*(side == gold for side in sides))
    return found._replace(has_few_seeds=any(map(has_few_seeds, results)))
