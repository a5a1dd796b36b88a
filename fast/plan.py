"""Which kernels replace which modules of a model, and in which number formats: all is planned before any is made.

A layer gives float32 unless every module that reads its output is known to read bfloat16: a user's own module or hook
may need float32. Something may compute in a model's place only while it is still what its class and config make it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from config import LlamaConfig
from engine.context import ContextAttention
from engine.equivalence import notice
from engine.weights import blueprint
from fast.attention import FusedAttention, FusedContextAttention
from fast.kernel import has_hooks, own_methods, replace
from fast.layers import FusedFeedForward, FusedRMSNorm
from fast.linear import Bf16Linear, Int4Linear, Int8Linear, KernelLinear, OneDNNLinear, RoundedLinear
from llama import NORMS, Attention, FeedForward, Llama, LlamaLayer

LLAMA_KERNELS = {OneDNNLinear, Bf16Linear, RoundedLinear, Int8Linear, Int4Linear}
LLAMA_KERNELS |= {FusedRMSNorm, FusedFeedForward, FusedAttention, FusedContextAttention}
OF_ATTENTION = ("compute_query", "compute_key", "compute_value", "compute_output")
OF_FEED_FORWARD = ("w1", "w3", "w2")
OF_LAYER = ("attention_norm", "attention", "ffn_norm", "feed_forward")


class Planned(NamedTuple):
    """A kernel that will be made in the place of a module."""

    make: Any  # a class method of the kernel that takes the module
    settings: dict[str, Any]


KernelPlan = dict[nn.Module, Planned]


def take_away_kernels(model: nn.Module, kinds: Set[type]) -> None:
    """Put the plain modules back."""
    replace(model, {part: part.without_kernel() for part in model.modules() if type(part) in kinds})


def plan_linears(
    plan: KernelPlan, model: nn.Module, kind: type[KernelLinear], formats: dict[str, Any], *, biases: bool = False
) -> None:
    """Plan one class of kernel for every linear layer that computes as PyTorch's. biases: also for layers with one."""
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    hung_on = {part for linear in linears for part in linear.modules() if part is not linear}  # a method's own
    for linear in linears:
        if is_plain_linear(linear, biases) and linear not in hung_on:
            plan[linear] = Planned(kind.from_linear, dict(formats))


def is_plain_linear(linear: nn.Module, biases: bool = False) -> bool:
    """Whether a layer computes x W^T, perhaps + b. Further parameters and hooks do not matter."""
    return type(linear) is nn.Linear and (biases or linear.bias is None) and not own_methods(linear)


def plan_parts(plan: KernelPlan, model: nn.Module, kind: type[nn.Module], make: Any, **settings: Any) -> None:
    """Plan a kernel for every module of exactly this class. A module of a subclass stays what it is."""
    for part in model.modules():
        if type(part) is kind:
            plan[part] = Planned(make, dict(settings))
        elif isinstance(part, kind) and type(part) is not ContextAttention:  # which is planned by itself
            notice(f"{type(part).__name__} is computed as it is written: it is not {kind.__name__} itself")


def apply_plan(plan: KernelPlan, model: nn.Module) -> None:
    """Make the kernels and put them in their places. Kernels of 8 or 4 bits round their weights, for good."""
    kernels = {part: make(part, **settings) for part, (make, settings) in plan.items()}
    for kernel in kernels.values():
        if isinstance(kernel, Int8Linear):
            kernel.round_weight()
    replace(model, kernels)


# ---------------------------------------------------------------------------------------------------------- bfloat16


def pass_on_bf16(plan: KernelPlan, llama: Llama, device: torch.device, *, generates: bool) -> None:
    """Plan bfloat16 outputs for kernels whose readers all read bfloat16.

    On a CPU queries, keys and values are float32 again for rotation and attention if text is generated, because the
    loops read float32 keys. Where texts are only classified, attention in bfloat16 saves the conversions, and in
    training where its gradients are computed in bfloat16.
    """
    for layer in llama.modules():
        if isinstance(layer, LlamaLayer):
            _pass_on_in_layer(plan, layer, device, generates)


def _pass_on_in_layer(plan: KernelPlan, layer: LlamaLayer, device: torch.device, generates: bool) -> None:
    heads = _usual_parts(layer._modules.get("attention"), Attention, OF_ATTENTION)
    gates = _usual_parts(layer._modules.get("feed_forward"), FeedForward, OF_FEED_FORWARD)
    if heads and _all_in_bf16(plan, heads):
        attention = plan.get(layer.attention)
        is_trained = attention is not None and bool(attention.settings["trained_by_products"])
        _give_bf16(plan, heads[:3], device, generates, is_trained)
    if gates and _all_in_bf16(plan, gates):
        for gate in gates[:2]:
            plan[gate].settings["out_dtype"] = torch.bfloat16
    if not _usual_parts(layer, LlamaLayer, OF_LAYER):
        return
    for norm, readers in ((layer.attention_norm, heads[:3]), (layer.ffn_norm, gates[:2])):
        if norm in plan and not _is_watched(norm) and readers and _all_in_bf16(plan, readers):
            plan[norm].settings["out_dtype"] = torch.bfloat16
    for last in (*heads[3:], *gates[2:]):
        if _all_in_bf16(plan, [last]):
            _give_bf16(plan, [last], device, generates)


def _give_bf16(
    plan: KernelPlan, linears: Iterable[nn.Module], device: torch.device, generates: bool, is_trained: bool = False
) -> None:
    """For layers whose outputs go to attention or the residual stream, which read either format.

    is_trained: also in training on a CPU.
    """
    for linear in linears:
        if device.type != "cpu" or is_trained:
            plan[linear].settings["out_dtype"] = torch.bfloat16
        if not generates:
            plan[linear].settings["read_dtype"] = torch.bfloat16
        elif device.type == "cpu":
            plan[linear].settings["read_dtype"] = torch.float32


def _all_in_bf16(plan: KernelPlan, linears: Iterable[nn.Module]) -> bool:
    """Whether all of these will be kernels in bfloat16, without hooks that read or change it."""
    return all(
        linear in plan and plan[linear].make == Bf16Linear.from_linear and not _is_watched(linear) for linear in linears
    )


def _usual_parts(module: nn.Module | None, kind: type, names: Iterable[str]) -> list[nn.Module]:
    """The parts of these names; none if the module computes otherwise than its class, or has further weights."""
    if type(module) is not kind or own_methods(module) or _is_watched(module) or module._parameters:
        return []
    others = [part for name, part in module.named_children() if name not in names]
    parts = [module._modules.get(name) for name in names]
    return [] if None in parts or any(next(other.parameters(), None) is not None for other in others) else parts


def _is_watched(module: nn.Module) -> bool:
    """Whether a hook reads or changes the inputs or outputs of this module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


# ------------------------------------------------------------------------------------ whether a model is as it was made

LLAMA_MODULES = {nn.ModuleList, nn.Embedding, nn.Dropout, LlamaLayer, Attention, FeedForward, nn.Linear}


def kinds_of(llama: Llama) -> list[type]:
    """Changes when another kernel takes a module's place."""
    return [type(module) for module in llama.modules()]


def what_changed_in(llama: Llama) -> str | None:
    """What of a model is not as its class and config make it: a module or method replaced, a hook, another setting."""
    try:
        as_made = _settings_as_made(tuple(vars(llama.config).items()))
        known = LLAMA_MODULES | LLAMA_KERNELS | {NORMS[llama.config.norm]}
        for name, module in llama.named_modules():
            where = name or "the model"
            if module is not llama and type(module) not in known:
                return f"{where} is a {type(module).__name__}"
            if has_hooks(module):
                return f"{where} has a hook"
            if own_methods(module) or _settings(module) != as_made.get(name):
                return f"{where} has other settings or methods than its class gives it"
    except Exception as error:  # a config or modules that cannot be made again, or compared
        return f"it cannot be compared with what its config makes: {type(error).__name__}"
    return None


@lru_cache(maxsize=8)
def _settings_as_made(config: tuple[tuple[str, Any], ...]) -> dict[str, dict[str, Any]]:
    made = blueprint(LlamaConfig(**dict(config)), Llama)
    return {name: _settings(module) for name, module in made.named_modules()}


def _settings(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    # stop_ids, of a directory's model, is what callers hand to `generate`; no module computes with it
    return {name: value for name, value in own.items() if name not in ("training", "stop_ids")}
