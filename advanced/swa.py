"""SWA: the plain mean of the weights in the last part of training is what is evaluated and saved (Izmailov et al. 2018,
"Averaging Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407, section 3 and algorithm 1).

After each step of the last part, or at the end of each of its epochs, with n the number of weights in the mean so far:

    mean <- (n * mean + theta) / (n + 1)

Before that the model itself is evaluated, so an epoch without a mean may be the one that is saved. The rate must be
constant in this part, as --lr is where no schedule lets it fall: weights that hardly move are one weight. (The authors'
code lets the rate fall to a constant one before, and averages at the ends of epochs alone; here that is every=epoch. It
also computes the statistics of BatchNorm anew, which these models do not have.)
"""

from __future__ import annotations

from torch.utils.data import DataLoader

from advanced.average import AveragingMethod, follow
from engine.methods import Step
from engine.tasks import Task


class SWA(AveragingMethod):
    """start: the share of all steps before the mean. every: "step" or "epoch"."""

    name = "swa"

    def __init__(self, start: float = 0.75, every: str = "step"):
        super().__init__(start=start, every=every)
        self.share, self.every = start, every
        self.period = 1  # steps from one weight of the mean to the next

    def task(self, task: Task, train: DataLoader) -> Task:
        self.period = len(train) if self.every == "epoch" else 1
        return task

    def after_step(self, step: Step) -> None:
        done = step.number + 1
        if done > self.share * step.total and done % self.period == 0:
            follow(self.average, step.model, self.steps / (self.steps + 1))
            self.steps += 1
