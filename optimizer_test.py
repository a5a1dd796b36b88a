"""Checks optimizer.AdamW: `python optimizer_test.py`. Exit status 0 if it is right, 1 if not."""

from __future__ import annotations

import sys

import numpy as np
import torch

from optimizer import AdamW
from utils import run_main

# The weights of the assignment's 1,000-step run, as its optimizer_test.npy publishes them
# (github.com/neubig/minllama-assignment, commit 2951cdd).
PUBLISHED_WEIGHTS = (
    (0.554827868938446, 0.8666566610336304, 0.0729198157787323),
    (-0.4472450613975525, -0.29512280225753784, -0.27172720432281494),
)
SEED = 0
STEPS = 1000
TOLERANCE = 1e-6


def train(optimizer_class: type, **hyper_parameters) -> torch.Tensor:
    """The assignment's toy problem: a 3 -> 2 linear layer learns (x0 + x1, -x2). Returns its weight, 2 3."""
    rng = np.random.default_rng(SEED)
    torch.manual_seed(SEED)
    layer = torch.nn.Linear(3, 2, bias=False)
    optimizer = optimizer_class(layer.parameters(), lr=1e-3, **hyper_parameters)
    for _ in range(STEPS):
        x = torch.tensor(rng.uniform(size=3), dtype=torch.float32)
        target = torch.stack((x[0] + x[1], -x[2]))
        optimizer.zero_grad()
        (target - layer(x)).square().sum().backward()
        optimizer.step()
    return layer.weight.detach()


def report(what: str, actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Print the largest error and whether it is within the tolerance."""
    error = (actual - expected).abs().max().item()
    passed = error <= TOLERANCE  # False for NaN as well
    print(f"{what}: largest error {error:.1e}, tolerance {TOLERANCE:.0e}: {'ok' if passed else 'WRONG'}")
    return passed


def main() -> int:
    ours = train(AdamW, weight_decay=1e-4, correct_bias=True)
    published = report(f"{STEPS} steps against the published weights", ours, torch.tensor(PUBLISHED_WEIGHTS))

    # eps is added before the bias correction here and after it in PyTorch: it must be tiny for the two to agree
    ours = train(AdamW, weight_decay=0.0, eps=1e-12)
    theirs = train(torch.optim.AdamW, weight_decay=0.0, eps=1e-12)
    pytorch = report(f"{STEPS} steps against torch.optim.AdamW without weight decay", ours, theirs)

    if published and pytorch:
        print("Optimizer test passed!")
        return 0
    hint = "look at the moments and the bias correction"
    if pytorch:  # which was compared without weight decay
        hint = "weight decay: subtract lr * weight_decay * p after the main update (1 - lr * weight_decay loses digits)"
    print(f"Optimizer test FAILED: {hint}")
    return 1


if __name__ == "__main__":
    sys.exit(run_main(main))
