"""Distillation: the model learns the probabilities of a saved classifier, its teacher, or the mean of several teachers'
(Hinton et al. 2015, arXiv:1503.02531, section 2).

With p_T the softmax of the teacher's logits / T, q_T that of the model's, and q = q_1, the loss of a sentence is

    (1 - weight) * -log q(y)  +  weight * T^2 * KL(p_T || q_T)

and that of a sentence without a label, which `--shots` leaves aside, is the second term alone. The gradients of the
soft targets shrink as 1 / T^2, which the factor undoes. The paper has a cross-entropy with p_T in the place of the
divergence: its gradients are the same. Of several teachers the mean is that of the probabilities at T = 1.

A teacher is a file that a fine-tuning has saved, of any kind of model, with its own tokenizer. All its predictions are
computed once, before training. There is no official code.

Shapes: b batch   n sentences   c classes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from advanced.unlabelled import outputs_for, own_rows, places_at
from engine.methods import Method, Step
from engine.processes import Batch, device_of
from engine.runs import load_classifier, predict
from engine.tasks import OtherLoss, Sentences, Task
from utils import UserError

LEAST = 1e-12  # of a teacher's probabilities, whose logarithms are used


def divergence(taught: torch.Tensor, outputs: torch.Tensor, temperature: float) -> torch.Tensor:
    """T^2 KL(p_T || q_T). Both are log-probabilities at T = 1, which are logits, too: b c and b c -> b"""
    p, q = ((each / temperature).log_softmax(dim=-1) for each in (taught, outputs))
    return temperature**2 * (p.exp() * (p - q)).sum(dim=-1)


class DistilledTask(OtherLoss):
    """The task with the loss of the labelled sentences. taught: n c, log-probabilities in the order of the data set."""

    def __init__(self, task: Task, taught: torch.Tensor, temperature: float, weight: float):
        super().__init__(task)
        self.taught, self.temperature, self.weight = taught, temperature, weight

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        taught = self.taught[batch["indices"]].to(outputs)  # b c; a process without rows has none
        soft = divergence(taught, outputs[: len(taught)], self.temperature).sum() / batch_size
        return (1 - self.weight) * self.plain.loss(outputs, batch, batch_size) + self.weight * soft


class Distill(Method):
    """teacher: files, joined by commas. temperature: T. weight: of the teacher's part of the loss."""

    name = "distill"
    uses_unlabelled = True

    def __init__(self, teacher: str = "", temperature: float = 2.0, weight: float = 0.9):
        super().__init__(teacher=teacher, temperature=temperature, weight=weight)
        self.teachers, self.temperature, self.weight = teacher.split(","), temperature, weight
        self.unlabelled: Sentences | None = None
        self.taught = torch.empty(0)  # n c, of the sentences without labels
        self.found: dict[str, Any] = {}

    def start(self, model: nn.Module) -> None:
        self.device, self.suffix = device_of(model), f" {model.prompt_suffix}" if model.prompt_suffix else ""

    def see(self, unlabelled: Sentences | None, label_names: Sequence[str]) -> None:
        self.unlabelled, self.label_names = unlabelled, tuple(label_names)

    def task(self, task: Task, train: DataLoader) -> Task:
        texts = [*train.dataset.sentences, *(self.unlabelled.sentences if self.unlabelled else ())]
        with torch.random.fork_rng(devices=[]):  # of a resumed run, too, which asks anew
            taught = self.ask([text.removesuffix(self.suffix) for text in texts])  # n c
        labels = torch.tensor(train.dataset.labels)
        self.batch_size, self.taught = train.batch_sampler.batch_size, taught[len(labels) :]
        accuracy = (taught[: len(labels)].argmax(-1) == labels).float().mean().item()
        self.found = {"teacher's train acc": accuracy, "sentences without labels": len(self.taught)}
        return DistilledTask(task, taught[: len(labels)], self.temperature, self.weight)

    def ask(self, texts: list[str]) -> torch.Tensor:
        """The log-probabilities of the teachers' mean: n c. Raises `UserError` for a teacher with other labels."""
        total = torch.zeros(len(texts), len(self.label_names))
        for path in self.teachers:
            model, about = load_classifier(path)
            if about.label_names != self.label_names:
                theirs, ours = ", ".join(about.label_names), ", ".join(self.label_names)
                raise UserError(f"distill: {path} tells {theirs} apart, and this run {ours}")
            predictions = predict(model.to(self.device), about, texts)
            total += torch.tensor([each.probabilities for each in predictions])
        return (total / len(self.teachers)).clamp(min=LEAST).log()

    def penalty(self, step: Step) -> torch.Tensor | float:
        if not len(self.taught):
            return 0.0
        places = places_at(step, len(self.taught), self.batch_size)
        outputs = outputs_for(step, self.unlabelled, places)  # b c
        taught = own_rows(step, self.taught[places]).to(outputs)
        return self.weight * divergence(taught, outputs, self.temperature).mean()

    def figures(self) -> dict[str, Any]:
        return self.found
