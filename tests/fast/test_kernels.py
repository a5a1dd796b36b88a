"""Kernels are modules in the places of a model's own: they hold what these hold, and their neighbours can read them."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, random_llama
from test_fast import CUDA, TOKENS, TWO_LABELS, ShiftedLinear, assert_near
from torch import nn

import fast.apply
import fast.layers
import fast.linear
from classifier import LlamaEmbeddingClassifier
from engine.context import ContextAttention, KVCache, why_no_context
from fast import accelerate
from fast.attention import FusedAttention, FusedContextAttention
from fast.compact import CompactWeight, quantise, quantise_4
from fast.kernel import Kernel
from fast.layers import FusedFeedForward, FusedRMSNorm
from fast.linear import (
    Bf16Linear,
    Int4Linear,
    Int8Linear,
    KernelLinear,
    OneDNNLinear,
    RoundedLinear,
    has_onednn,
    onednn_gated,
)
from fast.plan import LLAMA_KERNELS
from llama import Attention, FeedForward, Llama, LlamaLayer, RMSNorm
from optimizer import AdamW

TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2, "int8": 5e-2}  # as in test_fast.py
OF_LAYER = [f"attention.compute_{name}" for name in ("query", "key", "value", "output")]
OF_LAYER += [f"feed_forward.w{number}" for number in (1, 2, 3)]
LINEARS = [*(f"layers.0.{name}" for name in OF_LAYER), "output"]


@pytest.fixture(autouse=True)
def kernels_for_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast.linear, "SMALL_PRODUCT", 0)


def classifier_of(llama: Llama) -> LlamaEmbeddingClassifier:
    torch.manual_seed(0)
    return LlamaEmbeddingClassifier(TWO_LABELS, llama=llama).eval()


def accelerated(model: nn.Module, precision: str = "fp32", **purpose) -> nn.Module:
    model = copy.deepcopy(model)
    accelerate(model, precision, **purpose)
    return model


def logits_of(llama: Llama) -> torch.Tensor:
    with torch.inference_mode():
        return llama(TOKENS, targets=TOKENS)[0]


def classes_of(classifier: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return classifier.eval()(TOKENS)


def gradients_of(classifier: nn.Module) -> dict[str, torch.Tensor]:
    classifier.train().zero_grad()
    F.nll_loss(classifier(TOKENS), torch.tensor([0, 1])).backward()
    return {name: each.grad for name, each in classifier.named_parameters() if each.grad is not None}


def check_computes_as(classifier: nn.Module, plain: nn.Module, relative: float) -> None:
    """Classes, logits, and the gradients of a training step."""
    assert_near(classes_of(classifier), classes_of(plain), relative)
    assert_near(logits_of(classifier.llama), logits_of(plain.llama), relative)
    check_gradients(gradients_of(classifier), gradients_of(plain), relative)


def check_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float) -> None:
    """All together within `relative` of their length, and each, which may be small, within some times as much."""
    assert actual.keys() == expected.keys() and len(expected) > 0
    off = {name: actual[name] - gradient for name, gradient in expected.items()}
    assert all(gradient.dtype == torch.float32 for gradient in actual.values())
    assert all(off[name].norm() <= 5 * relative * gradient.norm() for name, gradient in expected.items())
    lengths = [torch.stack([each.norm() for each in gradients.values()]).norm() for gradients in (off, expected)]
    assert lengths[0] <= relative * lengths[1]


# ----------------------------------------------------------------------------------------------- what they hold


def made_of() -> dict[type, tuple[nn.Module, Kernel]]:
    """Every kernel, and the module that it is made of."""
    model = random_llama(dropout=0.1)
    linear, (layer, *_) = nn.Linear(32, 12, bias=False), model.layers
    linears = (OneDNNLinear, Bf16Linear, RoundedLinear, Int8Linear, Int4Linear)
    of_prefix = ContextAttention(model.config)
    return {
        **{kind: (linear, kind.from_linear(linear)) for kind in linears},
        FusedRMSNorm: (layer.ffn_norm, FusedRMSNorm.from_norm(layer.ffn_norm)),
        FusedFeedForward: (layer.feed_forward, FusedFeedForward.sharing(layer.feed_forward)),
        FusedAttention: (layer.attention, FusedAttention.from_attention(layer.attention)),
        FusedContextAttention: (of_prefix, FusedContextAttention.from_attention(of_prefix)),
    }


@pytest.mark.parametrize("kind", sorted(LLAMA_KERNELS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("on_kernel", [False, True])
def test_what_is_hung_on_either_is_seen_by_both(kind: type, on_kernel: bool):
    plain, kernel = made_of()[kind]
    assert type(kernel) is kind and isinstance(kernel, type(plain)) and type(plain) is kind.replaces
    one, other = (kernel, plain) if on_kernel else (plain, kernel)
    one.more = nn.Parameter(torch.ones(3))
    one.child = nn.Dropout(0.5)
    one.register_buffer("state", torch.zeros(2))
    one.setting = 5
    one.train(not one.training)
    assert other.more is one.more and other.child is one.child and other.state is one.state and other.setting == 5
    assert other.training == one.training and other.state_dict().keys() == one.state_dict().keys()
    called = []
    one.register_forward_pre_hook(lambda module, args: called.append("before"))
    one.register_forward_hook(lambda module, args, y: called.append("after"))
    one.register_full_backward_hook(lambda module, into, out: called.append((len(into), len(out))))
    config = random_llama().config
    x = torch.randn(2, 3, {nn.Linear: 32}.get(kind.replaces, config.dim), requires_grad=True)
    other(x).sum().backward()
    assert called == ["before", "after", (1, 1)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_cache_is_read_by_the_fused_attention(monkeypatch: pytest.MonkeyPatch, precision: str):
    """The first tokens as a causal text, one alone without a mask, and others with one, in every layer."""
    model = random_llama(attention="causal", n_kv_heads=2)
    expected = KVCache(model, *TOKENS.shape).read(TOKENS)
    accelerate(model, precision)
    assert why_no_context(model) is None
    cache, asked = KVCache(model, *TOKENS.shape), []
    assert {type(attention) for attention in cache.reader.attentions} == {FusedContextAttention}
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **how: asked.append(how) or fused(*args, **how)
    )
    pieces = [cache.read(piece) for piece in TOKENS.split([4, 1, 2], dim=1)]
    told = [(how["is_causal"], how["attn_mask"] is not None) for how in asked]
    assert told == [each for each in ((True, False), (False, False), (False, True)) for _ in range(model.n_layers)]
    near = {"fp32": 1e-5, "bf16": 3e-2, "int8": 5e-2}[precision]
    assert_near(torch.cat([h for _, h in pieces], dim=1), expected[1], near)
    assert_near(pieces[-1][0], expected[0], near)


@pytest.mark.parametrize("damage", [math.nan, math.inf, 1e25])
@pytest.mark.parametrize("name", ["compute_query", "compute_key"])
@pytest.mark.parametrize("length", [1, 7, 15, 16, 17])
def test_attention_shows_what_is_not_finite_in_texts_of_every_length(length: int, name: str, damage: float):
    """PyTorch's fused kernel gives zeros where all scores of a short text are NaN."""
    plain, tokens = random_llama(attention="causal"), torch.randint(3, 300, (2, length))
    with torch.no_grad():
        plain.layers[0].attention.get_submodule(name).weight.mul_(damage)
        if damage == 1e25:  # finite, but no scores are
            plain.layers[0].attention.compute_query.weight.mul_(1e15)
            plain.layers[0].attention.compute_key.weight.mul_(1e15)
        model = copy.deepcopy(plain)
        accelerate(model)
        assert not plain(tokens)[0].isfinite().any() and not model(tokens)[0].isfinite().any()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("generates", [False, True])
def test_a_bias_that_a_layer_is_given_after_its_kernel_counts(precision: str, generates: bool):
    model = random_llama(dim=32, n_heads=4, n_kv_heads=2, hidden_dim=64)
    accelerate(model, precision, generates=generates)
    with torch.no_grad():
        before = model(TOKENS)[1]
        for linear in model.layers.modules():
            if isinstance(linear, nn.Linear):
                linear.bias = nn.Parameter(torch.randn(linear.out_features))
        after = model(TOKENS)[1]
        accelerate(model, precision, generates=generates)  # the layers are computed as they are written
        expected = model(TOKENS)[1]
    assert (after - expected).abs().max() <= 3e-2 * expected.abs().max()
    assert (after - before).abs().max() > 0.3 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_a_batch_without_rows_has_a_product_without_rows(shape: tuple[int, ...]):
    for plain, kernel in made_of().values():
        if isinstance(plain, nn.Linear):
            assert kernel.eval()(torch.zeros(shape)).shape == plain(torch.zeros(shape)).shape


def test_a_kernel_adds_nothing_to_the_module_and_has_formats_of_its_own():
    linear = nn.Linear(8, 12, bias=False)
    before = set(vars(linear))
    narrow = Bf16Linear.from_linear(linear, out_dtype=torch.bfloat16)
    wide = Bf16Linear.from_linear(linear)
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert narrow(x).dtype == torch.bfloat16 and wide(x).dtype == torch.float32
    assert set(vars(linear)) == before and type(linear) is nn.Linear
    with pytest.raises(TypeError, match="inputs_to"):
        Bf16Linear.from_linear(linear, inputs_to=torch.int8)
    with pytest.raises(TypeError, match="out_dtype"):
        Int8Linear(8, 12, out_dtype=torch.bfloat16)


def test_a_hook_of_loading_finds_its_module():
    """PyTorch keeps no more than a weak reference to it."""
    model, seen = random_llama(), []
    model.layers[0].feed_forward.w2.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module.weight))
    accelerate(model)
    for each in (model, copy.deepcopy(model)):
        each.load_state_dict(model.state_dict())
        assert seen[-1] is each.layers[0].feed_forward.w2.weight


# --------------------------------------------------------------------------------------------- where they stand


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_taking_kernels_away_puts_the_modules_back(precision: str):
    model = classifier_of(random_llama(attention="causal"))
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    before = copy.deepcopy(model.state_dict())
    accelerate(model, precision)
    kernels = {name for name, module in model.named_modules() if isinstance(module, Kernel)}
    assert "llama.layers.0.attention" in kernels and "llama.norm" in kernels
    now = dict(model.named_modules())
    assert [*now] == [*modules]
    assert all((now[name] is module) == (name not in kernels) for name, module in modules.items())
    assert type(model.classifier_head) is nn.Linear and model.classifier_head.weight.requires_grad
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and parameter.dtype == torch.float32
        if precision != "int8" or parameter.dim() == 1 or name.startswith("classifier_head"):
            assert torch.equal(parameter, before[name])
    accelerate(model, "fp32", CUDA)
    for module in model.modules():
        if isinstance(module, FusedAttention):
            assert module.without_kernel() in modules.values()
    accelerate(model, "bf16")
    accelerate(model, "fp32", CUDA)  # which has kernels for attention alone
    back = dict(model.named_modules())
    assert all(back[name] is module for name, module in modules.items() if not isinstance(module, Attention))
    assert [*model.state_dict()] == [*classifier_of(random_llama()).state_dict()]
    assert model.llama.output.weight is model.llama.tok_embeddings.weight


def test_what_is_set_between_two_calls_stays():
    model = random_llama()
    norm = model.layers[0].ffn_norm
    accelerate(model)
    model.layers[0].ffn_norm.eps = 3.0
    expected = logits_of(model)
    accelerate(model, "fp32", CUDA)
    assert model.layers[0].ffn_norm is norm and norm.eps == 3.0
    assert_near(logits_of(model), expected, 1e-5)


def test_a_module_that_stands_in_two_places_does_so_afterwards():
    model = classifier_of(random_llama(attention="causal"))
    model.llama.layers[1] = model.llama.layers[0]
    model.llama.layers[0].ffn_norm = model.llama.layers[0].attention_norm
    model.shortcut = model.llama.output
    plain = copy.deepcopy(model)
    for precision in ("fp32", "bf16"):
        accelerate(model, precision)
        (layer, same), llama = model.llama.layers, model.llama
        assert layer is same and layer.ffn_norm is layer.attention_norm and model.shortcut is llama.output
        check_computes_as(model, plain, TOLERANCE[precision])


def test_an_optimizer_that_was_made_before_goes_on():
    plain = classifier_of(random_llama())
    model = copy.deepcopy(plain)
    optimizers = [AdamW(each.parameters(), lr=1e-3) for each in (plain, model)]
    for precision in ("fp32", "fp32"):
        accelerate(model, precision)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            gradients_of(each)
            optimizer.step()
    before, after = (torch.cat([each.flatten() for each in one.parameters()]) for one in (plain, model))
    assert (after - before).abs().max() <= 2.1e-4  # of two steps of 1e-3, whose direction rounding hardly turns
    assert not torch.equal(before, torch.cat([each.flatten() for each in classifier_of(random_llama()).parameters()]))


@pytest.mark.parametrize("generates", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_copies_of_a_used_model_are_computed_alike_and_their_kernels_taken_away(precision: str, generates: bool):
    model = accelerated(random_llama(attention="causal"), precision, generates=generates)
    model.generate(TOKENS, 2, temperature=0.0)
    expected, buffer = logits_of(model), io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(logits_of(other), expected)
        for mine, its in zip(other.modules(), model.modules(), strict=True):
            assert type(mine) is type(its) and mine is not its
            if isinstance(mine, Kernel):
                assert vars(mine.without_kernel()) is vars(mine) and type(mine.without_kernel()) is mine.replaces
        assert other.output.weight is other.tok_embeddings.weight
        with torch.no_grad():
            other.layers[0].feed_forward.w2.weight.zero_()
        assert not torch.equal(logits_of(other), expected) and torch.equal(logits_of(model), expected)
        assert torch.equal(other.generate(TOKENS, 2, temperature=0.0), copy.deepcopy(other).generate(TOKENS, 2, 0.0))
        accelerate(other, "fp32", CUDA)
        assert {type(each) for each in other.modules() if isinstance(each, nn.Linear)} == {nn.Linear}
        assert {type(each) for each in other.modules() if isinstance(each, RMSNorm)} == {RMSNorm}


# -------------------------------------------------------------------- what a method hangs on layers before accelerate


def lora(model: Llama, *names: str) -> None:
    """Low-rank updates (Hu et al. 2021, arXiv:2106.09685) of layers that end so; nothing else is trained."""

    def add(module: nn.Linear, args: tuple, y: torch.Tensor) -> torch.Tensor:
        return y + F.linear(F.linear(module.lora_dropout(args[0]), module.lora_A), module.lora_B)

    model.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        if name.endswith(names):
            linear.lora_A = nn.Parameter(torch.randn(3, linear.in_features) / linear.in_features**0.5)
            linear.lora_B = nn.Parameter(torch.randn(linear.out_features, 3) * 0.2)
            linear.lora_dropout = nn.Dropout(0.0)
            linear.register_forward_hook(add)


@pytest.mark.parametrize("names", [("query", "value"), ("compute_output",), ("w1",), ("w2",), tuple(OF_LAYER)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("generates", [False, True])
def test_low_rank_updates_are_computed_and_trained(names: tuple[str, ...], precision: str, generates: bool):
    plain = classifier_of(random_llama(attention="causal"))
    without = classes_of(plain)
    lora(plain.llama, *names)
    model = accelerated(plain, precision, generates=generates)
    if precision == "int8":
        plain.load_state_dict(model.state_dict())
    kinds = {type(part) for part in model.llama.layers[0].modules() if isinstance(part, nn.Linear)}
    assert len(kinds) == 1 and kinds < {OneDNNLinear, Bf16Linear, RoundedLinear, Int8Linear, nn.Linear}
    check_computes_as(model, plain, TOLERANCE[precision])
    assert (classes_of(model) - without).abs().max() > 0.1
    trained = {name for name, parameter in model.llama.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.llama.named_parameters() if "lora" in name}
    assert all(f"llama.{name}" in gradients_of(model) for name in trained)


def test_a_layer_inside_of_a_layer_is_a_methods_own():
    model = random_llama()
    linear = model.layers[0].feed_forward.w2
    linear.low = nn.Linear(linear.in_features, 3, bias=False)
    linear.high = nn.Linear(3, linear.out_features, bias=False)
    linear.register_forward_hook(lambda module, args, y: y + module.high(module.low(args[0])))
    plain = copy.deepcopy(model)
    for precision in ("bf16", "int8"):
        accelerate(model, precision)
        w2 = model.layers[0].feed_forward.w2
        assert type(w2.low) is type(w2.high) is nn.Linear and w2.low.weight.requires_grad
        assert_near(logits_of(model), logits_of(plain), TOLERANCE[precision])


# ------------------------------------------------------------------------- neighbours that know float32 and no less


@pytest.mark.parametrize("where", LINEARS)
@pytest.mark.parametrize(
    ("precision", "device", "generates", "when"),
    [
        *itertools.product(("bf16", "int8", "fp32"), ("cpu",), (False, True), ("before", "after")),
        ("bf16", "cuda", True, "before"),
    ],
)
def test_a_layer_in_float32_among_kernels(where: str, precision: str, device: str, generates: bool, when: str):
    plain = classifier_of(random_llama(attention="causal"))
    model = copy.deepcopy(plain)
    if when == "after":
        accelerate(model, precision, torch.device(device), generates=generates)
    for each in (plain, model):
        ShiftedLinear.replace(each.llama, where)
    if when == "before":
        accelerate(model, precision, torch.device(device), generates=generates)
    if precision == "int8":
        for each in (plain, model):
            each.llama.requires_grad_(False)
            each.llama.norm.requires_grad_(True)
    assert type(model.llama.get_submodule(where)) is ShiftedLinear
    check_computes_as(model, plain, TOLERANCE[precision])
    if device == "cpu":
        assert model.llama.eval().generate(TOKENS[:1], 5, temperature=0.0).shape == (1, 12)


def between_parts(model: Llama) -> None:
    """Layers between the parts of a layer of a user's own."""

    class Sandwich(LlamaLayer):
        def forward(self, x: torch.Tensor, *others, **named) -> torch.Tensor:
            h = x + self.extra(self.attention(self.attention_norm(x)))
            return h + self.extra(self.feed_forward(self.ffn_norm(h)))

    layer = Sandwich(0, model.config)
    layer.extra = nn.Linear(model.config.dim, model.config.dim)
    layer.load_state_dict(model.layers[0].state_dict(), strict=False)
    model.layers[0] = layer.eval()


def more_of(kind: type, where: str) -> Callable[[Llama], None]:
    """A part of a user's own that multiplies what it reads by a matrix in float32."""

    class More(kind):
        def forward(self, x: torch.Tensor, *others, **named) -> torch.Tensor:
            return super().forward(x + x @ self.extra, *others, **named)

    def change(model: Llama) -> None:
        part = model.layers[0].get_submodule(where)
        part.extra = torch.randn(model.config.dim, model.config.dim) / model.config.dim**0.5
        other = More.__new__(More)
        other.__dict__ = vars(part)
        setattr(model.layers[0], where, other)

    return change


def hook_on(where: str, before: bool) -> Callable[[Llama], None]:
    """A layer in float32 that a hook on a part computes."""

    def change(model: Llama) -> None:
        part = model.layers[0].get_submodule(where)
        model.extra = nn.Linear(model.config.dim, model.config.dim)
        if before:
            part.register_forward_pre_hook(lambda _, args: (model.extra(args[0]), *args[1:]))
        else:
            part.register_forward_hook(lambda _, args, y: y + model.extra(y))

    return change


def own_forward(model: Llama) -> None:
    w2 = model.layers[0].feed_forward.w2
    w2.forward = lambda x: F.linear(x, w2.weight) + 0.5


NEIGHBOURS = {
    "a layer of a user's own": between_parts,
    "an attention of a user's own": more_of(Attention, "attention"),
    "a feed-forward of a user's own": more_of(FeedForward, "feed_forward"),
    "a forward of a user's own": own_forward,
    "after the norm": hook_on("attention_norm", before=False),
    "before attention": hook_on("attention", before=True),
    "after attention": hook_on("attention", before=False),
    "before the feed-forward": hook_on("feed_forward", before=True),
    "after the feed-forward": hook_on("feed_forward", before=False),
}


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_of_a_users_own_are_given_what_they_can_read(neighbour: str, device: str):
    torch.manual_seed(0)
    llama = random_llama()
    NEIGHBOURS[neighbour](llama)
    model = classifier_of(llama)
    classes, expected = classes_of(model), copy.deepcopy(gradients_of(model))
    accelerate(model, "bf16", torch.device(device), generates=False)
    assert type(model.llama.layers[0].feed_forward.w1) is Bf16Linear
    assert_near(classes_of(model), classes, 3e-2)
    check_gradients(gradients_of(model), expected, 3e-2)


@pytest.mark.parametrize("holds", ["a layer", "a weight"])
def test_an_edited_attention_with_more_weights_reads_float32(monkeypatch: pytest.MonkeyPatch, holds: str):
    before = Attention.forward

    def forward(self: Attention, x: torch.Tensor, *others, **named) -> torch.Tensor:
        if hasattr(self, "extra"):
            x = self.extra(x) if holds == "a layer" else F.linear(x, self.extra)
        return before(self, x, *others, **named)

    monkeypatch.setattr(Attention, "forward", forward)
    plain = random_llama()
    layer = nn.Linear(plain.config.dim, plain.config.dim)
    plain.layers[0].attention.extra = layer if holds == "a layer" else layer.weight
    plain = classifier_of(plain)
    check_computes_as(accelerated(plain, "bf16", generates=False), plain, TOLERANCE["bf16"])


def test_renamed_layers_are_computed(monkeypatch: pytest.MonkeyPatch):
    """An edit whose feed-forward has one gate less, and other names."""

    def forward(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.silu(self.up(x))))

    model = random_llama()
    for layer in model.layers:
        part = layer.feed_forward
        part.up, part.down = part.w1, part.w2
        del part.w1, part.w2, part.w3
    monkeypatch.setattr(FeedForward, "forward", forward)
    plain = classifier_of(model)
    for precision in ("fp32", "bf16"):
        check_computes_as(accelerated(plain, precision, generates=False), plain, TOLERANCE[precision])


@pytest.mark.parametrize("changed", ["nothing", "a hook", "another layer", "a method", "the input", "the result"])
def test_gated_products_stand_for_two_plain_layers_only(monkeypatch: pytest.MonkeyPatch, changed: str):
    if not has_onednn(torch.bfloat16):
        pytest.skip("oneDNN's products in bfloat16 do not work here")
    monkeypatch.setattr(fast.apply, "_bf16", lambda: ("bfloat16 products", ""))
    calls = []
    monkeypatch.setattr(fast.layers, "onednn_gated", lambda *given: calls.append(given) or onednn_gated(*given))
    plain = random_llama()
    model = accelerated(plain, "bf16", generates=False)
    for llama in (plain, model):
        layer = llama.layers[0].feed_forward
        if changed == "a hook":
            layer.w3.register_forward_hook(lambda module, given, result: result * 2)
        elif changed == "another layer":
            layer.w1 = nn.Sequential(layer.w1, nn.Tanh())
        elif changed == "a method":
            layer.w1.forward = lambda x, linear=layer.w1: F.linear(x.float(), linear.weight * 3).to(x.dtype)
        elif changed == "the input":
            layer.register_forward_pre_hook(lambda module, given: (given[0].float(),))
        elif changed == "the result":
            layer.w1.out_dtype = layer.w3.out_dtype = torch.float32
    assert_near(logits_of(model), logits_of(plain), TOLERANCE["bf16"])
    with_gates = len(plain.layers) - (changed != "nothing")
    assert len(calls) == with_gates


# ------------------------------------------------------------------------------------------- inputs in bfloat16


def check_rounded_product(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """actual: products of both rounded to bfloat16, summed in float32 or better, and rounded once more."""
    expected = x.bfloat16().double() @ weight.bfloat16().double().T
    assert actual.dtype == torch.float32 and torch.equal(actual, actual.bfloat16().float())
    assert ((actual - expected).abs() <= expected.abs() / 256 + 1e-4).all()  # two neighbours of bfloat16 at most


@pytest.mark.parametrize(("kind", "in_few_bits"), [(Int4Linear, quantise_4), (Int8Linear, quantise)])
@pytest.mark.parametrize("kept", ["compact", "whole", "packed", "for one call"])
@pytest.mark.parametrize("rows", [1, 40])
def test_what_meets_few_bits_is_rounded_to_bfloat16_on_request(kind: type, in_few_bits: Callable, kept: str, rows: int):
    """Numbers of both grids that need no rounding, so that the weight is known without the code under test."""
    draw, most, outputs = torch.Generator().manual_seed(0), {Int4Linear: 8, Int8Linear: 127}[kind], 1100
    q = torch.randint(-most, most, (outputs, 6, 32), generator=draw)
    q[..., 5] = -most  # the number of a group that gives the scale
    scale = 1.0078125 * 2.0 ** torch.randint(-9, -5, (outputs, 6 if kind is Int4Linear else 1, 1), generator=draw)
    weight, off_grid = (q * scale).flatten(1), ((q + 0.3 * (q > -most)) * scale).flatten(1)
    linear = nn.Linear(192, outputs, bias=False)
    linear.weight = nn.Parameter(CompactWeight(*in_few_bits(weight)) if kept == "compact" else weight.clone(), False)
    settings = {"packs": kept == "packed" and has_onednn(torch.bfloat16), "keeps_copies": kept != "for one call"}
    kernel = kind.from_linear(linear, inputs_to=torch.bfloat16, **settings)
    kernel.round_weight()
    x = torch.randn(2, rows, 192, generator=draw)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            check_rounded_product(kernel(x), x, weight)
    finally:
        torch.set_num_threads(threads)
    if kept != "compact":  # a weight that is loaded later is rounded to few bits as well
        linear.weight.copy_(off_grid)
        check_rounded_product(kernel(x), x, weight)
        linear.weight.copy_(weight)
    x.requires_grad_()  # not rounded then
    torch.testing.assert_close(kernel(x), F.linear(x, weight))
    gradient, exact = torch.autograd.grad(kernel(x).sum(), x)[0], weight.double().sum(0)
    assert ((gradient - exact).abs() <= 1e-5 * weight.abs().sum(0)).all()  # of long sums, in any order of their parts


@pytest.mark.parametrize("generates", [False, True])
@pytest.mark.parametrize("way", ["bfloat16 products", "float32 products"])
def test_int4_rounds_inputs_where_that_is_faster_and_no_text_is_generated(
    monkeypatch: pytest.MonkeyPatch, way: str, generates: bool
):
    monkeypatch.setattr(fast.apply, "_bf16", lambda: (way, "as the test says"))
    plain = random_llama(attention="causal", tied=False)
    model = copy.deepcopy(plain)
    linears, *_ = accelerate(model, "int4", generates=generates, trains=False)
    is_rounded = way == "bfloat16 products" and not generates
    assert linears.reason.endswith("float32 products: text is generated" if generates else f"{way}: as the test says")
    kernels = [part for part in model.modules() if isinstance(part, Int8Linear)]
    assert len(kernels) == len(OF_LAYER) * len(plain.layers) + 1
    assert all(kernel.inputs_to == (torch.bfloat16 if is_rounded else None) for kernel in kernels)
    plain.load_state_dict(model.state_dict())
    assert_near(logits_of(model), logits_of(plain), TOLERANCE["bf16" if is_rounded else "fp32"])
    assert torch.equal(logits_of(model), logits_of(model).bfloat16().float()) == is_rounded


# ---------------------------------------------------------------------------------------------- copies of weights


@pytest.mark.parametrize("precision", ["fp32", "bf16", "rounded", "int8"])
@pytest.mark.parametrize("generates", [False, True])
def test_copies_that_are_not_wanted_are_not_kept(monkeypatch: pytest.MonkeyPatch, precision: str, generates: bool):
    if precision == "rounded":
        monkeypatch.setattr(fast.apply, "fastest", lambda question, ways: (next(iter(ways)), "as the test says"))
    plain, name = classifier_of(random_llama(attention="causal")), precision.replace("rounded", "bf16")
    keeping, model = (accelerated(plain, name, generates=generates, keeps_copies=keeps) for keeps in (True, False))
    for _ in range(2):
        assert_near(classes_of(model), classes_of(keeping), TOLERANCE[name])
    kernels = [[part for part in each.modules() if isinstance(part, KernelLinear)] for each in (keeping, model)]
    assert all(part._copy is None and part._copied is None for part in kernels[1])
    assert precision == "fp32" or any(part._copy is not None for part in kernels[0])
    if precision == "int8":
        return
    check_gradients(gradients_of(model), gradients_of(keeping), 0.0 if precision != "fp32" else 1e-5)
    weights, saved = {weight.data_ptr() for weight in model.parameters()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = model(TOKENS).sum()
    shape = model.llama.layers[0].feed_forward.w2.weight.shape
    of_shape = [tensor for tensor in saved if tensor.shape in (shape, shape[::-1])]
    assert len(of_shape) >= 6 and all(tensor.data_ptr() in weights for tensor in of_shape)
    loss.backward()


@pytest.mark.slow
def test_a_sharded_model_lies_whole_in_no_process(tmp_path: Path):
    """Each layer's weights are gathered for its computation, and nothing that is made of them outlives it."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = [str(ROOT / "tests/fast/shard_worker.py"), str(tmp_path / "found.json")]
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([*launch, *worker], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for found in json.loads((tmp_path / "found.json").read_text(encoding="utf-8")).values():
        assert found["sharded"] == pytest.approx(found["alone"], rel=1e-4)
        assert found["waiting"] == found["kept"] == 0
