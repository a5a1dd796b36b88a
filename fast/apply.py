"""Which kernel computes what: the one function that changes a model, and the rules that it follows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from base_llama import causal_mask
from config import PRECISIONS
from fast import linear
from fast.attention import MANY, FusedAttention, attention_by_products, scores_check
from fast.equivalence import notice
from fast.layers import FEED_FORWARD_CHECK, RMS_NORM_CHECK, FusedFeedForward, FusedRMSNorm, swiglu
from fast.linear import Bf16Linear, Int8Linear, KernelLinear, OneDNNLinear, RoundedLinear, has_onednn
from fast.measure import fastest
from fast.memory import keep_freed_memory
from fast.plan import LLAMA_KERNELS, KernelPlan, apply_plan, pass_on_bf16, plan_linears, plan_parts, take_away_kernels
from llama import Attention, FeedForward, Llama, RMSNorm

BY_PRODUCTS = "fused, short texts in two products"  # those that are classified in bfloat16
ROWS, WIDTH, HIDDEN = 512, 512, 1376  # what is measured: a small batch in the feed-forward of stories42M


class Choice(NamedTuple):
    """What a part of the model is computed with, and why."""

    part: str
    kernel: str
    reason: str


class Products(NamedTuple):
    """What is measured of linear layers: a small batch in layers of these shapes, o i each."""

    question: str = "float32 products"
    shapes: tuple[tuple[int, int], ...] = ((HIDDEN, WIDTH),)
    biases: bool = False

    def layers(self, requires_grad: bool = False) -> list[tuple[torch.Tensor | None, ...]]:
        """Inputs (r i), weight (o i), bias (o, or None) and the gradient of the outputs (r o) of each."""
        return [
            (
                torch.ones(ROWS, inputs, requires_grad=requires_grad),
                torch.ones(outputs, inputs, requires_grad=requires_grad),
                torch.ones(outputs) if self.biases else None,
                torch.ones(ROWS, outputs),
            )
            for outputs, inputs in self.shapes
        ]


OF_LLAMAS = Products()


def accelerate(
    model: nn.Module,
    precision: str = "fp32",
    device: torch.device | None = None,
    *,
    generates: bool = True,
    trains: bool = True,
    keeps_copies: bool = True,
) -> list[Choice]:
    """Compute every Llama inside `model` with the kernels that suit its device and `precision`. In place.

    A model of another kind there is asked for its own: its class names the module that plans them, `kernels`, as
    `bert.model.Bert` does. Such models are computed in float32.
    device: where the model will be computed, if it is not there yet. generates: False where no text is to be written.
    trains: False where no gradient is wanted, which saves measuring. keeps_copies: False where a weight must not lie
    twice in memory: what a kernel makes of it, in any precision, ends with the kernel's call. How text is generated is
    not touched: see `fast.decoder`.
    Kernels are modules in the places of the model's own, with which they share all but their settings (`fast.kernel`);
    an earlier call's are taken away first. Parameters stay the same ones under the same names, with the same float32
    values in fp32 and bf16; int8 rounds them for good and is for inference. A layer that something else has replaced
    stays as it is, and no kernel computes what llama.py, as it stands in this process, does not (`fast.equivalence`).
    On a CPU, freed memory is kept for what follows (`fast.memory`).
    Returns what was chosen. Raises `ValueError` for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}")
    device = device or next(model.parameters()).device
    if device.type == "cpu":
        keep_freed_memory()
    purpose = dict(keeps_copies=keeps_copies, generates=generates)
    others = _others(model)
    take_away_kernels(model, LLAMA_KERNELS.union(*(planner.KERNELS for _, planner in others)))
    plan: KernelPlan = {}
    llamas = [module for module in model.modules() if isinstance(module, Llama)]
    choices = _plan_llamas(plan, llamas, device, precision, trains, **purpose) if llamas or not others else []
    for module, planner in _others(model):  # as they are without kernels
        choices += _plan_other(plan, module, planner, model, device, trains, **purpose)
        if precision != "fp32":
            notice(f"a {type(module).__name__} is computed in fp32, whatever the precision")
    apply_plan(plan, model)
    return choices


def _others(model: nn.Module) -> list[tuple[nn.Module, ModuleType]]:
    """The models of other kinds inside `model`, and who plans kernels for each."""
    names = [(module, getattr(type(module), "kernels", None)) for module in model.modules()]
    return [(module, importlib.import_module(name)) for module, name in names if isinstance(name, str)]


def _plan_other(
    plan: KernelPlan,
    module: nn.Module,
    planner: ModuleType,
    model: nn.Module,
    device: torch.device,
    trains: bool,
    **purpose: bool,
) -> list[Choice]:
    """Kernels for a model of another kind inside `model`."""
    products = Products(**planner.products(module))
    linear = choose_linear("fp32", device, trains=trains, products=products, **purpose)
    linears = _formats_of(linear.kernel, device, "fp32", products=products, **purpose)
    return [linear, *(Choice(*choice) for choice in planner.plan_kernels(plan, module, model, device, linears))]


def _plan_llamas(
    plan: KernelPlan, llamas: list[Llama], device: torch.device, precision: str, trains: bool, **purpose: bool
) -> list[Choice]:
    """The modules of every Llama are given the kernels that are chosen."""
    linear = choose_linear(precision, device, trains=trains, **purpose)
    layers = choose_layers(device, trains)
    attention = choose_attention(device, precision, purpose["generates"])
    linears = _formats_of(linear.kernel, device, precision, **purpose)
    for llama in llamas:
        if linears is not None:
            plan_linears(plan, llama, *linears)
        if layers.kernel != "plain":
            plan_parts(plan, llama, RMSNorm, FusedRMSNorm.from_norm)
            plan_parts(plan, llama, FeedForward, FusedFeedForward.from_feed_forward)
        if attention.kernel != "plain":
            products_from = {torch.bfloat16: MANY} if attention.kernel == BY_PRODUCTS else {}
            plan_parts(plan, llama, Attention, FusedAttention.from_attention, products_from=products_from)
        pass_on_bf16(plan, llama, device, generates=purpose["generates"])
    return [linear, layers, attention]


def _formats_of(
    kernel: str,
    device: torch.device,
    precision: str,
    *,
    keeps_copies: bool,
    generates: bool,
    products: Products = OF_LLAMAS,
) -> tuple[type[KernelLinear], dict[str, Any]] | None:
    """The kernel of linear layers and how it computes; None for PyTorch's own."""
    packs = device.type == "cpu" and precision != "fp32" and has_onednn() and _packs()[0] == "oneDNN"
    trains_weights = kernel in ("oneDNN", "oneDNN, trained") and _in_training(products)[0] == "oneDNN"
    kinds = {
        "oneDNN": (OneDNNLinear, {"trains_weights": trains_weights}),
        "oneDNN, not trained": (OneDNNLinear, {"trains": False, "trains_weights": False}),
        "oneDNN, trained": (OneDNNLinear, {"packs": False, "trains_weights": trains_weights}),
        "bf16": (Bf16Linear, {}),
        "rounded to bf16": (RoundedLinear, {"packs": packs}),
        "int8": (Int8Linear, {"packs": packs, "rounds_inputs": not generates}),
    }
    if kernel == "plain":
        return None
    kind, formats = kinds[kernel]
    return kind, {**formats, "keeps_copies": keeps_copies}


def choose_linear(
    precision: str,
    device: torch.device,
    *,
    keeps_copies: bool = True,
    generates: bool = False,
    trains: bool = True,
    products: Products = OF_LLAMAS,
) -> Choice:
    part = "linear layers"
    if device.type != "cpu":
        kernel = {"fp32": "plain", "bf16": "bf16", "int8": "int8"}[precision]
        reason = "rounded weights, no faster on this device" if precision == "int8" else "PyTorch's own kernels"
        return Choice(part, kernel, f"{reason} ({device.type})")
    if precision == "int8":
        return _choose_int8(part, generates)
    if precision == "bf16":
        return _choose_bf16(part)
    if not keeps_copies:
        return Choice(part, "plain", "whole copies of the weights are not wanted")
    if not has_onednn():
        return Choice(part, "plain", linear.why_no_onednn() or "oneDNN is switched off")
    packs, why = _packs(products)
    if not trains:
        return Choice(part, "plain" if packs == "PyTorch" else "oneDNN, not trained", why)
    in_training, why_trained = _in_training(products)
    kernels = {
        (True, True): "oneDNN",
        (True, False): "oneDNN, not trained",
        (False, True): "oneDNN, trained",
        (False, False): "plain",
    }
    return Choice(part, kernels[packs == "oneDNN", in_training != "PyTorch"], f"{why}; trained, {why_trained}")


def _choose_bf16(part: str) -> Choice:
    way, why = _bf16()
    if way == "bfloat16 products":
        return Choice(part, "bf16", f"summed in float32; {why}")
    notice("bf16 is not faster than fp32 on this processor; its numbers are rounded and multiplied in float32")
    return Choice(part, "rounded to bf16", f"multiplied in float32; {why}")


def _choose_int8(part: str, generates: bool) -> Choice:
    if generates:
        return Choice(part, "int8", "rounded weights; what meets them is not rounded where text is generated")
    if not linear.has_integer_products():
        notice("int8 is not faster than fp32 for batches on this processor; its integers are multiplied in float32")
        return Choice(part, "int8", "integers multiplied in float32: this CPU has no exact integer products")
    return Choice(part, "int8", "products of integers")


def _packs(products: Products = OF_LLAMAS) -> tuple[str, str]:
    """Whose float32 products are faster with weights that are not trained, and why."""
    layers = [layer[:3] for layer in products.layers()]
    packed = [(x, linear.pack(weight), bias) for x, weight, bias in layers]
    ways = {
        "PyTorch": lambda: [F.linear(*layer) for layer in layers],
        "oneDNN": lambda: [linear.onednn_linear(*layer) for layer in packed],
    }
    return fastest(products.question, ways)


def _in_training(products: Products = OF_LLAMAS) -> tuple[str, str]:
    """Whose float32 products are faster in training, and why: of all three, or of two and not weights' gradients."""
    layers = products.layers(requires_grad=True)

    def train(product: Callable[..., torch.Tensor], *settings: bool) -> None:
        for x, weight, bias, grad in layers:
            torch.autograd.grad(product(x, weight, *settings, bias=bias), (x, weight), grad)

    ways = {
        "PyTorch": lambda: train(F.linear),
        "oneDNN but for gradients of weights": lambda: train(linear.onednn_trained, False),
        "oneDNN": lambda: train(linear.onednn_trained, True),
    }
    return fastest(f"{products.question}, trained", ways)


def _bf16() -> tuple[str, str]:
    x, weight = torch.ones(ROWS, WIDTH), torch.ones(HIDDEN, WIDTH)
    x16, weight16 = x.bfloat16(), weight.bfloat16()
    ways = {"float32 products": lambda: F.linear(x, weight), "bfloat16 products": lambda: F.linear(x16, weight16)}
    return fastest("products of bfloat16", ways)


def choose_layers(device: torch.device, trains: bool = True) -> Choice:
    part = "norms and gates"
    if device.type != "cpu":
        return Choice(part, "plain", f"PyTorch's own kernels on {device.type}")
    way, why = "fused", "fewer passes over memory"
    if trains and RMS_NORM_CHECK.holds():  # else it is another norm that would be measured
        way, why = _layers()
    if way != "fused":
        return Choice(part, "plain", why)
    changed = [
        f"{proof.name}: {found}" for proof in (RMS_NORM_CHECK, FEED_FORWARD_CHECK) if (found := proof.difference())
    ]
    return Choice(part, "fused", f"not for what has changed: {'; '.join(changed)}" if changed else why)


def _layers() -> tuple[str, str]:
    norms = {kind: kind(WIDTH, 1e-6) for kind in (RMSNorm, FusedRMSNorm)}
    x, gates = torch.ones(2 * ROWS, WIDTH, requires_grad=True), torch.ones(2, 2 * ROWS, HIDDEN, requires_grad=True)

    def train(norm: RMSNorm, gate: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(norm(x).sum(), x)
        torch.autograd.grad(gate(*gates).sum(), gates)

    ways = {  # what keeps less memory is the one to be beaten
        "fused": lambda: train(norms[FusedRMSNorm], swiglu),
        "plain": lambda: train(norms[RMSNorm], lambda a, b: F.silu(a) * b),
    }
    return fastest("norms and gates, trained", ways)


def measure_all() -> None:
    """Ask every question now, so that no later run has to wait for the answer."""
    products = (_packs, _in_training) if has_onednn() else ()
    for ask in (*products, _bf16, _attention_in_bf16, *((_layers,) if RMS_NORM_CHECK.holds() else ())):
        ask()


def choose_attention(device: torch.device, precision: str = "fp32", generates: bool = True) -> Choice:
    part, found = "attention", scores_check(device.type).difference()
    if found:
        return Choice(part, "plain", f"the page has changed: {found}")
    if device.type == "cpu" and precision == "bf16" and not generates and _bf16()[0] == "bfloat16 products":
        return Choice(part, *_attention_in_bf16())
    return Choice(part, "fused", "PyTorch's own kernel, which keeps no scores")


def _attention_in_bf16() -> tuple[str, str]:
    """Short texts, as classification has them in bfloat16."""
    texts = torch.ones(3, 10, 8, 48, 64, dtype=torch.bfloat16)
    mask = causal_mask(48, 48, texts.device)
    ways = {
        "fused": lambda: F.scaled_dot_product_attention(*texts, is_causal=True),
        BY_PRODUCTS: lambda: attention_by_products(*texts, mask),
    }
    return fastest("attention in bfloat16", ways)
