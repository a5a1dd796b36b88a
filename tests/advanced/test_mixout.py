"""Mixout and mixconnect: the paper's mixed matrix, built by a loop, must be what the layers compute with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from steps import check_kernels, move, prepared, step_of
from test_contract import Laboratory, laboratory  # noqa: F401 (a fixture)
from test_methods import classifier
from torch import nn

from advanced.mixout import Mixconnect, Mixout
from fast import accelerate

KINDS = pytest.mark.parametrize("kind", [Mixout, Mixconnect])
LAYER = "llama.layers.1.feed_forward.w2"


def mixing_layer(kind: type[Mixout], p: float) -> tuple[nn.Module, torch.Tensor]:
    """A layer in training whose weight has moved, and what it was pretrained to be."""
    model = classifier().double()
    before = model.get_submodule(LAYER).weight.detach().clone()
    prepared(model, kind(p=p))
    move(model)
    return model.get_submodule(LAYER), before


def mixed_by_hand(weight: torch.Tensor, before: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """(M W + (1 - M) W_pre - p W_pre) / (1 - p), number by number. mask: o i"""
    mixed = torch.zeros_like(weight)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            kept = weight[o, i] if mask[o, i] else before[o, i]
            mixed[o, i] = (kept - p * before[o, i]) / (1 - p)
    return mixed


@KINDS
def test_the_mixed_matrix_is_that_of_the_paper_and_its_gradient_that_of_autograd(kind: type[Mixout]):
    p = 0.4
    layer, before = mixing_layer(kind, p)
    x = torch.randn(2, 3, layer.in_features, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(5)
    output = layer(x)
    torch.manual_seed(5)
    shape = (1, layer.in_features) if kind is Mixout else layer.weight.shape
    mask = F.dropout(torch.ones(shape, dtype=torch.float64), p).expand_as(layer.weight) > 0
    weight = layer.weight.detach().clone().requires_grad_()
    mixed = mixed_by_hand(weight, before, mask, p)
    torch.testing.assert_close(output, x @ mixed.T)
    toward = torch.randn_like(output)
    mine = torch.autograd.grad((output * toward).sum(), [layer.weight, x])
    expected = torch.autograd.grad(((x @ mixed.T) * toward).sum(), [weight, x])
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other)
    plain = torch.autograd.grad((F.linear(x, weight) * toward).sum(), weight)[0]
    torch.testing.assert_close(mine[0], plain * mask / (1 - p))  # with 1 / (1 - p), unlike the official backward pass


@KINDS
def test_mixout_draws_neurons_and_mixconnect_weights_and_on_average_they_are_the_weight(kind: type[Mixout]):
    p, draws = 0.5, 800
    layer, before = mixing_layer(kind, p)
    eye = torch.eye(layer.in_features, dtype=torch.float64)
    total = torch.zeros_like(layer.weight)
    shares = []
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(draws):
            mixed = layer(eye).T  # o i
            is_pretrained = (mixed - before).abs() < 1e-12
            shares.append(is_pretrained.double().mean(dim=0))  # i: of each input neuron's outgoing weights
            total += mixed
    shares = torch.stack(shares)
    is_whole = (shares == 0) | (shares == 1)
    assert is_whole.all() if kind is Mixout else not is_whole.any()
    assert abs(shares.mean().item() - p) < 0.02
    deviation = (layer.weight - before).abs().max().item() / draws**0.5  # of (m' - 1) (W - W_pre), m' being 0 or 2
    torch.testing.assert_close(total / draws, layer.weight.detach(), rtol=0, atol=5 * deviation)
    assert (total / draws - before).abs().max() > 10 * deviation  # and not the pretrained one


@KINDS
def test_evaluation_computes_with_the_weight_alone_and_p_zero_always_does(kind: type[Mixout]):
    layer, before = mixing_layer(kind, 0.7)
    x = torch.randn(3, layer.in_features, dtype=torch.float64)
    expected = F.linear(x, layer.weight)
    assert not torch.allclose(layer(x), expected)
    assert torch.equal(layer.eval()(x), expected)
    layer, before = mixing_layer(kind, 0.0)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight))


@KINDS
def test_what_is_mixed_are_the_matrices_of_the_layers_with_a_copy_that_nothing_holds(kind: type[Mixout]):
    model = classifier()
    names, before = {*model.state_dict()}, {n: p.detach().clone() for n, p in model.named_parameters()}
    prepared(model, kind())
    move(model)
    mixing = {name: module for name, module in model.named_modules() if hasattr(module, "pretrained")}
    layers = [f"llama.layers.{i}." for i in range(2)]
    parts = [f"attention.compute_{part}" for part in ("query", "key", "value", "output")]
    parts += [f"feed_forward.w{number}" for number in (1, 2, 3)]
    assert mixing.keys() == {layer + part for layer in layers for part in parts}
    for name, module in mixing.items():
        assert torch.equal(module.pretrained, before[f"{name}.weight"])
        assert not torch.equal(module.weight, module.pretrained)
    assert {*model.state_dict()} == names and {n for n, _ in model.named_parameters()} == before.keys()
    assert not any(True for _ in model.buffers())


@KINDS
def test_a_second_pass_has_the_same_masks_where_it_is_asked_for_them(kind: type[Mixout]):
    model = prepared(classifier(), kind())
    move(model)
    step = step_of(model)
    assert torch.equal(step.forward(), step.outputs)
    assert not torch.allclose(step.forward(same_masks=False), step.outputs)


@KINDS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kernels_compute_the_rest(kind: type[Mixout], precision: str):
    plain, fast = classifier(), classifier()
    for model in (plain, fast):
        method = kind(p=0.5)
        method.prepare(model)
        if model is fast:
            accelerate(fast, precision, generates=False)
        method.start(model)
        move(model)
    check_kernels(plain, fast, precision, f"{LAYER}.weight", rounded=0.2, cosine=0.95)


def test_a_resumed_run_mixes_with_what_was_pretrained(laboratory: Laboratory):
    run = laboratory.assemble(laboratory.plan("mixout", epochs=2))
    pretrained = run.model.get_submodule(LAYER).weight.detach().clone()
    laboratory.train(run, laboratory.checkpointer(run), epochs=1)
    run = laboratory.assemble(laboratory.plan("mixout", epochs=2))
    laboratory.checkpointer(run).load_resume_point(run.model, run.trainer.optimizer)
    layer = run.model.get_submodule(LAYER)
    assert torch.equal(layer.pretrained, pretrained) and not torch.equal(layer.weight, pretrained)
