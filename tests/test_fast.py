"""Kernels and precisions: whatever they save, a model's numbers, gradients and texts must stay those of plain PyTorch."""

from __future__ import annotations

import copy
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, asset, random_llama
from error_helpers import check_one_error
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache import PROMPTS, left_padded
from torch import nn

import fast.apply
from classifier import LlamaEmbeddingClassifier
from fast import accelerate
from fast.apply import choose_decoder, choose_layers, choose_linear
from fast.layers import FusedFeedForward, FusedRMSNorm, _RMSNorm, _SwiGLU
from fast.linear import Bf16Linear, Int8Linear, OneDNNLinear, has_onednn, quantise
from llama import FeedForward, Llama, RMSNorm, load_pretrained
from optimizer import AdamW
from utils import UserError

TOKENS = torch.tensor([[1, 45, 299, 7, 7, 120, 33], [1, 45, 8, 260, 3, 3, 3]])
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VENDORS = ("AuthenticAMD", "GenuineIntel")  # one for each kernel that fp32 has
BUNDLED = ROOT / "checkpoints/minllama1M.pt"


@pytest.fixture(params=VENDORS)
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What this machine's processor says it is, so that every machine tests both kernels."""
    if request.param == "AuthenticAMD" and not has_onednn():
        pytest.skip("this PyTorch has no oneDNN products")
    monkeypatch.setattr(fast.apply, "cpu_vendor", lambda: request.param)
    return request.param


@pytest.fixture
def numba():
    """The tests that ask for it are about the compiled loops."""
    return pytest.importorskip("numba")


def accelerated(model: nn.Module, precision: str = "fp32", device: torch.device | None = None) -> nn.Module:
    """A copy on fast kernels."""
    model = copy.deepcopy(model)
    accelerate(model, precision, device)
    return model


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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_names_and_shapes_stay_and_values_too_but_for_int8(precision: str):
    model = random_llama()
    before = copy.deepcopy(model.state_dict())
    accelerate(model, precision)
    after = model.state_dict()
    assert [*after] == [*before]
    for name, value in after.items():
        assert value.shape == before[name].shape and value.dtype == torch.float32
        if precision != "int8" or value.dim() == 1:
            assert torch.equal(value, before[name])
    assert model.output.weight is model.tok_embeddings.weight
    random_llama().load_state_dict(after)


def test_kernels_can_be_switched_and_applied_again(vendor: str):
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
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), outputs(plain), strict=True))


def test_int8_rounds_once():
    model = random_llama()
    accelerate(model, "int8")
    rounded, logits = copy.deepcopy(model.state_dict()), outputs(model)[0]
    for precision in ("int8", "fp32", "int8"):
        accelerate(model, precision)
    assert all(torch.equal(value, rounded[name]) for name, value in model.state_dict().items())
    assert torch.equal(outputs(model)[0], logits)


def test_every_number_on_the_grid_is_rounded_to_itself():
    """So that rounding twice is rounding once: 127 s / 127 is s again for each of the 2^23 mantissas of a scale s."""
    scale = torch.arange(2**23, 2**24, dtype=torch.float32)
    assert torch.equal(scale * 127 / 127, scale)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="fp64.*fp32, bf16, int8"):
        accelerate(random_llama(), "fp64")


class ShiftedLinear(nn.Linear):
    """What a method might put in the place of a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.5


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("where", ["attention.compute_query", "feed_forward.w1", "feed_forward.w2"])
def test_a_layer_that_was_replaced_computes_on(precision: str, where: str):
    model = random_llama(attention="causal")
    model.layers[0].get_submodule(where).__class__ = ShiftedLinear
    fast_model = accelerated(model, precision)
    assert type(fast_model.layers[0].get_submodule(where)) is ShiftedLinear
    logits, expected = outputs(fast_model)[0], outputs(model)[0]
    assert_near(logits, expected, {"fp32": 1e-5, "bf16": 3e-2, "int8": 5e-2}[precision])
    gradients(fast_model)


def test_text_is_that_of_replaced_layers_biases_and_hooks(numba):
    def shift(module: nn.Module, args: tuple, y: torch.Tensor) -> torch.Tensor:
        return y + 0.5

    def replace(model: Llama) -> None:
        model.layers[0].attention.compute_query.__class__ = ShiftedLinear

    def add_bias(model: Llama) -> None:
        model.output.bias = nn.Parameter(torch.eye(300)[17])

    def add_hook(model: Llama) -> None:
        model.layers[1].feed_forward.register_forward_hook(shift)

    prompt = torch.tensor(PROMPTS[:1])
    for change in (replace, add_bias, add_hook):
        model = random_llama(attention="causal", gain=8.0)
        unchanged = model.generate(prompt, 30, temperature=0.0)
        fast_model = accelerated(model)
        fast_model.generate(prompt, 3, temperature=0.0)
        change(model)
        expected = model.generate(prompt, 30, temperature=0.0)
        assert not torch.equal(expected, unchanged)
        change(fast_model)  # after it was accelerated
        assert torch.equal(fast_model.generate(prompt, 30, temperature=0.0), expected)
        assert torch.equal(accelerated(model).generate(prompt, 30, temperature=0.0), expected)


def test_a_subclass_of_the_model_stays_one():
    class Shifted(Llama):
        def _next_logits(self, *args, **kwargs) -> torch.Tensor:
            return super()._next_logits(*args, **kwargs) + torch.eye(300)[17] * 100

    model = random_llama(attention="causal")
    model.__class__ = Shifted
    accelerate(model)
    assert type(model) is Shifted and model.generate(torch.tensor([[1]]), 2, temperature=0.0).tolist() == [[1, 17, 17]]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_the_classifier_head_stays_as_it_is(precision: str, config_for_two_labels):
    model = LlamaEmbeddingClassifier(config_for_two_labels, llama=random_llama())
    head = copy.deepcopy(model.classifier_head.state_dict())
    accelerate(model, precision)
    assert type(model.classifier_head) is nn.Linear and model.classifier_head.weight.requires_grad
    assert all(torch.equal(value, head[name]) for name, value in model.classifier_head.state_dict().items())
    assert type(model.llama.layers[0].attention_norm) is FusedRMSNorm


@pytest.fixture
def config_for_two_labels():
    class Config:
        num_labels, hidden_dropout_prob, option = 2, 0.0, "finetune"

    return Config()


def test_every_choice_names_a_kernel_and_a_reason():
    for precision in ("fp32", "bf16", "int8"):
        for device in (CPU, CUDA, torch.device("mps")):
            choices = accelerate(random_llama(), precision, device)
            assert [choice.part for choice in choices] == ["linear layers", "norms and gates", "decoding one text"]
            assert all(choice.kernel and len(choice.reason) > 10 for choice in choices)


@pytest.mark.parametrize("vendor_id", ["GenuineIntel", "", "0x41"])
def test_onednn_is_for_amd_alone(monkeypatch: pytest.MonkeyPatch, vendor_id: str):
    monkeypatch.setattr(fast.apply, "has_onednn", lambda: True)
    monkeypatch.setattr(fast.apply, "cpu_vendor", lambda: vendor_id)
    assert choose_linear("fp32", CPU).kernel == "plain"
    monkeypatch.setattr(fast.apply, "cpu_vendor", lambda: "AuthenticAMD")
    assert choose_linear("fp32", CPU).kernel == "oneDNN"
    monkeypatch.setattr(fast.apply, "has_onednn", lambda: False)
    assert choose_linear("fp32", CPU).kernel == "plain"


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_another_device_has_pytorchs_own_kernels(device: str):
    device = torch.device(device)
    assert [choose_linear(precision, device).kernel for precision in ("fp32", "bf16", "int8")] == [
        "plain",
        "bf16",
        "int8",
    ]
    assert choose_layers(device).kernel == "plain"
    assert {choose_decoder(precision, device).kernel for precision in ("fp32", "bf16", "int8")} == {"plain"}


def test_what_another_device_would_run_gives_the_same_numbers():
    """The kernels of a GPU, run here."""
    plain = random_llama(attention="causal")
    fp32, bf16, int8 = (accelerated(plain, precision, CUDA) for precision in ("fp32", "bf16", "int8"))
    assert all(type(model) is Llama for model in (fp32, bf16, int8))
    assert torch.equal(outputs(fp32)[0], outputs(plain)[0])
    assert_near(outputs(bf16)[0], outputs(plain)[0], 3e-2)
    assert outputs(bf16)[0].dtype == torch.float32
    rounded = random_llama(attention="causal")
    rounded.load_state_dict(int8.state_dict())
    assert_near(outputs(int8)[0], outputs(rounded)[0], 5e-2)  # int8 on a CPU rounds what comes in as well
    for model in (fp32, bf16, int8):
        assert model.generate(TOKENS, 4, temperature=0.0).shape == (2, 11)


def test_without_numba_another_path_is_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    plain = random_llama(attention="causal", gain=8.0)
    choice = choose_decoder("fp32", CPU)
    assert choice.kernel == "plain" and "pip install numba" in choice.reason
    model = accelerated(plain)
    assert type(model) is Llama
    assert torch.equal(model.generate(TOKENS, 40, temperature=0.0), plain.generate(TOKENS, 40, temperature=0.0))


def test_where_compiled_code_can_be_kept_nowhere_decoding_is_plain(numba):
    """numba then refuses the functions at import; a read-only installation has no other sign."""
    code = (
        "import numba.core.caching as caching; caching.CacheImpl._locator_classes = []; import torch; "
        "from fast.apply import choose_decoder; print(choose_decoder('fp32', torch.device('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kernel='plain'" in done.stdout and "numba does not load" in done.stdout


# ------------------------------------------------------------------------------------------------------- fp32


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_fp32_is_the_plain_model(vendor: str, attention: str, n_kv_heads: int):
    plain = random_llama(attention=attention, n_kv_heads=n_kv_heads)
    model = accelerated(plain)
    assert type(model.layers[0].feed_forward) is FusedFeedForward
    kernel = OneDNNLinear if vendor == "AuthenticAMD" else nn.Linear
    assert type(model.output) is type(model.layers[1].feed_forward.w2) is kernel
    for actual, expected in zip(outputs(model), outputs(plain), strict=True):
        assert_near(actual, expected, 1e-5)
    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        assert_near(gradient, expected[name], 2e-5)
    at = torch.tensor([4, 2])
    assert_near(model.hidden_state_at(TOKENS, at), plain.hidden_state_at(TOKENS, at), 1e-5)


def test_frozen_weights_get_no_gradient_and_pass_one_on(vendor: str):
    plain = random_llama()
    for part in (plain.layers[1], plain.output):
        part.requires_grad_(False)
    model = accelerated(plain)
    expected = {name: p.grad for name, p in plain.named_parameters() if gradients(plain) and p.grad is not None}
    actual = {name: p.grad for name, p in model.named_parameters() if gradients(model) and p.grad is not None}
    assert [*actual] == [*expected] and len(actual) == 10
    for name, gradient in actual.items():
        assert_near(gradient, expected[name], 2e-5)


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
    model = accelerated(random_llama(attention="causal", gain=8.0))
    outputs(model)
    model.generate(TOKENS, 2, temperature=0.0)
    model.to(dtype)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), outputs(plain), strict=True))
    assert outputs(model)[0].dtype == dtype
    assert torch.equal(model.generate(TOKENS, 9, temperature=0.0), plain.generate(TOKENS, 9, temperature=0.0))
    model.float()
    assert_near(outputs(model)[0], outputs(plain.float())[0], 1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_used_model_can_be_copied_and_stored(vendor: str, precision: str):
    model = accelerated(random_llama(attention="causal"), precision)
    expected = outputs(model)[0]
    model.generate(TOKENS, 2, temperature=0.0)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(outputs(other)[0], expected)
        with torch.no_grad():
            other.layers[0].feed_forward.w2.weight.zero_()
        assert not torch.equal(outputs(other)[0], expected)
        assert torch.equal(outputs(model)[0], expected)
        assert torch.equal(other.generate(TOKENS, 2, temperature=0.0), copy.deepcopy(other).generate(TOKENS, 2, 0.0))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generating_and_predicting_leave_nothing_behind_that_training_cannot_use(vendor: str, precision: str):
    model = accelerated(random_llama(attention="causal"), precision)
    fresh = gradients(accelerated(random_llama(attention="causal"), precision))
    model.generate(TOKENS, 3, temperature=0.0)
    with torch.inference_mode():
        model(TOKENS)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, fresh[name])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_made_in_inference_mode_are_seen_to_change(vendor: str, precision: str):
    """PyTorch counts no changes of such tensors."""
    with torch.inference_mode():
        model = accelerated(random_llama(attention="causal", gain=8.0), precision)
        model.generate(TOKENS, 2, temperature=0.0)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        plain = random_llama(attention="causal")
        plain.load_state_dict(model.state_dict())
        text = model.generate(TOKENS, 20, temperature=0.0)
        assert torch.equal(text, accelerated(plain, precision).generate(TOKENS, 20, temperature=0.0))


# -------------------------------------------------------------------------------------------- copies of weights


def halve(model: Llama) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def load_others(model: Llama) -> None:
    model.load_state_dict(random_llama(seed=7).state_dict())


def assign_others(model: Llama) -> None:
    model.load_state_dict(random_llama(seed=7).state_dict(), assign=True)


def replace_one(model: Llama) -> None:
    model.layers[1].feed_forward.w2.weight = nn.Parameter(torch.ones_like(model.layers[1].feed_forward.w2.weight))


def change_data(model: Llama) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(-0.5)
    model.eval()


def step(make: Callable) -> Callable[[Llama], None]:
    def take_step(model: Llama) -> None:
        gradients(model)
        make(model.parameters(), lr=0.01).step()

    return take_step


CHANGES = {
    "in place": halve,
    "load_state_dict": load_others,
    "assigned": assign_others,
    "replaced": replace_one,
    "p.data, then eval()": change_data,
    "AdamW": step(AdamW),
    "torch's AdamW": step(torch.optim.AdamW),
    "torch's AdamW, in one kernel": step(lambda parameters, lr: torch.optim.AdamW(parameters, lr, fused=True)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("training", [True, False])
def test_whatever_changes_a_weight_is_seen_by_the_next_pass(vendor: str, change: str, precision: str, training: bool):
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
def test_whatever_changes_a_weight_is_seen_by_the_next_text(numba, change: str):
    model = accelerated(random_llama(attention="causal", gain=8.0))
    prompt = torch.tensor(PROMPTS[:1])
    model.generate(prompt, 20, temperature=0.0)
    CHANGES[change](model)
    plain = random_llama(attention="causal")
    plain.load_state_dict(model.state_dict())
    for begins_with in (1, 7):
        text = model.generate(prompt[:, :begins_with], 40, temperature=0.0)
        assert torch.equal(text, plain.generate(prompt[:, :begins_with], 40, temperature=0.0))


def test_a_text_that_begins_with_a_long_prompt_sees_new_weights(numba):
    """PyTorch's kernels read the prompt, and the loops, which had an earlier text, go on."""
    model = accelerated(random_llama(attention="causal", gain=8.0, max_seq_len=400))
    model.generate(torch.tensor([[1, 5]]), 5, temperature=0.0)
    assign_others(model)
    plain = random_llama(attention="causal", max_seq_len=400)
    plain.load_state_dict(model.state_dict())
    prompt = torch.randint(4, 300, (1, 300), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.generate(prompt, 30, temperature=0.0), plain.generate(prompt, 30, temperature=0.0))
