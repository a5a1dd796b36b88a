"""Figures of a training: a JSON line for each step and epoch, and TensorBoard's event files beside them.

`metrics.jsonl` begins with the identity of the run; then come its steps and epochs, and at the end its scores:

    {"kind": "run", "identity": {...}}
    {"kind": "step", "step": 0, "epoch": 0, "loss": 1.61, "lr": 2e-05, "gradient_norm": 2.3, "rows_per_second": ...}
    {"kind": "epoch", "epoch": 0, "train_loss": 1.4, "train_score": 0.5, "dev_score": 0.4, "seconds": 12.1, ...}
    {"kind": "judged", "split": "dev", "accuracy": 0.4, "confusion": [[...]], "errors": [...]}

NaN and infinity become null (train_score, if it is not measured). PyTorch is imported for TensorBoard only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from engine.figures import Record, error_of_run, key_of_run, read_figures
from engine.programs import peak_memory
from utils import UserError, atomic_write

if TYPE_CHECKING:
    import torch

    from engine.methods import EpochResult
    from engine.training import StepMeasurement

FILE = "metrics.jsonl"
CHARTS = {"loss": "train/loss", "lr": "train/lr", "gradient_norm": "train/gradient_norm",
          "rows_per_second": "pace/rows_per_second", "memory_mb": "pace/memory_mb"}  # fmt: skip
SCORES = {"train_score": "score/train", "dev_score": "score/dev"}


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
            for name, chart in CHARTS.items():
                value = record[name]
                self.events.add_scalar(chart, max(value) if isinstance(value, list) else value, measurement.number)

    def epoch(self, result: EpochResult) -> None:
        if not self.is_first:
            return
        self._keep(_of_epoch(result))
        if self.events is not None:
            for name, chart in SCORES.items():
                self.events.add_scalar(chart, getattr(result, name), result.epoch)
            self.events.flush()

    def judged(self, outcome: Mapping[str, Any]) -> None:
        """Record the final scores on one data set. outcome: see `engine.outcome`."""
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
