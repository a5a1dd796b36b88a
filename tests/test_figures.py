"""Files of figures: every text survives them, and a damaged one is refused in one line that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from damage import damaged

from advanced.experiments.results import append_result, read_results
from engine.data import misfit, pack, parse_json
from engine.metrics import FILE, MetricsLog, read_records
from explore.page import write_page
from explore.trained import page_of_log, page_of_results, read_results_file
from utils import UserError

JUDGED = {"accuracy": 0.5, "macro_f1": 0.33, "predictions": pack([0, 1, 1, 0]), "labels": pack([0, 1, 0, 1])}
RESULT = {
    "key": "0", "family": "llama", "model": "base", "checksums": ["1", "2"], "weights": "1", "row": "plain",
    "option": "finetune", "method": "", "data": "films", "shots": None, "seed": 1, "phase": "final", "arguments": [],
    "settings": {"attention": "causal", "batch_size": 4, "precision": "fp32", "lr": 0.01, "hold_out": 0.1},
    "selection": 0.5, "epoch": 1, "epoch_scores": [0.4, 0.5], "train_losses": [1.2, 0.9], "trainable": 100,
    "train_sentences": 40, "seconds": 2.5, "figures": {}, "fit_loss": 0.5, "classes": 2, "draw": 0, "members": 1,
    "date": "2026-01-02", "machine": "a machine", "processor": "a processor", "torch": "2", "kernels": "plain",
    "commit": "0123456789ab", "threads": 1, "wall_seconds": 3.0, "peak_mb": 100, "dev": JUDGED, "test": JUDGED,
}  # fmt: skip
ENDS = "one\u0085two\u2028three\u2029four\x1c\x0cfive"  # what `str.splitlines` takes for ends of lines
RUN = (
    {"kind": "run", "identity": {"lr": 0.1, "methods": {"lora": {"rank": 2}}}},
    {"kind": "step", "step": 0, "epoch": 0, "loss": 1.6, "lr": 2e-5, "gradient_norm": None, "rows_per_second": 3.5,
     "positions_per_second": 30.0, "memory_mb": 300},
    {"kind": "step", "step": 1, "epoch": 0, "loss": 1.6, "lr": [1e-3, 2e-3], "gradient_norm": 0.5,
     "rows_per_second": 3.5, "positions_per_second": 30.0, "memory_mb": 300},
    {"kind": "epoch", "epoch": 0, "train_loss": 1.6, "train_score": None, "dev_score": 0.5, "seconds": 1.0,
     "improved": True, "is_finish": False},
    {"kind": "judged", "split": "dev", "label_names": ["bad", "good"], "count": 4, "accuracy": 0.5, "majority": 0.5,
     "confusion": [[1, 1], [1, 1]], "errors": [{"index": 0, "sentence": ENDS, "label": 0, "prediction": 1,
                                                "probability": 0.9, "gold_probability": 0.1}]},
)  # fmt: skip


def lines_of_run() -> list[str]:
    return [json.dumps(record, ensure_ascii=False) for record in RUN]


def test_no_character_of_a_text_ends_a_line(tmp_path: Path):
    (tmp_path / FILE).write_text("".join(f"{line}\n" for line in lines_of_run()), encoding="utf-8")
    assert read_records(tmp_path) == [*RUN]
    result = RESULT | {"row": ENDS}
    for name in ("own-base.jsonl", "other-base.jsonl"):
        (tmp_path / name).write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_results_file(str(tmp_path / "own-base.jsonl")) == [result]
    assert read_results([tmp_path / "own-base.jsonl"]) == {result["key"]: result}


def test_a_damaged_run_is_refused_in_one_line(tmp_path: Path):
    refused = 0
    for number, text in enumerate(damaged(lines_of_run(), 200)):
        (tmp_path / FILE).write_text(text, encoding="utf-8")
        try:
            write_page(str(tmp_path / "p.html"), page_of_log(read_records(tmp_path), "log"))
            MetricsLog(tmp_path, RUN[0]["identity"], torch.device("cpu")).close()
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and FILE in str(error), number
    assert refused > 100


def test_damaged_results_are_refused_in_one_line(tmp_path: Path):
    lines, refused = [json.dumps(RESULT | {"key": str(seed), "seed": seed}) for seed in range(6)], 0
    path = tmp_path / "r.jsonl"
    keyed = json.dumps(json.loads(lines[0]) | {"key": [1]})  # no value of a dictionary's key
    for number, text in enumerate([keyed + "\n", *damaged(lines, 200)]):
        path.write_text(text, encoding="utf-8")
        try:
            write_page(str(tmp_path / "p.html"), page_of_results(read_results_file(str(path)), "results"))
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and "r.jsonl" in str(error), number
    assert refused > 100


def test_two_lines_of_one_run_that_differ_are_named(tmp_path: Path):
    path, about = tmp_path / "r.jsonl", {"model": "m", "checksums": ["1", "2"]}
    for key, seconds in (("a", 1.0), ("b", 1.0), ("a", 1.0)):
        append_result(path, {"key": key, "seconds": seconds, **about})
    assert len(read_results([path])) == 2  # two equal lines are one
    append_result(path, {"key": "b", "seconds": 2.0, **about})
    with pytest.raises(UserError, match="r.jsonl lines 2 and 4 are about the same and differ"):
        read_results([path])


@pytest.mark.parametrize(("text", "words"), [
    (r'{"a": "\ud83d"}', r"\\ud83d is half a character \(a lone surrogate\) \(line 1, column 8\)"),
    (r'{"a": "\uDC00"}', "half a character"),
    ('[1,\n"\\\\\\ud800x"]', r"line 2, column 4"),
    (r'{"a": "\ud83d\u0041"}', "half a character"),
    ('{"a": 1, "b": 2, "a": 3}', "two entries of one object are called 'a'"),
    ("[" * 100_000, "nested too deeply"),
    ("{", r"Expecting property name .*\(line 1, column 2\)"),
])  # fmt: skip
def test_what_is_no_json_for_us(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        parse_json(text)


@pytest.mark.parametrize("text", [r'"\ud83d\ude00"', r'"\\ud83d"', r'"\uD83D\uDE00 \\\\uD800"', '"\U0001f600"'])
def test_whole_characters_are_json(text: str):
    assert parse_json(text) == json.loads(text)


def test_a_value_of_a_wrong_kind_is_named():
    kind = {"a": int, "b?": [float], "c?": (str, None), "*": bool}
    for value in ({"a": 1}, {"a": 0, "b": [1, 0.5], "c": None, "d": True}):
        assert misfit(value, kind) == ""
    for value, where in (
        ({}, "'a' of the line"), ({"a": True}, "'a' of the line"), ([], "the line"), ({"a": 1, "d": 1}, "'d' of the"),
        ({"a": 1, "b": [float("nan")]}, "an item of 'b' of the line"), ({"a": 10**400}, "'a'"),
        ({"a": 1, "c": 1}, "'c'"),
    ):  # fmt: skip
        assert where in misfit(value, kind)
