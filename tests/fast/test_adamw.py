"""AdamW's kernel computes optimizer.py's update, keeps its state, and steps aside where that is edited."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_optimizer import GROUPS, SHAPES, STEPS, TAKEN, slow_adamw

import engine.equivalence
from engine.runs import update_fast
from fast import accelerate_optimizer
from fast.adamw import FusedAdamW, choose_update
from optimizer import AdamW

CPU = torch.device("cpu")
FUSED = torch._fused_adamw_


@pytest.fixture(autouse=True)
def notes_are_new() -> None:
    engine.equivalence.notice.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """One entry for each call of the kernel."""
    seen: list[None] = []
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **named: seen.append(None) or FUSED(*args, **named))
    return seen


def accelerated(optimizer: AdamW) -> AdamW:
    accelerate_optimizer(optimizer)
    return optimizer


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=draw).to(dtype)) for shape in ((5, 7), (300,), (1,), (0,))]


def train(optimizer: AdamW, steps: range = range(4)) -> list[torch.Tensor]:
    """The parameters after these steps; one of them has no gradient in every second step."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for index, parameter in enumerate(trained):
            gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            parameter.grad = None if index == 1 and step % 2 else gradient
        optimizer.step()
    return [parameter.detach() for parameter in trained]


@pytest.mark.parametrize(("shape", "lies", "gradient_lies"), SHAPES.values(), ids=SHAPES)
def test_equals_the_algorithm_to_rounding(calls: list, shape: tuple, lies: Callable, gradient_lies: Callable):
    draw = torch.Generator().manual_seed(0)
    cases, groups = [], [{"params": [], **settings} for settings in GROUPS]
    for settings, group in zip(GROUPS, groups, strict=True):
        for taken in TAKEN:
            drawn = [gradient_lies(torch.randn(shape, generator=draw)) for _ in range(STEPS)]
            gradients = [each if step in taken else None for step, each in enumerate(drawn)]
            parameter = torch.nn.Parameter(lies(torch.randn(shape, generator=draw)))
            group["params"].append(parameter)
            doubles = [None if each is None else each.double() for each in gradients]
            expected = slow_adamw(parameter.double(), doubles, **{"lr": 0.003, **settings})
            cases.append((parameter, gradients, expected))
    optimizer = accelerated(AdamW(groups, lr=0.003))
    calls.clear()
    for step in range(STEPS):
        for parameter, gradients, _ in cases:
            parameter.grad = gradients[step]
        optimizer.step()
    assert bool(calls) == (lies is gradient_lies)  # numbers that do not lie one after another are no work for it
    for parameter, _, expected in cases:
        # a step rounds p up to three times, by 2^-24 of at most 8, and an update of at most 0.1 by some 2^-22
        np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=STEPS * 1.5e-6, rtol=0)


def test_state_goes_back_and_forth_between_the_kernel_and_the_class():
    settings = {"lr": 0.01, "weight_decay": 0.1}
    expected = train(AdamW(parameters(), **settings), range(9))
    trained = parameters()
    optimizer = AdamW(trained, **settings)
    for first, makes in ((0, accelerated), (3, lambda plain: plain), (6, accelerated)):
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = makes(AdamW(trained, lr=0.5))
        optimizer.load_state_dict(state)
        result = train(optimizer, range(first, first + 3))
    plain = AdamW(parameters(), **settings)
    train(plain, range(9))
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    for mine, other in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert mine.keys() == other.keys() and mine["step"] == other["step"]
    for mine, other in zip(result, expected, strict=True):  # 9 steps, rounded as above
        torch.testing.assert_close(mine, other, atol=9 * 1.5e-6, rtol=0)


def rule(alter: str) -> Callable[..., None]:
    """The update with one line edited, as a student would."""

    def update(ps: list, gs: list, ms: list, vs: list, alpha: float, group: dict) -> None:
        beta1, beta2 = group["betas"]
        lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
        for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
            if alter == "decays first":
                p.mul_(1 - lr * decay)
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            root = (v + eps).sqrt() if alter == "eps inside" else v.sqrt() + eps
            p.sub_(alpha * (m.sign() if alter == "signs" else m / root))
            if alter != "decays first":
                p.sub_((alpha if alter == "decay by alpha" else lr) * decay * p)

    return update


RULES = ("decays first", "eps inside", "signs", "decay by alpha")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("alter", RULES)
def test_an_edited_update_is_what_is_computed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, alter: str, when: str
):
    settings = {"lr": 0.1, "weight_decay": 0.5, "eps": 1e-3}
    optimizer = AdamW(parameters(), **settings)
    if when == "after":
        accelerate_optimizer(optimizer)
    monkeypatch.setattr(AdamW, "_update", staticmethod(rule(alter)))
    if when == "before":
        accelerate_optimizer(optimizer)
    expected = train(AdamW(parameters(), **settings))
    assert all(map(torch.equal, train(optimizer), expected))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("note: AdamW._update is computed as it is written")
    assert choose_update(CPU).kernel == "plain"


class OwnStep(AdamW):
    """A subclass."""


def with_momentum(parameters: list[torch.nn.Parameter], **settings: float) -> AdamW:
    return AdamW([{"params": parameters, "momentum": 0.9}], **settings)


OTHERS = {"a subclass": (OwnStep, "OwnStep"), "a setting of its own": (with_momentum, "momentum")}


@pytest.mark.parametrize("other", OTHERS)
def test_other_optimizers_stay_what_they_are(calls: list, capfd: pytest.CaptureFixture, other: str):
    make, named = OTHERS[other]
    optimizer = make(parameters(), lr=0.01)
    kind = type(optimizer)
    train(accelerated(optimizer))
    assert type(optimizer) is kind and not calls
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: ") and named in line


def test_an_own_step_without_an_update_is_computed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.delattr(AdamW, "_update")
    monkeypatch.setattr(AdamW, "step", lambda self: None)
    optimizer = accelerated(AdamW(parameters(), lr=0.01))
    assert all(map(torch.equal, train(optimizer), parameters()))
    assert "it has no _update" in capfd.readouterr().err


def test_an_update_may_take_other_inputs(monkeypatch: pytest.MonkeyPatch):
    optimizer = accelerated(AdamW(parameters(), lr=0.01))
    taken: list[tuple] = []
    monkeypatch.setattr(AdamW, "step", lambda self: self._update(1, 2.0, {}, "v", 5, 6))
    monkeypatch.setattr(AdamW, "_update", staticmethod(lambda *inputs: taken.append(inputs)))
    train(optimizer, range(1))
    assert taken[-1] == (1, 2.0, {}, "v", 5, 6)


def test_an_edited_step_keeps_the_kernel(monkeypatch: pytest.MonkeyPatch, calls: list):
    pieces = AdamW._pieces
    monkeypatch.setattr(AdamW, "_pieces", lambda self, some: list(pieces(self, some))[1:])
    optimizer = accelerated(AdamW(parameters(), lr=0.01))
    calls.clear()
    first, *others = train(optimizer)
    assert torch.equal(first, parameters()[0]) and not torch.equal(others[1], parameters()[2]) and calls


def test_pytorch_counts_what_the_kernel_writes():
    trained = parameters()
    train(accelerated(AdamW(trained, lr=0.01)), range(1))
    assert trained[0]._version > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_number_formats_are_computed_as_they_are_written(calls: list, dtype: torch.dtype):
    optimizer = accelerated(AdamW(parameters(dtype), lr=0.01))
    calls.clear()
    expected = train(AdamW(parameters(dtype), lr=0.01))
    assert all(map(torch.equal, train(optimizer), expected)) and not calls


def test_a_state_of_another_shape_is_an_error_and_nothing_is_written_beside_it():
    """The kernel itself would write past the end."""
    optimizer = accelerated(AdamW([torch.nn.Parameter(torch.ones(8))], lr=0.01))
    train(optimizer, range(1))
    (state,) = optimizer.state.values()
    state["m"] = torch.zeros(5)
    with pytest.raises(RuntimeError, match="size"):
        train(optimizer, range(1))


@pytest.mark.parametrize(("kernels", "kind"), [("auto", FusedAdamW), ("plain", AdamW)])
def test_a_run_has_the_kernel_unless_all_is_to_be_plain(kernels: str, kind: type):
    assert type(update_fast(AdamW(parameters()), kernels)) is kind
