"""The one training loop and the one evaluation loop.

Three independent choices make an experiment: *what is predicted* (a module), *what is asked of it* (a `Task`), and *how
the weights move* (a list of `Method`s around `fit`). Nothing here prints or parses arguments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from engine.methods import EpochResult, Method, RandomState, Step
from engine.processes import SINGLE_PROCESS, Distributed, LocalBatch, device_of, on_device
from engine.tasks import CLASSIFICATION, Task
from utils import UserError

# ----------------------------------------------------------------------------------------------------------- evaluation


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
    distributed: Distributed = SINGLE_PROCESS,
) -> Any:
    """What `task` makes of every batch of `loader` with dropout off. Leaves the model in evaluation mode.

    Raises `Diverged` where the outputs are not numbers.
    """
    model.eval()
    network, device = distributed.network(model), device_of(model)
    result = task.evaluation(loader.dataset)
    with _progress_bar(loader, desc, progress) as bar:
        for part in distributed.parts(loader):
            batch = on_device(part.batch, device)
            outputs = task.forward(network, batch)
            if distributed.total(task.count_not_finite(outputs)) > 0:
                raise Diverged(f"{desc}: the predictions are not finite; training diverged, or the model is wrong")
            result.add(outputs, batch)
            bar.update(part.total)
    result.finish(distributed)
    return result


def _progress_bar(loader: DataLoader, desc: str, progress: bool) -> tqdm:
    """On a terminal alone: in a log nobody sees it move."""
    total, disable = len(loader.dataset), None if progress else True
    return tqdm(total=total, desc=desc, unit=" sentences", leave=False, mininterval=0.5, disable=disable)


# ------------------------------------------------------------------------------------------------------------- training


class StepMeasurement(NamedTuple):
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


class TrainingCallback:
    """Who looks on while a model is trained, and changes nothing. On several processes all are told alike."""

    def step(self, measurement: StepMeasurement) -> None:
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
    checkpointer: Any,
    history: Iterable[EpochResult] = (),
    train_eval: bool = True,
    progress: bool = True,
    distributed: Distributed = SINGLE_PROCESS,
    callback: TrainingCallback | None = None,
) -> Iterator[EpochResult]:
    """Train, and yield each epoch's result after its model (if it is the best on dev) and resume point are saved.

    model: prepared by the methods and spread over the processes. seed: of what methods draw by `Step.generator`.
    checkpointer: saves models and resume points. schedule: of (step, steps in all), the factor of the learning rates.
    clip: the largest norm of all gradients together. stop: of the results so far, whether to train no further. history:
    the epochs that a resumed run has done. train_eval: measure the score on the training data as the reference does.
    callback: told of steps and epochs; without one, steps are not measured. A loader whose sampler has `set_epoch`
    is told each epoch's number. Raises `Diverged` when the loss is not finite; what earlier epochs saved stays.
    """
    for method in methods:
        task = method.task(task, train)
    scored, shared = train if train_eval else None, (progress, distributed, seed, callback)
    run = _Run(model, optimizer, scored, dev, task, methods, checkpointer, *shared, list(history))
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
    checkpointer: Any
    progress: bool
    distributed: Distributed
    seed: int
    callback: TrainingCallback | None = None
    history: list[EpochResult] = field(default_factory=list)

    def train_epoch(self, loader: DataLoader, epoch: int, pace: _Pace) -> float:
        """One pass over the data; returns the mean batch loss."""
        for each in (loader, self.dev):
            if hasattr(each.batch_sampler, "set_epoch"):
                each.batch_sampler.set_epoch(epoch)
        self.model.train()
        total, clock = 0.0, time.perf_counter()
        with _progress_bar(loader, f"train {epoch}", self.progress) as bar:
            for index, part in enumerate(self.distributed.parts(loader)):
                step = self._forward(part, epoch, epoch * len(loader) + index, pace)
                if index == 0:
                    self.task.check(step.outputs)
                loss = self.task.loss(step.outputs, step.batch, loader.batch_sampler.batch_size)
                for method in self.methods:
                    loss = loss + part.share * method.penalty(step)
                value = self.distributed.total(loss.detach()).item()
                if not math.isfinite(value):
                    raise Diverged(f"epoch {epoch}, batch {index + 1}: the loss is {value}, training stops")
                self.distributed.backward(loss)
                norm = math.nan if self.callback is None else _gradient_norm(self.optimizer)
                pace.step(self.optimizer, step.number)
                for method in self.methods:
                    method.after_step(step)
                if self.callback is not None:
                    size, now = (part.total, part.total * part.batch["token_ids"].shape[1]), time.perf_counter()
                    rates = pace.rates(self.optimizer, step.number)
                    self.callback.step(StepMeasurement(step.number, epoch, value, rates, norm, *size, now - clock))
                    clock = now
                total += value
                bar.set_postfix(loss=f"{total / (index + 1):.3f}", refresh=False)
                bar.update(part.total)
        return total / len(loader)

    def _forward(self, part: LocalBatch, epoch: int, number: int, pace: _Pace) -> Step:
        self.optimizer.zero_grad()
        device = device_of(self.model)
        before = RandomState(device) if self.methods else None
        batch, network = on_device(part.batch, device), self.distributed.network(self.model)
        outputs = self.task.forward(network, batch)
        return Step(self.model, self.task, part, batch, outputs, epoch, number, pace.total, network, before, self.seed)

    def judge(self, train_loss: float, start: float) -> EpochResult:
        """Evaluate the weights that the methods judge, save them if they are the best so far, and the resume point."""
        with self._evaluation_weights():
            train_score = math.nan
            if self.train_eval is not None:
                train_score = self._score(self.train_eval, f"train acc {len(self.history)}")
            result = self._judge(train_loss, train_score, start)
        return self._finished(result)

    def finish(self) -> EpochResult | None:
        """The same for what the methods make of the judged weights after the last epoch, if they make anything."""
        start, result = time.perf_counter(), None
        with self._evaluation_weights():
            if any([method.finish(self.model, self.dev_score) for method in self.methods]):
                result = self._judge(self.history[-1].train_loss, math.nan, start, is_finish=True)
        return None if result is None else self._finished(result)

    def _finished(self, result: EpochResult) -> EpochResult:
        self.checkpointer.save_resume_point(self.model, self.optimizer, self.history)
        if self.callback is not None:
            self.callback.epoch(result)
        return result

    @contextmanager
    def _evaluation_weights(self) -> Iterator[None]:
        with ExitStack() as stack:
            for method in reversed(self.methods):  # averages of parameters, before these are merged into others
                stack.enter_context(method.evaluation_weights(self.model))
            yield

    def _judge(self, train_loss: float, train_score: float, start: float, is_finish: bool = False) -> EpochResult:
        number, history = len(self.history), self.history
        dev_score = self._score(self.dev, f"dev acc {number}")
        improved = all(dev_score > earlier.dev_score for earlier in history)
        seconds = time.perf_counter() - start
        history.append(EpochResult(number, train_loss, train_score, dev_score, seconds, improved, is_finish))
        if improved:
            self.checkpointer.save_model(self.model, history[-1])
        return history[-1]

    def dev_score(self) -> float:
        """Of the weights as they stand."""
        return self._score(self.dev, "dev acc")

    def _score(self, loader: DataLoader, desc: str) -> float:
        shared = dict(progress=self.progress, distributed=self.distributed)
        return evaluate(self.model, loader, task=self.task, desc=desc, **shared).score
