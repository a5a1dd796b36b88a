"""Whether a weight is still what it was when something was made of it.

PyTorch counts the writes to a tensor, but not those to its `.data`, of NumPy or of fused optimizers. So some numbers of
the weight are compared as well: what changes all numbers, such as a merged LoRA, is seen.
"""

from __future__ import annotations

import numpy as np
import torch

SAMPLE = 32  # numbers, spread over rows and columns: to compare them takes a microsecond
OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # NumPy has no bfloat16


class WeightState:
    """A matrix as it is now. It is kept, so that no other one can come to lie at its address."""

    def __init__(self, weight: torch.Tensor):
        self.weight, self.place = weight.detach(), _place_of(weight)
        self.numbers = _some_numbers(self.weight)  # not copied: what is written to the weight shows here
        self.before = self.numbers.tobytes()

    def stands(self, weight: torch.Tensor) -> bool:
        """Whether `weight` lies where it did, and no write to it is known of."""
        return _place_of(weight) == self.place and self.numbers.tobytes() == self.before


def _place_of(weight: torch.Tensor) -> tuple[object, ...]:
    # PyTorch does not count writes to an inference tensor, so its state is never the same
    return weight.data_ptr(), weight.stride(), object() if weight.is_inference() else weight._version


def _some_numbers(weight: torch.Tensor) -> np.ndarray:
    """A view of numbers of a matrix that lies in the CPU's memory as numbers; else nothing. weight: o i"""
    if type(weight) is not torch.Tensor or weight.device.type != "cpu" or weight.dim() != 2 or not weight.numel():
        return np.empty(0)
    rows, columns = (max(1, size // SAMPLE) for size in weight.shape)
    return weight[::rows, ::columns].diagonal().view(OF_SIZE[weight.element_size()]).numpy()
