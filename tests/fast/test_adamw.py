"""AdamW's kernel computes optimizer.py's update, keeps its state, and steps aside where that is edited."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_optimizer import GROUPS, SHAPES, STEPS, TAKEN, slow_adamw

import engine.equivalence
import optimizer as optimizer_module
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


DECAY = """\
                if group["weight_decay"] > 0.0:  # not a product with 1 - 1e-7: float32 would lose most digits
                    p.add_(p, alpha=-group["lr"] * group["weight_decay"])
"""
RULES = {  # lines of AdamW.step that a student edits: what stands there, and what then does
    "decays first": (
        (DECAY, ""),
        ("                state = self.state[p]\n", f"{DECAY}                state = self.state[p]\n"),
    ),
    "eps inside": (('state["v"].sqrt().add_(group["eps"])', 'state["v"].add(group["eps"]).sqrt()'),),
    "signs": (('addcdiv_(state["m"], ', 'addcdiv_(state["m"].sign(), '),),
    "decay by alpha": (('-group["lr"] * group["weight_decay"]', '-alpha * group["weight_decay"]'),),
    "no decay of vectors": (('if group["weight_decay"] > 0.0:', 'if group["weight_decay"] > 0.0 and p.dim() > 1:'),),
    "matrices move more slowly": (("value=-alpha)", "value=-alpha / p.dim())"),),
    "one parameter stays": (('for p in group["params"]:', 'for p in group["params"][1:]:'),),
    "a state of 2": (("step=0", "step=1"),),
    "no bias correction of v": (('math.sqrt(1 - beta2 ** state["step"])', "1.0"),),
    "clips each number": (("clip_grad_norm_(", "clip_grad_value_("),),
    "clips all": (('if group.get("max_grad_norm") is not None:', "if True:"), ('group["max_grad_norm"])', "0.1)")),
    "from a step on": (("value=-alpha)", 'value=-alpha if state["step"] < 3 else -0.5 * alpha)'),),
}


LATER = (("value=-alpha)", 'value=-alpha if state["step"] < 10_000 else -0.5 * alpha)'),)


def edited_step(edits: tuple[tuple[str, str], ...]) -> Callable:
    code = inspect.getsource(optimizer_module)
    for before, after in edits:
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    names: dict = {"__name__": "edited"}
    exec(compile(code, "edited optimizer.py", "exec"), names)
    return names["AdamW"].step


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("alter", RULES)
def test_an_edited_step_is_what_is_computed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, alter: str, when: str
):
    settings = {"lr": 0.1, "weight_decay": 0.5, "eps": 1e-3, "max_grad_norm": 3.0}
    optimizer, unedited = AdamW(parameters(), **settings), train(AdamW(parameters(), **settings))
    if when == "after":
        accelerate_optimizer(optimizer)
        assert type(optimizer) is FusedAdamW
    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "step", edited_step(RULES[alter]))
        if when == "before":
            accelerate_optimizer(optimizer)
        expected = train(AdamW(parameters(), **settings))
        assert all(map(torch.equal, train(optimizer), expected)) and not all(map(torch.equal, expected, unedited))
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("note: AdamW.step is computed as it is written")
        assert choose_update(CPU).kernel == "plain"
    assert choose_update(CPU).kernel == "fused"


def test_an_edit_of_late_steps_is_noticed_before_they_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(AdamW, "step", edited_step(LATER))
    assert "differ" in choose_update(CPU).reason


def test_an_edit_that_changes_nothing_keeps_the_kernel(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, calls: list
):
    same = (('state["m"].lerp_(p.grad, 1 - beta1)', 'state["m"].mul_(beta1).add_(p.grad, alpha=1 - beta1)'),)
    monkeypatch.setattr(AdamW, "step", edited_step(same))
    optimizer = accelerated(AdamW(parameters(), lr=0.01))
    calls.clear()
    train(optimizer)
    assert calls and capfd.readouterr().err == ""


@pytest.mark.parametrize("length", [0.5, 1e6])
def test_the_kernel_clips_as_the_class_does(calls: list, length: float):
    results = []
    for make in (AdamW, lambda *args, **settings: accelerated(AdamW(*args, **settings))):
        trained = parameters()
        groups = [{"params": trained[:2], "max_grad_norm": length}, {"params": trained[2:]}]
        optimizer = make(groups, lr=0.01, eps=0.1)
        calls.clear()
        results.append([*train(optimizer), *(p.grad for p in trained if p.grad is not None)])
    assert calls
    for mine, other in zip(*results, strict=True):  # 4 steps, rounded as above
        torch.testing.assert_close(mine, other, atol=4 * 1.5e-6, rtol=0)


def test_the_kernel_takes_a_closure_and_refuses_sparse_gradients(calls: list):
    parameter = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = accelerated(AdamW([parameter], lr=0.1))
    calls.clear()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        (loss := (parameter**2).sum()).backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 9.0 and optimizer.step(closure=closure).item() < 9.0
    assert len(calls) == 2 and optimizer.step() is None
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        accelerated(AdamW(table.parameters())).step()
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("alter", [None, "signs"])
def test_hooks_of_a_step_run_once(monkeypatch: pytest.MonkeyPatch, alter: str | None):
    optimizer, seen = accelerated(AdamW(parameters(), lr=0.01)), []
    optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
    optimizer.register_step_post_hook(lambda *args: seen.append("after"))
    if alter:
        monkeypatch.setattr(AdamW, "step", edited_step(RULES[alter]))
    train(optimizer, range(2))
    assert seen == ["before", "after"] * 2


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


def test_an_edited_step_may_compute_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.setattr(AdamW, "step", lambda self: None)
    optimizer = accelerated(AdamW(parameters(), lr=0.01))
    assert all(map(torch.equal, train(optimizer), parameters())) and type(optimizer) is AdamW
    assert "AdamW.step is computed as it is written" in capfd.readouterr().err


def test_an_edited_step_may_take_other_inputs(monkeypatch: pytest.MonkeyPatch):
    optimizer = accelerated(AdamW(parameters(), lr=0.01))
    for inputs, named in (((None, 2.0), {}), ((), {"scale": 3.0}), ((None,), {"closure": None})):
        with pytest.raises(TypeError):  # as long as it does not
            optimizer.step(*inputs, **named)
    taken: list[tuple] = []
    monkeypatch.setattr(AdamW, "step", lambda self, *inputs, **named: taken.append((inputs, named)) or 7)
    assert [optimizer.step(None, 2.0), optimizer.step(scale=3.0), optimizer.step()] == [7, 7, 7]
    asked = ((None, 2.0), {}), ((), {"scale": 3.0}), ((), {})  # and what the comparison asks
    assert all(each in taken for each in asked) and taken[-1] == asked[-1]


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
