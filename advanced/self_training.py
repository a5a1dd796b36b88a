"""Self-training: from some step on, the model also learns the labels that it gives to sentences without labels (Lee
2013, "Pseudo-Label", equation 15; Du et al. 2021, arXiv:2010.02194).

After the share `after` of all steps, the model predicts every sentence that `--shots` leaves aside, without dropout.
For each class, the sentences with the highest probability of it join: at most `per_class`, none below `threshold`, and
as many of every class that has a sentence above it. From then on the loss of a step is

    loss of the labelled batch  +  weight * mean of -log P(y') over as many sentences that have joined

with y' their predicted labels.

Lee labels anew at every step and raises the weight slowly; here, as in Du et al., the sentences are labelled once and
chosen by class. These train a new student, with the whole distribution as its target; here one run goes on, with the
label alone, as in Lee. (The code of Du et al. retrieves sentences, and there is no official code of the rest.)

Shapes: b batch   n sentences without labels   c classes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from advanced.table import NO_SENTENCES
from advanced.unlabelled import outputs_for, own_rows, places_at
from engine.data import NO_GOLD_LABEL
from engine.methods import Method, Step, pretrained_of
from engine.processes import device_of
from engine.runs import loader_of
from engine.tasks import Sentences, Task
from utils import UserError, warn


class SelfTraining(Method):
    """after, threshold, per_class, weight: see above."""

    name = "self-training"
    uses_unlabelled = True

    def __init__(self, after: float = 0.5, threshold: float = 0.6, per_class: int = 256, weight: float = 1.0):
        super().__init__(after=after, threshold=threshold, per_class=per_class, weight=weight)
        self.after, self.threshold, self.per_class, self.weight = after, threshold, per_class, weight
        self.labels: torch.Tensor | None = None  # n, NO_GOLD_LABEL for what has not joined; None: not labelled yet

    def see(self, unlabelled: Sentences | None, label_names: Sequence[str]) -> None:
        if not unlabelled:
            raise UserError(f"self-training {NO_SENTENCES}, or a smaller N")
        self.unlabelled = unlabelled

    def task(self, task: Task, train: DataLoader) -> Task:
        self.batch_size = train.batch_sampler.batch_size
        return task

    def penalty(self, step: Step) -> torch.Tensor | float:
        joined = [] if self.labels is None else (self.labels != NO_GOLD_LABEL).nonzero().flatten().tolist()
        if not joined:
            return 0.0
        places = [joined[place] for place in places_at(step, len(joined), self.batch_size)]
        outputs = outputs_for(step, self.unlabelled, places)  # b c
        labels = own_rows(step, self.labels[places]).to(outputs.device)
        return self.weight * step.task.loss(outputs, {"labels": labels}, len(outputs))

    def after_step(self, step: Step) -> None:
        if step.number + 1 == max(1, round(self.after * step.total)):
            probabilities = self.predict(step)
            self.labels = self.choose(probabilities)
            if (self.labels == NO_GOLD_LABEL).all():
                most = f"the highest is {probabilities.max():.3f}"
                warn(f"self-training: no sentence has a probability of {self.threshold} or more ({most}); none joins")

    @torch.inference_mode()
    def predict(self, step: Step) -> torch.Tensor:
        """The probabilities of all sentences: n c"""
        device, found = device_of(step.model), None
        step.model.eval()
        for batch in loader_of(self.unlabelled, pretrained_of(step.model).config, self.batch_size, device):
            outputs = step.network(batch["token_ids"].to(device)).float().softmax(dim=-1).cpu()  # b c
            found = torch.empty(len(self.unlabelled), outputs.shape[1]) if found is None else found
            found[batch["indices"]] = outputs
        step.model.train()
        return found

    def choose(self, probabilities: torch.Tensor) -> torch.Tensor:
        """The labels of the sentences that join. probabilities: n c -> n"""
        highest, predicted = probabilities.max(dim=-1)  # n
        order = highest.argsort(descending=True, stable=True)
        of_classes = [order[predicted[order] == label] for label in predicted.unique()]
        sure = [places[highest[places] >= self.threshold] for places in of_classes]
        most = min([self.per_class, *(len(places) for places in sure if len(places))])
        labels = torch.full_like(predicted, NO_GOLD_LABEL)
        for places in sure:
            labels[places[:most]] = predicted[places[:most]]
        return labels

    def figures(self) -> dict[str, Any]:
        if self.labels is None:
            return {}
        counts = self.labels[self.labels != NO_GOLD_LABEL].bincount().tolist()
        joined = ", ".join(f"{number} of class {label}" for label, number in enumerate(counts) if number)
        return {"joined": joined or "none", "of": len(self.labels)}

    def state(self) -> dict[str, Any]:
        return {} if self.labels is None else {"labels": self.labels}

    def load_state(self, state: dict[str, Any], piece: Callable[..., torch.Tensor]) -> None:
        if state:
            if state["labels"].dtype != torch.long or state["labels"].dim() != 1:
                raise ValueError("not labels")
            self.labels = state["labels"]
