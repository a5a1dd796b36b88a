"""The figures of every run, one JSON line each; means, differences and their intervals.

Shapes: S seeds, n sentences.
"""

from __future__ import annotations

import glob
import itertools
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from advanced.experiments.schema import JUDGES, SOLVED
from advanced.experiments.statistics import Difference, macro_f1_table, two_way
from engine.data import parse_json, unpack
from engine.metrics import PACKED, SETTINGS, entry_of, error_of_result, packed_lines, read_figures
from utils import UserError, atomic_write, warn

Runs = Mapping[int, Mapping[str, Any]]  # results by seed
FEWEST_SEEDS = 3  # fewer seeds of what is drawn give no interval
FITTED = 0.9  # of the loss of a guess
ROUNDED = 1e-5  # of figures in a line
RESULT_KINDS = {"key": str, "model": str, "checksums": [str]}  # in every line
KINDS_OF_TRIAL = {  # in the line of every run of a table
    "processor": str, "torch": str, "kernels": str, "commit": (str, None), "date": str, "weights": str,
    "row": str, "option": str, "method": str, "data": str, "phase": str, "shots": (int, None), "seed": int,
    "arguments": [str], "settings?": {"attention": (str, None), "precision": str, "batch_size": int, **SETTINGS},
}  # fmt: skip


def read_results(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Results by key. What lies packed beside one of `paths`, see `parts_of`, is read as well.

    A last line that is cut, as after a kill, is left out, so that its run is done again.

    Raises `UserError` for any other line that is no result, and for two lines of one run that differ.
    """
    parts = (part for path in paths for part in parts_of(path))
    each = (read_figures(part, result_error, itemgetter("key"), "a result") for part in parts)
    return {result["key"]: result for results in each for result in results}


def parts_of(path: Path) -> list[Path]:
    """What there is of a file of results: the lines that `xz` has packed, and those that have come since."""
    return [part for part in (path.with_name(path.name + PACKED), path) if part.is_file()]


def files_of_results(folder: Path, pattern: str) -> list[Path]:
    """The names NAME.jsonl of results in a folder, packed or not. pattern: of NAME."""
    found = (path for ending in ("", PACKED) for path in folder.glob(f"{pattern}.jsonl{ending}"))
    return sorted({path.with_name(path.name.removesuffix(PACKED)) for path in found})


def results_now(path: Path) -> dict[str, dict[str, Any]]:
    """`read_results` of a file that grows while a grid runs: read anew only when it has changed."""
    states = (part.stat() for part in parts_of(path))
    return _results_at(path, *((now.st_size, now.st_mtime_ns) for now in states))


@lru_cache(maxsize=1)
def _results_at(path: Path, *states: tuple[int, int]) -> dict[str, dict[str, Any]]:
    return read_results([path])


def results_beside(path: Path, name: str) -> dict[str, dict[str, Any]]:
    """Results of a checkpoint's other tables by key, from the files TABLE-NAME.jsonl beside `path`.

    A line that is no result is skipped: another process may be writing to the file. Raises `UserError` for a damaged
    packed file, to which nobody writes.
    """
    found: dict[str, dict[str, Any]] = {}
    for other in files_of_results(path.parent, f"*-{glob.escape(name)}"):
        for part in parts_of(other) if other != path else ():
            is_packed = part.suffix == PACKED
            lines = packed_lines(part) if is_packed else part.read_text("utf-8", errors="replace").split("\n")
            results = map(_result_in, lines)
            found |= {result["key"]: result for result in results if result is not None}
    return found


def result_error(result: Any) -> str:
    """Why a value is no result, or ""."""
    is_of_table = isinstance(result, dict) and ("phase" in result or "settings" in result)
    if where := error_of_result(result, **RESULT_KINDS, **(KINDS_OF_TRIAL if is_of_table else {})):
        return where
    if any(result.get(name, 0) < 0 for name in ("seconds", "wall_seconds", "peak_mb")):
        return "'seconds' or 'peak_mb' of the line, which is below 0"
    combined = result.get("combined", {}).values()
    wrong = (_wrong_judgement(each[split], split) for each in (result, *combined) for split in JUDGES if split in each)
    return next(filter(None, wrong), "")


def _wrong_judgement(judged: Mapping[str, Any], split: str) -> str:
    """Which entry about a split does not fit its predictions, or ""."""
    try:
        predictions, labels = (unpack(judged[name]) for name in ("predictions", "labels"))
    except (KeyError, ValueError, zlib.error):
        predictions, labels = [], [0]
    if len(predictions) != len(labels):
        return f"'labels' of {split!r} of the line"
    accuracy = sum(map(int.__eq__, predictions, labels)) / max(1, len(labels))
    is_right = abs(judged["accuracy"] - accuracy) <= ROUNDED
    return "" if is_right else f"'accuracy' of {split!r} of the line, which is {accuracy:.5f} by its predictions,"


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


def keep_probabilities(path: Path, result: Mapping[str, Any], found: Mapping[str, np.ndarray]) -> None:
    """Add a run's probabilities to the file of its panel beside the results, so that others can vote with them.

    path: the file of results. found: by split, n c, kept as float16 under the run's key and the split.
    Raises `UserError` if the file is damaged.
    """
    file = path.with_name(f"{path.stem}-{_panel_in_name(result)}.npz")
    kept = _kept_in(file) if file.is_file() else {}
    kept |= {f"{result['key']}-{split}": each.astype(np.float16) for split, each in found.items()}
    with atomic_write(file, "wb") as opened:
        np.savez_compressed(opened, **kept)


def probabilities_beside(path: Path, result: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    """The probabilities of a run, by split, that another table of the checkpoint `name` has kept, if it has.

    A notice if they cannot be read.
    """
    if result["method"] or result["phase"] != "final":
        return {}
    files = path.parent.glob(f"*-{glob.escape(f'{name}-{_panel_in_name(result)}')}.npz")
    try:
        kept = {key: each for file in files for key, each in _kept_in(file).items()}
    except UserError as error:
        warn(f"the probabilities of the run {result['key']} are not taken over: {error}")
        return {}
    return {split: kept[key] for split in JUDGES if (key := f"{result['key']}-{split}") in kept}


def _kept_in(file: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(file) as archive:
            return dict(archive)
    except (OSError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{file} is damaged: {str(error).splitlines()[0] if str(error) else 'it ends early'}"
        ) from error


def _panel_in_name(result: Mapping[str, Any]) -> str:
    return f"{result['data']}-{'all' if result['shots'] is None else result['shots']}"


# ---------------------------------------------------------------------------------------------------------- comparisons


def judges_of(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The splits that judge runs: dev and test, as far as they are there; without dev where it chose the epoch."""
    runs = [*runs]
    there = [split for split in JUDGES if any(split in run for run in runs)]
    has_chosen = any("epoch" in run and not entry_of(run, "settings").get("hold_out") for run in runs)
    return there[1:] if has_chosen and len(there) > 1 else there


def table_of(runs: Sequence[Mapping[str, Any]], splits: Sequence[str], figure: str = "accuracy") -> np.ndarray:
    """The table of runs on all sentences of these splits together, see `statistics`: S n. figure: accuracy or macro_f1.

    Raises `UserError` unless all runs were judged on sentences with the same labels.
    """
    predictions, labels = ([_joined(run, splits, name) for run in runs] for name in ("predictions", "labels"))
    if len({*map(len, labels + predictions)}) > 1:
        raise UserError(f"the result {runs[0]['key']} and others beside it are not of the same sentences")
    predictions, labels = np.array(predictions), np.array(labels)
    if (labels != labels[0]).any():
        raise UserError(f"the result {runs[0]['key']} and others beside it are of sentences with other labels")
    if figure == "accuracy":
        return (predictions == labels).astype(np.float64)
    return macro_f1_table(predictions, labels[0], 1 + max(int(labels.max()), int(predictions.max())))


def figure_of(runs: Sequence[Mapping[str, Any]], splits: Sequence[str], figure: str = "accuracy") -> Difference:
    """Mean accuracy or macro-F1 of runs, with its error."""
    return two_way(table_of(runs, splits, figure))._replace(has_few_seeds=has_few_seeds(runs))


def compare(ours: Runs, theirs: Runs, splits: Sequence[str], figure: str = "accuracy") -> Difference | None:
    """The difference of results by seed, over the seeds that both have; None if they share none.

    A run that has no seed, since nothing in it is drawn, is compared with every seed of the other side. Two runs that
    start from one checkpoint are compared only if it is of the same make.
    """
    if is_fixed(ours) != is_fixed(theirs):
        pairs = itertools.product(ours.values(), theirs.values())
    else:
        pairs = ((ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys()))
    pairs = [pair for pair in pairs if _are_of_one_make(*pair)]
    if not pairs:
        return None
    sides = [[*side] for side in zip(*pairs, strict=True)]
    tables = [table_of(side, splits, figure) for side in sides]
    if tables[0].shape != tables[1].shape:
        raise UserError(f"the results {sides[0][0]['key']} and {sides[1][0]['key']} are of other sentences")
    return two_way(tables[0] - tables[1])._replace(has_few_seeds=any(map(has_few_seeds, sides)))


def is_fixed(runs: Runs) -> bool:
    """Whether nothing in these runs is drawn: a single one, which does not depend on its seed."""
    return len(runs) == 1 and not any(map(is_drawn, runs.values()))


def is_drawn(run: Mapping[str, Any]) -> bool:
    """Whether a run depends on its seed: on training, on a draw of sentences, or on what it holds out."""
    shows = "in-context" in run.get("method", "") and not any(each.endswith("shots=0") for each in run["arguments"])
    has_draw = shows or "trainable" in run or run.get("shots") is not None
    return has_draw or (run.get("option") in SOLVED and bool(run.get("settings", {}).get("hold_out")))


def has_few_seeds(runs: Iterable[Mapping[str, Any]]) -> bool:
    """Whether what depends on its seed has fewer than three different results."""
    each = {run["key"]: run for run in runs}
    return any(map(is_drawn, each.values())) and len(each) < FEWEST_SEEDS


def fits(run: Mapping[str, Any]) -> bool:
    """Whether training has fitted its sentences: their loss is well below that of a guess, ln(classes)."""
    return "fit_loss" not in run or run["fit_loss"] <= FITTED * math.log(run["classes"])


def _are_of_one_make(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["model"] != other["model"] or one.get("weights") == other.get("weights")


def _joined(run: Mapping[str, Any], splits: Sequence[str], name: str) -> list[int]:
    return [label for split in splits for label in unpack(entry_of(run, split)[name])]
