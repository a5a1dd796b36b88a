"""A run on text files: the lock on its name, training in rounds of about `--every` steps with `Trainer`, resuming."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from engine.checkpointer import Checkpointer, OtherRun
from engine.families import create_methods
from engine.locks import NameLock
from engine.methods import EpochResult, Method
from engine.plan import InputFile
from engine.processes import device_of
from engine.programs import check_new
from engine.runs import update_fast
from engine.tasks import Task
from engine.text.flags import Outputs, columns_of
from engine.text.windows import hold_out, read_documents
from engine.training import Trainer
from optimizer import AdamW
from utils import UserError

PACE = ("epochs", "lr", "warmup", "batch_size", "length", "weight_decay", "clip", "held_out", "every", "seed")


def read_texts(args: Namespace) -> tuple[list[str], list[str]]:
    """The documents to train on, and the held-out documents; a share of each text is held out."""
    train, held = [], []
    for number, path in enumerate(args.text):
        documents = read_documents(path, columns_of(args))
        print(f"load {len(documents)} documents from {path}")
        for part, more in zip((train, held), hold_out(documents, args.held_out, args.seed + number), strict=True):
            part += more
    return train, held


def identity_of(args: Namespace, **more: Any) -> dict[str, Any]:
    """The values that must be equal to resume a run: its texts, the flags in PACE, and `more`."""
    train = [InputFile.of(path, columns=columns_of(args)).sha256 for path in args.text]
    return {"train": train, **more, **{name: getattr(args, name) for name in PACE}}


class Rounds(NamedTuple):
    """The number of measurements of a run, and the number of steps between two of them."""

    count: int
    steps: int

    @classmethod
    def of(cls, args: Namespace, rows: int) -> Rounds:
        """rows: the number of rows in one pass over the training data."""
        steps = max(1, math.ceil(args.epochs * rows / args.batch_size))
        count = max(1, round(steps / args.every))
        return cls(count, math.ceil(steps / count))


def make_optimizer(model: nn.Module, lr: float, weight_decay: float = 0.1) -> AdamW:
    """AdamW with weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    gains = [p for p in trained if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)


def paced(args: Namespace) -> Method:
    """The method for the learning rate: it rises during `--warmup`, then falls to 0 at the end (cosine)."""
    (schedule,) = create_methods([("schedule", (("warmup", args.warmup), ("decay", "cosine")))])
    return schedule


@dataclass
class TextSaver(Checkpointer):
    """A checkpointer that writes the files beside the model with the first model, so not before training.

    Saving raises `UserError` if another program has made one of these files since the run began.
    """

    has_saved: bool = False
    flag: str = "--out"

    def save_model(self, model: nn.Module, result: EpochResult) -> None:
        if not self.has_saved:
            check_new(self.model_path, self.flag)
            self.save_beside()
        self.save_anew(model, result)

    def save_beside(self) -> None:
        """Called at the first measurement, or when a run is resumed; subclasses write their files here."""
        self.has_saved = True

    def save_anew(self, model: nn.Module, result: EpochResult) -> None:
        super().save_model(model, result)


def alone(args: Namespace, outputs: Outputs, rows: Callable[[], Iterator]) -> Iterator:
    """Yield the values of `rows` while holding the lock on the run's name. Raises `UserError` if it is taken."""
    lock = NameLock(outputs.lock)
    if not lock.acquire():
        raise UserError(f"{outputs.flag} {args.out} is in use by another process")
    try:
        outputs.check(args)  # again: another run may have ended in the meantime
        yield from rows()
    finally:
        lock.release()


def train_in_rounds(
    args: Namespace,
    model: nn.Module,
    train: DataLoader,
    held_out: DataLoader,
    checkpointer: TextSaver,
    task: Task,
    methods: Sequence[Method],
) -> Iterator[EpochResult]:
    """Train a language model; yield the result of each round, first those that a resumed run had finished.

    A round is about `--every` steps, then a measurement. `dev_score`: minus the held-out loss.
    """
    optimizer = update_fast(make_optimizer(model, args.lr, args.weight_decay))
    history = resume(args, checkpointer, model, optimizer)
    yield from history
    with watched(args, checkpointer, model, history) as callback:
        trainer = Trainer(
            model,
            optimizer,
            task,
            methods,
            checkpointer,
            seed=args.seed,
            clip=args.clip,
            train_eval=False,
            progress=False,
            callback=callback,
            history=list(history),
        )
        yield from trainer.fit(train, held_out, checkpointer.epochs)
    checkpointer.resume_path.unlink(missing_ok=True)


@contextmanager
def watched(args: Namespace, checkpointer: Checkpointer, model: nn.Module, history: list[EpochResult]) -> Iterator[Any]:
    """A callback that records the figures of the steps, if --log_dir is given; else None."""
    if args.log_dir is None:
        yield None
        return
    from engine.metrics import MetricsLog

    log = MetricsLog(args.log_dir, checkpointer.identity, device_of(model), history)
    try:
        yield log
    finally:
        log.close()


def resume(
    args: Namespace, checkpointer: TextSaver, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[EpochResult]:
    """With --resume, restore the state after the last measurement, if there is one. Returns the finished rounds."""
    if not args.resume:
        return []
    if not checkpointer.resume_path.is_file():
        print(f"there is no resume point {checkpointer.resume_path}; starting from the beginning")
        return []
    try:
        history = checkpointer.load_resume_point(model, optimizer)
    except OtherRun as error:
        raise UserError(f"{error}; use the same arguments, or name another {checkpointer.flag}") from None
    print(f"resuming from {checkpointer.resume_path}")
    checkpointer.save_beside()
    return history
