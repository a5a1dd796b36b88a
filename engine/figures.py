"""Lines of figures, a JSON object each: of one run (`--log_dir`), and of many (`advanced.experiments`). No PyTorch.

What may stand in a line, and reading a file of them: a file that was edited or damaged is refused with its line.
"""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from engine.data import pack, unpack
from engine.json_text import lines_of, misfit, parse_json
from utils import UserError, warn

Record = dict[str, Any]  # one line
PACKED = ".xz"
NUMBER = (float, None)  # None: it was not measured, or not finite
OUTCOME_ERROR = {"sentence": str, "label": int, "prediction": int, "probability": float, "gold_probability": float}
KINDS_OF_RUN = {
    "run": {"identity": {}},
    "step": {"step": int, "epoch": int, "loss": NUMBER, "lr": (float, None, [NUMBER]), "gradient_norm": NUMBER,
             "rows_per_second": NUMBER, "positions_per_second?": NUMBER, "memory_mb": NUMBER},
    "epoch": {"epoch": int, "train_loss": NUMBER, "train_score": NUMBER, "dev_score": NUMBER, "seconds": NUMBER,
              "improved": bool, "is_finish?": bool},
    "judged": {"split": str, "label_names": [str], "count": int, "accuracy?": float, "majority?": float,
               "confusion?": [[int]], "errors?": [OUTCOME_ERROR]},
}  # fmt: skip
NOTHING = pack([])
SCORES = {"accuracy": float, "macro_f1": float, "predictions": str, "labels?": str}
SETTINGS = {"*": (str, float, bool, None)}
RESULT = {
    "key?": str, "row?": str, "option?": str, "method?": str, "data?": str, "phase?": str, "model?": str,
    "family?": str, "weights?": str, "shots?": (int, None), "seed?": int, "arguments?": [str], "settings?": SETTINGS,
    "dev?": SCORES, "test?": SCORES, "selection?": float, "epoch?": int, "epoch_scores?": [float],
    "train_losses?": [float], "trainable?": int, "train_sentences?": int, "seconds?": float,
    "wall_seconds?": float, "peak_mb?": float, "fit_loss?": float, "classes?": int, "draw?": int, "members?": int,
    "combined?": {"*": {"dev?": SCORES, "test?": SCORES}},
    "figures?": {"wise-ft?": {"alphas": [float], "scores": [float]}, "*": {}},
}  # fmt: skip


def error_of_run(record: Any) -> str:
    """Why a value is no line of the figures of a run; "" if it is one."""
    if where := misfit(record, {"kind": str}):
        return where
    if record["kind"] not in KINDS_OF_RUN:
        return "'kind' of the line"
    if where := misfit(record, KINDS_OF_RUN[record["kind"]]):
        return where
    classes, confusion = len(record.get("label_names", ())), record.get("confusion")
    if confusion is not None and [len(row) for row in confusion] != [classes] * classes:
        return "'confusion' of the line"
    labels = (error[name] for error in record.get("errors", ()) for name in ("label", "prediction"))
    return "" if all(0 <= label < classes for label in labels) else "'errors' of the line"


def key_of_run(record: Record) -> Hashable:
    """What only one line of a run may be about: a step, an epoch, a split."""
    return record["kind"], record.get("is_finish", False), *map(record.get, ("step", "epoch", "split"))


def error_of_result(result: Any, **needed: Any) -> str:
    """Why a value is no result of a run of experiments; "" if it is one. needed: the kinds of entries it must have."""
    named = {name.removesuffix("?") for name in needed}
    kinds = {name: kind for name, kind in RESULT.items() if name.removesuffix("?") not in named}
    if where := misfit(result, kinds | needed):
        return where
    if len(result.get("epoch_scores", ())) != len(result.get("train_losses", ())):
        return "'epoch_scores' of the line"
    sweep = result.get("figures", {}).get("wise-ft", {"alphas": (), "scores": ()})
    if len(sweep["alphas"]) != len(sweep["scores"]):
        return "'wise-ft' of the line"
    if "train_losses" in result and "epoch" not in result:
        return "'epoch' of the line"
    for split in ("dev", "test"):
        try:
            unpack(result[split]["predictions"] if split in result else NOTHING)
        except (ValueError, zlib.error):
            return f"'predictions' of {split!r} of the line"
    return ""


def entry_of(result: Mapping[str, Any], name: str) -> Any:
    """An entry that a run of this phase must have. Raises `UserError` if its line has been damaged."""
    if name not in result:
        raise UserError(f"the result {result['key']} has no {name!r}, as if its line had been damaged; remove it")
    return result[name]


def read_figures(
    path: str | os.PathLike, error_of: Callable[[Any], str], key_of: Callable[[Record], Hashable], what: str
) -> list[Record]:
    """The lines of a file, packed or not, without a last one that was cut, as after a kill.

    error_of: where a line is wrong, or "". key_of: what only one line may be about; of equal lines the first counts.
    Raises `UserError` for a line that is none of these, and for two lines about one thing that differ.
    what: the name of such a line, for the message.
    """
    found: dict[Hashable, tuple[int, Record]] = {}
    lines = packed_lines(path) if os.fspath(path).endswith(PACKED) else lines_of(path)
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line, is_line=True)
        except ValueError as error:
            if number < len(lines):
                raise UserError(f"{path} line {number} is not {what}: {error}") from None
            warn(f"{path}: the last line is cut, and left out")
            break
        if where := error_of(record):
            raise UserError(f"{path} line {number} is not {what}: {where} is missing or of a wrong kind")
        first, other = found.setdefault(key_of(record), (number, record))
        if other != record:
            raise UserError(f"{path} lines {first} and {number} are about the same and differ; remove one of them")
    return [record for _, record in found.values()]


def packed_lines(path: str | os.PathLike) -> list[str]:
    """The lines of a file that the program `xz` has packed. Raises `UserError` if it is damaged."""
    try:
        with lzma.open(path) as file:
            return file.read().decode().removesuffix("\n").split("\n")
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
