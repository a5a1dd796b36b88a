"""Which kernel computes what: the one function that changes a model, and the rules that it follows."""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple

import torch
from torch import nn

from config import PRECISIONS
from fast.cpu import cpu_vendor, has_bf16_products
from fast.graphs import GraphedLlama
from fast.layers import FusedFeedForward, FusedRMSNorm
from fast.linear import Bf16Linear, Int8Linear, OneDNNLinear, has_onednn
from llama import FeedForward, Llama, LlamaLayer, RMSNorm

LINEAR_KERNELS = {"plain": nn.Linear, "oneDNN": OneDNNLinear, "bf16": Bf16Linear, "int8": Int8Linear}


class Choice(NamedTuple):
    """What a part of the model is computed with, and why."""

    part: str
    kernel: str
    reason: str


def accelerate(
    model: nn.Module, precision: str = "fp32", device: torch.device | None = None, *, generates: bool = True
) -> list[Choice]:
    """Compute every Llama inside `model` with the kernels that suit its device and `precision`. In place.

    device: where the model will be computed, if it is not there yet. generates: False where no text is to be written,
    which saves loading the decoder. Parameters keep their names and shapes, and in fp32 and bf16 their float32 values;
    int8 rounds them for good and is for inference. A layer that something else has replaced stays as it is.
    Returns what was chosen. Raises `ValueError` for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}")
    device = device or next(model.parameters()).device
    choices = [choose_linear(precision, device), choose_layers(device), choose_decoder(device, generates)]
    linears, layers, decoder = (choice.kernel for choice in choices)
    for llama in [module for module in model.modules() if isinstance(module, Llama)]:
        for module in llama.modules():
            if type(module) in LINEAR_KERNELS.values() and module.bias is None:
                module.__class__ = LINEAR_KERNELS[linears]
                if linears == "int8":
                    module.round_weight()
        _set_layers(llama, layers == "fused")
        _pass_on_bf16(llama, device)
        _set_decoder(llama, decoder)
    return choices


def choose_linear(precision: str, device: torch.device) -> Choice:
    """By a rule and not by a measurement, which could come out otherwise the next time and change the last digits."""
    part = "linear layers"
    if precision == "int8":
        reason = "products of integers" if device.type == "cpu" else "rounded weights, no faster on this device"
        return Choice(part, "int8", reason)
    if precision == "bf16":
        slow = device.type == "cpu" and not has_bf16_products()
        reason = "slow: this CPU has no bfloat16 products" if slow else "bfloat16 products, summed in float32"
        return Choice(part, "bf16", reason)
    if device.type != "cpu":
        return Choice(part, "plain", f"PyTorch's own kernels on {device.type}")
    if not has_onednn() or cpu_vendor() != "AuthenticAMD":
        return Choice(part, "plain", "what PyTorch calls is the vendor's own or the only one")
    return Choice(part, "oneDNN", "on AMD's processors it is faster than MKL, which PyTorch calls")


def choose_layers(device: torch.device) -> Choice:
    part = "norms and gates"
    if device.type == "cpu":
        return Choice(part, "fused", "fewer passes over memory, less of it kept for the backward pass")
    return Choice(part, "plain", f"PyTorch's own kernels on {device.type}")


def choose_decoder(device: torch.device, generates: bool = True) -> Choice:
    """What computes the next token of a text."""
    part = "decoding"
    if not generates:
        return Choice(part, "plain", "nothing is to be generated")
    if device.type == "cuda":
        return Choice(part, "CUDA graph", "launches the kernels of a token all together")
    if device.type != "cpu":
        return Choice(part, "plain", f"PyTorch's own kernels on {device.type}")
    if importlib.util.find_spec("numba") is None:
        return Choice(part, "plain", "numba is not installed; pip install numba makes it several times faster")
    try:
        importlib.import_module("fast.decode")
    except (ImportError, RuntimeError) as error:
        # of a NumPy that this numba does not know, or where compiled code can be kept in no folder
        return Choice(part, "plain", f"numba does not load: {error}")
    return Choice(part, "numba", "reads the weights at the speed of memory")


def _set_layers(llama: Llama, fused: bool) -> None:
    for plain, fast in ((RMSNorm, FusedRMSNorm), (FeedForward, FusedFeedForward)):
        for module in llama.modules():
            if type(module) in (plain, fast):
                module.__class__ = fast if fused else plain


def _set_decoder(llama: Llama, kernel: str) -> None:
    if hasattr(llama, "drop_decoder"):  # an earlier choice
        llama.drop_decoder()
        llama.__class__ = Llama
    if type(llama) is not Llama:  # somebody's own model, which may generate in its own way
        return
    if kernel == "numba":
        from fast.decode import DecodingLlama

        llama.__class__ = DecodingLlama
    elif kernel == "CUDA graph":
        llama.__class__ = GraphedLlama


def _pass_on_bf16(llama: Llama, device: torch.device) -> None:
    """What is bfloat16 between two layers: nothing that a layer in float32 reads, on a CPU no more than products need.

    On a CPU it is float32 again before rotation and attention.
    """
    for layer in llama.modules():
        if isinstance(layer, LlamaLayer):
            attention, feed_forward = layer.attention, layer.feed_forward
            heads = attention.compute_query, attention.compute_key, attention.compute_value
            gates = feed_forward.w1, feed_forward.w3
            layer.attention_norm.out_dtype = _narrowest(*heads)
            layer.ffn_norm.out_dtype = _narrowest(*gates)
            for linear in gates:
                linear.out_dtype = _narrowest(*gates, feed_forward.w2)
            for linear in (*heads, attention.compute_output, feed_forward.w2):
                linear.out_dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    llama.output.out_dtype = torch.float32


def _narrowest(*linears: nn.Module) -> torch.dtype:
    """What all of these compute in."""
    return torch.bfloat16 if all(type(linear) is Bf16Linear for linear in linears) else torch.float32
