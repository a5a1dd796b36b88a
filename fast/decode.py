"""The model that generates text through compiled loops, where they are at hand, agree with the page, and pay.

Shapes:  b texts   s positions   v vocabulary
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from cache import KVCache
from config import LlamaConfig
from fast import compiled
from fast.attention import FusedAttention, scores_proof
from fast.compiled import LOAD_SECONDS, NotReady
from fast.kernel import has_hooks, own_methods
from fast.layers import FEED_FORWARD, RMS_NORM, FusedFeedForward, FusedRMSNorm
from fast.linear import Bf16Linear, Int8Linear, OneDNNLinear, RoundedLinear, state_of
from fast.proof import Proof, say
from llama import Attention, FeedForward, Llama, LlamaLayer, RMSNorm
from weights import blueprint

if TYPE_CHECKING:
    from fast.engine import DecodeEngine

MODULES = {nn.ModuleList, nn.Embedding, nn.Dropout, LlamaLayer, Attention, FeedForward, RMSNorm, nn.Linear}
KERNELS = {FusedAttention, FusedFeedForward, FusedRMSNorm, OneDNNLinear, Bf16Linear, RoundedLinear, Int8Linear}
PASSES = ("embed", "encode", "hidden_states", "forward", "next_logits")  # of `Llama`
PAGE = (LlamaLayer, Attention, FeedForward, RMSNorm, KVCache, *((Llama, name) for name in PASSES))


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


def is_readable(llama: Llama) -> bool:
    """Whether the loops can read a model's weights: float32 on the CPU, no biases."""
    return all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in llama.parameters()) and all(
        getattr(module, "bias", None) is None for module in llama.modules()
    )


def source_of(llama: Llama) -> list[Any]:
    """Changes when a weight is replaced or written to, or a module is replaced."""
    return [state_of(weight) for weight in llama.parameters()] + [type(module) for module in llama.modules()]


@lru_cache(maxsize=16)
def _proof(config: tuple[tuple[str, Any], ...], format_: str) -> Proof:
    """That the loops for one number format agree with a model of this shape."""
    engine, kernel = compiled.load(format_), compiled.FORMATS[format_]
    return Proof("Llama", PAGE, lambda: engine.sides(LlamaConfig(**dict(config)), kernel))


class DecodingLlama(Llama):
    """A `Llama` that continues one text through a `DecodeEngine`, which is made when needed.

    Everything else (prompts, several texts together, a window that slides, training, a bidirectional model) is left to
    PyTorch's kernels. Which of the two continues a text is decided at its first new token.
    """

    _engine: DecodeEngine | None = None
    _source: list[Any] | None = None
    _tokens_ahead: int | None = None  # how many tokens will be generated in all; None where nobody knows

    def train(self, mode: bool = True) -> DecodingLlama:
        self.drop_decoder()
        return super().train(mode)

    def drop_decoder(self) -> None:
        self._engine = None

    def hidden_states(self, *inputs: Any, **named: Any) -> torch.Tensor:
        if torch.is_grad_enabled():  # PyTorch does not count what its fused optimizers change; gradients come before
            self.drop_decoder()
        return super().hidden_states(*inputs, **named)

    def next_logits(
        self, idx: torch.Tensor, cache: KVCache | None = None, *settings: Any, **named: Any
    ) -> torch.Tensor:
        """As in `Llama`, whose arguments may have been changed. idx: b s -> b v"""
        is_step = cache is not None and len(idx) == 1 and 0 < cache.length == idx.shape[1] - 1 < self.config.max_seq_len
        if not is_step or self.training or torch.is_autocast_enabled("cpu"):
            return super().next_logits(idx, cache, *settings, **named)
        texts = vars(self).setdefault("_texts", WeakKeyDictionary())
        if cache not in texts:  # the weights cannot change before a text ends
            texts[cache] = self._engine_for(cache)
        engine = texts[cache]
        if engine is None or settings or named:
            return super().next_logits(idx, cache, *settings, **named)
        return engine.next_logits(idx[:, -1:], cache)

    def _engine_for(self, cache: KVCache) -> DecodeEngine | None:
        """The engine that will continue a text; None if PyTorch will."""
        if cache.keys.dtype != torch.float32 or not is_readable(self):
            return None
        format_ = compiled.format_of(self)
        if format_ not in compiled.loaded() and not self._is_worth_loading():
            return None
        stranger = stranger_in(self)
        if stranger is not None:
            say(f"text is generated as the model is written, without compiled loops: {stranger}")
            return None
        try:
            proof = _proof(tuple(vars(self.config).items()), format_)
        except NotReady:
            return None
        # each of these has said so itself
        if not all(each.holds() for each in (RMS_NORM, FEED_FORWARD, scores_proof("cpu"), proof)):
            return None
        source = source_of(self)
        if self._engine is None or self._source != source:
            self._engine, self._source = compiled.load(format_).DecodeEngine(self), source
        return self._engine

    def _is_worth_loading(self) -> bool:
        tokens = self._tokens_ahead
        return tokens is None or compiled.saved_seconds(self.config, tokens) >= LOAD_SECONDS

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and `torch.save` take along."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_engine", "_source", "_texts")}
