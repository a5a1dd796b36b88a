"""What `training.Trainer` tells of its steps and epochs, and to whom. No PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.methods import EpochResult


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
