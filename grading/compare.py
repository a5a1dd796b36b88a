"""Comparing a student's numbers with expected ones, and the lines that `rope_test.py` and `optimizer_test.py` print."""

from __future__ import annotations

from collections.abc import Callable

import torch

from grading.asking import Student

Tensors = tuple[torch.Tensor, ...]
LARGEST_ERROR = 1e-6
Say = Callable[[str], None]  # takes a line: `print`, or a list's `append`


def alike(actual: Tensors, expected: Tensors, tolerance: float = 1e-5) -> bool:
    """Whether shapes are the same and all numbers equal up to `tolerance`, relative above 1. NaN is equal to NaN."""
    return len(actual) == len(expected) and all(
        a.shape == e.shape and torch.allclose(a.double(), e.double(), atol=tolerance, rtol=tolerance, equal_nan=True)
        for a, e in zip(actual, expected, strict=True)
    )


def report_error(what: str, actual: torch.Tensor, expected: torch.Tensor, say: Say = print) -> bool:
    """Print the largest error of a tensor, and whether it is within `LARGEST_ERROR`. The shapes are the same."""
    error = (actual - expected.double()).abs().max().item()
    passed = error <= LARGEST_ERROR  # False for NaN as well
    say(f"{what}: largest error {error:.1e}, tolerance {LARGEST_ERROR:.0e}: {'ok' if passed else 'WRONG'}")
    return passed


def report_verdict(test: str, student: Student, mistake: str | None, say: Say = print) -> bool:
    """Print the last line of a test. mistake: None if all numbers are right; then the process must end well, too."""
    trouble = student.end() if mistake is None else mistake
    say(f"{test} test FAILED: {trouble}" if trouble else f"{test} test passed!")
    return not trouble
