"""Which kernel computes what: `accelerate`, the one function that changes a model, and the rules that it follows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from config import PRECISIONS, ROUNDING
from engine.context import ContextAttention
from engine.equivalence import notice
from engine.weights import is_large
from fast import linear
from fast.attention import (
    BY_PRODUCTS,
    BY_PRODUCTS_FROM,
    TRAINED_BY_PRODUCTS,
    FusedAttention,
    FusedContextAttention,
    scores_check,
    ways_read,
    ways_trained,
)
from fast.compact import keep_freed_memory
from fast.last_position import read_one_position
from fast.layers import FEED_FORWARD_CHECK, RMS_NORM_CHECK, FusedFeedForward, FusedRMSNorm, swiglu
from fast.linear import Bf16Linear, Int4Linear, Int8Linear, KernelLinear, OneDNNLinear, RoundedLinear, has_onednn
from fast.measure import FEW_ROWS, HIDDEN, MEASURED, PRODUCTS_OF_LLAMAS, ROWS, WHOLE_TEXT, WIDTH, Products, fastest
from fast.plan import LLAMA_KERNELS, KernelPlan, apply_plan, pass_on_bf16, plan_linears, plan_parts, take_away_kernels
from llama import Attention, FeedForward, Llama, RMSNorm

LinearKernel = tuple[type[KernelLinear], dict[str, Any]]  # the class, and the settings of `from_linear`


class Choice(NamedTuple):
    """What a part of the model is computed with, and why."""

    part: str
    kernel: str
    reason: str


class Purpose(NamedTuple):
    """What a model is computed for; see `accelerate`."""

    device: torch.device
    precision: str = "fp32"
    generates: bool = False
    trains: bool = True
    keeps_copies: bool = True

    @property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu"


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

    The class of a model of another kind names the module that plans its kernels, as `bert.model.Bert.kernels` does.
    Such models are computed in float32.
    device: where the model will be computed, if it is not there yet. generates: False if the model writes no text.
    trains: False if no gradient is needed, which saves measuring; a large model then gets no packed copies of float32
    weights. keeps_copies: False if a weight must not lie twice in memory: then a kernel makes a copy for the time of a
    call, in any precision.
    Kernels are modules in the places of the model's own, with which they share everything but their settings
    (`fast.kernel`); kernels of an earlier call are taken away first. Parameters stay the same objects under the same
    names, with the same float32 values in fp32 and bf16; int8 and int4 round them for good, for inference. A layer that
    something else has replaced stays as it is, and no kernel computes what llama.py, as it stands in this process, does
    not (`engine.equivalence`). A classifier computes the last layer at the position that it reads alone. On a CPU,
    freed memory is kept for later steps (`fast.compact`); for CUDA, attention through cuDNN is switched off.
    Returns what was chosen. Raises `ValueError` for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}")
    is_trained = trains and any(parameter.requires_grad for parameter in model.parameters())
    keeps_copies = keeps_copies and (is_trained or precision != "fp32" or not is_large(model))
    purpose = Purpose(device or next(model.parameters()).device, precision, generates, trains, keeps_copies)
    _prepare_process(purpose)
    others = _others(model)
    take_away_kernels(model, LLAMA_KERNELS.union(*(planner.BERT_KERNELS for _, planner in others)))
    plan: KernelPlan = {}
    llamas = [module for module in model.modules() if isinstance(module, Llama)]
    choices = _plan_llamas(plan, llamas, purpose) if llamas or not others else []
    for module, planner in others:
        choices += _plan_other(plan, module, planner, purpose._replace(precision="fp32"))
        if precision != "fp32":
            notice(f"a {type(module).__name__} is computed in fp32, whatever the precision")
    apply_plan(plan, model)
    read_one_position(model)  # anew: the code that it replaces may have been edited
    return choices


def _prepare_process(purpose: Purpose) -> None:
    """On a CPU, freed memory is kept for later steps (`fast.compact`); for CUDA, no attention goes through cuDNN."""
    if purpose.is_on_cpu:
        keep_freed_memory()
    if purpose.device.type == "cuda":  # cuDNN plans attention in bfloat16 anew for each length of a text: 0.1 to 0.7 s
        torch.backends.cuda.enable_cudnn_sdp(False)


def _others(model: nn.Module) -> list[tuple[nn.Module, ModuleType]]:
    """The models of other kinds inside `model`, and the module that plans kernels for each."""
    names = [(module, getattr(type(module), "kernels", None)) for module in model.modules()]
    return [(module, importlib.import_module(name)) for module, name in names if isinstance(name, str)]


def _plan_other(plan: KernelPlan, module: nn.Module, planner: ModuleType, purpose: Purpose) -> list[Choice]:
    """Kernels for a model of another kind."""
    products = planner.products(module)
    choice = choose_linear(purpose, products)
    linears = _linear_kernel(choice.kernel, purpose, products)
    return [choice, *planner.plan_kernels(plan, module, purpose.device, linears)]


def _plan_llamas(plan: KernelPlan, llamas: list[Llama], purpose: Purpose) -> list[Choice]:
    """The chosen kernels for the modules of every Llama."""
    products = PRODUCTS_OF_LLAMAS
    if purpose.generates and not purpose.trains:
        products = FEW_ROWS if any(llama.config.is_causal for llama in llamas) else WHOLE_TEXT
    linear, layers, attention = choose_linear(purpose, products), choose_layers(purpose), choose_attention(purpose)
    linears = _linear_kernel(linear.kernel, purpose, products)
    for llama in llamas:
        if linears is not None:
            plan_linears(plan, llama, *linears)
            if linears[0] is Int4Linear:  # the output matrix in 4 bits costs more loss than it saves time
                plan_linears(plan, nn.ModuleList([llama.output]), Int8Linear, linears[1])
        if layers.kernel != "plain":
            plan_parts(plan, llama, RMSNorm, FusedRMSNorm.from_norm)
            plan_parts(plan, llama, FeedForward, FusedFeedForward.sharing)
        if attention.kernel != "plain":
            products_from = {torch.bfloat16: BY_PRODUCTS_FROM} if BY_PRODUCTS in attention.kernel else {}
            trained = {torch.bfloat16} if TRAINED_BY_PRODUCTS in attention.kernel else set()
            settings = {"products_from": products_from, "trained_by_products": trained}
            plan_parts(plan, llama, Attention, FusedAttention.from_attention, **settings)
            plan_parts(plan, llama, ContextAttention, FusedContextAttention.from_attention, **settings)
        pass_on_bf16(plan, llama, purpose.device, generates=purpose.generates)
    return [linear, layers, attention]


# -------------------------------------------------------------------------------------------------------- linear layers


def choose_linear(purpose: Purpose, products: Products = PRODUCTS_OF_LLAMAS) -> Choice:
    part, precision = "linear layers", purpose.precision
    if not purpose.is_on_cpu:
        reason = "rounded weights, no faster on this device" if precision in ROUNDING else "PyTorch's own kernels"
        return Choice(part, "plain" if precision == "fp32" else precision, f"{reason} ({purpose.device.type})")
    if precision == "int8":
        return _choose_int8(part, purpose.generates)
    if precision == "int4":
        way, why = ("float32 products", "text is generated") if purpose.generates else _bf16()
        kernel = "int4, inputs in bf16" if way == "bfloat16 products" else "int4"
        return Choice(part, kernel, f"rounded weights, those of the output to 8 bits; {way}: {why}")
    if precision == "bf16":
        return _choose_bf16(part)
    if not purpose.keeps_copies:
        return Choice(part, "plain", "whole copies of the weights are not wanted")
    if not has_onednn():
        return Choice(part, "plain", linear.why_no_onednn() or "oneDNN is switched off")
    packs, why = _packs(products)
    if not purpose.trains:
        return Choice(part, "plain" if packs == "PyTorch" else "oneDNN, not trained", why)
    in_training, why_trained = _in_training(products)
    kernels = {(True, True): "oneDNN", (True, False): "oneDNN, not trained", (False, True): "oneDNN, trained"}
    kernel = kernels.get((packs == "oneDNN", in_training != "PyTorch"), "plain")
    return Choice(part, kernel, f"{why}; trained, {why_trained}")


def _choose_bf16(part: str) -> Choice:
    way, why = _bf16()
    if way == "bfloat16 products":
        return Choice(part, "bf16", f"summed in float32; {why}")
    slower = "bf16 is not faster than fp32 on this processor"
    notice(f"{slower if why.endswith(MEASURED) else why}; numbers of bf16 are rounded and multiplied in float32")
    return Choice(part, "rounded to bf16", f"multiplied in float32; {why}")


def _choose_int8(part: str, generates: bool) -> Choice:
    if generates:
        return Choice(part, "int8", "rounded weights; what meets them is not rounded where text is generated")
    if not linear.has_integer_products():
        notice("int8 is not faster than fp32 for batches on this processor; its integers are multiplied in float32")
        return Choice(part, "int8", "integers multiplied in float32: this CPU has no exact integer products")
    return Choice(part, "int8", "products of integers")


def _linear_kernel(kernel: str, purpose: Purpose, products: Products) -> LinearKernel | None:
    """The class and settings of a chosen kernel; None for PyTorch's own."""
    if kernel == "plain":
        return None
    packs = purpose.is_on_cpu and purpose.precision != "fp32" and has_onednn() and _packs(products)[0] == "oneDNN"
    trains_weights = kernel in ("oneDNN", "oneDNN, trained") and _in_training(products)[0] == "oneDNN"
    kind, settings = {
        "oneDNN": (OneDNNLinear, {"trains_weights": trains_weights}),
        "oneDNN, not trained": (OneDNNLinear, {"trains": False, "trains_weights": False}),
        "oneDNN, trained": (OneDNNLinear, {"packs": False, "trains_weights": trains_weights}),
        "bf16": (Bf16Linear, {}),
        "rounded to bf16": (RoundedLinear, {"packs": packs}),
        "int8": (Int8Linear, {"packs": packs, "inputs_to": None if purpose.generates else torch.int8}),
        "int4": (Int4Linear, {"packs": packs, "inputs_to": None}),
        "int4, inputs in bf16": (Int4Linear, {"packs": packs, "inputs_to": torch.bfloat16}),
    }[kernel]
    return kind, {**settings, "keeps_copies": purpose.keeps_copies}


def _packs(products: Products = PRODUCTS_OF_LLAMAS) -> tuple[str, str]:
    """Whether oneDNN's or PyTorch's products are faster while weights are not trained, and why."""
    plain = products.not_trained()
    packed = [(x, OneDNNLinear.from_linear(linear)) for x, linear in plain]
    ways = {
        "PyTorch": lambda: [linear(x) for x, linear in plain],
        "oneDNN": lambda: [linear(x) for x, linear in packed],
    }
    return fastest(products.question, ways)


def _in_training(products: Products = PRODUCTS_OF_LLAMAS) -> tuple[str, str]:
    """The same in training, where oneDNN may compute all three products, or all but the gradient of the weight."""
    layers = products.trained()

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


# ------------------------------------------------------------------------------------------------- the rest of a Llama


def choose_layers(purpose: Purpose) -> Choice:
    part = "norms and gates"
    if not purpose.is_on_cpu:
        return Choice(part, "plain", f"PyTorch's own kernels on {purpose.device.type}")
    if purpose.generates and not purpose.trains and purpose.precision != "bf16":
        return Choice(part, "plain", "a text that is generated has few rows, where calls cost more than memory")
    way, why = "fused", "fewer passes over memory"
    if purpose.trains and RMS_NORM_CHECK.holds():  # else an edited norm would be measured
        way, why = _layers()
    if way != "fused":
        return Choice(part, "plain", why)
    checks = RMS_NORM_CHECK, FEED_FORWARD_CHECK
    changed = [f"{check.name}: {found}" for check in checks if (found := check.difference())]
    return Choice(part, "fused", f"not for what has changed: {'; '.join(changed)}" if changed else why)


def _layers() -> tuple[str, str]:
    norms = {kind: kind(WIDTH, 1e-6) for kind in (RMSNorm, FusedRMSNorm)}
    x, gates = torch.ones(2 * ROWS, WIDTH, requires_grad=True), torch.ones(2, 2 * ROWS, HIDDEN, requires_grad=True)

    def train(norm: RMSNorm, gate: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(norm(x).sum(), x)
        torch.autograd.grad(gate(*gates).sum(), gates)

    ways = {  # the first one keeps less memory, so the other one must be clearly faster
        "fused": lambda: train(norms[FusedRMSNorm], swiglu),
        "plain": lambda: train(norms[RMSNorm], lambda a, b: F.silu(a) * b),
    }
    return fastest("norms and gates, trained", ways)


def choose_attention(purpose: Purpose) -> Choice:
    part, found = "attention", scores_check(purpose.device.type).difference()
    if found:
        return Choice(part, "plain", f"llama.py has changed: {found}")
    if not purpose.is_on_cpu or purpose.precision != "bf16" or _bf16()[0] != "bfloat16 products":
        return Choice(part, "fused", "PyTorch's own kernel, which keeps no scores")
    measured = [] if purpose.generates else [_attention_in_bf16()]
    measured += [_attention_in_training()] if purpose.trains else []
    ways = [way for way, _ in measured if way in (BY_PRODUCTS, TRAINED_BY_PRODUCTS)]
    return Choice(part, ", ".join(["fused", *ways]), "; ".join(why for _, why in measured) or "keeps no scores")


def _attention_in_bf16() -> tuple[str, str]:
    return fastest("attention in bfloat16", ways_read())


def _attention_in_training() -> tuple[str, str]:
    return fastest("attention in bfloat16, trained", ways_trained())


def measure_all() -> None:
    """Measure everything now, so that no later run has to wait for it."""
    products = (_packs, partial(_packs, FEW_ROWS), partial(_packs, WHOLE_TEXT), _in_training) if has_onednn() else ()
    layers = (_layers,) if RMS_NORM_CHECK.holds() else ()
    for measure in (*products, _bf16, _attention_in_bf16, _attention_in_training, *layers):
        measure()
