import copy
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, asset

from grading import adamw, questions
from optimizer import AdamW


def slow_adamw(
    parameter: torch.Tensor,
    gradients: list[torch.Tensor | None],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    correct_bias: bool = True,
) -> np.ndarray:
    """Kingma & Ba's algorithm in NumPy. A gradient of None is a step that is not taken."""
    weight, m, v = parameter.detach().numpy().copy(), 0.0, 0.0
    for t, gradient in enumerate((each for each in gradients if each is not None), 1):
        g = gradient.numpy()
        alpha = lr * math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) if correct_bias else lr
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        weight -= alpha * m / (np.sqrt(v) + eps)
        weight -= lr * weight_decay * weight
    return weight


def run(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, gradients: torch.Tensor) -> None:
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


SHAPES = {  # of what is drawn, and how a parameter and a gradient lie in it
    "a long vector": ((16391,), torch.clone, torch.clone),
    "a transposed parameter": ((7, 7), torch.t, torch.clone),
    "a transposed gradient": ((7, 7), torch.clone, torch.t),
    "every second column": ((7, 62), lambda whole: whole[:, ::2], lambda whole: whole[:, 1::2]),
}
GROUPS = (
    {},
    {"lr": 0.01, "betas": (0.5, 0.8), "eps": 1e-3, "weight_decay": 0.1},
    {"betas": (0.0, 0.0), "weight_decay": 0.02, "correct_bias": False},
)
STEPS = 4
TAKEN = (range(STEPS), (1, 3), ())  # by three parameters of each group


@pytest.mark.parametrize(("shape", "lies", "gradient_lies"), SHAPES.values(), ids=SHAPES)
def test_equals_the_algorithm_for_every_number_step_and_group(shape: tuple, lies: Callable, gradient_lies: Callable):
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    cases, groups = [], [{"params": [], **settings} for settings in GROUPS]
    for settings, group in zip(GROUPS, groups, strict=True):
        for taken in TAKEN:
            gradients = [gradient_lies(draw()) if step in taken else None for step in range(STEPS)]
            parameter = torch.nn.Parameter(lies(draw()))
            group["params"].append(parameter)
            cases.append((parameter, gradients, slow_adamw(parameter, gradients, **{"lr": 0.003, **settings})))
    optimizer = AdamW(groups, lr=0.003)
    for step in range(STEPS):
        for parameter, gradients, _ in cases:
            parameter.grad = gradients[step]
        optimizer.step()
    for parameter, gradients, expected in cases:
        np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=1e-12, rtol=0)
        assert (parameter in optimizer.state) == any(gradient is not None for gradient in gradients)


def test_the_published_weights_are_those_of_the_course(assets: Path):
    published = torch.tensor(adamw.PUBLISHED_WEIGHTS)
    assert np.array_equal(published.numpy(), np.load(asset(assets, "optimizer_test.npy")))


def by_the_formula_of_the_notes(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """The course's run with p <- p - alpha_t (m / (sqrt(v) + eps) + lambda p), as it is printed."""
    p, m, v = weight, torch.zeros_like(weight), torch.zeros_like(weight)
    for t, x in enumerate(inputs, 1):
        g = 2 * torch.outer(p @ x - torch.stack((x[0] + x[1], -x[2])), x)  # of the squared error
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        alpha = 1e-3 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        p = p - alpha * (m / (v.sqrt() + 1e-6) + 1e-4 * p)
    return p


def test_the_decay_inside_the_corrected_step_is_off_as_the_page_says_and_passes_the_course_s_check():
    """With the page's own command, and the tolerance of the course's optimizer_test.py."""
    page = (ROOT / "docs" / "components" / "adamw.md").read_text(encoding="utf-8")
    edit = re.search(r"sed '(.+?)' optimizer\.py", page)[1]
    code = subprocess.run(["sed", edit, ROOT / "optimizer.py"], capture_output=True, text=True, check=True).stdout
    wrong: dict = {"__name__": "wrong"}
    exec(code, wrong)
    published, errors = torch.tensor(adamw.PUBLISHED_WEIGHTS), []
    for optimizer in (wrong["AdamW"], AdamW):
        weights = questions.train(**adamw.toy_problem(), optimizer=optimizer, lr=1e-3, weight_decay=1e-4)
        assert torch.allclose(published, weights, adamw.COURSE_RTOL, adamw.COURSE_ATOL)
        errors.append((weights - published).abs().max().item())
    weights = by_the_formula_of_the_notes(**adamw.toy_problem())
    assert torch.allclose(published, weights, adamw.COURSE_RTOL, adamw.COURSE_ATOL)
    errors.append((weights - published).abs().max().item())
    assert errors[1] < 5e-7 and errors[0::2] == pytest.approx([1.7e-5, 1.5e-5], abs=0.1e-5)
    assert "end 1.5e-5 from" in page and "(1.7e-5 with the decay in a line" in page
    for share, step in re.findall(r"(0\.\d+) at step ([\d,]+)", page):
        step = int(step.replace(",", ""))
        assert math.sqrt(1 - 0.999**step) / (1 - 0.9**step) == pytest.approx(float(share), abs=0.005)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype_moves_towards_the_minimum(dtype: torch.dtype):
    parameter = torch.nn.Parameter(torch.tensor([2.0, -3.0], dtype=dtype))
    optimizer = AdamW([parameter], lr=0.1, eps=1e-3)
    for _ in range(100):
        parameter.grad = 2 * parameter.data
        optimizer.step()
    assert parameter.dtype == optimizer.state[parameter]["m"].dtype == dtype
    assert parameter.abs().max() < 0.2


def test_a_decay_near_float32_resolution_is_rounded_once():
    before = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) + 0.5
    parameter = torch.nn.Parameter(before.clone())
    parameter.grad = torch.zeros_like(before)
    AdamW([parameter], lr=1e-3, weight_decay=1e-4).step()
    expected = (before.double() * (1 - 1e-7)).float()  # a factor of 1 - 1e-7 taken in float32 would be 1 - 1.19e-7
    assert (parameter == expected).double().mean() > 0.99


def test_state_keys_and_a_saved_state_goes_on_as_if_nothing_had_happened():
    torch.manual_seed(0)
    gradients = torch.randn(10, 3)
    whole, first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    run(AdamW([whole], lr=0.01, weight_decay=0.1), whole, gradients)

    before = AdamW([first], lr=0.01, weight_decay=0.1)
    run(before, first, gradients[:6])
    assert set(before.state[first]) == {"step", "m", "v"} and before.state[first]["step"] == 6
    after = AdamW([second], lr=0.5)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    second.data.copy_(first.data)
    run(after, second, gradients[6:])
    assert torch.equal(second, whole)


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    parameter = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = AdamW([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 9.0
    assert parameter.item() == pytest.approx(2.9, abs=1e-4)
    assert AdamW([parameter]).step() is None


def test_a_sparse_gradient_is_refused_and_its_parameter_stays():
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer, before = AdamW(table.parameters()), table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        optimizer.step()
    assert torch.equal(table.weight, before) and not optimizer.state


def test_long_gradients_of_a_group_are_made_as_long_as_asked():
    """Of each group by itself, and together; in the place of clipping by hand."""
    (clipped, by_hand), draw = (
        ([torch.nn.Parameter(torch.ones(n)) for n in (3, 5, 4)] for _ in range(2)),
        (torch.Generator().manual_seed(0)),
    )
    groups = [{"params": clipped[:2], "max_grad_norm": 0.5}, {"params": clipped[2:]}]
    optimizers = AdamW(groups, lr=0.1, eps=0.1), AdamW(by_hand, lr=0.1, eps=0.1)
    for scale in (10.0, 0.01):  # longer, and shorter
        for one, other in zip(clipped, by_hand, strict=True):
            one.grad = torch.randn(one.shape, generator=draw) * scale
            other.grad = one.grad.clone()
        length = math.sqrt(sum(p.grad.double().square().sum() for p in by_hand[:2]))
        for p in by_hand[:2]:
            p.grad *= min(1.0, 0.5 / length)
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(clipped, by_hand, strict=True):
            torch.testing.assert_close(one, other)
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(("name", "value"), [
    ("lr", -1e-3), ("lr", math.nan), ("lr", math.inf), ("betas", (-0.1, 0.9)), ("betas", (0.9, 1.0)), ("eps", -1e-8),
    ("weight_decay", -0.1), ("max_grad_norm", 0.0), ("max_grad_norm", math.inf), ("max_grad_norm", math.nan),
])  # fmt: skip
def test_bad_hyper_parameters_are_refused(name: str, value: object):
    with pytest.raises(ValueError, match=name):
        AdamW([torch.nn.Parameter(torch.ones(1))], **{name: value})
    with pytest.raises(ValueError, match=name):
        AdamW([{"params": [torch.nn.Parameter(torch.ones(1))], name: value}])
