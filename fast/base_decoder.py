"""The decoder that every other one is derived from, and whether a model is still what its class and config make it.

Shapes:  b texts   s positions
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from config import LlamaConfig
from engine.weights import blueprint
from fast.apply import Choice
from fast.attention import FusedAttention
from fast.equivalence import notice
from fast.kernel import has_hooks, own_methods
from fast.layers import FusedFeedForward, FusedRMSNorm
from fast.linear import Bf16Linear, Int8Linear, OneDNNLinear, RoundedLinear
from llama import Attention, FeedForward, Llama, LlamaLayer, RMSNorm

PART = "decoding"
MODULES = {nn.ModuleList, nn.Embedding, nn.Dropout, LlamaLayer, Attention, FeedForward, RMSNorm, nn.Linear}
KERNELS = {FusedAttention, FusedFeedForward, FusedRMSNorm, OneDNNLinear, Bf16Linear, RoundedLinear, Int8Linear}
PASSES = ("embed", "encode", "hidden_states", "forward", "next_logits")  # of `Llama`
SAMPLE = 32  # numbers of a weight that are looked at before a text
OUTDATED = "the model's weights were written to or replaced since this decoder was made; make another one"


def why_not_asked(llama: Llama) -> str | None:
    """What keeps whatever stands in for `Llama.next_logits` from being asked; None where nothing does."""
    reason = None
    if type(llama) is not Llama:
        reason = f"{type(llama).__name__} generates as it is written: it is not Llama itself"
    elif not any(
        parameter.name == "next_logits" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in inspect.signature(Llama.generate).parameters.values()
    ):
        reason = "text is generated as it is written: generate takes no next_logits"
    if reason is not None:
        notice(reason)
    return reason


class Decoder:
    """Generates text as the model does. Derived ones compute some of it in the model's place.

    A decoder is made for weights that stay as they are. Before each text it looks whether they do: at what PyTorch
    counts (not what is written by way of `.data`, nor by fused optimizers), and at a sample of their numbers.
    choice: what it computes with, and why.
    """

    def __init__(self, llama: Llama, choice: Choice):
        self.llama, self.choice = llama, choice
        self._weights = [*llama.parameters()]  # kept, so that no others can come to lie at their addresses
        self._state = state_of(self._weights)

    def generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0, **settings: Any
    ) -> torch.Tensor:
        """The text that `Llama.generate` gives for the same arguments. idx: b s -> b (s + new)

        Raises `RuntimeError` where the model's weights are no longer those that the decoder was made for.
        """
        if state_of([*self.llama.parameters()]) != self._state:
            raise RuntimeError(OUTDATED)
        if settings.get("next_logits") is not None:  # somebody's own
            return self.llama.generate(idx, max_new_tokens, temperature, **settings)
        return self._generate(idx, max_new_tokens, temperature, settings)

    def _generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float, settings: dict[str, Any]
    ) -> torch.Tensor:
        return self.llama.generate(idx, max_new_tokens, temperature, **settings)


def state_of(weights: list[torch.Tensor]) -> list[Any]:
    """Changes when one is replaced or written to, see `Decoder`."""
    return [(id(w), w.data_ptr(), w.dtype, w.is_inference() or w._version, _sample(w)) for w in weights]


def _sample(weight: torch.Tensor) -> bytes:
    numbers = weight.detach().flatten()
    if weight.is_meta or not len(numbers):
        return b""
    return numbers[:: max(1, len(numbers) // SAMPLE)].clone().view(torch.uint8).cpu().numpy().tobytes()


def kinds_of(llama: Llama) -> list[type]:
    """Changes when another kernel takes a module's place."""
    return [type(module) for module in llama.modules()]


def stranger_in(llama: Llama) -> str | None:
    """What of a model is not as its class and config make it: a module or method replaced, a hook, another setting."""
    try:
        return _stranger_in(llama)
    except Exception as error:  # a config or modules that cannot be made again, or compared
        return f"it cannot be compared with what its config makes: {type(error).__name__}"


def _stranger_in(llama: Llama) -> str | None:
    as_made = _settings_as_made(tuple(vars(llama.config).items()))
    for name, module in llama.named_modules():
        where = name or "the model"
        if module is not llama and type(module) not in MODULES | KERNELS:
            return f"{where} is a {type(module).__name__}"
        if has_hooks(module):
            return f"{where} has a hook"
        if own_methods(module) or _settings(module) != as_made.get(name):
            return f"{where} has other settings or methods than its class gives it"
    return None


@lru_cache(maxsize=8)
def _settings_as_made(config: tuple[tuple[str, Any], ...]) -> dict[str, dict[str, Any]]:
    return {name: _settings(module) for name, module in blueprint(LlamaConfig(**dict(config))).named_modules()}


def _settings(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: value for name, value in own.items() if name != "training"}
