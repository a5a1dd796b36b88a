"""What stands in for what in a model, and in which number formats: decided for all of it before anything is made.

A layer gives float32 unless it is known who reads what it gives, and that they read bfloat16: what somebody has put
into a model, or hung on a part of it, may know float32 alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from fast.attention import FusedAttention
from fast.equivalence import notice
from fast.kernel import own_methods, replace
from fast.layers import FusedFeedForward, FusedRMSNorm
from fast.linear import Bf16Linear, Int8Linear, KernelLinear, OneDNNLinear, RoundedLinear
from llama import Attention, FeedForward, Llama, LlamaLayer

LLAMA_KERNELS = {OneDNNLinear, Bf16Linear, RoundedLinear, Int8Linear}
LLAMA_KERNELS |= {FusedRMSNorm, FusedFeedForward, FusedAttention}
HEADS = ("compute_query", "compute_key", "compute_value", "compute_output")
GATES = ("w1", "w3", "w2")
OF_LAYER = ("attention_norm", "attention", "ffn_norm", "feed_forward")


class Planned(NamedTuple):
    """A kernel that is to be made in the place of a module."""

    make: Any  # a kernel's class method that takes the module
    settings: dict[str, Any]


KernelPlan = dict[nn.Module, Planned]


def take_away_kernels(model: nn.Module, kinds: Set[type]) -> None:
    """Put back what kernels stand in for."""
    replace(model, {part: part.without_kernel() for part in model.modules() if type(part) in kinds})


def plan_linears(
    plan: KernelPlan, model: nn.Module, kind: type[KernelLinear], formats: dict[str, Any], *, biases: bool = False
) -> None:
    """One kind of kernel for every linear layer that is computed as PyTorch's own. biases: also for those with one."""
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    hung_on = {part for linear in linears for part in linear.modules() if part is not linear}  # a method's own
    for linear in linears:
        if is_plain_linear(linear, biases) and linear not in hung_on:
            plan[linear] = Planned(kind.from_linear, dict(formats))


def is_plain_linear(linear: nn.Module, biases: bool = False) -> bool:
    """Whether a layer is x W^T, perhaps + b. Parameters and hooks that somebody has given it do not matter."""
    return type(linear) is nn.Linear and (biases or linear.bias is None) and not own_methods(linear)


def plan_parts(plan: KernelPlan, model: nn.Module, kind: type[nn.Module], make: Any, **settings: Any) -> None:
    """A kernel for every module of exactly the page's class; a subclass of somebody's own stays what it is."""
    for part in model.modules():
        if type(part) is kind:
            plan[part] = Planned(make, dict(settings))
        elif isinstance(part, kind):
            notice(f"{type(part).__name__} is computed as it is written: it is not {kind.__name__} itself")


def apply_plan(plan: KernelPlan, model: nn.Module) -> None:
    """Make the kernels and put them in their places. Those of 8 bits round their weights, for good."""
    kernels = {part: make(part, **settings) for part, (make, settings) in plan.items()}
    for kernel in kernels.values():
        if isinstance(kernel, Int8Linear):
            kernel.round_weight()
    replace(model, kernels)


# ---------------------------------------------------------------------------------------------------------- bfloat16


def pass_on_bf16(plan: KernelPlan, llama: Llama, device: torch.device, *, generates: bool) -> None:
    """What is bfloat16 between two layers: nothing that a layer in float32 reads, on a CPU no more than products need.

    On a CPU it is float32 again before rotation and attention, but where texts are only classified, whose attention in
    bfloat16 saves the way back and forth. (The loops that generate read float32 keys.)
    """
    for layer in llama.modules():
        if isinstance(layer, LlamaLayer):
            _pass_on_in_layer(plan, layer, device, generates)


def _pass_on_in_layer(plan: KernelPlan, layer: LlamaLayer, device: torch.device, generates: bool) -> None:
    attention, feed_forward = layer._modules.get("attention"), layer._modules.get("feed_forward")
    heads = [attention._modules[name] for name in HEADS] if _is_usual(attention, Attention, HEADS) else []
    gates = [feed_forward._modules[name] for name in GATES] if _is_usual(feed_forward, FeedForward, GATES) else []
    if heads and _all_in_bf16(plan, heads):
        _give_bf16(plan, heads[:3], device, generates)
    if gates and _all_in_bf16(plan, gates):
        for gate in gates[:2]:
            plan[gate].settings["out_dtype"] = torch.bfloat16
    if not _is_usual(layer, LlamaLayer, OF_LAYER):
        return
    for norm, readers in ((layer.attention_norm, heads[:3]), (layer.ffn_norm, gates[:2])):
        if norm in plan and not _is_watched(norm) and readers and _all_in_bf16(plan, readers):
            plan[norm].settings["out_dtype"] = torch.bfloat16
    for last in (*heads[3:], *gates[2:]):
        if _all_in_bf16(plan, [last]):
            _give_bf16(plan, [last], device, generates)


def _give_bf16(plan: KernelPlan, linears: Iterable[nn.Module], device: torch.device, generates: bool) -> None:
    """What goes to attention or the residual stream, which read either format."""
    for linear in linears:
        if device.type != "cpu":
            plan[linear].settings["out_dtype"] = torch.bfloat16
        if not generates:
            plan[linear].settings["read_dtype"] = torch.bfloat16


def _all_in_bf16(plan: KernelPlan, linears: Iterable[nn.Module]) -> bool:
    """Whether all of these will read and give bfloat16, and nobody else reads or changes that."""
    return all(
        linear in plan and plan[linear].make == Bf16Linear.from_linear and not _is_watched(linear) for linear in linears
    )


def _is_usual(module: nn.Module | None, kind: type, parts: Iterable[str]) -> bool:
    """Whether a module computes as the page's class does, with these parts and no other weights."""
    if type(module) is not kind or own_methods(module) or _is_watched(module) or module._parameters:
        return False
    others = [part for name, part in module.named_children() if name not in parts]
    has_parts = all(module._modules.get(name) is not None for name in parts)
    return has_parts and all(next(other.parameters(), None) is None for other in others)


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody reads or changes what goes in or comes out of this module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
