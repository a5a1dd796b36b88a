"""Checks rope.apply_rotary_emb: `python rope_test.py`. Exit status 0 if it is right, 1 if not."""

from __future__ import annotations

import math
import sys

import torch

from rope import apply_rotary_emb
from utils import run_main

TOLERANCE = 1e-6
# What the assignment's rotary_embedding_actual.data publishes for a query of twos and a key of threes, shape 1 2 2 4
# (github.com/neubig/minllama-assignment, commit 2951cdd): position 0 is not turned, position 1 is this for every head.
PUBLISHED_QUERY = (-0.6023372411727905, 2.7635464668273926, 1.9799003601074219, 2.019899606704712)
PUBLISHED_KEY = (-0.903505802154541, 4.145319938659668, 2.969850540161133, 3.0298495292663574)


def rotate_by_hand(x: torch.Tensor, theta: float) -> torch.Tensor:
    """RoFormer's equation 34, one number at a time in double precision. x: b s h d"""
    _, length, _, head_dim = x.shape
    rotated = x.double().clone()
    for position in range(length):
        for pair in range(head_dim // 2):
            angle = position * theta ** (-2 * pair / head_dim)
            first, second = x[:, position, :, 2 * pair].double(), x[:, position, :, 2 * pair + 1].double()  # b h
            rotated[:, position, :, 2 * pair] = first * math.cos(angle) - second * math.sin(angle)
            rotated[:, position, :, 2 * pair + 1] = first * math.sin(angle) + second * math.cos(angle)
    return rotated


def report(what: str, actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Print the largest error and whether it is within the tolerance."""
    if actual.shape != expected.shape:
        print(f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}: WRONG")
        return False
    error = (actual.double() - expected.double()).abs().max().item()
    passed = error <= TOLERANCE  # False for NaN as well
    print(f"{what}: largest error {error:.1e}, tolerance {TOLERANCE:.0e}: {'ok' if passed else 'WRONG'}")
    return passed


def check_published() -> bool:
    query, key = apply_rotary_emb(2 * torch.ones(1, 2, 2, 4), 3 * torch.ones(1, 2, 2, 4), 4, 20)
    verdicts = []
    for name, actual, start, at_one in (("query", query, 2.0, PUBLISHED_QUERY), ("key", key, 3.0, PUBLISHED_KEY)):
        expected = torch.stack((torch.full((2, 4), start), torch.tensor(at_one).expand(2, 4)))[None]  # 1 2 2 4
        verdicts.append(report(f"published values, {name}", actual, expected))
    return all(verdicts)


def check_closed_form() -> bool:
    generator = torch.Generator().manual_seed(0)
    verdicts = []
    for batch, length, heads, kv_heads, head_dim, theta in ((2, 7, 4, 2, 8, 10000.0), (1, 33, 3, 3, 6, 500.0)):
        query = torch.randn(batch, length, heads, head_dim, generator=generator)
        key = torch.randn(batch, length, kv_heads, head_dim, generator=generator)
        rotated = apply_rotary_emb(query, key, head_dim, 64, theta)
        for name, actual, x in zip(("query", "key"), rotated, (query, key), strict=True):
            what = f"closed form, {name} {list(x.shape)}, theta {theta:g}"
            verdicts.append(report(what, actual, rotate_by_hand(x, theta)))
    return all(verdicts)


def main() -> int:
    published, closed_form = check_published(), check_closed_form()
    if published and closed_form:
        print("Rotary embedding test passed!")
        return 0
    print("Rotary embedding test FAILED: are neighbouring numbers paired, and does pair i turn by theta^(-2i/d)?")
    return 1


if __name__ == "__main__":
    sys.exit(run_main(main))
