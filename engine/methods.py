"""How the weights move: what a `Method` sees of a step, and the hooks by which it changes plain fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from engine.processes import Batch, LocalBatch, device_of
from engine.tasks import Task


@dataclass
class EpochResult:
    """What one epoch brought. `train_loss` is the mean over batches of summed loss / batch size.

    Scores are the task's: accuracies, for classification. `train_score` is NaN where it was not asked for. is_finish:
    it is what the methods made of the model after the last epoch (`Method.finish`).
    """

    epoch: int
    train_loss: float
    train_score: float
    dev_score: float
    seconds: float
    improved: bool
    is_finish: bool = False


class RandomState:
    """PyTorch's global random generators, as they stand."""

    def __init__(self, device: torch.device):
        self.device, self.cpu = device, torch.get_rng_state()
        self.gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.mps = torch.mps.get_rng_state() if device.type == "mps" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)


@dataclass
class Step:
    """One step of training, as a `Method` sees it.

    local: this process's rows of the batch; batch: the same on the device. outputs: what `Task.forward` returned for
    them. number: counts the steps of the whole run from 0; total: how many the run has.
    """

    model: nn.Module
    task: Task
    local: LocalBatch
    batch: Batch
    outputs: torch.Tensor
    epoch: int
    number: int
    total: int
    network: Callable[..., Any] = field(repr=False)
    before: RandomState | None = field(default=None, repr=False)
    seed: int = 0

    def forward(self, *, same_masks: bool = True, **changed: Any) -> torch.Tensor:
        """A second pass over the batch, with the dropout masks of the first one or with new ones.

        changed: further arguments of the model, or of a batch's entries, for example `token_ids`.
        """
        batch = {name: changed.pop(name, value) for name, value in self.batch.items()}
        if not same_masks:
            return self.task.forward(self.network, batch, **changed)
        if self.before is None:
            raise ValueError("the masks of a step are kept where there are methods")
        after = RandomState(device_of(self.model))
        self.before.restore()
        try:
            return self.task.forward(self.network, batch, **changed)
        finally:
            after.restore()

    @cached_property
    def generator(self) -> torch.Generator:
        """Random numbers that are alike on all processes, and the same again after a run was resumed. On the CPU."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + self.number) % 2**63)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers for this process's rows of a batch, those that a single process would draw.

        shape: of one row. Returns b *shape.
        """
        drawn, tokens = torch.randn(self.local.total, *shape, generator=self.generator), self.batch["token_ids"]
        # a process without rows computes one that counts for nothing
        rows = drawn[self.local.start : self.local.end] if self.local.share else drawn[: len(tokens)]
        return rows.to(tokens.device)


class Method:
    """How the weights move. Every hook defaults to plain fine-tuning; methods compose around one loop.

    settings: plain values that make the method again, part of the run's identity. `advanced` has the methods' names.
    """

    name = "plain"
    freezes = False  # whether the pretrained weights are not trained (see `prepare`)
    begins_as_base = True  # whether the output in evaluation mode is that of the plain model before training
    is_needed = False  # whether a saved model computes something else without it, even where it has no tensors

    def __init__(self, **settings: Any):
        self.settings = settings

    def prepare(self, model: nn.Module) -> None:
        """Once, before kernels, processes and optimizer: add parameters and hooks to the modules that are there.

        The output in evaluation mode must not change, unless `begins_as_base` says so. Drawing from PyTorch's global
        generator is fine.
        """

    def parameter_groups(self, groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        """What the optimizer is given: groups of "params" and their rate "lr".

        The first method gets one group of all that requires gradients.
        """
        return groups

    def start(self, model: nn.Module) -> None:
        """Once, when the model lies where it computes: copies of its weights are made here."""

    def task(self, task: Task, train: DataLoader) -> Task:
        """What is asked in the place of `task`: another loss. Once, before training, of which `train` is the data."""
        return task

    def rate(self, number: int, total: int) -> float:
        """What the learning rates of a step are multiplied by; those of several methods are multiplied."""
        return 1.0

    def stop(self, history: list[EpochResult]) -> bool:
        """Whether these epochs are enough."""
        return False

    def penalty(self, step: Step) -> torch.Tensor | float:
        """A term added to the loss: a mean over the rows of the batch, or of the weights alone."""
        return 0.0

    def after_step(self, step: Step) -> None:
        """After each optimizer step: moving averages, projections."""

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside it the model has the weights that are evaluated and saved; afterwards those that are trained."""
        return nullcontext()

    def finish(self, model: nn.Module, evaluate: Callable[[], float]) -> bool:
        """After the last epoch, inside of `evaluation_weights`: may change the weights. evaluate: their score on dev.

        Returns whether what it made is to be judged as one more epoch is.
        """
        return False

    def figures(self) -> dict[str, Any]:
        """What it has found, plain values for a report."""
        return {}

    def export(self, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The plain model's state dict, with all that can be merged into it, and the tensors that cannot be.

        state: of the whole model in the weights that are judged. With tensors of its own a saved model needs the method
        to be opened: `prepare` is called on a plain model, which is then given all tensors.
        """
        return state, {}

    def state(self) -> dict[str, Any]:
        """Its part of a resume point, besides what is in the model and the optimizer."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor], piece: Callable[..., torch.Tensor]) -> None:
        """The inverse of `state`. piece(whole, like): what this process holds of a tensor (see `Distributed.piece`).

        Raises an error of some kind for another state.
        """
        if state:
            raise ValueError("this method has no state")


def prepare(model: nn.Module, methods: Sequence[Method]) -> None:
    """Let methods make what they need of a plain classifier or Llama, and freeze what they do not want trained.

    The pretrained weights are frozen here, once, so that no method freezes what another one has added.
    """
    pretrained = [*pretrained_of(model).parameters()]
    for method in methods:
        method.prepare(model)
    if any(method.freezes for method in methods):
        for parameter in pretrained:
            parameter.requires_grad_(False)


PARTS = ("llama", "encoder")  # what a classifier may call the pretrained model in it


def pretrained_of(model: nn.Module) -> nn.Module:
    """The pretrained model in a classifier; what is no classifier, itself."""
    return next((getattr(model, name) for name in PARTS if hasattr(model, name)), model)
