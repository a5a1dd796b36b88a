"""Figures of a training, a JSON object a line: what may stand there, who measures it, where it is written. No PyTorch.

In: what `training.Trainer` tells a `TrainingCallback` of its steps and epochs. Out: `metrics.jsonl`, which begins
with the identity of the run; then come its steps and epochs, and at the end its scores:

    {"kind": "run", "identity": {...}}
    {"kind": "step", "step": 0, "epoch": 0, "loss": 1.61, "lr": 2e-05, "gradient_norm": 2.3, "rows_per_second": ...}
    {"kind": "epoch", "epoch": 0, "train_loss": 1.4, "train_score": 0.5, "dev_score": 0.4, "seconds": 12.1, ...}
    {"kind": "judged", "split": "dev", "accuracy": 0.4, "confusion": [[...]], "errors": [...]}

NaN and infinity become null (train_score, if it is not measured). TensorBoard's event files may stand beside them;
for these alone PyTorch is imported. The results of many runs (`advanced.experiments`) are lines of the same kind; a
file that was edited or damaged is refused with its line.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from engine.data import lines_of, misfit, pack, parse_json, unpack
from engine.programs import peak_memory
from utils import UserError, atomic_write, warn

if TYPE_CHECKING:
    import torch

    from engine.methods import EpochResult


Record = dict[str, Any]  # one line
PACKED = ".xz"
MOST_UNPACKED = 1 << 28  # bytes
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
            raise UserError(f"{path} line {number} is not {what}: {where} is missing or wrong")
        first, other = found.setdefault(key_of(record), (number, record))
        if other != record:
            raise UserError(f"{path} lines {first} and {number} are about the same and differ; remove one of them")
    return [record for _, record in found.values()]


def packed_lines(path: str | os.PathLike) -> list[str]:
    """The lines of a file that the program `xz` has packed. Raises `UserError` if it is damaged."""
    try:
        with lzma.open(path) as file:
            text = file.read(MOST_UNPACKED + 1)
        if len(text) > MOST_UNPACKED:
            raise UserError(f"{path} holds more than {MOST_UNPACKED >> 20} MiB of lines")
        return text.decode().removesuffix("\n").split("\n")
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


# -------------------------------------------------------------------------- whom training tells of its steps and epochs


class StepMeasurement(NamedTuple):
    """The figures of one step of training.

    number: counts the steps of the whole run from 0. loss: of the whole batch, with the methods' penalties. rates: the
    learning rate of each group of parameters. gradient_norm: of all gradients together, before clipping. rows,
    positions: of the batch, with padding. seconds: since the previous step, or since the start of the epoch.
    """

    number: int
    epoch: int
    loss: float
    rates: list[float]
    gradient_norm: float
    rows: int
    positions: int
    seconds: float


class TrainingCallback:
    """`Trainer` calls it after each step and epoch; it changes nothing. Each of several processes calls its own."""

    def step(self, measurement: StepMeasurement) -> None:
        """After each optimizer step."""

    def epoch(self, result: EpochResult) -> None:
        """After the model and the resume point of an epoch are saved."""


# ----------------------------------------------------------------------------------------------- the figures of one run

FILE = "metrics.jsonl"
STEP_CHARTS = {"loss": "train/loss", "lr": "train/lr", "gradient_norm": "train/gradient_norm",
               "rows_per_second": "pace/rows_per_second", "memory_mb": "pace/memory_mb"}  # fmt: skip
EPOCH_CHARTS = {"train_score": "score/train", "dev_score": "score/dev"}


def check_folder(folder: str | os.PathLike, is_resumed: bool) -> None:
    """Raise `UserError` unless the figures of a run can be written to this folder without overwriting others."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--log_dir {folder} is a file; name a folder")
    if not folder.exists() and not folder.parent.is_dir():
        raise UserError(f"--log_dir {folder}: the folder {folder.parent} does not exist; create it first")
    if not os.access(folder if folder.exists() else folder.parent, os.W_OK):
        raise UserError(f"--log_dir {folder}: nothing can be written there")
    if (folder / FILE).exists() and not is_resumed:
        raise UserError(f"--log_dir: {folder / FILE} is of an earlier run; name another folder, or add --resume")


class MetricsLog:
    """A `training.TrainingCallback` that records the figures of steps and epochs; only the first process does so.

    folder: for the file of figures; None: the figures stay in `records`. history: the finished epochs of a resumed run,
    and begun: how many steps of the next one are done; the folder has their figures. Raises `UserError` if the folder
    has figures of another run.
    """

    def __init__(
        self,
        folder: str | os.PathLike | None,
        identity: Mapping[str, Any],
        device: torch.device,
        history: Iterable[EpochResult] = (),
        is_first: bool = True,
        begun: int = 0,
    ):
        self.folder = None if folder is None else Path(folder)
        self.device, self.is_first = device, is_first
        self.records: list[Record] = []
        self.file: IO[str] | None = None
        self.events: Any = None
        if not is_first:
            return
        run = _plain({"kind": "run", "identity": identity})
        earlier, history = [], list(history)
        if self.folder is not None and (self.folder / FILE).exists():
            earlier = read_records(self.folder)
            _check_same_run(self.folder / FILE, run, earlier)
        kept = [run, *_finished(earlier, history, begun)]
        if self.folder is None:
            self.records = kept
            return
        self.folder.mkdir(exist_ok=True)
        with atomic_write(self.folder / FILE) as file:
            file.writelines(map(_line, kept))
        self.file = open(self.folder / FILE, "a", encoding="utf-8", newline="\n")
        if has_tensorboard():
            from torch.utils.tensorboard import SummaryWriter

            done = sum(record["kind"] == "step" for record in kept)
            self.events = SummaryWriter(str(self.folder), purge_step=done)  # hides steps that are computed again

    def step(self, measurement: StepMeasurement) -> None:
        if not self.is_first:
            return
        rates = measurement.rates
        record = {
            "kind": "step",
            "step": measurement.number,
            "epoch": measurement.epoch,
            "loss": measurement.loss,
            "lr": rates[0] if len(set(rates)) == 1 else rates,
            "gradient_norm": measurement.gradient_norm,
            "rows_per_second": round(measurement.rows / measurement.seconds, 2),
            "positions_per_second": round(measurement.positions / measurement.seconds, 1),
            "memory_mb": peak_memory(self.device),
        }
        self._keep(record)
        if self.events is not None:
            for name, chart in STEP_CHARTS.items():
                value = record[name]
                self.events.add_scalar(chart, max(value) if isinstance(value, list) else value, measurement.number)

    def epoch(self, result: EpochResult) -> None:
        if not self.is_first:
            return
        self._keep(_of_epoch(result))
        if self.events is not None:
            for name, chart in EPOCH_CHARTS.items():
                self.events.add_scalar(chart, getattr(result, name), result.epoch)
            self.events.flush()

    def judged(self, outcome: Mapping[str, Any]) -> None:
        """Record the final scores on one data set. outcome: see `engine.tasks`."""
        if self.is_first:
            self._keep({"kind": "judged", **outcome})

    def close(self) -> None:
        for each in (self.file, self.events):
            if each is not None:
                each.close()

    def all_records(self) -> list[Record]:
        """All figures of the run so far."""
        return self.records if self.folder is None else read_records(self.folder)

    def _keep(self, record: Record) -> None:
        if self.file is None:
            self.records.append(_plain(record))
            return
        self.file.write(_line(record))
        self.file.flush()  # a killed run leaves all its lines, and other programs can read them meanwhile


def has_tensorboard() -> bool:
    return find_spec("tensorboard") is not None


def read_records(folder: str | os.PathLike) -> list[Record]:
    """The figures in a folder, without a last line that was cut when the run was killed. Raises `UserError`."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no {FILE}, so it is not the --log_dir of a run")
    records = read_figures(path, error_of_run, key_of_run, "a line of figures")
    if not records or records[0]["kind"] != "run":
        raise UserError(f"{path} does not begin with the line of a run")
    return records


def _check_same_run(path: Path, run: Record, earlier: list[Record]) -> None:
    if earlier[0] != run:
        raise UserError(f"{path} is of a run with other data or settings; name another --log_dir")
    if earlier[-1]["kind"] == "judged":
        raise UserError(f"{path} is of a run that has ended; name another --log_dir")


def _finished(earlier: list[Record], history: list[EpochResult], begun: int) -> Iterator[Record]:
    """The figures of what is done: of each finished epoch, and of the first steps of the next one.

    A resumed run computes later steps again.
    """

    def steps_of(epoch: int) -> list[Record]:
        return [each for each in earlier if each["kind"] == "step" and each["epoch"] == epoch]

    for result in history:
        yield from steps_of(result.epoch)
        yield _plain(_of_epoch(result))
    yield from steps_of(len(history))[:begun]


def _of_epoch(result: EpochResult) -> Record:
    return {"kind": "epoch", **asdict(result)}


def _line(record: Record) -> str:
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """A value as it is after JSON: a tuple becomes a list, a number that is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
