"""`Method`, whose hooks change plain fine-tuning, and `Step`, the step of training that a hook sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from engine.processes import Batch, Distributed, LocalBatch, device_of
from engine.tasks import Sentences, Task


@dataclass
class EpochResult:
    """The result of one epoch. train_loss: the mean over batches of (sum of losses / batch size).

    Scores are those of the task, for classification accuracies. train_score: NaN if it was not measured. improved:
    whether dev_score is the best so far. is_finish: whether the result is of `Method.finish` instead of an epoch.
    """

    epoch: int
    train_loss: float
    train_score: float
    dev_score: float
    seconds: float
    improved: bool
    is_finish: bool = False


@dataclass
class BegunEpoch:
    """What an interrupted run had done of an epoch.

    steps: the steps that were finished. loss: the sum of their losses. seconds: since the epoch began. random: the
    state of the random generators when the epoch began, from which its order of the data follows.
    """

    random: dict[str, Any]
    steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0


class RandomState:
    """The present state of PyTorch's global random generators; `restore` returns to it."""

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


def random_state() -> dict[str, Any]:
    """The state of PyTorch's global random generators, as plain tensors."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()  # of the device in use; a resumed run may use another one
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


@dataclass
class Step:
    """One step of training, as a `Method` sees it.

    local: this process's rows of the batch; batch: the same rows on the device. outputs: what `Task.forward` returned
    for them; empty before the first pass. number: counts the steps of the whole run from 0; total: the number of
    steps of the run.
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

    def rewind(self) -> None:
        """Draw again the random numbers with which the step began: the same dropout masks, the same `generator`."""
        if self.before is not None:
            self.before.restore()
        vars(self).pop("generator", None)

    def forward(self, *, same_masks: bool = True, **changed: Any) -> torch.Tensor:
        """A second pass over the batch, with the dropout masks of the first pass or with new masks.

        changed: entries of the batch to replace, for example `token_ids`; all others are arguments of the model.
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
        """A random generator on the CPU with equal numbers in all processes, also after a run was resumed."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + self.number) % 2**63)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers for this process's rows of a batch; a single process would draw the same numbers.

        shape: the shape for one row. Returns b *shape.
        """
        drawn, tokens = torch.randn(self.local.total, *shape, generator=self.generator), self.batch["token_ids"]
        # a process without rows computes one row that does not count
        rows = drawn[self.local.start : self.local.end] if self.local.share else drawn[: len(tokens)]
        return rows.to(tokens.device)


class Method:
    """Changes plain fine-tuning by hooks. A hook that is not overridden changes nothing; methods can be combined.

    settings: the arguments of `__init__`, plain values: from them a saved run makes the method again, and they are part
    of the run's identity. The methods are in the folder advanced/.
    """

    name = "plain"
    freezes = False  # whether the pretrained weights are frozen before `prepare` is called
    begins_as_base = True  # whether, before training, the output in evaluation mode equals the plain model's
    is_needed = False  # whether a saved model needs the method to compute the same, even without own tensors
    uses_unlabelled = False  # whether it is shown the training sentences that `--shots` leaves aside

    def __init__(self, **settings: Any):
        self.settings = settings

    def prepare(self, model: nn.Module) -> None:
        """Add parameters and hooks to the model's modules. Called once, before kernels, processes and optimizer.

        The output in evaluation mode must not change, unless `begins_as_base` is False. The method may draw from
        PyTorch's global generator.
        """

    def parameter_groups(self, groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        """The parameter groups for the optimizer: "params" and their learning rate "lr".

        The first method gets one group with all parameters that require gradients.
        """
        return groups

    def start(self, model: nn.Module) -> None:
        """Called once, when the model is on its device: the place to copy its weights."""

    def see(self, unlabelled: Sentences | None, label_names: Sequence[str]) -> None:
        """Called once, before `task`, with the names of the labels.

        unlabelled: the sentences that `uses_unlabelled` asks for, with `NO_GOLD_LABEL` as labels; None: there are none.
        """

    def task(self, task: Task, train: DataLoader) -> Task:
        """The task that replaces `task`, for example with another loss. Called once, before the first step.

        train: the batches of one epoch; its length is the number of steps.
        """
        return task

    def begin(self, model: nn.Module, train: DataLoader, distributed: Distributed) -> None:
        """Called before the first step of a run, not where a run is resumed. May change the weights.

        train: the batches of one epoch; `start` and `task` were called before, and `begin` of the methods before this.
        """

    def rate(self, number: int, total: int) -> float:
        """A factor for the learning rates of step `number` of `total`; factors of several methods are multiplied."""
        return 1.0

    def stop(self, history: list[EpochResult]) -> bool:
        """Whether to stop training after these epochs."""
        return False

    def gradients(self, step: Step, compute: Callable[[], float]) -> float:
        """Compute the gradients of a step, by one call of `compute` or by several, for example with other weights.

        compute: sets all gradients to those of the loss with all penalties, at the present weights and with the same
        random numbers in every call. Returns the loss of the whole batch, as `compute` does.
        """
        return compute()

    def penalty(self, step: Step) -> torch.Tensor | float:
        """A term to add to the loss: a mean over this process's rows of the batch, or a function of the weights."""
        return 0.0

    def after_step(self, step: Step) -> None:
        """Called after each optimizer step, for example for a moving average of the weights."""

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which the model has the weights to evaluate and save; after it, the trained weights again."""
        return nullcontext()

    def finish(self, model: nn.Module, evaluate: Callable[[], float]) -> bool:
        """Called after the last epoch, inside `evaluation_weights`; may change the weights. evaluate: their dev score.

        Returns whether the weights have changed; then they are scored and saved like those of one more epoch.
        """
        return False

    def figures(self) -> dict[str, Any]:
        """Results of the method for a report, as plain values."""
        return {}

    def export(self, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The plain model's state dict, with the method merged into it, and the tensors that cannot be merged.

        state: of the whole model, with the evaluation weights. If there are unmerged tensors, a saved model needs the
        method: on loading, `prepare` is called on a plain model, which then loads all tensors.
        """
        return state, {}

    def kept(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a saved model keeps beside its weights although loading it does not need it: what `export` has merged.

        state: as for `export`. `convert/` reads it.
        """
        return {}

    def state(self) -> dict[str, Any]:
        """The method's own values in a resume point, besides those of model and optimizer."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor], piece: Callable[..., torch.Tensor]) -> None:
        """The inverse of `state`. piece(whole, like): this process's part of a whole tensor (see `Distributed.piece`).

        Raises an error of any class if the state does not fit the method.
        """
        if state:
            raise ValueError("this method has no state")


def prepare(model: nn.Module, methods: Sequence[Method]) -> None:
    """Let methods prepare a plain classifier or Llama; freeze the pretrained weights if a method wants that.

    Freezing is done here, once and first: a method may add parameters, or thaw some, and no other freezes them again.
    """
    if any(method.freezes for method in methods):
        pretrained_of(model).requires_grad_(False)
    for method in methods:
        method.prepare(model)


PARTS = ("llama", "encoder")  # possible names of the pretrained model in a classifier
# Modules that have attributes in common and no base class, because the course's classes have none: not `nn.Module`, for
# which type checkers take every attribute for a tensor. `families.ModelFamily` names the attributes.
Pretrained = Any  # a Llama or a Bert
Classifier = Any  # token ids b s -> log-probabilities b c


def pretrained_of(model: nn.Module) -> Pretrained:
    """The pretrained model in a classifier; any other model is returned as it is."""
    return next((getattr(model, name) for name in PARTS if hasattr(model, name)), model)
