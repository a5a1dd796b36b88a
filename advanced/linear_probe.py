"""A linear probe: the head is trained, and the pretrained weights stay as they are (Alain & Bengio 2016,
arXiv:1610.01644, section 3).

The accuracy of a linear classifier on a layer's state shows what the state holds. Here it is the state of the last
layer, and a baseline for all methods that train more. A classifier with option "pretrain" does the same.

The best head need not be searched in small steps: with solved=true it is computed (`solved_probe.py`) before the first
step. Nothing is left to train, so the learning rate is 0 and training ends after one epoch, which is evaluated.
"""

from __future__ import annotations

from torch import nn
from torch.utils.data import DataLoader

from advanced.solved_probe import SolvedHead
from engine.methods import EpochResult
from engine.processes import Distributed
from utils import warn


class LinearProbe(SolvedHead):
    """solved: whether the head is solved. `engine.methods.prepare` freezes the pretrained weights."""

    name = "linear-probe"
    freezes = True

    def __init__(self, solved: bool = False):
        super().__init__(solved=solved)
        self.is_solved = solved

    def begin(self, model: nn.Module, train: DataLoader, distributed: Distributed) -> None:
        super().begin(model, train, distributed)
        if self.is_solved:
            warn("linear-probe: the head is solved, not trained: one epoch with the learning rate 0")

    def rate(self, number: int, total: int) -> float:
        return 0.0 if self.is_solved else 1.0

    def stop(self, history: list[EpochResult]) -> bool:
        return self.is_solved
