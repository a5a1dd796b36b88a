"""The two files that a run saves: its best model, which needs no other file, and a resume point to continue from."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.methods import BegunEpoch, EpochResult, Method, random_state, set_random_state
from engine.processes import SINGLE_PROCESS, Distributed
from engine.storage import NameLock, load_tensors, save_tensors
from utils import UserError, join_names

KINDS = {"model": "fine-tuned classifier", "resume": "resume point"}  # the entry "kind" of these files


class BadResumePoint(UserError):
    """A resume point is damaged, or the file is not a resume point."""


class OtherRun(UserError):
    """A resume point belongs to another run. differing: the names of the identity's entries that are not equal."""

    def __init__(self, message: str, differing: list[str]):
        super().__init__(message)
        self.differing = differing


@dataclass
class Checkpointer:
    """Saves the best model and the resume point of a run, and loads the resume point.

    model_path: file of the best epoch's model. resume_path: file from which a run can continue after its last finished
    epoch. record: plain values and tensors to save beside the weights. identity: plain values that must be equal in a
    resume point, for example the seed and the data. epochs: of the run; None: unknown.
    seconds: also save a resume point within an epoch, this long after the last one at `saved_at` (`time.monotonic`).
    apart: leave out that of an epoch which ends sooner than so many seconds after the last one; never that of the end.
    begun: the epoch that the last resume point, saved or loaded, is in the middle of; None: in none.
    saves_model: False: save resume points only; nothing is written to `model_path`.
    """

    model_path: Path
    resume_path: Path
    record: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    epochs: int | None = None
    methods: Sequence[Method] = ()
    distributed: Distributed = SINGLE_PROCESS
    seconds: float = math.inf
    apart: float = 0.0
    begun: BegunEpoch | None = None
    saved_at: float = field(default_factory=time.monotonic)
    saves_model: bool = True

    def is_due(self) -> bool:
        """Whether it is time for a resume point within an epoch. All processes get the answer of the first one."""
        if self.seconds == math.inf:
            return False
        return self.distributed.from_first(lambda: time.monotonic() - self.saved_at >= self.seconds)

    def is_too_soon(self, history: list[EpochResult]) -> bool:
        """Whether the resume point of an epoch that has ended is left out."""
        if self.apart == 0.0 or len(history) == self.epochs:
            return False
        return self.distributed.from_first(lambda: time.monotonic() - self.saved_at < self.apart)

    def save_model(self, model: nn.Module, result: EpochResult) -> None:
        """Save the plain model's weights, and the tensors that methods could not merge into them (`Method.export`)."""
        if not self.saves_model:
            return
        state = self.distributed.model_state(model)
        if not self.distributed.is_first:
            return
        own, kept = {}, {}
        for method in reversed(self.methods):
            if tensors := method.kept(state):
                kept[method.name] = {"settings": method.settings, "tensors": tensors}
            state, tensors = method.export(state)
            if tensors or method.is_needed:
                own[method.name] = {"settings": method.settings, "tensors": tensors}
        about = {"identity": self.identity, "epoch": result.epoch, "dev_score": result.dev_score}
        content = {"kind": KINDS["model"], "model": state, "methods": own, **self.record, **about}
        if kept:
            content["kept"] = kept
        if figures := {method.name: found for method in self.methods if (found := method.figures())}:
            content["figures"] = figures
        save_tensors(self.model_path, content)

    def save_resume_point(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        history: list[EpochResult],
        begun: BegunEpoch | None = None,
    ) -> None:
        point = {
            "kind": KINDS["resume"],
            "identity": self.identity,
            "history": [asdict(result) for result in history],
            "model": self.distributed.model_state(model),
            "optimizer": self.distributed.whole(optimizer.state_dict()),
            "methods": {method.name: self.distributed.whole(method.state()) for method in self.methods},
            "rng": random_state(),
            "begun": None if begun is None else asdict(begun),
        }
        if self.distributed.is_first:
            save_tensors(self.resume_path, point)
        self.begun, self.saved_at = begun, time.monotonic()

    def load_resume_point(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[EpochResult]:
        """Restore model, optimizer, methods and random generators; return the results of the finished epochs.

        Raises `BadResumePoint` if the file is damaged, `OtherRun` if it belongs to another run, and `UserError` if the
        saved best model is absent or of another run.
        """
        point = self.distributed.from_first(self._read_resume_point)
        try:
            self.begun = _checked_begun(point.get("begun"))
            history = [] if self.begun and not point["history"] else checked_history(point["history"], self.epochs)
            load_model(model, point["model"], self.distributed)
            _load_optimizer(optimizer, point["optimizer"], self.distributed)
            if point["methods"].keys() != {method.name for method in self.methods}:
                raise ValueError("other methods")
            for method in self.methods:
                method.load_state(point["methods"][method.name], self.distributed.piece)
            set_random_state(point["rng"])
        except Exception:  # a damaged file makes these functions raise errors of many classes
            raise BadResumePoint(f"{self.resume_path} is damaged; remove it") from None
        if self.saves_model and history:
            self.distributed.from_first(lambda: self._check_best_model(best_of(history).epoch))
        return history

    def _read_resume_point(self) -> dict[str, Any]:
        try:
            point = load_tensors(self.resume_path, mmap=False)  # the optimizer keeps these tensors
        except UserError as error:
            raise BadResumePoint(f"{error}; remove it") from None
        if not isinstance(point, dict) or not isinstance(point.get("identity"), dict):
            raise BadResumePoint(f"{self.resume_path} is not a resume point; remove it")
        if differing := differences(self.identity, point["identity"]):
            raise OtherRun(f"{self.resume_path} belongs to a run with another {join_names(differing)}", differing)
        return point

    def _check_best_model(self, best_epoch: int) -> None:
        """Raise `UserError` unless the saved model is of this run, and of its best epoch so far or a later epoch.

        Why later: a run may stop after it saved its model and before it saved its resume point; it repeats that epoch.
        """
        try:
            identity, epoch = self.saved_as()
            fits = identity == self.identity and epoch >= best_epoch
        except UserError as error:
            raise UserError(f"{error}; without it nobody can go on from {self.resume_path}") from None
        except Exception:  # a foreign file may hold any values under these names
            fits = False
        if not fits:
            raise UserError(f"{self.model_path} is not of the run that {self.resume_path} belongs to; start anew")

    def saved_as(self) -> tuple[dict[str, Any], int]:
        """The identity and the epoch of the saved model. Raises an error of any class for a foreign file."""
        saved = load_tensors(self.model_path)
        return saved["identity"], saved["epoch"]


def differences(identity: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of the entries in which two identities differ. `other` may be damaged, or of an older version."""
    return [
        str(key)
        for key in identity | other
        if key not in identity
        or key not in other
        or not isinstance(other[key], type(identity[key]))
        or other[key] != identity[key]
    ]


def identity_of(path: Path) -> dict[str, Any]:
    """The identity of the run that saved a model or resume point; empty if the file is damaged or is neither."""
    try:
        saved = load_tensors(path, warns=False)
    except UserError:
        return {}
    identity = saved.get("identity") if isinstance(saved, dict) else None
    return identity if isinstance(identity, dict) else {}


def choose_model_path(
    candidates: Sequence[Path], identity: dict[str, Any], is_resumed: bool, held: ExitStack
) -> tuple[Path, list[str]]:
    """The first candidate that no other run is using and that is not a model of other training data.

    (This run would overwrite such a model.) is_resumed: take the name whose resume point is of this run, if there is
    one. held: will release the lock on the name. Returns the name, and for each earlier candidate the reason why it was
    not taken. Raises `UserError` if no candidate is free.
    """
    own = [path for path in candidates if is_resumed and identity_of(path.with_suffix(".resume")) == identity]
    reasons = []
    for candidate in own or candidates:
        lock = NameLock(candidate.with_suffix(".lock"))
        if not lock.acquire():
            reasons.append(f"{candidate} is in use by another process")
            continue
        is_ours = bool(own) or identity_of(candidate).get("train") == identity["train"]
        if is_ours or not candidate.exists():
            held.callback(lock.release)
            return candidate, reasons
        lock.release()
        reasons.append(f"{candidate} belongs to something else and is kept")
    raise UserError(f"{'; '.join(reasons)}; name another file, or run in another folder")


def other_resume_points(pattern: str, identity: dict[str, Any]) -> list[tuple[Path, list[str]]]:
    """The resume points of other runs in this folder, each with the names of the entries in which its run differs."""
    found = [(path, identity_of(path)) for path in sorted(Path().glob(f"{pattern}.resume"))]
    return [(path, differences(identity, other)) for path, other in found if other]


def best_of(history: list[EpochResult]) -> EpochResult:
    """The result of the epoch whose model is saved."""
    return [result for result in history if result.improved][-1]


def checked_history(entries: list[dict[str, Any]], epochs: int | None) -> list[EpochResult]:
    """The results of epochs 0, 1, ... Raises an error of any class if no run can have written these entries."""
    history: list[EpochResult] = []
    numbers = dict.fromkeys(("train_loss", "train_score", "dev_score", "seconds"), float)
    types = {"epoch": int, **numbers, "improved": bool, "is_finish": bool}
    for number, entry in enumerate(entries):
        if {name: type(value) for name, value in entry.items()} != types or entry["epoch"] != number:
            raise ValueError("not an epoch's result")
        if not entry["dev_score"] <= 1.0 or not math.isfinite(entry["train_loss"]):
            raise ValueError("not an epoch's figures")
        if entry["improved"] != all(entry["dev_score"] > earlier.dev_score for earlier in history):
            raise ValueError("not the best epoch")
        if history and history[-1].is_finish:
            raise ValueError("an epoch after the last one")
        history.append(EpochResult(**entry))
    trained = [result for result in history if not result.is_finish]
    if not trained or (epochs is not None and len(trained) > epochs):
        raise ValueError("not so many epochs")
    return history


def _checked_begun(entry: dict[str, Any] | None) -> BegunEpoch | None:
    """Raises an error of any class if no run can have written this entry."""
    if entry is None:
        return None
    begun = BegunEpoch(**entry)
    if type(begun.steps) is not int or begun.steps < 1 or not math.isfinite(begun.loss) or not begun.seconds >= 0.0:
        raise ValueError("not a part of an epoch")
    now = random_state()
    set_random_state(begun.random)  # an error, if it is no state
    set_random_state(now)
    return begun


def load_model(model: nn.Module, state: dict[str, Any], distributed: Distributed = SINGLE_PROCESS) -> None:
    """Load a whole model's state dict into this process's part of it. Raises an error if names or shapes differ."""
    own = model.state_dict()
    if not isinstance(state, dict) or state.keys() != own.keys():
        raise ValueError("other tensors")
    model.load_state_dict({name: distributed.piece(tensor, own[name]) for name, tensor in state.items()})


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], distributed: Distributed) -> None:
    """Load an optimizer's state. Raises `ValueError` for other settings, and for values that cannot be its state."""

    def settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of each group; an option that is None is one that an older version does not have."""
        return [{k: value for k, value in group.items() if k != "params" and value is not None} for group in groups]

    if not isinstance(state, dict) or settings(state["param_groups"]) != settings(optimizer.param_groups):
        raise ValueError("other settings")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    dtypes = {parameter.dtype for parameter in parameters}
    saved = [value for values in state["state"].values() for value in values.values()]
    if any(isinstance(value, torch.Tensor) and value.dtype not in dtypes for value in saved):
        raise ValueError("other number formats")  # loading would round them
    pieces = {
        index: {
            name: distributed.piece(value, parameters[index]) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": pieces})
    for parameter, values in optimizer.state.items():
        for value in values.values():
            is_moment = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if not is_moment and not (isinstance(value, int) and value >= 1):
                raise ValueError("another parameter's state")
