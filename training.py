"""The one training loop and the one evaluation loop, and the methods that move a model's weights.

Three independent choices make an experiment: *what is predicted* (a module), *what is asked of it* (a `Task`), and *how
the weights move* (a list of `Method`s around `fit`). Nothing here prints or parses arguments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from tasks import ALONE, CLASSIFICATION, Batch, Part, Task, World
from utils import UserError

# ------------------------------------------------------------------------------------------------ evaluation


class Diverged(UserError):
    """Training has led to numbers that are none. A smaller learning rate is what helps."""


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: DataLoader,
    *,
    task: Task = CLASSIFICATION,
    desc: str = "eval",
    progress: bool = True,
    world: World = ALONE,
) -> Any:
    """What `task` makes of every batch of `loader` with dropout off. Leaves the model in evaluation mode.

    Raises `Diverged` where the outputs are not numbers.
    """
    model.eval()
    network, device = world.network(model), device_of(model)
    result = task.evaluation(loader.dataset)
    with _progress_bar(loader, desc, progress) as bar:
        for part in world.parts(loader):
            batch = on_device(part.batch, device)
            outputs = task.forward(network, batch)
            if world.total(task.faults(outputs)) > 0:
                raise Diverged(f"{desc}: the predictions are not finite; training diverged, or the model is wrong")
            result.add(outputs, batch)
            bar.update(part.total)
    result.finish(world)
    return result


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def on_device(batch: Batch, device: torch.device) -> Batch:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _progress_bar(loader: DataLoader, desc: str, progress: bool) -> tqdm:
    """On a terminal alone: in a log nobody sees it move."""
    total, disable = len(loader.dataset), None if progress else True
    return tqdm(total=total, desc=desc, unit=" sentences", leave=False, mininterval=0.5, disable=disable)


# --------------------------------------------------------------------------------------------------- methods


@dataclass
class Step:
    """One step of training, as a `Method` sees it.

    batch: this process's rows, on the device. outputs: what the task read of the model for them. number: of the step in
    the whole run, from 0; total: how many the run has.
    """

    model: nn.Module
    task: Task
    part: Part
    batch: Batch
    outputs: torch.Tensor
    epoch: int
    number: int
    total: int
    network: Callable[..., Any] = field(repr=False)
    before: _RandomState | None = field(default=None, repr=False)
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
        after = _RandomState(device_of(self.model))
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
        drawn, tokens = torch.randn(self.part.total, *shape, generator=self.generator), self.batch["token_ids"]
        # a process without rows computes one that counts for nothing
        rows = drawn[self.part.start : self.part.end] if self.part.share else drawn[: len(tokens)]
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

    def judged(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside it the model has the weights that are evaluated and saved; afterwards those that are trained."""
        return nullcontext()

    def finish(self, model: nn.Module, evaluate: Callable[[], float]) -> bool:
        """After the last epoch, inside of `judged`: may change the weights. evaluate: their score on dev.

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
        """The inverse of `state`. piece(whole, like): what this process holds of a tensor (see `World.piece`).

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


class _RandomState:
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


# -------------------------------------------------------------------------------------------------- training


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


class Measured(NamedTuple):
    """What was measured of one step of training.

    number: of the step in the whole run, from 0. loss: of the whole batch, with the methods' penalties. rates: the
    learning rate of each group of parameters. gradient_norm: of all gradients together, before they are clipped.
    rows, positions: of the batch, padding included. seconds: since the step before it, or the epoch's beginning.
    """

    number: int
    epoch: int
    loss: float
    rates: list[float]
    gradient_norm: float
    rows: int
    positions: int
    seconds: float


class Watch:
    """Who looks on while a model is trained, and changes nothing. On several processes all are told alike."""

    def step(self, measured: Measured) -> None:
        """After each optimizer step."""

    def epoch(self, result: EpochResult) -> None:
        """After the model and the resume point of an epoch are saved."""


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: DataLoader,
    dev: DataLoader,
    *,
    task: Task = CLASSIFICATION,
    methods: Sequence[Method] = (),
    epochs: int,
    seed: int = 0,
    schedule: Callable[[int, int], float] | None = None,
    clip: float | None = None,
    stop: Callable[[list[EpochResult]], bool] | None = None,
    saver: Any,
    history: Iterable[EpochResult] = (),
    train_eval: bool = True,
    progress: bool = True,
    world: World = ALONE,
    watch: Watch | None = None,
) -> Iterator[EpochResult]:
    """Train, and yield each epoch's result after its model (if it is the best on dev) and resume point are saved.

    model: prepared by the methods and spread over the world. seed: of what methods draw by `Step.generator`. saver: a
    `saver.Saver`, or what stands in its place. schedule: of (step, total steps), the factor of the learning rates then.
    clip: the largest norm of all gradients together. stop: of the results so far, whether to train no further. history:
    the epochs that a resumed run has done. train_eval: measure the score on the training data as the reference does.
    watch: told of steps and epochs; without one, steps are not measured. A loader whose batch sampler has `set_epoch`
    is told each epoch's number. Raises `Diverged` when the loss is not finite; what earlier epochs saved stays.
    """
    for method in methods:
        task = method.task(task, train)
    run = _Run(model, optimizer, train if train_eval else None, dev, task, methods, saver, progress, world, seed, watch)
    run.history = list(history)
    pace = _Pace([*filter(None, [schedule]), *(method.rate for method in methods)], clip, epochs * len(train))
    stops = [*filter(None, [stop]), *(method.stop for method in methods)]
    for epoch in range(len(run.history), epochs):
        if run.history and (run.history[-1].is_finish or any([enough(run.history) for enough in stops])):
            break
        start = time.perf_counter()
        train_loss = run.train_epoch(train, epoch, pace)
        yield run.judge(train_loss, start)
    if run.history and not run.history[-1].is_finish:
        result = run.finish()
        if result is not None:
            yield result


class _Pace(NamedTuple):
    """How far each step goes."""

    factors: Sequence[Callable[[int, int], float]]
    clip: float | None
    total: int

    def rates(self, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
        """The learning rate of each group at a step."""
        factor = math.prod(factor(number, self.total) for factor in self.factors)
        return [group["lr"] * factor for group in optimizer.param_groups]

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        groups = optimizer.param_groups
        if self.clip is not None:
            nn.utils.clip_grad_norm_([parameter for group in groups for parameter in group["params"]], self.clip)
        planned = [group["lr"] for group in groups]
        for group, rate in zip(groups, self.rates(optimizer, number), strict=True):
            group["lr"] = rate
        optimizer.step()
        for group, rate in zip(groups, planned, strict=True):  # a resume point is compared with the rates of the plan
            group["lr"] = rate


def _gradient_norm(optimizer: torch.optim.Optimizer) -> float:
    """Of all gradients together."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # of a model in pieces


@dataclass
class _Run:
    """What `fit` has at hand."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train_eval: DataLoader | None
    dev: DataLoader
    task: Task
    methods: Sequence[Method]
    saver: Any
    progress: bool
    world: World
    seed: int
    watch: Watch | None = None
    history: list[EpochResult] = field(default_factory=list)

    def train_epoch(self, loader: DataLoader, epoch: int, pace: _Pace) -> float:
        """One pass over the data; returns the mean batch loss."""
        for each in (loader, self.dev):
            if hasattr(each.batch_sampler, "set_epoch"):
                each.batch_sampler.set_epoch(epoch)
        self.model.train()
        total, clock = 0.0, time.perf_counter()
        with _progress_bar(loader, f"train {epoch}", self.progress) as bar:
            for index, part in enumerate(self.world.parts(loader)):
                step = self._forward(part, epoch, epoch * len(loader) + index, pace)
                if index == 0:
                    self.task.check(step.outputs)
                loss = self.task.loss(step.outputs, step.batch, loader.batch_sampler.batch_size)
                for method in self.methods:
                    loss = loss + part.share * method.penalty(step)
                value = self.world.total(loss.detach()).item()
                if not math.isfinite(value):
                    raise Diverged(f"epoch {epoch}, batch {index + 1}: the loss is {value}, training stops")
                self.world.backward(loss)
                norm = math.nan if self.watch is None else _gradient_norm(self.optimizer)
                pace.step(self.optimizer, step.number)
                for method in self.methods:
                    method.after_step(step)
                if self.watch is not None:
                    size, now = (part.total, part.total * part.batch["token_ids"].shape[1]), time.perf_counter()
                    rates = pace.rates(self.optimizer, step.number)
                    self.watch.step(Measured(step.number, epoch, value, rates, norm, *size, now - clock))
                    clock = now
                total += value
                bar.set_postfix(loss=f"{total / (index + 1):.3f}", refresh=False)
                bar.update(part.total)
        return total / len(loader)

    def _forward(self, part: Part, epoch: int, number: int, pace: _Pace) -> Step:
        self.optimizer.zero_grad()
        device = device_of(self.model)
        before = _RandomState(device) if self.methods else None
        batch, network = on_device(part.batch, device), self.world.network(self.model)
        outputs = self.task.forward(network, batch)
        return Step(self.model, self.task, part, batch, outputs, epoch, number, pace.total, network, before, self.seed)

    def judge(self, train_loss: float, start: float) -> EpochResult:
        """Evaluate the weights that the methods judge, save them if they are the best so far, and the resume point."""
        with self._judged():
            train_score = math.nan
            if self.train_eval is not None:
                train_score = self._score(self.train_eval, f"train acc {len(self.history)}")
            result = self._judge(train_loss, train_score, start)
        return self._finished(result)

    def finish(self) -> EpochResult | None:
        """The same for what the methods make of the judged weights after the last epoch, if they make anything."""
        start, result = time.perf_counter(), None
        with self._judged():
            if any([method.finish(self.model, self.dev_score) for method in self.methods]):
                result = self._judge(self.history[-1].train_loss, math.nan, start, is_finish=True)
        return None if result is None else self._finished(result)

    def _finished(self, result: EpochResult) -> EpochResult:
        self.saver.save_resume_point(self.model, self.optimizer, self.history)
        if self.watch is not None:
            self.watch.epoch(result)
        return result

    @contextmanager
    def _judged(self) -> Iterator[None]:
        with ExitStack() as stack:
            for method in reversed(self.methods):  # averages of parameters, before these are merged into others
                stack.enter_context(method.judged(self.model))
            yield

    def _judge(self, train_loss: float, train_score: float, start: float, is_finish: bool = False) -> EpochResult:
        number, history = len(self.history), self.history
        dev_score = self._score(self.dev, f"dev acc {number}")
        improved = all(dev_score > earlier.dev_score for earlier in history)
        seconds = time.perf_counter() - start
        history.append(EpochResult(number, train_loss, train_score, dev_score, seconds, improved, is_finish))
        if improved:
            self.saver.save_model(self.model, history[-1])
        return history[-1]

    def dev_score(self) -> float:
        """Of the weights as they stand."""
        return self._score(self.dev, "dev acc")

    def _score(self, loader: DataLoader, desc: str) -> float:
        shared = dict(progress=self.progress, world=self.world)
        return evaluate(self.model, loader, task=self.task, desc=desc, **shared).score
