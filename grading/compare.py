"""Comparing tensors."""

from __future__ import annotations

import torch

Tensors = tuple[torch.Tensor, ...]


def alike(actual: Tensors, expected: Tensors, tolerance: float = 1e-5) -> bool:
    """Whether shapes are the same and all numbers equal up to `tolerance`, relative above 1. NaN is equal to NaN."""
    return len(actual) == len(expected) and all(
        a.shape == e.shape and torch.allclose(a.double(), e.double(), atol=tolerance, rtol=tolerance, equal_nan=True)
        for a, e in zip(actual, expected, strict=True)
    )
