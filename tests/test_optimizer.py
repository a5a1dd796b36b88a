from __future__ import annotations

import copy
import math

import pytest
import torch

from optimizer import AdamW


def slow_adamw(weights: list[float], gradients: list[list[float]], lr, beta1, beta2, eps, weight_decay, correct_bias):
    """Kingma & Ba's algorithm with plain numbers; gradients[t][i] is that of weight i at step t + 1."""
    weights = list(weights)
    m, v = [0.0] * len(weights), [0.0] * len(weights)
    for t, gradient in enumerate(gradients, 1):
        alpha = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) if correct_bias else lr
        for i, g in enumerate(gradient):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            weights[i] -= alpha * m[i] / (math.sqrt(v[i]) + eps)
            weights[i] -= lr * weight_decay * weights[i]
    return weights


def run(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, gradients: torch.Tensor) -> None:
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("correct_bias", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8), (0.0, 0.0)])
def test_equals_the_algorithm_with_plain_numbers(betas, weight_decay: float, correct_bias: bool):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    gradients = torch.randn(20, 5, dtype=torch.float64)
    settings = dict(eps=1e-6, weight_decay=weight_decay, correct_bias=correct_bias)
    expected = slow_adamw(parameter.tolist(), gradients.tolist(), 0.01, *betas, **settings)
    run(AdamW([parameter], lr=0.01, betas=betas, **settings), parameter, gradients)
    torch.testing.assert_close(parameter.data, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


def test_equals_pytorch_without_weight_decay():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64)) for _ in range(2))
    gradients = torch.randn(50, 4, 3, dtype=torch.float64)
    run(AdamW([ours], lr=0.01, eps=1e-15), ours, gradients)
    run(torch.optim.AdamW([theirs], lr=0.01, eps=1e-15, weight_decay=0.0), theirs, gradients)
    torch.testing.assert_close(ours.data, theirs.data, atol=1e-12, rtol=0)


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


def test_groups_have_their_own_settings_and_a_missing_gradient_changes_nothing():
    fast, slow, still = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = AdamW([{"params": [fast], "lr": 0.1}, {"params": [slow, still]}], lr=0.001)
    fast.grad, slow.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert fast.tolist() == pytest.approx([0.9, 0.9], abs=1e-4)
    assert slow.tolist() == pytest.approx([0.999, 0.999], abs=1e-4)
    assert still.tolist() == [1.0, 1.0] and still not in optimizer.state


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


def test_a_sparse_gradient_is_refused_before_anything_moves():
    dense = torch.nn.Parameter(torch.ones(3))
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = AdamW([dense, *table.parameters()])
    dense.grad = torch.ones(3)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3),
        ("lr", math.nan),
        ("lr", math.inf),
        ("betas", (-0.1, 0.9)),
        ("betas", (0.9, 1.0)),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
    ],
)
def test_bad_hyper_parameters_are_refused(name: str, value: object):
    with pytest.raises(ValueError, match=name):
        AdamW([torch.nn.Parameter(torch.ones(1))], **{name: value})
    with pytest.raises(ValueError, match=name):
        AdamW([{"params": [torch.nn.Parameter(torch.ones(1))], name: value}])
