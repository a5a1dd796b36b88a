"""The one training loop and the one evaluation loop.

Three independent choices make an experiment: the *model* (a module), the *task* with its loss (a `Task`), and the
*changes of training* (a list of `Method`s for `Trainer`). This module prints nothing and parses no arguments.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from engine.methods import BegunEpoch, EpochResult, Method, RandomState, Step, random_state, set_random_state
from engine.metrics import StepMeasurement, TrainingCallback
from engine.processes import SINGLE_PROCESS, Distributed, LocalBatch, device_of, gradient_norm, on_device
from engine.tasks import CLASSIFICATION, NextToken, Task, TextWindows, perplexity_of
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError

# ----------------------------------------------------------------------------------------------------------- evaluation


class Diverged(UserError):
    """The loss or the outputs are NaN or infinite. A smaller learning rate helps."""


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
    """Evaluate a model on every batch of `loader`, with dropout off; returns the task's evaluation.

    Leaves the model in evaluation mode. Raises `Diverged` if an output is NaN.
    """
    model.eval()
    network, device = distributed.network(model), device_of(model)
    result = task.evaluation(loader.dataset)
    with _progress_bar(loader, desc, progress) as bar:
        for local in distributed.local_batches(loader):
            batch = on_device(local.batch, device)
            outputs = task.forward(network, batch)
            if distributed.total(task.count_not_finite(outputs)) > 0:
                raise Diverged(f"{desc}: the predictions are not finite; training diverged, or the model is wrong")
            result.add(outputs, batch)
            bar.update(local.total)
    result.finish(distributed)
    return result


def _progress_bar(loader: DataLoader, desc: str, progress: bool) -> tqdm:
    """A progress bar; it appears on a terminal only, not in a log file."""
    data: Any = loader.dataset  # PyTorch's Dataset declares no length
    disable = None if progress else True
    return tqdm(total=len(data), desc=desc, unit=" sentences", leave=False, mininterval=0.5, disable=disable)


# ----------------------------------------------------------------------------------------------------------- perplexity


class Perplexity(NamedTuple):
    """How well a language model predicts a text. tokens: the number of predicted tokens."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.nats_per_token)


def perplexity(llama: Llama, tokenizer: Tokenizer, text: str, batch_size: int = 8) -> Perplexity:
    """The perplexity of a text: every token is predicted once, in windows of `max_seq_len` that begin with bos.

    Raises `UserError` for a bidirectional model, which sees the tokens that it predicts, and for an empty text.
    """
    if not llama.config.is_causal:
        raise UserError("a bidirectional model sees the tokens that it would predict; use attention causal")
    ids = tokenizer.encode_all(text)
    if not ids:
        raise UserError("there is no text")
    windows = TextWindows(ids, tokenizer.bos_id, llama.config.max_seq_len)
    result = evaluate(llama, windows.loader(batch_size), task=NextToken(), desc="perplexity")
    return Perplexity(result.loss, result.nats / math.log(2) / len(text.encode()), result.tokens)


# ------------------------------------------------------------------------------------------------------------- training


@dataclass
class Trainer:
    """Trains a model on one task, and evaluates it.

    model: prepared by the methods and spread over the processes. methods: change plain training, in this order.
    checkpointer: saves the best model and the resume point, as `checkpointer.Checkpointer` does; None: nothing is
    saved. seed: of the numbers that methods draw (`Step.generator`). clip: the largest norm of all gradients together.
    train_eval: score the training data after each epoch, as the reference does. callback: called after each step and
    epoch; None: steps are not measured. history: the finished epochs of a resumed run; `fit` continues after them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task = CLASSIFICATION
    methods: Sequence[Method] = ()
    checkpointer: Any = None
    seed: int = 0
    clip: float | None = None
    train_eval: bool = True
    progress: bool = True
    distributed: Distributed = SINGLE_PROCESS
    callback: TrainingCallback | None = None
    history: list[EpochResult] = field(default_factory=list)

    def __post_init__(self):
        self._asked = self.task  # in `fit`, the task after the methods changed it

    def fit(self, train: DataLoader, dev: DataLoader, epochs: int) -> Iterator[EpochResult]:
        """Train, and yield each epoch's result after its model (if it is the best on dev) and resume point are saved.

        Goes on within an epoch if the checkpointer has loaded such a resume point (`Checkpointer.begun`). If a loader's
        batch sampler has `set_epoch`, it is called with the number of each epoch. Raises `Diverged` if
        the loss is not finite; the files that earlier epochs saved stay.
        """
        self._asked = self.task
        for method in self.methods:
            self._asked = method.task(self._asked, train)
        begun = None if self.checkpointer is None else self.checkpointer.begun
        if not self.history and begun is None:
            for method in self.methods:
                method.begin(self.model, train, self.distributed)
        self._first = time.perf_counter(), len(self.history) * len(train) + (begun.steps if begun else 0)
        for epoch in range(len(self.history), epochs):
            if self._has_finished() or any([method.stop(self.history) for method in self.methods if self.history]):
                break
            begun = begun or BegunEpoch(random_state())
            start = time.perf_counter() - begun.seconds
            for loader in (train, dev):
                if (set_epoch := getattr(loader.batch_sampler, "set_epoch", None)) is not None:
                    set_epoch(epoch)
            train_loss = self._train_epoch(train, epoch, epochs * len(train), begun, start)
            begun = None
            yield self._close_epoch(train_loss, train, dev, start)
        if self.history and not self._has_finished():
            yield from self._finish(dev)

    def evaluate(self, loader: DataLoader, desc: str = "eval") -> Any:
        """Evaluate the task on a loader (see `evaluate`), with the present weights."""
        return evaluate(
            self.model, loader, task=self._asked, desc=desc, progress=self.progress, distributed=self.distributed
        )

    def _has_finished(self) -> bool:
        """Whether the history ends with a result of `Method.finish`, so that training is over."""
        return bool(self.history) and self.history[-1].is_finish

    def _train_epoch(self, loader: DataLoader, epoch: int, total: int, begun: BegunEpoch, start: float) -> float:
        """One pass over the data; returns the mean loss of a batch.

        total: the number of steps of the run. begun: what is done of this epoch; it began at `start`.
        """
        self.model.train()
        sampler: Any = loader.batch_sampler  # PyTorch's Sampler declares no `batch_size`
        losses, clock = begun.loss, time.perf_counter()
        with _progress_bar(loader, f"train {epoch}", self.progress) as bar:
            for index, local in self._batches_after(begun, loader, bar):
                step = self._step(local, epoch, epoch * len(loader) + index, total)
                value = self._gradients(step, sampler.batch_size, index)
                norm = math.nan if self.callback is None else gradient_norm(self._trained())
                rates = self._rates(step)
                self._update(step, rates)
                losses, now = losses + value, time.perf_counter()
                if self.callback is not None:
                    size = local.total, local.total * local.batch["token_ids"].shape[1]
                    self.callback.step(StepMeasurement(step.number, epoch, value, rates, norm, *size, now - clock))
                clock = now
                bar.set_postfix(loss=f"{losses / (index + 1):.3f}", left=self._time_left(step, now), refresh=False)
                bar.update(local.total)
                if self.checkpointer is not None and self.checkpointer.is_due():
                    done = BegunEpoch(begun.random, index + 1, losses, now - start)
                    self.checkpointer.save_resume_point(self.model, self.optimizer, self.history, done)
        return losses / len(loader)

    def _batches_after(self, begun: BegunEpoch, loader: DataLoader, bar: tqdm) -> Iterator[tuple[int, LocalBatch]]:
        """The batches that are left of an epoch, with their numbers; the others are drawn again, and passed over."""
        batches = enumerate(self.distributed.local_batches(loader))
        if begun.steps:
            after = random_state()
            set_random_state(begun.random)
            bar.update(sum(local.total for _, local in itertools.islice(batches, begun.steps)))
            set_random_state(after)
        return batches

    def _time_left(self, step: Step, now: float) -> str:
        """Time until the last step of all epochs, at the pace of the steps and evaluations since `fit` began."""
        start, number = self._first
        seconds = (now - start) / (step.number + 1 - number)
        return tqdm.format_interval(seconds * (step.total - step.number - 1))

    def _step(self, local: LocalBatch, epoch: int, number: int, total: int) -> Step:
        """A step of training before its first pass."""
        device, none = device_of(self.model), torch.empty(0)
        before = RandomState(device) if self.methods else None
        batch, network = on_device(local.batch, device), self.distributed.network(self.model)
        return Step(self.model, self._asked, local, batch, none, epoch, number, total, network, before, self.seed)

    def _gradients(self, step: Step, batch_size: int, index: int) -> float:
        """Compute the gradients of a step as the methods want it. Returns the loss of the whole batch."""

        def compute() -> float:
            self.optimizer.zero_grad()
            step.rewind()
            step.outputs = step.task.forward(step.network, step.batch)
            return self._backward(step, batch_size, index)

        for method in self.methods:
            compute = partial(method.gradients, step, compute)
        return compute()

    def _backward(self, step: Step, batch_size: int, index: int) -> float:
        """Compute gradients of the task's loss and the methods' penalties. Returns the loss of the whole batch."""
        if index == 0:
            step.task.check(step.outputs)
        loss = step.task.loss(step.outputs, step.batch, batch_size)
        for method in self.methods:
            loss = loss + step.local.share * method.penalty(step)
        value = self.distributed.total(loss.detach()).item()
        if not math.isfinite(value):
            raise Diverged(f"epoch {step.epoch}, batch {index + 1}: the loss is {value}, training stops")
        self.distributed.backward(loss)
        return value

    def _rates(self, step: Step) -> list[float]:
        """The learning rate of each group of parameters: the planned one, as the methods change it for this step."""
        factor = math.prod(method.rate(step.number, step.total) for method in self.methods)
        return [group["lr"] * factor for group in self.optimizer.param_groups]

    def _update(self, step: Step, rates: list[float]) -> None:
        """One step of the optimizer, with the learning rate of each group of parameters."""
        groups = self.optimizer.param_groups
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self._trained(), self.clip)
        planned = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        for group, rate in zip(groups, planned, strict=True):  # a resume point stores the planned rates
            group["lr"] = rate
        for method in self.methods:
            method.after_step(step)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _close_epoch(self, train_loss: float, train: DataLoader, dev: DataLoader, start: float) -> EpochResult:
        """Score the evaluation weights, save them if they are the best so far, and save the resume point."""
        with self._evaluation_weights():
            name = f"train acc {len(self.history)}"
            train_score = self.evaluate(train, name).score if self.train_eval else math.nan
            self._record(train_loss, train_score, dev, start)
        return self._saved()

    def _finish(self, dev: DataLoader) -> Iterator[EpochResult]:
        """Call `Method.finish`; if the weights have changed, score and save them like those of one more epoch."""

        def dev_score() -> float:
            return self.evaluate(dev, "dev acc").score

        start = time.perf_counter()
        with self._evaluation_weights():
            has_changed = any([method.finish(self.model, dev_score) for method in self.methods])
            if has_changed:
                self._record(self.history[-1].train_loss, math.nan, dev, start, is_finish=True)
        if has_changed:
            yield self._saved()

    @contextmanager
    def _evaluation_weights(self) -> Iterator[None]:
        with ExitStack() as stack:
            for method in reversed(self.methods):  # reversed: averages of parameters come before merging the parameters
                stack.enter_context(method.evaluation_weights(self.model))
            yield

    def _record(
        self, train_loss: float, train_score: float, dev: DataLoader, start: float, is_finish: bool = False
    ) -> None:
        """Score dev, add the result to the history, and save the model if it is the best so far."""
        number = len(self.history)
        dev_score = self.evaluate(dev, f"dev acc {number}").score
        improved = all(dev_score > earlier.dev_score for earlier in self.history)
        seconds = time.perf_counter() - start
        self.history.append(EpochResult(number, train_loss, train_score, dev_score, seconds, improved, is_finish))
        if improved and self.checkpointer is not None:
            self.checkpointer.save_model(self.model, self.history[-1])

    def _saved(self) -> EpochResult:
        """Save the resume point, if it is time for one; returns the last result."""
        if self.checkpointer is not None and not self.checkpointer.is_too_soon(self.history):
            self.checkpointer.save_resume_point(self.model, self.optimizer, self.history)
        if self.callback is not None:
            self.callback.epoch(self.history[-1])
        return self.history[-1]
