"""Decoders: objects that generate the same text as a model, sooner.

A decoder computes next-token logits in the place of a model, as `continue_texts`'s argument `next_logits`. Compiled
loops continue up to 32 texts at once if they are installed, agree with llama.py and save time. A bidirectional model
reads the whole text anew for every token (`fast/whole_text.py`). The model itself does the rest: prompts, more texts
together, a window that slides.

Shapes:  b texts   s positions   v vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from config import PRECISIONS, LlamaConfig
from engine import decoding
from engine.context import KVCache
from engine.decoding import continue_texts, logits_after
from engine.equivalence import EquivalenceCheck, notice
from fast import compiled, last_position
from fast.apply import Choice
from fast.attention import MOST_LANES, scores_check
from fast.compiled import LOAD_SECONDS, NotReady
from fast.layers import FEED_FORWARD_CHECK, RMS_NORM_CHECK
from fast.plan import kinds_of, what_changed_in
from fast.whole_text import WholeTextEngine, is_in_float32, whole_text_check
from llama import Attention, FeedForward, Llama, LlamaLayer, RMSNorm

if TYPE_CHECKING:
    from types import ModuleType

    from fast.loop_engine import BestThreads, DecodeEngine

PART = "decoding"
REPLACED_BY_LOOPS = (LlamaLayer, Attention, FeedForward, RMSNorm, (Llama, "forward"))
MOST_TOGETHER = 32  # texts whose next tokens the loops compute at once
SAMPLE = 32  # numbers of each weight that are compared before a text
ANEW = "everything is computed anew for every token, but for what the last layer would give at other positions"
OUTDATED = "the model's weights were written to or replaced since this decoder was made; make another one"


def decoder(llama: Llama, precision: str = "fp32", *, tokens: int | None = None) -> WatchedDecoder:
    """The fastest decoder for `llama` as it is now.

    precision: the one that `accelerate` has given the model. tokens: how many will be generated in all, if known: for
    few tokens the loops are not loaded. Raises `ValueError` for an unknown precision.
    """
    device = next(llama.parameters()).device
    choice = choose_decoder(device, precision)
    if device.type == "cpu" and (reason := _why_plain(llama)):
        return WatchedDecoder(llama, Choice(PART, "plain", reason))
    if device.type == "cpu" and not llama.config.is_causal:
        return WholeTextDecoder(llama, Choice(PART, "whole text", ANEW))
    if choice.kernel == "numba" and (reason := _why_no_loops_for(llama, precision, tokens)):
        choice = Choice(PART, "plain", reason)
    return LoopDecoder(llama, choice, precision) if choice.kernel == "numba" else WatchedDecoder(llama, choice)


def choose_decoder(device: torch.device, precision: str = "fp32") -> Choice:
    """What computes the next token of a text, as far as that depends on the machine alone."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}")
    if device.type != "cpu":
        return Choice(PART, "plain", f"PyTorch's own kernels on {device.type}")
    reason = compiled.why_no_loops()
    if reason is None and not (precision in compiled.loaded() or compiled.was_compiled(precision)):
        reason = "the loops are not compiled; python -m fast --compile makes long texts several times faster"
    if reason is not None:
        return Choice(PART, "plain", reason)
    return Choice(PART, "numba", f"for up to {MOST_TOGETHER} texts, where the work ahead is worth loading the loops")


def _why_plain(llama: Llama) -> str | None:
    """Why nothing may compute in the place of a model's modules; None if something may."""
    if type(llama) is Llama:
        return None
    reason = f"{type(llama).__name__} generates as it is written: it is not Llama itself"
    notice(reason)
    return reason


def _why_no_loops_for(llama: Llama, precision: str, tokens: int | None) -> str | None:
    """Why the loops of one number format cannot continue a model's texts; None if they can. Loads them if needed."""
    if (other := compiled.format_of(llama)) != precision:
        reason = f"the model computes in {other}, not in {precision}"
        notice(f"text is generated as the model is written, without compiled loops: {reason}")
        return reason
    if not is_readable(llama):
        return "the loops read float32 weights without biases on a CPU"
    if precision not in compiled.loaded() and tokens is not None:
        if compiled.saved_seconds(llama.config, tokens) < LOAD_SECONDS:
            return "so few tokens of so small a model are not worth loading the loops"
    try:
        return None if _agrees(llama, precision) else "the loops do not compute what the model does"
    except NotReady as error:
        return str(error)


def is_readable(llama: Llama) -> bool:
    """Whether the loops can read a model's weights: float32 on the CPU, no biases."""
    return all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in llama.parameters()) and all(
        getattr(module, "bias", None) is None for module in llama.modules()
    )


# ------------------------------------------------------------------------------------------------------------- decoders


class WatchedDecoder(decoding.Decoder):
    """Generates text as the model does. A subclass computes some of it in the model's place.

    A decoder is made for weights that stay as they are. Before each text it compares PyTorch's count of writes to each
    weight, and a sample of its numbers. (PyTorch does not count writes to `.data`, nor those of fused optimizers.)
    choice: what it computes with, and why.
    """

    def __init__(self, llama: Llama, choice: Choice):
        super().__init__(llama)
        self.choice = choice
        self._weights = [*llama.parameters()]  # kept, so that no others can come to lie at their addresses
        self._state = _state_of_weights(self._weights)

    def generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0, **settings: Any
    ) -> torch.Tensor:
        """The text that `continue_texts` gives for the same arguments. idx: b s -> b (s + new)

        Raises `RuntimeError` if the model's weights are no longer those that the decoder was made for.
        """
        if _state_of_weights([*self.llama.parameters()]) != self._state:
            raise RuntimeError(OUTDATED)
        if settings.get("next_logits") is not None:  # the caller's own
            return continue_texts(self.llama, idx, max_new_tokens, temperature, **settings)
        return self._generate(idx, max_new_tokens, temperature, settings)

    def _generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float, settings: dict[str, Any]
    ) -> torch.Tensor:
        return continue_texts(self.llama, idx, max_new_tokens, temperature, **settings)


class WholeTextDecoder(WatchedDecoder):
    """Continues texts of a bidirectional model, which reads a text anew for every token, while that agrees with it.

    In float32 an engine reads its weights; else its own layers compute, the last one at one position.
    """

    def __init__(self, llama: Llama, choice: Choice):
        super().__init__(llama, choice)
        self._kinds: list[type] | None = None  # of the model that the engine was made of
        self._engine: WholeTextEngine | None = None

    def _generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float, settings: dict[str, Any]
    ) -> torch.Tensor:
        if self._may_compute():
            settings["next_logits"] = self._next_logits
        return super()._generate(idx, max_new_tokens, temperature, settings)

    def _may_compute(self) -> bool:
        llama = self.llama
        if _computes_otherwise(llama) or _is_changed(llama, "text is generated as the model is written"):
            return False
        if self._kinds != kinds_of(llama):
            self._kinds, self._engine = kinds_of(llama), WholeTextEngine(llama) if is_in_float32(llama) else None
        if self._engine is None:
            return last_position.agrees(llama)
        return whole_text_check(tuple(vars(llama.config).items())).holds()

    def _next_logits(self, idx: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        """As `decoding.logits_after`. idx: b s -> b v"""
        if self._engine is None:
            return last_position.next_logits(self.llama, idx)
        if min(idx.shape[1], self.llama.config.max_seq_len) < MOST_LANES:  # PyTorch's kernel may hide NaN
            return logits_after(self.llama, idx)
        return self._engine.next_logits(idx)


class LoopDecoder(WatchedDecoder):
    """Continues texts through compiled loops of one number format, while they agree with the model's code."""

    def __init__(self, llama: Llama, choice: Choice, precision: str):
        """precision: the number format of the loops, which are loaded, and of the model."""
        super().__init__(llama, choice)
        engine = compiled.load(precision)
        self._precision, self._kinds = precision, kinds_of(llama)
        self._engine: DecodeEngine = engine.DecodeEngine(llama)
        self._threads: dict[bool, BestThreads] = {together: engine.BestThreads() for together in (False, True)}

    def _generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float, settings: dict[str, Any]
    ) -> torch.Tensor:
        llama = self.llama
        is_other = self._kinds != kinds_of(llama) or self._engine.config != llama.config  # than the engine was made of
        if is_other or _computes_otherwise(llama) or not _agrees(llama, self._precision):
            return super()._generate(idx, max_new_tokens, temperature, settings)
        only_largest = temperature == 0.0 and settings.get("choose") is None  # what is read of the logits
        threads = copy.deepcopy(self._threads)  # another thread of Python may be generating as well
        together = lru_cache(self._together)  # of a number of texts: asked for once in a text, if at all
        settings["next_logits"] = partial(self._next_logits, threads, only_largest, together)
        text = continue_texts(llama, idx, max_new_tokens, temperature, **settings)
        self._threads = threads
        return text

    def _next_logits(
        self,
        threads: dict[bool, BestThreads],
        only_largest: bool,
        together: Callable[[int], ModuleType | None],
        idx: torch.Tensor,
        cache: KVCache | None,
    ) -> torch.Tensor:
        """As `decoding.logits_after`. idx: b s -> b v"""
        llama = self.llama
        is_step = cache is not None and 0 < cache.length == idx.shape[1] - 1 < llama.config.max_seq_len
        is_step = is_step and cache.shape[1] == len(idx)
        if not is_step or cache.keys.dtype != torch.float32:
            return logits_after(llama, idx, cache)
        if len(idx) == 1:
            return self._engine.next_logits(idx, cache, only_largest, threads[False])
        if len(idx) > MOST_TOGETHER or (engine := together(len(idx))) is None:
            return logits_after(llama, idx, cache)
        return engine.next_logits(self._engine, idx, cache, only_largest, threads[True])

    def _together(self, texts: int) -> ModuleType | None:
        """The loops for several texts; None if they do not load, do not compute what llama.py says, or are slower."""
        try:
            check = _loops_check(tuple(vars(self.llama.config).items()), self._precision, compiled.TOGETHER)
            engine = compiled.load(self._precision, compiled.TOGETHER) if check.holds() else None
        except NotReady:
            return None
        return engine if engine and engine.is_fastest(self._engine, self.llama, texts) else None


# ------------------------------------------------------------------------------------------- what must not have changed


def _state_of_weights(weights: list[torch.Tensor]) -> list[Any]:
    """Changes when a weight is replaced or written to, see `Decoder`."""
    return [(id(w), w.data_ptr(), w.dtype, w.is_inference() or w._version, _sample(w)) for w in weights]


def _sample(weight: torch.Tensor) -> bytes:
    numbers = getattr(weight, "stored", weight).detach().flatten()
    if weight.is_meta or not len(numbers):
        return b""
    return numbers[:: max(1, len(numbers) // SAMPLE)].clone().view(torch.uint8).cpu().numpy().tobytes()


def _computes_otherwise(llama: Llama) -> bool:
    """Whether a model is asked under autocast, drops some of its numbers, or is of a class of its own."""
    is_plain = torch.is_autocast_enabled("cpu") or any(module.training for module in llama.modules())
    return is_plain or _why_plain(llama) is not None


def _is_changed(llama: Llama, instead: str) -> bool:
    """Whether a model is not what its config makes; a notice then says what is done instead, and why."""
    changed = what_changed_in(llama)
    if changed is not None:
        notice(f"{instead}: {changed}")
    return changed is not None


def _agrees(llama: Llama, precision: str) -> bool:
    """Whether a model is what its config makes, and the loops compute what llama.py says. Raises `NotReady`."""
    if _is_changed(llama, "text is generated as the model is written, without compiled loops"):
        return False
    loops_check = _loops_check(tuple(vars(llama.config).items()), precision)
    return all(check.holds() for check in (RMS_NORM_CHECK, FEED_FORWARD_CHECK, scores_check("cpu"), loops_check))


@lru_cache(maxsize=16)
def _loops_check(
    config: tuple[tuple[str, Any], ...], precision: str, engine_name: str = compiled.ONE_TEXT
) -> EquivalenceCheck:
    """Whether the loops of one number format agree with a model of this shape."""
    engine, kernel = compiled.load(precision, engine_name), compiled.LINEAR_KERNELS[precision]
    sides = partial(engine.sides, LlamaConfig(**dict(config)), kernel)
    return EquivalenceCheck("Llama.forward", REPLACED_BY_LOOPS, sides)
