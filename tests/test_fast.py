"""Kernels and precisions: whatever they save, numbers, gradients and texts must stay those of plain PyTorch."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, asset, choosing, random_llama, slow_among
from error_helpers import TEXT_FLAGS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_cache import PROMPTS
from torch import nn
from torch.profiler import profile

import fast.apply
import fast.attention
import fast.decode
import fast.linear
import fast.plan
from advanced.decoding import BeamSearch, ContrastiveSearch
from base_llama import LayerNorm, causal_mask
from config import LlamaConfig
from engine import runs
from engine.context import KVCache
from engine.decoding import Decoder, continue_texts, logits_after
from engine.weights import load_llama_model
from fast import accelerate, compiled, decoder
from fast.apply import BY_PRODUCTS, Purpose, choose_attention
from fast.attention import (
    TRAINED_BY_PRODUCTS,
    FusedAttention,
    attention_by_products,
    fuse_attention,
    scores_check,
    trained_by_products,
)
from fast.compact import quantise_4, widened
from fast.decode import OUTDATED, LoopDecoder, WatchedDecoder, WholeTextDecoder, choose_decoder
from fast.last_position import hidden_state_at
from fast.layers import FusedFeedForward, FusedRMSNorm, _RMSNorm, _SwiGLU
from fast.linear import (
    Bf16Linear,
    Int4Linear,
    Int8Linear,
    OneDNNLinear,
    RoundedLinear,
    has_integer_products,
    has_onednn,
    int8_linear,
    onednn_linear,
    onednn_trained,
    onednn_weight_gradient,
    pack,
    quantise,
    why_no_onednn,
)
from llama import Attention, FeedForward, Llama, LlamaLayer, RMSNorm
from optimizer import AdamW
from utils import UserError

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="oneDNN's products do not work here")
TOKENS = torch.tensor([[1, 45, 299, 7, 7, 120, 33], [1, 45, 8, 260, 3, 3, 3]])
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BUNDLED = ROOT / "checkpoints/minllama1M.pt"


@pytest.fixture(params=["oneDNN", "PyTorch"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose float32 products are taken, so that every machine tests both."""
    if request.param == "PyTorch":
        monkeypatch.setattr(fast.apply, "has_onednn", lambda: False)
    elif not has_onednn():
        pytest.skip("oneDNN's products do not work here")
    monkeypatch.setattr(fast.linear, "SMALL_PRODUCT", 0)  # all products of the tests' models are small
    return request.param


@pytest.fixture(scope="session")
def numba():
    """The tests that ask for it are about the compiled loops, which work wherever numba does: an error is a failure."""
    module = pytest.importorskip("numba")
    for format_ in compiled.LINEAR_KERNELS:
        compiled.compile_now(format_)
    return module


TWO_LABELS = SimpleNamespace(num_labels=2, hidden_dropout_prob=0.0, option="finetune")  # a classifier's config


def accelerated(model: nn.Module, precision: str = "fp32", device: torch.device | None = None) -> nn.Module:
    """A copy on fast kernels."""
    model = copy.deepcopy(model)
    accelerate(model, precision, device)
    return model


def decoding(model: Llama, precision: str = "fp32") -> WatchedDecoder:
    """Of a copy on fast kernels."""
    return decoder(accelerated(model, precision), precision)


def outputs(model: Llama) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return model(TOKENS, targets=TOKENS)


def gradients(model: Llama) -> dict[str, torch.Tensor]:
    """Of a random projection of everything that the model returns."""
    model.zero_grad()
    logits, hidden = model(TOKENS, targets=TOKENS)
    generator = torch.Generator().manual_seed(0)
    sum((y.float() * torch.randn(y.shape, generator=generator)).sum() for y in (logits, hidden)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """Within `relative` of the largest number: sums in another order differ by what their terms are worth."""
    assert (actual - expected).abs().max() <= relative * expected.abs().max()


# ------------------------------------------------------------------------------------------------- accelerate


def test_kernels_can_be_switched_and_applied_again(products: str):
    plain, model = random_llama(), random_llama()
    for precision in ("fp32", "fp32", "bf16", "bf16", "fp32"):
        choices = accelerate(model, precision)
        assert choices == accelerate(model, precision)
        fresh = accelerated(plain, precision)
        for actual, expected in zip(outputs(model), outputs(fresh), strict=True):
            assert torch.equal(actual, expected)
    accelerate(model, "bf16", CUDA)  # and to what another device would have
    assert type(model.layers[0].ffn_norm) is RMSNorm and type(model.layers[0].feed_forward) is FeedForward
    accelerate(model, "fp32", CUDA)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    for actual, expected in zip(outputs(model), outputs(plain), strict=True):  # of that device's fused attention
        assert_near(actual, expected, 1e-5)


def test_attention_on_cuda_never_waits_for_cudnn_to_plan_it():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        accelerate(random_llama(), "bf16")
        assert torch.backends.cuda.cudnn_sdp_enabled()
        accelerate(random_llama(), "bf16", CUDA)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_the_model_and_the_machine_decide_what_decodes(numba):
    model = accelerated(random_llama(attention="causal"))
    assert type(decoder(model)) is type(decoder(accelerated(model, "int8"), "int8")) is LoopDecoder
    for other, words in (
        (decoder(model, "bf16"), "computes in fp32, not in bf16"),
        (decoder(random_llama(attention="causal").double()), "float32 weights"),
    ):
        assert type(other) is WatchedDecoder and other.choice.kernel == "plain" and words in other.choice.reason
    assert type(decoder(accelerated(random_llama()))) is WholeTextDecoder
    assert choose_decoder(CUDA).kernel == "plain"
    for function in (decoder, accelerate):
        with pytest.raises(ValueError, match="fp64.*fp32, bf16, int8, int4"):
            function(model, "fp64")


def test_the_last_layer_of_a_bidirectional_model_gives_one_position():
    """Its text is the model's; what is left out is the other positions' query, output and feed-forward."""
    model, idx, new = random_llama(), torch.randint(0, 40, (2, 18)), 5
    operations, texts = [], []
    for each in (model, decoder(model)):
        each.generate(idx, 1, 0.0)  # compares kernels
        with profile(with_flops=True) as watched:
            texts.append(each.generate(idx, new, 0.0))
        operations.append(sum(event.flops for event in watched.key_averages() if event.key == "aten::mm"))
    assert torch.equal(*texts)
    config, lengths = model.config, range(idx.shape[1], idx.shape[1] + new)
    of_position = 2 * (2 * config.dim**2 + 3 * config.dim * config.hidden_dim)
    assert operations[0] - operations[1] == sum(2 * (length - 1) * of_position for length in lengths)


@pytest.mark.parametrize("change", ["training", "a hook", "a subclass", "autocast"])
def test_a_bidirectional_model_that_may_compute_otherwise_computes_every_position(change: str):
    model = random_llama()
    ours = decoder(model)
    assert ours._may_compute()
    with torch.autocast("cpu", enabled=change == "autocast"):
        if change == "training":
            model.layers[0].train()
        elif change == "a hook":
            model.layers[1].feed_forward.register_forward_hook(lambda module, args, output: output.flip(1))
        elif change == "a subclass":
            model.layers[1].feed_forward.__class__ = type("Other", (FeedForward,), {})
        assert not ours._may_compute()
    assert torch.equal(ours.generate(TOKENS[:1], 9, 0.0), model.generate(TOKENS[:1], 9, 0.0))


def test_a_bidirectional_model_with_layer_norm_computes_one_position_unless_its_norm_is_edited(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    model = random_llama(norm="layer", sampling="top-p")
    ours = decoder(model)
    assert ours._may_compute() and capfd.readouterr().err == ""
    assert torch.equal(ours.generate(TOKENS[:1], 9, 0.0), model.generate(TOKENS[:1], 9, 0.0))
    model.norm.__class__ = RMSNorm
    assert not ours._may_compute()
    model.norm.__class__ = LayerNorm
    assert ours._may_compute()
    monkeypatch.setattr(LayerNorm, "_norm", lambda self, x: x - x.mean((0, 1), keepdim=True))  # over positions
    assert not ours._may_compute() and "results differ" in capfd.readouterr().err


def test_a_last_layer_that_is_edited_alone_computes_every_position(monkeypatch: pytest.MonkeyPatch):
    model, plain = random_llama(n_layers=4), LlamaLayer.forward

    def forward(self: LlamaLayer, x: torch.Tensor) -> torch.Tensor:
        y = plain(self, x)
        return y - y.mean(1, keepdim=True) if self.layer_id == 3 else y

    monkeypatch.setattr(LlamaLayer, "forward", forward)
    ours = decoder(model)
    assert not ours._may_compute()
    assert torch.equal(ours.generate(TOKENS[:1], 9, 0.0), model.generate(TOKENS[:1], 9, 0.0))


def test_tokens_that_end_a_text_leave_a_model_the_compiled_loops():
    """A directory's model has them as an attribute; any other attribute may change what is computed."""
    model = random_llama(attention="causal")
    model.stop_ids = (2,)
    assert fast.plan.what_changed_in(model) is None
    model.scale = 2.0
    assert "the model has other settings" in fast.plan.what_changed_in(model)


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_weights_are_rounded_once(rounding: str):
    model = random_llama()
    accelerate(model, rounding)
    rounded, logits = copy.deepcopy(model.state_dict()), outputs(model)[0]
    for precision in (rounding, "fp32", rounding):
        accelerate(model, precision)
    assert all(torch.equal(value, rounded[name]) for name, value in model.state_dict().items())
    assert torch.equal(outputs(model)[0], logits)


def test_rounding_twice_is_rounding_once():
    """The largest number of a row gives the scale, and 127 scales give the same scale again, for each mantissa."""
    largest = torch.arange(2**23, 2**24, dtype=torch.float32)
    scale = largest / 127
    assert torch.equal(scale * 127 / 127, scale)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_choosing_draws_no_random_numbers(numba, precision: str):
    """Or the text at temperature 1 and the order of training would depend on the kernels."""
    model = random_llama(attention="causal")
    for cached in (why_no_onednn, scores_check, fast.plan._settings_as_made):
        cached.cache_clear()
    before = torch.get_rng_state()
    accelerate(model, precision)
    decoder(model, precision).generate(TOKENS[:1], 3, temperature=0.0)
    assert torch.equal(torch.get_rng_state(), before)


class ShiftedLinear(nn.Linear):
    """What a method might put in the place of a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.5

    @classmethod
    def replace(cls, model: nn.Module, where: str) -> None:
        """Stand where a layer has stood, with its weight."""
        linear = model.get_submodule(where)
        other = cls(linear.in_features, linear.out_features, bias=False)
        other.weight = linear.weight
        parent, _, name = where.rpartition(".")
        setattr(model.get_submodule(parent), name, other)


FEW_TOKENS = ("", "--num_samples 2 --max_new_tokens 5")


@pytest.mark.parametrize("flags", [*FEW_TOKENS, "--precision bf16", "--option prompt", "--max_new_tokens 100000"])
def test_few_tokens_of_a_small_model_are_not_worth_choosing(
    monkeypatch: pytest.MonkeyPatch, drive: Callable, course_folder: Path, flags: str
):
    calls: list[dict] = []
    monkeypatch.setattr(fast.apply, "accelerate", lambda *args, **purpose: calls.append(purpose))
    monkeypatch.setattr(Llama, "generate", lambda model, idx, *args, **settings: idx)
    drive(*flags.split())
    assert bool(calls) == (flags not in FEW_TOKENS)


def test_little_is_told_without_loading_kernels():
    code = "import sys, fast; fast.is_small_job; sys.exit('fast.apply' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'accelerator'"):
        _ = fast.accelerator


def test_what_another_device_would_run_gives_the_same_numbers():
    """The kernels of a GPU, run here."""
    plain = random_llama(attention="causal")
    fp32, bf16, int8 = (accelerated(plain, precision, CUDA) for precision in ("fp32", "bf16", "int8"))
    assert_near(outputs(fp32)[0], outputs(plain)[0], 1e-5)
    assert_near(outputs(bf16)[0], outputs(plain)[0], 3e-2)
    assert outputs(bf16)[0].dtype == torch.float32
    rounded = random_llama(attention="causal")
    rounded.load_state_dict(int8.state_dict())
    assert_near(outputs(int8)[0], outputs(rounded)[0], 5e-2)  # int8 on a CPU rounds what comes in as well
    assert all(model.generate(TOKENS, 4, temperature=0.0).shape == (2, 11) for model in (fp32, bf16, int8))
    assert type(fp32.output) is nn.Linear and type(bf16.output) is Bf16Linear and type(int8.output) is Int8Linear


def test_without_numba_another_path_is_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    plain = random_llama(attention="causal", gain=8.0)
    choice = choose_decoder(CPU)
    assert choice.kernel == "plain" and "pip install numba" in choice.reason
    ours = decoding(plain)
    assert type(ours) is WatchedDecoder and ours.choice == choice
    assert torch.equal(ours.generate(TOKENS, 40, temperature=0.0), plain.generate(TOKENS, 40, temperature=0.0))


# ------------------------------------------------------------------------------------------------------- fp32


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_fp32_is_the_plain_model(products: str, attention: str, n_kv_heads: int):
    plain = random_llama(attention=attention, n_kv_heads=n_kv_heads)
    model = accelerated(plain)
    assert type(model.layers[0].feed_forward) is FusedFeedForward
    kernel = OneDNNLinear if products == "oneDNN" else nn.Linear
    assert type(model.output) is type(model.layers[1].feed_forward.w2) is kernel
    for actual, expected in zip(outputs(model), outputs(plain), strict=True):
        assert_near(actual, expected, 1e-5)
    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        assert_near(gradient, expected[name], 1e-5)
    at = torch.tensor([4, 2])
    assert_near(hidden_state_at(model, TOKENS, at), plain(TOKENS)[1][torch.arange(2), at], 1e-5)


@needs_onednn
@pytest.mark.parametrize("trains_weights", [True, False])
@pytest.mark.parametrize(("inputs", "outputs_"), [(48, 48), (48, 136), (136, 48), (1, 7), (7, 1)])
@pytest.mark.parametrize("loss", ["of parts", "a sum"])
def test_gradients_of_onednn_are_those_of_the_plain_product(
    inputs: int, outputs_: int, trains_weights: bool, loss: str
):
    torch.manual_seed(0)
    x = torch.randn(2, 9, inputs, dtype=torch.float64).transpose(0, 1)  # not as it lies in memory
    weight, part = torch.randn(outputs_, inputs, dtype=torch.float64), torch.randn(9, 2, outputs_, dtype=torch.float64)
    answers = []
    for dtype, product in ((torch.float64, F.linear), (torch.float32, onednn_trained)):
        settings = (trains_weights,) if product is onednn_trained else ()
        leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in (x, weight)]
        y = product(*leaves, *settings)
        grads = torch.autograd.grad((y * part.to(dtype)).sum() if loss == "of parts" else y.sum(), leaves)
        answers.append((y, *grads))
    for expected, actual in zip(*answers, strict=True):
        assert actual.is_contiguous() or actual.shape == x.shape
        assert_near(actual.double(), expected, 1e-5)


@needs_onednn
def test_a_weight_that_is_part_of_another_tensor_is_not_left_to_slow_code():
    """oneDNN's reference code takes a thousand times as long."""
    x, large = torch.randn(128, 256), torch.randn(256, 600)
    weights = [large[:, :256], large[:, :512:2], large[:1, :256].expand(256, 256), large[:, :256].t()]

    def seconds(product: Callable[[], torch.Tensor]) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            product()
            times.append(time.perf_counter() - start)
        return min(times)

    plain = seconds(lambda: F.linear(x, large[:, :256].contiguous()))
    for weight in weights:
        assert_near(onednn_linear(x, weight), F.linear(x, weight), 1e-5)
        assert_near(onednn_linear(x, pack(weight)), F.linear(x, weight), 1e-5)
        for product in (lambda w=weight: onednn_linear(x, w), lambda w=weight: onednn_linear(x, pack(w))):
            assert seconds(product) < 50 * plain
        assert seconds(lambda w=weight: onednn_weight_gradient(w[:128], x)) < 50 * plain


def test_frozen_weights_get_no_gradient_and_pass_one_on(products: str):
    plain = random_llama()
    for part in (plain.layers[1], plain.output):
        part.requires_grad_(False)
    model = accelerated(plain)
    expected = {name: p.grad for name, p in plain.named_parameters() if gradients(plain) and p.grad is not None}
    actual = {name: p.grad for name, p in model.named_parameters() if gradients(model) and p.grad is not None}
    assert [*actual] == [*expected] and len(actual) == 10
    for name, gradient in actual.items():
        assert_near(gradient, expected[name], 2e-5)


@needs_onednn
@pytest.mark.parametrize("kind", [OneDNNLinear, Bf16Linear, RoundedLinear])
@pytest.mark.parametrize(("wants_x", "wants_weight"), [(True, False), (False, True), (True, True)])
def test_each_gradient_is_there_with_and_without_the_other(kind: type, wants_x: bool, wants_weight: bool):
    plain = nn.Linear(96, 160, bias=False)
    grads = []
    for layer in (plain, copy.deepcopy(plain)):
        layer.weight.requires_grad_(wants_weight)
        computes = layer if layer is plain else kind.from_linear(layer)
        torch.manual_seed(0)
        x, direction = torch.randn(120, 96, requires_grad=wants_x), torch.randn(120, 160)
        computes(x).float().mul(direction).sum().backward()
        grads.append((x.grad, layer.weight.grad))
    for mine, its, wanted in zip(*reversed(grads), (wants_x, wants_weight), strict=True):
        assert (mine is not None) == (its is not None) == wanted
        if wanted:
            assert_near(mine, its, 2e-2)


@needs_onednn
@pytest.mark.parametrize(("packs", "rows", "expected"), [(True, 64, True), (False, 64, False), (True, 1, False)])
def test_onednn_has_the_products_that_it_is_faster_for(monkeypatch, packs: bool, rows: int, expected: bool):
    layer, asked = RoundedLinear(160, 160, packs=packs).requires_grad_(False), []
    monkeypatch.setattr(fast.linear, "onednn_linear", lambda *args: asked.append(args) or onednn_linear(*args))
    layer(torch.randn(rows, 160))
    assert bool(asked) == expected
    x = torch.randn(64, 160)
    assert_near(layer(x)[:1], layer(x[:1]), 1e-2)  # one copy takes the place of the other


def test_gradients_of_the_norm_and_the_gate_are_those_of_finite_differences():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: _RMSNorm.apply(x, weight, 1e-5, torch.float64), (x, weight))
    gate = torch.randn_like(x).mul(3).requires_grad_()
    assert torch.autograd.gradcheck(_SwiGLU.apply, (gate, x))


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e12])
def test_the_norm_is_the_plain_norm_for_any_scale(scale: float):
    torch.manual_seed(1)
    plain, fused = RMSNorm(64), FusedRMSNorm(64)
    nn.init.normal_(plain.weight)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(5, 7, 64) * scale
    direction = torch.randn(5, 7, 64)
    results = []
    for norm in (plain, fused):
        row = x.clone().requires_grad_()
        (norm(row) * direction).sum().backward()
        results.append((norm(x).detach(), row.grad, norm.weight.grad))
    for actual, expected in zip(*reversed(results), strict=True):
        assert actual.isfinite().all()
        assert_near(actual, expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_model_that_is_converted_afterwards_computes_in_the_new_format(dtype: torch.dtype):
    plain = random_llama(attention="causal", gain=8.0).to(dtype)
    fuse_attention(plain)  # which rounds otherwise in fewer bits
    model = accelerated(random_llama(attention="causal", gain=8.0))
    outputs(model)
    before = decoder(model)
    before.generate(TOKENS[:1], 2, temperature=0.0)
    model.to(dtype)
    with pytest.raises(RuntimeError, match=OUTDATED):
        before.generate(TOKENS[:1], 2, temperature=0.0)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), outputs(plain), strict=True))
    assert outputs(model)[0].dtype == dtype
    assert torch.equal(decoder(model).generate(TOKENS, 9, temperature=0.0), plain.generate(TOKENS, 9, temperature=0.0))
    model.float()
    assert_near(outputs(model)[0], outputs(plain.float())[0], 1e-5)


@pytest.mark.parametrize("shape", [None, (6, 6), (2, 1, 1, 6), (2, 1, 6, 6)])
def test_attention_by_two_products_is_attention(shape: tuple[int, ...] | None):
    query, key, value = torch.randn(3, 2, 4, 6, 8).bfloat16()
    mask = None if shape is None else torch.rand(shape) < 0.7
    if mask is not None:
        mask[..., 0] = True  # every query sees something
    if shape == (2, 1, 1, 6):
        query = query[:, :, :1]
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask)
    actual = attention_by_products(query, key, value, mask)
    assert actual.shape == query.shape and actual.dtype == torch.bfloat16
    assert_near(actual, expected, 2e-2)


@pytest.mark.parametrize("shape", [None, "causal", (6, 6), (2, 1, 1, 6), (2, 1, 6, 6)])
def test_gradients_of_attention_by_products_are_those_of_attention(monkeypatch, shape: tuple[int, ...] | str | None):
    monkeypatch.setattr(fast.attention, "MOST_QUERIES", 4)  # two groups of three queries
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in torch.randn(3, 2, 6, 4, 8).bfloat16()]  # b h s d
    mask = None if shape is None else causal_mask(6) if shape == "causal" else torch.rand(shape) < 0.7
    if shape not in (None, "causal"):
        mask[..., 0] = True  # every query sees something
    wide = [x.detach().double().requires_grad_() for x in inputs]
    hidden = 0.0 if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    expected = (wide[0] @ wide[1].transpose(-2, -1) / math.sqrt(8) + hidden).softmax(-1) @ wide[2]
    actual = trained_by_products(*inputs, mask, shape == "causal")
    assert_near(actual, expected, 2e-2)
    along = torch.randn(expected.shape)
    true = torch.autograd.grad(expected, wide, along.double())
    for mine, its in zip(torch.autograd.grad(actual, inputs, along.bfloat16()), true, strict=True):
        assert mine.dtype == torch.bfloat16
        assert_near(mine, its, 3e-2)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
def test_attention_by_products_computes_the_gradients_that_are_needed(monkeypatch, needed: tuple[int, ...]):
    inputs = [torch.randn(2, 4, 6, 8, requires_grad=index in needed) for index in range(3)]  # b h s d
    monkeypatch.setattr(fast.attention, "MOST_QUERIES", 4)
    trained = [inputs[index] for index in needed]
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*inputs).square().sum(), trained)
    loss, products, multiply = trained_by_products(*inputs, None, False).square().sum(), [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *pair: products.append(None) or multiply(*pair))
    for mine, its in zip(torch.autograd.grad(loss, trained), expected, strict=True):
        assert_near(mine, its, 1e-5)
    # two groups of queries; the gradients of queries and keys need one product more
    assert len(products) == 2 * (len(needed) + (needed != (2,)))


@pytest.mark.parametrize("changes", [{}, {"way": "fused in float32"}, {"generates": True}, {"trains": False}])
def test_attention_is_trained_in_bfloat16_where_that_is_faster(monkeypatch: pytest.MonkeyPatch, changes: dict):
    case = {"way": TRAINED_BY_PRODUCTS, "generates": False, "trains": True} | changes
    ways = {"products of bfloat16": "bfloat16 products", "attention in bfloat16, trained": case["way"]}
    monkeypatch.setattr(fast.apply, "fastest", lambda question, _: (ways.get(question, "fused"), "as the test says"))
    asked, way = [], lambda query, *others: asked.append(query.dtype) or trained_by_products(query, *others)
    monkeypatch.setattr(fast.attention, "trained_by_products", way)
    model = random_llama(attention="causal")
    choices = accelerate(model, "bf16", generates=case["generates"], trains=case["trains"])
    is_taken = case["trains"] and case["way"] == TRAINED_BY_PRODUCTS
    assert (TRAINED_BY_PRODUCTS in choices[2].kernel) == is_taken
    asked.clear()  # by the comparison with llama.py
    model(TOKENS)
    assert asked == [torch.bfloat16] * (model.n_layers * is_taken)
    project, x = model.layers[0].attention.compute_query, torch.ones(1, 1, model.config.dim)
    assert (project(x).dtype == torch.bfloat16) == is_taken
    with torch.no_grad():
        assert (project(x).dtype == torch.float32) == case["generates"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"texts": 1},
        {"length": 257},
        {"dtype": torch.float32},
        {"grad": True},
        {"way": "fused"},
        {"generates": True},
    ],
)
def test_two_products_attend_to_short_texts_in_bfloat16_alone(monkeypatch, changes: dict):
    case = {"texts": 81, "length": 30, "dtype": torch.bfloat16, "grad": False, "way": BY_PRODUCTS, "generates": False}
    case.update(changes)
    ways = {"products of bfloat16": "bfloat16 products", "attention in bfloat16": case["way"]}
    monkeypatch.setattr(fast.apply, "fastest", lambda question, _: (ways.get(question, "PyTorch"), "as the test says"))
    model = random_llama(attention="causal")
    choices = accelerate(model, "bf16", generates=case["generates"], trains=False)
    layer = next(module for module in model.modules() if isinstance(module, Attention))
    assert type(layer) is FusedAttention
    assert (BY_PRODUCTS in choices[2].kernel) == (case["way"] == BY_PRODUCTS and not case["generates"])
    asked = []
    monkeypatch.setattr(fast.attention, "attention_by_products", lambda *args: asked.append(args))
    texts = torch.randn(3, case["texts"], 2, case["length"], 8, dtype=case["dtype"])
    with torch.set_grad_enabled(case["grad"]):
        layer.compute_query_key_value_scores(*texts)
    assert bool(asked) == (not changes)


@pytest.mark.parametrize("way", [attention_by_products, trained_by_products])
def test_an_attention_by_products_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, way: Callable):
    monkeypatch.setattr(fast.attention, way.__name__, lambda *given: 1.01 * way(*given))
    scores_check.cache_clear()
    try:
        assert "differ" in scores_check("cpu").difference()
        assert choose_attention(Purpose(CPU, "bf16")).kernel == "plain"
    finally:
        scores_check.cache_clear()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generating_and_predicting_leave_nothing_behind_that_training_cannot_use(products: str, precision: str):
    model = accelerated(random_llama(attention="causal"), precision)
    fresh = gradients(accelerated(random_llama(attention="causal"), precision))
    for rows in (1, 2):
        decoder(model, precision).generate(TOKENS[:rows], 3, temperature=0.0)
    with torch.inference_mode():
        model(TOKENS)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, fresh[name])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_made_in_inference_mode_are_seen_to_change(products: str, precision: str):
    """PyTorch counts no changes of such tensors."""
    with torch.inference_mode():
        model = accelerated(random_llama(attention="causal", gain=8.0), precision)
        before = decoder(model, precision)
        assert torch.equal(*(before.generate(TOKENS[:1], 2, temperature=0.0) for _ in range(2)))
        for parameter in model.parameters():
            parameter.mul_(1.5)
        plain = random_llama(attention="causal")
        plain.load_state_dict(model.state_dict())
        with pytest.raises(RuntimeError, match=OUTDATED):
            before.generate(TOKENS[:1], 2, temperature=0.0)
        text = decoder(model, precision).generate(TOKENS[:1], 20, temperature=0.0)
        assert torch.equal(text, decoding(plain, precision).generate(TOKENS[:1], 20, temperature=0.0))
        assert torch.equal(model.generate(TOKENS, 9, 0.0), accelerated(plain, precision).generate(TOKENS, 9, 0.0))


# -------------------------------------------------------------------------------------------- copies of weights


@torch.no_grad()
def halve(model: Llama) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def assign_others(model: Llama) -> None:
    model.load_state_dict(random_llama(seed=7).state_dict(), assign=True)
    model.tok_embeddings.weight = model.output.weight  # what assigning unties


def swap_layers(model: Llama) -> None:
    model.layers = nn.ModuleList(reversed(model.layers)).train(model.training)
    for layer_id, layer in enumerate(model.layers):
        layer.layer_id = layer_id


def replace_one(model: Llama) -> None:
    w2 = model.layers[1].feed_forward.w2
    w2.weight = nn.Parameter(torch.ones_like(w2.weight))


def change_data(model: Llama) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(-0.5)


def merge_into_data(model: Llama) -> None:
    """As a LoRA is often merged: an update of low rank."""
    for layer in model.layers:
        for linear in (layer.attention.compute_value, layer.feed_forward.w1, layer.feed_forward.w2):
            linear.weight.data += torch.ones(linear.out_features, 1) @ torch.randn(1, linear.in_features)


def transpose_data(model: Llama) -> None:
    weight = model.layers[1].attention.compute_output.weight
    weight.data = weight.data.t()


def change_array(model: Llama) -> None:
    array = model.layers[0].feed_forward.w1.weight.detach().numpy()
    array *= -0.5


def step(make: Callable, **settings: bool) -> Callable[[Llama], None]:
    def take_step(model: Llama) -> None:
        gradients(model)
        make(model.parameters(), lr=0.01, **settings).step()

    return take_step


CHANGES = {
    "in place": halve,
    "load_state_dict": lambda model: model.load_state_dict(random_llama(seed=7).state_dict()),
    "assigned": assign_others,
    "replaced": replace_one,
    "layers swapped": swap_layers,
    "p.data": change_data,
    "p.data, then eval()": lambda model: (change_data(model), model.eval()),
    "p.data, merged": merge_into_data,
    "p.data, transposed": transpose_data,
    "through NumPy": change_array,
    "AdamW": step(AdamW),
    "AdamW, by its kernel": step(lambda *args, **settings: runs.update_fast(AdamW(*args, **settings))),
    "torch's AdamW": step(torch.optim.AdamW),
    "torch's AdamW, in one kernel": step(torch.optim.AdamW, fused=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("precision", slow_among(["fp32", "bf16"], ["fp32"]))
@pytest.mark.parametrize("training", [True, False])
def test_whatever_changes_a_weight_is_seen_by_the_next_pass(products: str, change: str, precision: str, training: bool):
    model = accelerated(random_llama(attention="causal", gain=8.0), precision).train(training)
    before = outputs(model)[0]
    CHANGES[change](model)
    fresh = random_llama(attention="causal", gain=8.0)
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    fresh = accelerated(fresh, precision)
    after = outputs(model)[0]
    assert torch.equal(after, outputs(fresh)[0]) and not torch.equal(after, before)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    expected = gradients(fresh.train(training))
    for name, gradient in gradients(model).items():  # and where it is trained
        assert torch.equal(gradient, expected[name])


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_weight_ends_a_decoder_and_is_seen_by_the_next_one(numba, change: str):
    ours = decoding(random_llama(attention="causal", gain=8.0))
    model, prompt = ours.llama, torch.tensor(PROMPTS[:1])
    assert torch.equal(*(ours.generate(prompt, 20, temperature=0.0) for _ in range(2)))
    CHANGES[change](model)
    with pytest.raises(RuntimeError, match=OUTDATED):
        ours.generate(prompt, 20, temperature=0.0)
    plain = random_llama(attention="causal")
    plain.load_state_dict(model.state_dict())
    ours = decoder(model)
    assert type(ours) is LoopDecoder
    for begins_with in (1, 7):
        text = ours.generate(prompt[:, :begins_with], 40, temperature=0.0)
        assert torch.equal(text, plain.generate(prompt[:, :begins_with], 40, temperature=0.0))


# ------------------------------------------------------------------------------------------------------- bf16


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("n_kv_heads", [4, 1])
@pytest.mark.parametrize("generates", [False, True])
def test_bf16_is_fp32_but_for_its_rounding(attention: str, n_kv_heads: int, generates: bool):
    """bfloat16 rounds by up to 2^-9; two layers of seven matrices each add up to about 1 % of the largest number."""
    plain = random_llama(attention=attention, n_kv_heads=n_kv_heads)
    model = copy.deepcopy(plain)
    accelerate(model, "bf16", generates=generates)
    seen = []
    model.layers[0].attention.compute_key.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    for actual, expected in zip(outputs(model), outputs(plain), strict=True):
        assert actual.dtype == torch.float32 and not torch.equal(actual, expected)
        assert_near(actual, expected, 3e-2)
    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        assert gradient.dtype == torch.float32
        assert_near(gradient, expected[name], 3e-2)
        assert gradient.norm() / expected[name].norm() == pytest.approx(1.0, abs=1e-2)
    assert seen == [torch.float32 if generates else torch.bfloat16, torch.bfloat16]  # read, then trained


# ------------------------------------------------------------------------------------------------------- int8


@pytest.mark.parametrize("scale", [1e-44, 1e-36, 1e-3, 1.0, 1e20])
def test_quantise_is_the_slow_loop(scale: float):
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(0)).mul(10).exp() * scale
    x *= torch.randn(7, 12, generator=torch.Generator().manual_seed(1)).sign()
    x[3] = 0.0
    quantised, scales = quantise(x)
    assert quantised.dtype == torch.int8 and scales.dtype == torch.float32
    for row, integers, step_size in zip(x.double().tolist(), quantised.tolist(), scales.tolist(), strict=True):
        assert step_size == pytest.approx(max(max(map(abs, row)) / 127, 2.0**-126), rel=1e-6)
        for number, integer in zip(row, integers, strict=True):
            assert -127 <= integer <= 127
            assert abs(number - integer * step_size) <= step_size * 0.50002
    assert quantised[3].tolist() == [0] * 12
    if scale > 1e-30:
        assert quantised.abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127]


@pytest.mark.parametrize("features", [1, 2, 3, 64, 513])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_products_of_integers_are_exact(rows: int, features: int):
    draw = torch.Generator().manual_seed(features)
    x, weight = (torch.randint(-127, 128, (n, features), generator=draw, dtype=torch.int8) for n in (rows, 70))
    for left, right in ((x, weight), (torch.full_like(x, 127), torch.full_like(weight, 127))):
        y = int8_linear(left, torch.full((rows,), 0.5), right, torch.full((70,), 0.25))
        assert torch.equal(y.double(), left.double() @ right.double().T / 8)


def test_products_of_integers_are_used_if_they_are_exact(monkeypatch: pytest.MonkeyPatch):
    for error in (0, 1):
        monkeypatch.setattr(torch, "_int_mm", lambda left, right, error=error: left.int() @ right.int() - error)
        assert has_integer_products.__wrapped__() is (error == 0)


def test_products_of_integers_are_exact_on_an_older_processor():
    """It adds pairs of products in 16 bits, which is too few for the largest."""
    code = (
        "import torch; from fast.linear import int8_linear; x = torch.full((3, 64), 127, dtype=torch.int8); "
        "print(int8_linear(x, torch.ones(3), x, torch.ones(3)).unique().tolist())"
    )
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.stdout == f"[{64.0 * 127 * 127}]\n", done.stderr


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_int8_is_near_fp32_and_each_weight_within_half_a_step(attention: str):
    plain = random_llama(attention=attention)
    with torch.no_grad():
        plain.layers[0].feed_forward.w1.weight[5] = 0.0
    model = accelerated(plain, "int8")
    for name, weight in plain.state_dict().items():
        rounded = model.state_dict()[name]
        if weight.dim() == 2:
            half_step = weight.abs().amax(1, keepdim=True) / 127 / 2
            assert ((rounded - weight).abs() <= half_step * 1.0001).all()
    assert type(model.output) is Int8Linear and not model.layers[0].feed_forward.w1.weight[5].any()
    for actual, expected in zip(outputs(model), outputs(plain), strict=True):
        assert_near(actual, expected, 5e-2)


def test_what_int8_leaves_to_be_trained_gets_the_gradients_of_the_rounded_model():
    model = accelerated(random_llama(), "int8")
    rounded = random_llama()
    rounded.load_state_dict(model.state_dict())
    expected = gradients(rounded)
    for name, gradient in gradients(model).items():
        if expected[name].dim() == 2:
            assert gradient is None
        else:
            assert_near(gradient, expected[name], 2e-5)


# ------------------------------------------------------------------------------------------------------- int4


def test_quantise_4_packs_as_q4_0_of_gguf():
    """Its scales are float16, ours bfloat16: these groups have scales that both have."""
    quants = pytest.importorskip("gguf.quants", reason="the package gguf is not installed")
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).clamp(-1.9, 1.9)
    groups = x.view(40, 3, 32)
    largest = groups.abs().argmax(-1, keepdim=True)
    groups.scatter_(-1, largest, groups.gather(-1, largest).sign() * 2.0 ** torch.arange(1, 4)[:, None])
    x[7] = 0.0
    packed, scale = quantise_4(x)
    theirs = torch.from_numpy(quants.quantize(x.numpy(), quants.GGMLQuantizationType.Q4_0)).view(40, 3, 18)
    assert torch.equal(packed.view(40, 3, 16), theirs[..., 2:])
    assert torch.equal(scale.float(), theirs[..., :2].contiguous().view(torch.float16)[..., 0].float())
    dequantised = quants.dequantize(theirs.flatten(1).numpy(), quants.GGMLQuantizationType.Q4_0)
    assert torch.equal(widened(packed, scale), torch.from_numpy(dequantised))


def test_int4_rounds_the_layers_to_4_bits_and_the_output_to_8():
    plain = random_llama(attention="causal", tied=False)
    model = accelerated(plain, "int4")
    assert type(model.output) is Int8Linear and type(model.layers[0].attention.compute_key) is Int4Linear
    assert torch.equal(model.tok_embeddings.weight, plain.tok_embeddings.weight)
    for name, weight in plain.state_dict().items():
        if weight.dim() == 2 and name.startswith("layers"):
            groups, rounded = (each.view(-1, 32) for each in (weight, model.state_dict()[name]))
            step = groups.abs().amax(1, keepdim=True) / 8
            assert ((rounded - groups).abs() <= step * 1.05).all()  # a whole step beyond 7; scales are rounded
            assert all(len(row.unique()) <= 16 for row in rounded)
    expected = copy.deepcopy(plain)
    expected.load_state_dict(model.state_dict())
    for actual, wanted in zip(outputs(model), outputs(expected), strict=True):
        assert_near(actual, wanted, 1e-5)


def test_int4_is_refused_for_rows_that_are_no_whole_groups():
    model = random_llama(hidden_dim=40)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match="32 numbers of a row together, and a row here has 40; use int8"):
        accelerate(model, "int4")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ----------------------------------------------------------------------------------------------------- decoding


def assert_same_text(plain: Llama, actual: torch.Tensor, expected: torch.Tensor, prompt_length: int) -> None:
    """Equal ids. Where a row differs, the plain model's two likeliest tokens must be equal but for rounding."""
    assert actual.shape == expected.shape
    for row in range(len(expected)):
        differs = (actual[row] != expected[row]).nonzero()
        if len(differs):
            at = int(differs[0])
            assert at >= prompt_length
            with torch.no_grad():
                logits = plain(expected[row : row + 1, :at][:, -plain.config.max_seq_len :])[0][0, -1]
            assert logits[expected[row, at]] - logits[actual[row, at]] <= 1e-5 * logits.abs().max()


def steps_of(ours: WatchedDecoder) -> list[torch.Tensor]:
    """Grows whenever the loops compute a token."""
    steps = []
    if isinstance(ours, LoopDecoder):
        step = ours._engine.next_logits
        ours._engine.next_logits = lambda tokens, *settings: steps.append(tokens) or step(tokens, *settings)
    return steps


def check_texts(plain: Llama, prompts: torch.Tensor, new: int, precision: str = "fp32", variety: int = 8) -> None:
    """Compare each prompt alone, and all together, with the uncached plain model."""
    ours = decoding(plain, precision)
    steps = steps_of(ours)
    plain = copy.deepcopy(plain)
    plain.load_state_dict(ours.llama.state_dict())  # which int8 has rounded
    expected = plain.generate(prompts, new, temperature=0.0)
    alone = [ours.generate(prompt[None], new, temperature=0.0) for prompt in prompts]
    engine = importlib.import_module("fast.together")
    with (
        mock.patch.object(engine, "is_fastest", return_value=True),
        mock.patch.object(engine, "next_logits", wraps=engine.next_logits) as at_once,
    ):
        together = ours.generate(prompts, new, temperature=0.0)
    for actual in (torch.cat(alone), together):
        assert_same_text(plain, actual, expected, prompts.shape[1])
    # all but the first token of each, or the comparison would be of the plain model with itself
    steps_of_each = min(new - 1, plain.config.max_seq_len - prompts.shape[1])
    steps_of_each = max(0, steps_of_each) if plain.config.is_causal else 0
    assert len(steps) == len(prompts) * steps_of_each
    steps_at_once = [call for call in at_once.call_args_list if call.args[0] is ours._engine]  # not the comparison's
    assert len(steps_at_once) == (steps_of_each if len(prompts) > 1 else 0)
    assert len(expected[:, prompts.shape[1] :].unique()) >= variety


def random_prompts(rows: int, length: int, vocab: int = 300, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n_kv_heads", slow_among([4, 2, 1], [4, 1]))
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_texts_are_those_of_the_plain_model_for_thousands_of_tokens(numba, n_kv_heads: int, precision: str):
    for seed in range(2):
        plain = random_llama(seed, gain=8.0, attention="causal", n_kv_heads=n_kv_heads, max_seq_len=128)
        check_texts(plain, random_prompts(8, 5, seed=seed), 60, precision, variety=40)


SIZES = {  # vocab_size, dim, n_heads, n_kv_heads, hidden_dim, n_layers
    "odd": (301, 36, 6, 3, 50, 2),
    "odd, three layers": (7, 6, 3, 1, 3, 3),
    "the least": (303, 2, 1, 1, 1, 1),
    "one head": (18, 34, 1, 1, 99, 2),
    "one token": (1, 4, 2, 2, 5, 2),
    "large enough for threads to meet": (3001, 192, 6, 2, 515, 2),
}


def decoded(plain: Llama, step: Callable, idx: torch.Tensor, *settings: bool) -> tuple:
    """All logits after texts of which the plain model has read four tokens, their keys and values."""
    cache = KVCache(plain, *idx.shape)
    cache.read(idx[:, :4])
    logits = [step(idx[:, :end], cache, *settings) for end in range(5, idx.shape[1] + 1)]
    return torch.cat(logits), cache.keys, cache.values


SIZES_IN_GROUPS = {"groups": (301, 96, 6, 3, 160, 3), "one of them": (18, 32, 1, 1, 32, 2)}
CASES = [*itertools.product(("fp32", "bf16", "int8"), SIZES.values())]
RARELY = [*SIZES.values()][1:]  # many texts together, and one text in other formats than fp32
CASES += [*itertools.product(("int4",), (*SIZES_IN_GROUPS.values(), (3001, 192, 6, 2, 512, 2)))]


def is_rare(texts: int, precision: str, sizes: tuple[int, ...]) -> bool:
    return sizes in RARELY and (texts > 1 or precision != "fp32")


WITH_TEXTS = [
    pytest.param(texts, *case, marks=pytest.mark.slow if is_rare(texts, *case) else ())
    for texts, case in itertools.product((1, 18), CASES)
]


@pytest.mark.parametrize(("texts", "precision", "sizes"), WITH_TEXTS)
@torch.no_grad()
def test_every_logit_of_the_loops_is_the_plain_one_with_any_number_of_threads(
    numba, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], precision: str, texts: int
):
    from fast import loop_engine, together

    use_threads, threads = loop_engine.use_threads, 1
    for engine in (loop_engine, together):
        monkeypatch.setattr(engine, "use_threads", lambda number: use_threads(threads))
    torch.manual_seed(0)
    names = "vocab_size", "dim", "n_heads", "n_kv_heads", "hidden_dim", "n_layers"
    config = LlamaConfig.from_preset("tiny", attention="causal", **dict(zip(names, sizes, strict=True)))
    plain, loops = loop_engine.make_pair(config, compiled.LINEAR_KERNELS[precision])

    def step(tokens: torch.Tensor, cache: KVCache, *settings: bool) -> torch.Tensor:
        if texts > 1:
            return together.next_logits(loops, tokens, cache, *settings)
        return loops.next_logits(tokens, cache, *settings)

    idx = random_prompts(texts, 20, config.vocab_size)
    expected, of_threads = decoded(plain, functools.partial(logits_after, plain), idx), []
    for threads in (1, 2, 3):
        of_threads.append(decoded(plain, step, idx))
        assert numba.get_num_threads() == threads
        for actual, wanted, of_one in zip(of_threads[-1], expected, of_threads[0], strict=True):
            assert_near(actual, wanted, 2e-5 if texts == 1 else 4e-5)  # the largest of more errors is larger
            assert torch.equal(actual, of_one)
    likeliest, *_ = decoded(plain, step, idx, True)  # of which all but the largest may be approximate
    assert torch.equal(likeliest.argmax(-1), expected[0].argmax(-1))
    assert_near(likeliest.amax(-1), expected[0].amax(-1), 2e-5 if texts == 1 else 4e-5)


@pytest.mark.parametrize("kind", compiled.LINEAR_KERNELS.values(), ids=compiled.LINEAR_KERNELS)
def test_loops_get_rows_that_lie_one_after_another(kind: type[nn.Linear]):
    """Their code for LLVM reads no strides."""
    pytest.importorskip("numba", reason="numba is not installed")
    from fast.loop_engine import _matrix

    linears = [nn.Linear(64, 96, bias=False) for _ in range(2)]
    linears[1].weight.data = linears[0].weight.detach().t().contiguous().t()
    if kind is not nn.Linear:
        linears = [kind.from_linear(linear) for linear in linears]
    for usual, by_columns in zip(*map(_matrix, linears), strict=True):
        assert by_columns.flags.c_contiguous and (by_columns == usual).all()


def test_text_of_int8_weights_that_were_loaded_later(numba):
    others = random_llama(7, gain=8.0, attention="causal")
    model = accelerated(random_llama(attention="causal"), "int8")
    model.load_state_dict(others.state_dict())
    ours = decoder(model, "int8")
    others.output.weight = nn.Parameter(others.output.weight.detach().clone())  # embeddings are not rounded
    with torch.no_grad():
        for module in others.modules():
            if isinstance(module, nn.Linear):
                in_8_bits, scale = quantise(module.weight)
                module.weight.copy_(in_8_bits * scale[:, None])
    for rows in (1, 3):
        prompts = random_prompts(rows, 5)
        expected = others.generate(prompts, 40, temperature=0.0)
        assert_same_text(others, ours.generate(prompts, 40, temperature=0.0), expected, 5)


@pytest.mark.parametrize("rows_and_lengths", [[(1, 3), (1, 5)], [(1, 3), (1, 4), (1, 5)], [(1, 3), (2, 4)]])
def test_what_does_not_fit_a_cache_is_an_error_and_not_written_beside_it(numba, rows_and_lengths: list):
    ours = decoding(random_llama(attention="causal"))
    through_loops = functools.partial(ours._next_logits, ours._threads, True, ours._together)
    for next_logits in (functools.partial(logits_after, ours.llama), through_loops):
        cache = KVCache(ours.llama, 1, 4)
        *fitting, last = (torch.ones(size, dtype=torch.int64) for size in rows_and_lengths)
        with torch.inference_mode():
            for idx in fitting:
                next_logits(idx, cache)
            with pytest.raises(RuntimeError):
                next_logits(last, cache)


def test_threads_of_python_may_share_a_decoder(numba):
    plain = random_llama(gain=8.0, attention="causal")
    ours = decoding(plain)
    prompts = random_prompts(3, 5).split(1)
    expected = [plain.generate(prompt, 60, temperature=0.0) for prompt in prompts]
    with ThreadPoolExecutor(3, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        texts = pool.map(lambda prompt: ours.generate(prompt, 60, temperature=0.0), prompts)
        for text, wanted in zip(texts, expected, strict=True):
            assert_same_text(plain, text, wanted, 5)


def test_under_autocast_the_text_is_the_plain_one(numba, products: str):
    """Which a long prompt, left to PyTorch's kernels, continues with keys in bfloat16."""
    plain = random_llama(gain=8.0, attention="causal", max_seq_len=400)
    ours = decoding(plain)
    with torch.autocast("cpu", torch.bfloat16):
        for length in (5, 300):
            text = ours.generate(random_prompts(1, length), 10, temperature=0.0)
            assert torch.equal(text, ours.llama.generate(random_prompts(1, length), 10, temperature=0.0))


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_texts_that_outgrow_the_model(numba, attention: str):
    plain = random_llama(gain=8.0, attention=attention, max_seq_len=12)
    check_texts(plain, random_prompts(2, 5), 30)
    check_texts(plain, random_prompts(2, 20), 5, variety=1)


@pytest.mark.parametrize("name", slow_among(["minllama1M.pt", "stories260K.pt"], ["stories260K.pt"]))
def test_trained_models_tell_the_same_stories(numba, request: pytest.FixtureRequest, name: str):
    path = BUNDLED if name == BUNDLED.name else asset(request.getfixturevalue("assets"), name)
    plain = load_llama_model(path, attention="causal")
    prompts = random_prompts(4, 3, plain.config.vocab_size)
    prompts[:, 0] = 1
    for precision in ("fp32", "int8", *["int4"] * (name == BUNDLED.name)):  # the other's rows are no whole groups
        check_texts(plain, prompts, 60, precision)
    check_texts(load_llama_model(path, attention="bidirectional"), prompts[:2], 12)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_sampling_draws_the_plain_texts(numba, attention: str):
    plain = random_llama(gain=8.0, attention=attention)
    model = decoding(plain)
    penalized = {"min_p": 0.01, "repetition_penalty": 1.5}
    for rows, settings_ in ((1, {}), (1, {"top_k": 20, "top_p": 0.9}), (3, {"epsilon": 0.001}), (1, penalized)):
        texts = []
        for each in (model, Decoder(plain)):
            torch.manual_seed(3)
            texts.append(each.generate(random_prompts(rows, 5), 40, choose=choosing(1.0, **settings_)))
        assert torch.equal(*texts)


def test_a_token_is_chosen_and_logits_are_computed_as_the_caller_says(numba):
    """A function `choose` may read any of the logits, also at temperature 0."""
    plain = random_llama(gain=8.0, attention="causal")
    ours = decoding(plain)
    steps, prompt = steps_of(ours), random_prompts(1, 5)

    def third(logits: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        return logits.topk(3).indices[:, 2:]

    for temperature in (0.0, 1.0):
        texts = [each.generate(prompt, 30, temperature, choose=third) for each in (ours, Decoder(plain))]
        assert torch.equal(*texts)
    assert len(steps) == 2 * 29
    text = ours.generate(prompt, 30, 0.0, next_logits=lambda idx, cache: -logits_after(plain, idx))
    assert torch.equal(
        text, continue_texts(plain, prompt, 30, choose=lambda logits, idx: logits.argmin(-1, keepdim=True))
    )
    assert len(steps) == 2 * 29


def test_penalized_texts_and_searched_ones_are_the_plain_ones(numba):
    """A penalty may make any token the likeliest, so that no logit can be left unknown."""
    plain = random_llama(gain=8.0, attention="causal")
    ours = decoding(plain)
    steps = steps_of(ours)
    for seed in range(4):
        prompt = random_prompts(1, 5, seed=seed)
        penalized = ours.generate(prompt, 30, choose=choosing(0.0, repetition_penalty=1.5))
        assert torch.equal(penalized, continue_texts(plain, prompt, 30, choose=choosing(0.0, repetition_penalty=1.5)))
        assert not torch.equal(penalized, plain.generate(prompt, 30, 0.0))
        assert torch.equal(BeamSearch(ours, 4).generate(prompt, 30), BeamSearch(Decoder(plain), 4).generate(prompt, 30))
        assert torch.equal(BeamSearch(ours, 1).generate(prompt, 30), plain.generate(prompt, 30, 0.0))
        texts = [ContrastiveSearch(each, 0.6, 4).generate(prompt, 30) for each in (ours.llama, plain)]
        assert torch.equal(*texts)
    assert len(steps) == 4 * 2 * 29  # of the penalized text, and of the one beam


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["output.weight", "layers.0.feed_forward.w2.weight", "layers.1.attention_norm.weight"])
def test_a_damaged_model_is_reported(numba, precision: str, value: float, name: str):
    plain = random_llama(attention="causal")
    with torch.no_grad():
        plain.get_parameter(name).flatten()[3] = value
    model = decoding(plain, precision)
    for rows in (1, 2):
        with pytest.raises(UserError, match="not finite"):
            model.generate(torch.zeros(rows, 3, dtype=torch.int64), 3, temperature=0.0)


def test_an_id_outside_of_the_vocabulary_is_an_error_as_in_pytorch(numba):
    model = decoding(random_llama(attention="causal"))
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[1, 300]]), 2, temperature=0.0)


@pytest.mark.parametrize("part", ["", "layers.1", "layers.1.attention.attn_dropout"])
def test_in_training_mode_dropout_stays(numba, part: str):
    plain = random_llama(attention="causal", gain=8.0, dropout=0.5)
    ours = decoding(plain)
    for model in (plain, ours.llama):
        model.get_submodule(part).train()
    texts = []
    for each in (Decoder(plain), ours, decoder(ours.llama)):  # a cache asks for other random numbers
        torch.manual_seed(0)
        texts.append(each.generate(TOKENS[:1], 10, temperature=0.0))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_kernels_that_are_exchanged_leave_a_decoder_to_the_model(numba):
    """The weights stay what they are, so that the decoder is not outdated."""
    ours = decoding(random_llama(attention="causal", gain=8.0))
    steps = steps_of(ours)
    ours.generate(TOKENS[:1], 30, temperature=0.0)
    assert len(steps) == 29
    accelerate(ours.llama, "bf16")
    text = ours.generate(TOKENS[:1], 30, temperature=0.0)
    assert torch.equal(text, ours.llama.generate(TOKENS[:1], 30, temperature=0.0)) and len(steps) == 29


def test_settings_that_the_whole_model_is_given_later_leave_a_decoder_to_it(numba):
    """The modules are then what the new config makes them, and the loops what the old one did."""
    ours = decoding(random_llama(attention="causal", gain=8.0))
    model, before = ours.llama, ours.generate(TOKENS[:1], 30, temperature=0.0)
    model.config = model.params = LlamaConfig(**{**vars(model.config), "rope_theta": 3.0, "layer_norm_eps": 0.5})
    for module in model.modules():
        if isinstance(module, Attention):
            module.rope = (3.0,)
        elif isinstance(module, RMSNorm):
            module.eps = 0.5
    for each in (ours, decoder(model)):
        text = each.generate(TOKENS[:1], 30, temperature=0.0)
        assert torch.equal(text, model.generate(TOKENS[:1], 30, temperature=0.0)) and not torch.equal(text, before)


def test_threads_are_those_of_pytorch_unless_fewer_are_faster(numba):
    from fast.loop_engine import BestThreads

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for cost, best in (({2: 1.0, 1: 1.5}, 2), ({2: 1.0, 1: 0.5}, 1)):
            now, used = [0.0], []
            threads = BestThreads(lambda now=now: now[0])
            for _ in range(200):
                with threads.timed() as number:
                    used.append(number)
                    now[0] += cost[number]
            assert used.count(best) > 0.9 * len(used) and len(set(used)) == 2
        torch.set_num_threads(1)
        with threads.timed() as number:
            assert number == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_the_first_text_leaves_pytorch_its_number_of_threads(numba, tiny_checkpoint: Path):
    """numba starts its threads once in a process, and sets OpenMP's number then."""
    code = (
        "import torch; torch.set_num_threads(1); "
        "from fast import decoder; from engine.weights import load_llama_model; "
        f"ours = decoder(load_llama_model({str(tiny_checkpoint)!r}, attention='causal')); "
        "ours.generate(torch.tensor([[1, 5]]), 3, temperature=0.0); import numba; "
        "assert ours.choice.kernel == 'numba'; print(torch.get_num_threads(), numba.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1 1\n", done.stderr


def test_exp_is_the_exponential_function(numba):
    from fast.loops import exp

    x = np.linspace(-87, 88, 20001, dtype=np.float32)
    true = np.exp(x.astype(np.float64))
    assert (np.abs([exp(value) for value in x] - true) <= 2 * np.spacing(true.astype(np.float32))).all()
    assert np.isnan(exp(np.float32("nan")))
    assert exp(np.float32("inf")) == exp(np.float32(88)) and exp(np.float32("-inf")) == exp(np.float32(-87))


@pytest.mark.parametrize("width", [1, 31, 32, 33, 8192, 70000])
def test_sums_of_8_bit_rows_are_those_of_float64_and_never_overflow(numba, width: int):
    from fast.loops import matvec
    from fast.row_sums import Matrix

    rows = np.full((5, width), 127, np.int8)
    rows[2] = np.arange(width) * 37 % 255 - 127
    weight = Matrix(rows, np.linspace(0.5, 1, 5, dtype=np.float32))
    x, y = np.full(width, -0.7, np.float32), np.empty(5, np.float32)
    x[::2] = -np.float32(1 / 3)
    matvec(weight, x, y)
    products = rows.astype(np.float64) * x * weight.scale[:, None]
    assert (np.abs(y - products.sum(1)) <= 1e-6 * np.abs(products).sum(1)).all()
    for value in (np.nan, np.inf):
        x[-1] = value
        matvec(weight, x, y)
        assert not np.isfinite(y).any()


def test_compiled_loops_are_never_older_than_what_they_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """numba compiles anew when a function's own file has changed, not when one has that it calls into."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "fast").glob("*.py")}
    files = {path for path, source in sources.items() if "@njit" in source or "@intrinsic" in source}
    assert files == {*compiled.LOOPS_FILES}
    written = max(file.stat().st_mtime for file in compiled.LOOPS_FILES)
    for name, seconds in (("old", -1), ("new", 1)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (written + seconds, written + seconds))
    monkeypatch.setattr(compiled, "_files", lambda: [*tmp_path.iterdir()])
    compiled._remove_outdated_files()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


# --------------------------------------------------------------------------------------------- the screened head

KINDS = ("normal", "heavy tails", "equal rows", "near ties", "zero rows", "one feature", "signs")


def heads_and_inputs(
    kind: str, vocab: int, dim: int, rows: int, seed: int, log_scales: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """v D and b D"""
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(vocab, dim, generator=generator), torch.randn(rows, dim, generator=generator)
    if kind == "heavy tails":
        weight, x = weight**7, x**5
    elif kind == "equal rows":
        weight = weight[torch.randint(0, min(3, vocab), (vocab,), generator=generator)]
    elif kind == "near ties":
        weight = weight[:1] + 1e-6 * weight
    elif kind == "zero rows":
        weight[torch.rand(vocab, generator=generator) < 0.5] = 0.0
        x[:1] *= seed % 3
    elif kind == "one feature":
        weight[:, 0] *= 1e4
        x[:, 0] = 1e-4
    elif kind == "signs":
        weight, x = weight.sign(), x.sign()
    return weight * 10.0 ** log_scales[0], x * 10.0 ** log_scales[1]


def approximate_together(head: Any, x: torch.Tensor) -> np.ndarray:
    """Logits of a `ScreenedHead`'s copy for several texts. x: n D -> n v"""
    from fast.loops_head import logits_in_8_bits
    from fast.together import to_panels

    logits = np.empty((len(x), len(head.error)), np.float32)
    logits_in_8_bits(head.copy, to_panels(x), logits)
    return logits


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    vocab=st.integers(1, 70),
    dim=st.sampled_from((1, 2, 3, 8, 31, 64, 257)),
    rows=st.sampled_from((1, 2, 5, 18)),
    seed=st.integers(0, 10**6),
    log_scales=st.tuples(st.integers(-22, 12), st.integers(-12, 12)),
)
@example(kind="signs", vocab=20, dim=1, rows=2, seed=0, log_scales=(-22, -12))  # scales whose product is denormal
@example(kind="normal", vocab=20, dim=8, rows=2, seed=0, log_scales=(-12, 31))  # and sums times a step may overflow
def test_the_screened_head_finds_the_largest_logit(
    numba, kind: str, vocab: int, dim: int, rows: int, seed: int, log_scales: tuple[int, int]
):
    from fast.loop_engine import ScreenedHead

    weight, x = heads_and_inputs(kind, vocab, dim, rows, seed, log_scales)
    head = ScreenedHead(weight, weight.numpy())
    smallest = dim * 2.0**-149  # numbers that underflow are lost in any order
    for row, of_several in zip(x, approximate_together(head, x), strict=True):
        true = (weight.double() @ row.double()).numpy()  # vocab
        norm = row.double().norm().item()
        logits = head.approximate(row.numpy())
        bound = head.error * norm + smallest
        assert (np.abs(logits.astype(np.float64) - true) <= bound).all()
        is_lost = row.abs().max() <= 1e-30 or row.abs().sum() >= 1e30  # every logit is then computed anew
        assert np.isnan(of_several).all() if is_lost else (np.abs(of_several.astype(np.float64) - true) <= bound).all()

        logits = head.pick(row.numpy(), logits, at_most=vocab)
        chosen, best = logits.argmax(), true.argmax()
        lengths = (weight[chosen].double().norm() + weight[best].double().norm()).item()
        rounding = dim * 2.0**-24 * norm * lengths
        assert true[chosen] >= true[best] - 1.01 * rounding - 2 * smallest
        assert logits[chosen] == pytest.approx(true[chosen], abs=1.01 * rounding + smallest)


# Rows of a head and an input, each a first number and one that so many of the others are, the rest being 0. The second
# row is the likeliest, and rounding makes the first look likelier; where it looks so likely that nothing else seems to
# matter, the third shows that something did: unless it is computed anew, it looks likelier than the second.
HIDDEN = {
    "a weight, rounded down": ((140, 0, 0), (127, 0.49, 64), (0, 0, 0), (1, 1, 64)),
    "a weight, rounded up": ((127, 0.51, 64), (170, 0, 0), (168, 0.67, 2), (1, 1, 64)),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_the_largest_logit_is_found_where_rounding_hides_it(numba, case: str):
    """All numbers are rounded in the same direction, which is nearly the worst case that the bound allows."""
    from fast.loop_engine import ScreenedHead

    rows = [[first] + count * [other] + (64 - count) * [0] for first, other, count in HIDDEN[case]]
    *_, x = rows = torch.tensor(rows, dtype=torch.float32)
    head = ScreenedHead(rows[:3], rows[:3].numpy())
    logits = head.approximate(x.numpy())
    assert logits.argmax() == 0
    logits = head.pick(x.numpy(), logits, at_most=3)
    assert logits.argmax() == 1
    assert logits[1] == pytest.approx((rows[1] @ x).item(), rel=1e-5)


@pytest.mark.parametrize("texts", [3, 18])
def test_the_largest_logit_is_found_where_rounded_inputs_hide_it(numba, texts: int):
    """Weights are exact in 8 bits. A step of the inputs is 1: the first row gains 31 times .49 by rounding."""
    from fast.loop_engine import ScreenedHead
    from fast.loops_together import rescore_together

    x = torch.tensor([32767.0, *31 * [1.51], *32 * [1.49]])
    rows = torch.tensor([[1.0, *31 * [1.0], *32 * [0.0]], [1.0, *31 * [0.0], *32 * [1.0]]])
    x = x * 2.0 ** torch.arange(texts)[:, None]  # a step of its own for each text
    head = ScreenedHead(rows, rows.numpy())
    logits = approximate_together(head, x)
    assert (logits.argmax(-1) == 0).all()
    assert head.pick(x.numpy(), logits, at_most=2, by=rescore_together) is logits
    assert (logits.argmax(-1) == 1).all()
    assert logits == pytest.approx((x.double() @ rows.T.double()).numpy(), rel=64 * 2.0**-24)  # of 64 products' sum


@pytest.mark.parametrize("dim", [600, 70001])
def test_sums_of_the_largest_products_do_not_overflow(numba, dim: int):
    """Inputs of all 16 bits would give sums of 33 bits from 517 inputs on, if each product is as large as it can be."""
    from fast.loop_engine import ScreenedHead

    weight = torch.ones(7, dim)
    logits = approximate_together(ScreenedHead(weight, weight.numpy()), torch.tensor([[1.0], [-3.0]]).expand(2, dim))
    assert logits == pytest.approx(dim * np.array([[1.0], [-3.0]]).repeat(7, 1), rel=1e-6)


def test_too_many_candidates_are_left_to_the_whole_head(numba):
    from fast.loop_engine import ScreenedHead

    weight, (x, *_) = heads_and_inputs("near ties", 64, 32, 2, 0, (0, 0))
    head = ScreenedHead(weight, weight.numpy())
    approximate = head.approximate(x.numpy())
    logits = approximate.copy()
    assert head.pick(x.numpy(), logits, at_most=10) is None
    assert np.array_equal(logits, approximate)
    assert head.pick(x.numpy(), logits, at_most=64) is logits
    assert logits.argmax() == (weight.double() @ x.double()).argmax()


def test_a_head_of_near_ties_gives_the_plain_text(numba):
    plain = random_llama(attention="causal", gain=8.0)
    with torch.no_grad():
        plain.output.weight.copy_(plain.output.weight[:1] + 0.01 * plain.output.weight)
    check_texts(plain, random_prompts(2, 5), 20, variety=1)


# ------------------------------------------------------------------------------------------------- run_llama.py


def test_generate_writes_the_same_text_whatever_computes_it(
    numba, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: Callable, tiny_checkpoint: Path
):
    flags = ["--pretrained-model-path", tiny_checkpoint, "--attention", "causal", "--prompt", "A film", *TEXT_FLAGS]
    monkeypatch.setattr(fast, "LITTLE", 0)  # or no kernels would be chosen for so small a model
    monkeypatch.setattr(fast.decode, "LOAD_SECONDS", 0.0)
    texts = []
    for kernels in ("auto", "plain"):
        drive(*flags, "--kernels", kernels)
        texts.append([(tmp_path / f"generated-sentence-temp-{each}.txt").read_bytes() for each in (0, 1)])
    assert texts[0] == texts[1] and len(texts[0][0]) > 60


def test_finetune_in_bf16_learns_and_saves_float32(
    tmp_path: Path, drive: Callable, classify_flags: Callable, tiny_checkpoint: Path
):
    flags = [*classify_flags("finetune"), "--precision", "bf16", "--epochs", 2, "--lr", "1e-3"]
    assert "test acc :: " in drive(*flags)
    saved = torch.load(tmp_path / "finetune-2-0.001.pt", weights_only=True)["model"]
    for name, weight in load_llama_model(tiny_checkpoint).state_dict().items():
        assert saved[f"llama.{name}"].dtype == torch.float32 and not torch.equal(saved[f"llama.{name}"], weight)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--option", "finetune", "--precision", "int8"], "--precision int8 rounds .* use bf16"),
        (["--option", "lora", "--precision", "int4"], "--precision int4 rounds .* use bf16"),
        (["--precision", "bf16", "--kernels", "plain"], "--kernels plain is .* --precision bf16"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, drive: Callable, flags: list[str], words: str):
    with pytest.raises(UserError, match=words):
        drive(*flags)
    assert not list(tmp_path.iterdir())


def test_int4_is_for_large_models_unless_it_is_asked_for_twice(
    tmp_path: Path, drive: Callable, flags_for: Callable, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    once, twice = (["--precision", "int4"] * times for times in (1, 2))
    for option in ("generate", "prompt"):
        before = {*tmp_path.iterdir()}
        for flags in (once, ["--precision", "int8", *once]):
            with pytest.raises(UserError, match="0.0 M parameters much worse.* given twice"):
                drive(*flags_for(option), *flags)
        assert {*tmp_path.iterdir()} == before
        drive(*flags_for(option), *twice)
        assert "int8 loses less" in capsys.readouterr().err
    monkeypatch.setattr(runs, "FEWEST_IN_4_BITS", 1)
    drive(*flags_for("generate"), *once)
    assert "int8 loses less" in capsys.readouterr().err
    monkeypatch.setattr(runs, "MANY_IN_4_BITS", 1)
    drive(*flags_for("generate"), *once)
    assert "int8" not in capsys.readouterr().err
