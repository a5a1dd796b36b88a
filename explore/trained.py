"""A run from its `--log_dir`, or many runs from the results of `advanced.experiments`, as plain values for the page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.data import create_data, read_label_names, unpack
from engine.metrics import SETTINGS, Record, entry_of, error_of_result, read_figures
from utils import UserError, find_asset

POINTS = 1500  # of a curve; a longer run is thinned
HARD_SENTENCES = 30
STEP_CURVES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "gradient_norm": "Gradient norm",
    "rows_per_second": "Rows of batches a second",
    "memory_mb": "Memory at most, MB",
}
SHOWN_SETTINGS = (
    "epochs", "lr", "batch_size", "seed", "hidden_dropout_prob", "attention", "precision", "methods", "shots",
)  # fmt: skip

SHOWN_OF_RESULT = {
    "row": str, "data": str, "seed": int, "shots": (int, None), "settings": SETTINGS, "method": str, "arguments": [str],
}  # fmt: skip


def page_of_log(records: Sequence[Record], name: str) -> dict[str, Any]:
    """records: see `engine.metrics`."""
    identity = records[0]["identity"]
    steps, epochs, judged = ([each for each in records if each["kind"] == kind] for kind in ("step", "epoch", "judged"))
    thinned = thin(steps)
    numbers = [each["step"] for each in thinned]
    curves = [
        {"key": key, "title": title, "x": numbers, "y": [_highest(each[key]) for each in thinned]}
        for key, title in STEP_CURVES.items()
        if steps
    ]
    run = {
        "name": Path(name).name,
        "settings": {key: value for key in SHOWN_SETTINGS if (value := identity.get(key)) not in (None, {}, [])},
        "steps": len(steps),
        "chosen_on": chosen_on(identity),
        "curves": curves,
        "epochs": [_without_kind(each) for each in epochs],
        "judged": [_without_kind(each) for each in judged],
    }
    return {"run": {"name": run["name"], "runs": [run]}}


def _without_kind(record: Record) -> Record:
    return {key: value for key, value in record.items() if key != "kind"}


def chosen_on(settings: Mapping[str, Any]) -> str:
    """The data that the score of an epoch is measured on."""
    return "held-out sentences" if settings.get("hold_out") else "dev"


def _highest(value: float | list[float] | None) -> float | None:
    """The highest of several rates; each group of parameters has one."""
    return max((rate for rate in value if rate is not None), default=None) if isinstance(value, list) else value


def thin(records: Sequence[Record], most: int = POINTS) -> list[Record]:
    """At most `most` records at even distances, with the last one."""
    every = -(-len(records) // most) or 1
    return [*records[::-1][::every]][::-1]


# ---------------------------------------------------------------------------- results of advanced.experiments


def page_of_results(results: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """results: a run each; those without a score on dev are left out. Raises `UserError` if none is left."""
    final = [result for result in results if "dev" in result]
    if not final:
        raise UserError(f"{name} has no run that was judged on dev")
    return {"run": {"name": name, "runs": [page_of_result(each) for each in final], "hard": hard_sentences(final)}}


def page_of_result(result: Mapping[str, Any]) -> dict[str, Any]:
    size = "all" if result["shots"] is None else f"{result['shots']} a class"
    settings = {key: value for key, value in entry_of(result, "settings").items() if value is not None}
    losses, scores = result.get("train_losses", []), result.get("epoch_scores", [])
    finish = settings.get("epochs")  # the place after the last epoch: what a method made of the model then
    epochs = [
        {"epoch": number, "train_loss": loss, "dev_score": score, "is_best": number == result["epoch"],
         "is_finish": number == finish}
        for number, (loss, score) in enumerate(zip(losses, scores, strict=True))
    ]  # fmt: skip
    return {
        "name": f"{result['row']}, {result['data']} ({size}), seed {result['seed']}",
        "settings": settings | {name: result[name] for name in ("method", "arguments") if result[name]},
        "steps": 0,
        "chosen_on": chosen_on(settings),
        "curves": [],
        "epochs": epochs,
        "judged": [_judged(result, split) for split in ("dev", "test") if split in result],
    }


def _judged(result: Mapping[str, Any], split: str) -> dict[str, Any]:
    from engine.tasks import confusion

    judged = {"split": split, **{key: result[split][key] for key in ("accuracy", "macro_f1")}}
    data = read_split(result["data"], split)
    if data is None:
        return judged
    (labels, _), names, predictions = data, names_of(result["data"]), unpack(result[split]["predictions"])
    if names is None or not _are_of(predictions, labels, names):
        return judged
    majority = max(Counter(labels).values()) / len(labels)
    more = {"confusion": confusion(labels, predictions, len(names)), "label_names": names, "majority": majority}
    return judged | more | {"count": len(labels)}


def _are_of(predictions: Sequence[int], labels: Sequence[int], names: Sequence[str]) -> bool:
    """Whether predictions can be of these sentences; if not, the data file is not the one of the run."""
    return len(predictions) == len(labels) and max(predictions, default=0) < len(names)


def read_split(data: str, split: str) -> tuple[list[int], list[str]] | None:
    """The labels and sentences of a data set; None: its file is not here."""
    path = find_asset(f"data/{data}-{split}.txt")
    if path is None:
        return None
    examples = create_data(path, is_test=split == "test")
    return [example.label for example in examples], [example.sentence for example in examples]


def names_of(data: str) -> list[str] | None:
    path = find_asset(f"data/{data}-label-mapping.json")
    return None if path is None else read_label_names(path)


def hard_sentences(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sentences of dev with the largest share of wrong runs; results hold no probabilities."""
    found: list[dict[str, Any]] = []
    for data in dict.fromkeys(result["data"] for result in results):
        split, names = read_split(data, "dev"), names_of(data)
        if split is None or names is None:
            continue
        labels, sentences = split
        runs = [unpack(result["dev"]["predictions"]) for result in results if result["data"] == data]
        runs = [run for run in runs if _are_of(run, labels, names)]
        for place, label in enumerate(labels):
            predicted = Counter(run[place] for run in runs)
            wrong = len(runs) - predicted[label]
            if wrong:
                often = max((count, -each) for each, count in predicted.items() if each != label)[1]
                found.append({
                    "data": data, "sentence": sentences[place], "label": names[label],
                    "prediction": names[-often], "wrong": wrong, "runs": len(runs),
                })  # fmt: skip
    return sorted(found, key=lambda each: -each["wrong"] / each["runs"])[:HARD_SENTENCES]


def read_results_file(path: str) -> list[dict[str, Any]]:
    """Raises `UserError` if the file does not hold results."""
    results = read_figures(path, lambda each: error_of_result(each, **SHOWN_OF_RESULT), _run_of, "a result")
    if not results:
        raise UserError(f"{path} is not a file of results of advanced.experiments")
    return results


def _run_of(result: Mapping[str, Any]) -> str:
    """What only one line may be about: its key; without one, all that says which run it is of."""
    return result.get("key") or json.dumps([result[name] for name in SHOWN_OF_RESULT], sort_keys=True)
