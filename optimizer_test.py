"""Checks optimizer.AdamW: `python optimizer_test.py`. Exit status 0 if it is right, 1 if not.

Where it is wrong, its numbers are compared with those that the usual mistakes give, and the mistake that fits is named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from rope_test import Answer, alike, ask, student
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


def report(what: str, answer: Answer, expected: torch.Tensor) -> bool:
    """Print the largest error and whether it is within the tolerance."""
    if answer.trouble:
        print(f"{what}: {answer.line}: WRONG")
        return False
    error = (answer.tensors[0] - expected.double()).abs().max().item()
    passed = error <= TOLERANCE  # False for NaN as well
    print(f"{what}: largest error {error:.1e}, tolerance {TOLERANCE:.0e}: {'ok' if passed else 'WRONG'}")
    return passed


# -------------------------------------------------------------------------------------------- AdamW by hand

# Two parameters, and few steps with such settings that every mistake shows.
FIRST_WEIGHTS = torch.tensor(((0.5, -0.3), (1.2, 0.8)), dtype=torch.float64)
FEW_STEPS = 5
SETTINGS = dict(lr=0.05, betas=(0.6, 0.9), eps=0.1, weight_decay=0.0, correct_bias=True)
CASES = {
    "eps 0.1": SETTINGS,
    "eps 0.1, weight decay 0.4": {**SETTINGS, "weight_decay": 0.4},
    "eps 0.1, correct_bias=False": {**SETTINGS, "correct_bias": False},
}


def gradients() -> Iterator[torch.Tensor]:
    for step in range(FEW_STEPS):
        yield torch.sin(torch.arange(1, 5, dtype=torch.float64).square() + step).view(2, 2)


def few_steps(optimizer_class: type, **settings) -> torch.Tensor:
    """What an optimizer makes of two parameters, the rows of `FIRST_WEIGHTS`."""
    parameters = [torch.nn.Parameter(row.clone()) for row in FIRST_WEIGHTS]
    optimizer = optimizer_class(parameters, **settings)
    for gradient in gradients():
        for parameter, row in zip(parameters, gradient, strict=True):
            parameter.grad = row.clone()
        optimizer.step()
    return torch.stack([parameter.detach() for parameter in parameters])


def adamw(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    correct_bias: bool,
    gradient: Callable = lambda g, p, decay: g,
    first: Callable = lambda m, g, beta: beta * m + (1 - beta) * g,
    second: Callable = lambda v, g, beta: beta * v + (1 - beta) * g**2,
    count: Callable = lambda step: step,
    correction: Callable = lambda c1, c2: c2.sqrt() / c1,
    denominator: Callable = lambda v, eps, c2: v.sqrt() + eps,
    decay: Callable = lambda new, old, lr, alpha, decay: new - lr * decay * new,
) -> torch.Tensor:
    """The formulas of `optimizer.AdamW`'s docstring, in float64. The functions are what can go wrong.

    c1 and c2 are 1 - beta^t of the first and of the second moment.
    """
    weights, m, v = FIRST_WEIGHTS, torch.zeros_like(FIRST_WEIGHTS), torch.zeros_like(FIRST_WEIGHTS)
    for step, g in enumerate(gradients(), 1):
        g = gradient(g, weights, weight_decay)
        m, v = first(m, g, betas[0]), second(v, g, betas[1])
        c1, c2 = (1 - torch.tensor(beta if correct_bias else 0.0, dtype=torch.float64) ** count(step) for beta in betas)
        alpha = lr * correction(c1, c2) if correct_bias else lr
        weights = decay(weights - alpha * m / denominator(v, eps, c2), weights, lr, alpha, weight_decay)
    return weights


def with_settings(**other) -> Callable[..., torch.Tensor]:
    """`adamw` with other settings than those that were asked for."""
    return lambda **settings: adamw(**{**settings, **other})


MISTAKES: dict[str, Callable[..., torch.Tensor]] = {
    "the weight decay comes before the update; subtract lr * weight_decay * p after it, of the new p": partial(
        adamw, decay=lambda new, old, lr, alpha, decay: new - lr * decay * old
    ),
    "the weight decay is scaled by alpha_t, the corrected step size; it is lr * weight_decay * p": partial(
        adamw, decay=lambda new, old, lr, alpha, decay: new - alpha * decay * new
    ),
    "the weight decay comes before the update and is scaled by alpha_t; it is lr * weight_decay * p, after it": partial(
        adamw, decay=lambda new, old, lr, alpha, decay: new - alpha * decay * old
    ),
    "the weight decay lacks lr; it is lr * weight_decay * p": partial(
        adamw, decay=lambda new, old, lr, alpha, decay: new - decay * new
    ),
    "the weight decay has the wrong sign: it makes weights grow": partial(
        adamw, decay=lambda new, old, lr, alpha, decay: new + lr * decay * new
    ),
    "the weight decay is added to the gradient (L2 regularization); AdamW decouples it from the moments": partial(
        adamw, gradient=lambda g, p, decay: g + decay * p, decay=lambda new, *_: new
    ),
    "there is no weight decay": with_settings(weight_decay=0.0),
    "there is no bias correction: alpha_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)": with_settings(correct_bias=False),
    "correct_bias=False is ignored": with_settings(correct_bias=True),
    "the bias correction lacks sqrt(1 - beta2^t)": partial(adamw, correction=lambda c1, c2: 1 / c1),
    "the bias correction lacks the division by 1 - beta1^t": partial(adamw, correction=lambda c1, c2: c2.sqrt()),
    "the bias correction lacks the root of 1 - beta2^t": partial(adamw, correction=lambda c1, c2: c2 / c1),
    "the bias correction is upside down: it is sqrt(1 - beta2^t) / (1 - beta1^t)": partial(
        adamw, correction=lambda c1, c2: c1 / c2.sqrt()
    ),
    "the bias correction has beta1 and beta2 exchanged": partial(adamw, correction=lambda c1, c2: c1.sqrt() / c2),
    "the step is counted from 0, where 1 - beta^t is 0; count it before it is used": partial(
        adamw, count=lambda step: step - 1
    ),
    "the first step is counted as the second": partial(adamw, count=lambda step: step + 1),
    "the step stays 1; it is counted in the state of each parameter": partial(adamw, count=lambda step: 1),
    "eps stands inside the root; it is sqrt(v) + eps": partial(adamw, denominator=lambda v, eps, c2: (v + eps).sqrt()),
    "eps stands inside the root of the bias-corrected v; it is sqrt(v) + eps, of v as it is": partial(
        adamw, denominator=lambda v, eps, c2: (v + eps * c2).sqrt()
    ),
    "eps is added after the bias correction, as in torch.optim.AdamW; it is sqrt(v) + eps, of v as it is": partial(
        adamw, denominator=lambda v, eps, c2: v.sqrt() + eps * c2.sqrt()
    ),
    "eps is scaled by 1 - beta2^t; it is sqrt(v) + eps": partial(
        adamw, denominator=lambda v, eps, c2: v.sqrt() + eps * c2
    ),
    "eps is missing, or not the one that was given; it is sqrt(v) + eps": with_settings(eps=0.0),
    "the root of the second moment is missing; it is sqrt(v) + eps": partial(
        adamw, denominator=lambda v, eps, c2: v + eps
    ),
    "beta1 and beta2 are exchanged; beta1 is the first moment's": lambda betas, **settings: adamw(
        betas=betas[::-1], **settings
    ),
    "beta1 and beta2 are exchanged in the moments; beta1 is the first moment's": lambda betas, **settings: adamw(
        betas=betas[::-1], correction=lambda c1, c2: c1.sqrt() / c2, **settings
    ),
    "the argument betas is ignored, (0.9, 0.999) always taken": with_settings(betas=(0.9, 0.999)),
    "the second moment lacks the square; it is of g^2": partial(
        adamw, second=lambda v, g, beta: beta * v + (1 - beta) * g
    ),
    "the second moment is of |g|; it is of g^2": partial(
        adamw, second=lambda v, g, beta: beta * v + (1 - beta) * g.abs()
    ),
    "the first moment lacks the factor 1 - beta1": partial(adamw, first=lambda m, g, beta: beta * m + g),
    "the second moment lacks the factor 1 - beta2": partial(adamw, second=lambda v, g, beta: beta * v + g**2),
    "the first moment has beta1 and 1 - beta1 exchanged": partial(
        adamw, first=lambda m, g, beta: (1 - beta) * m + beta * g
    ),
    "the second moment has beta2 and 1 - beta2 exchanged": partial(
        adamw, second=lambda v, g, beta: (1 - beta) * v + beta * g**2
    ),
    "the update takes the gradient itself; it is the first moment's": partial(adamw, first=lambda m, g, beta: g),
    "the moments are not kept from step to step; they belong into self.state": partial(
        adamw, first=lambda m, g, beta: (1 - beta) * g, second=lambda v, g, beta: (1 - beta) * g**2
    ),
    "weights move up the gradient; subtract the update": lambda lr, **settings: adamw(
        lr=-lr, decay=lambda new, old, lr, alpha, decay: new + lr * decay * new, **settings
    ),
}


# ------------------------------------------------------------------------------------------------- the check


def check_few_steps() -> tuple[bool, str]:
    """Whether a few steps are right, where eps matters. If not, prints the errors and returns the mistake that fits."""
    answers = {
        what: ask(lambda settings=settings: few_steps(student("optimizer", "AdamW"), **settings))
        for what, settings in CASES.items()
    }
    expected = {what: adamw(**settings) for what, settings in CASES.items()}
    if all(alike(answers[what].tensors, (expected[what],)) for what in CASES):
        return True, ""
    for what in CASES:
        report(f"{FEW_STEPS} steps against the formulas, {what}", answers[what], expected[what])
    for sentence, mistake in MISTAKES.items():
        if all(alike(answers[what].tensors, (mistake(**settings),)) for what, settings in CASES.items()):
            return False, sentence
    return False, ""


def main() -> int:
    ours = ask(lambda: train(student("optimizer", "AdamW"), weight_decay=1e-4, correct_bias=True))
    published = report(f"{STEPS} steps against the published weights", ours, torch.tensor(PUBLISHED_WEIGHTS))

    # eps is added before the bias correction here and after it in PyTorch: it must be tiny for the two to agree
    ours = ask(lambda: train(student("optimizer", "AdamW"), weight_decay=0.0, eps=1e-12))
    theirs = train(torch.optim.AdamW, weight_decay=0.0, eps=1e-12)
    pytorch = report(f"{STEPS} steps against torch.optim.AdamW without weight decay", ours, theirs)

    few, mistake = (False, f"AdamW: {ours.line}") if ours.trouble else check_few_steps()
    if published and pytorch and few:
        print("Optimizer test passed!")
        return 0
    if "ZeroDivisionError" in ours.trouble:
        mistake = f"is the step counted from 0, where 1 - beta^t is 0? {ours.trouble}"
    if few and pytorch:  # which was compared without weight decay
        mistake = (
            "the weight decay loses digits, as a factor 1 - lr * weight_decay does: subtract lr * weight_decay * p"
        )
    if pytorch:
        hint = (
            "it is right for one parameter and a tiny eps; look at eps, weight decay, and the state of each parameter"
        )
    else:
        hint = "look at the moments and the bias correction"
    print(f"Optimizer test FAILED: {mistake or f'no usual mistake fits. {hint.capitalize()}'}")
    return 1


if __name__ == "__main__":
    sys.exit(run_main(main))
