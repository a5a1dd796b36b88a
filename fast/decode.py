"""Decoders: what generates text with a model, sooner than the model by itself, and says the same.

Each is an object that stands beside a model and computes next-token logits in its place, `Llama.generate`'s
`next_logits`. Compiled loops continue one text where they are at hand, agree with the page, and pay; everything else
(prompts, several texts together, a window that slides, a bidirectional model) is left to the model.

Shapes:  b texts   s positions   v vocabulary
"""

from __future__ import annotations

import copy
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from base_llama import KVCache
from config import PRECISIONS, LlamaConfig
from fast import compiled
from fast.apply import Choice
from fast.attention import scores_proof
from fast.base_decoder import PART, PASSES, Decoder, kinds_of, stranger_in, why_not_asked
from fast.compiled import LOAD_SECONDS, NotReady
from fast.equivalence import Case, Comparison, EquivalenceCheck, notice
from fast.layers import FEED_FORWARD, RMS_NORM
from llama import Attention, FeedForward, Llama, LlamaLayer, RMSNorm

if TYPE_CHECKING:
    from fast.loop_engine import BestThreads, DecodeEngine

PAGE = (LlamaLayer, Attention, FeedForward, RMSNorm, KVCache, *((Llama, name) for name in PASSES))


def decoder(llama: Llama, precision: str = "fp32", *, tokens: int | None = None, cuda_graphs: bool = False) -> Decoder:
    """What generates text with `llama` fastest, as it now is.

    precision: the one that `accelerate` has given the model. tokens: how many will be generated in all, if that is
    known: few are not worth loading the loops. cuda_graphs: on CUDA, through recorded graphs.
    Raises `ValueError` for an unknown precision.
    """
    choice = choose_decoder(next(llama.parameters()).device, precision, cuda_graphs=cuda_graphs)
    if choice.kernel != "plain" and (reason := why_not_asked(llama)):
        choice = Choice(PART, "plain", reason)
    if choice.kernel == "CUDA graph":
        from fast.graphs import GraphDecoder  # which is derived from `Decoder`

        return GraphDecoder(llama, choice)
    if choice.kernel == "numba" and (reason := _why_no_loops_for(llama, precision, tokens)):
        choice = Choice(PART, "plain", reason)
    return LoopDecoder(llama, choice, precision) if choice.kernel == "numba" else Decoder(llama, choice)


def choose_decoder(device: torch.device, precision: str = "fp32", *, cuda_graphs: bool = False) -> Choice:
    """What computes the next token of a text, as far as that depends on the machine alone."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}")
    if device.type == "cuda" and cuda_graphs:
        return Choice(PART, "CUDA graph", "launches the kernels of a token all together")
    if device.type != "cpu":
        return Choice(PART, "plain", f"PyTorch's own kernels on {device.type}")
    reason = compiled.why_no_loops()
    if reason is None and not (precision in compiled.loaded() or compiled.was_compiled(precision)):
        reason = "the loops are not compiled; python -m fast --compile makes long texts several times faster"
    if reason is not None:
        return Choice(PART, "plain", reason)
    return Choice(PART, "numba", "for one text, where the work ahead is worth loading the loops")


def _why_no_loops_for(llama: Llama, precision: str, tokens: int | None) -> str | None:
    """What keeps the loops for one number format from continuing a model's texts. Loads them where nothing does."""
    if not llama.config.is_causal:
        return "a bidirectional model computes everything anew for every token"
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


class LoopDecoder(Decoder):
    """Continues one text through compiled loops, for one number format, wherever the page still agrees with them."""

    def __init__(self, llama: Llama, choice: Choice, precision: str):
        """The loops are in memory. precision: their number format, and the model's."""
        super().__init__(llama, choice)
        engine = compiled.load(precision)
        self._precision, self._kinds = precision, kinds_of(llama)
        self._engine: DecodeEngine = engine.DecodeEngine(llama)
        self._threads: BestThreads = engine.BestThreads()

    def _generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float, settings: dict[str, Any]
    ) -> torch.Tensor:
        llama = self.llama
        is_plain = torch.is_autocast_enabled("cpu") or any(module.training for module in llama.modules())
        is_plain = is_plain or self._kinds != kinds_of(llama) or why_not_asked(llama) is not None
        if is_plain or not _agrees(llama, self._precision):
            return super()._generate(idx, max_new_tokens, temperature, settings)
        only_largest = asks_largest_alone(temperature, settings) and LARGEST.holds()
        threads = copy.deepcopy(self._threads)  # another thread of Python may be generating as well
        settings["next_logits"] = partial(self._next_logits, threads, only_largest)
        text = llama.generate(idx, max_new_tokens, temperature, **settings)
        self._threads = threads
        return text

    def _next_logits(
        self,
        threads: BestThreads,
        only_largest: bool,
        idx: torch.Tensor,
        cache: KVCache | None = None,
        *more: Any,
        **named: Any,
    ) -> torch.Tensor:
        """As `Llama.next_logits`, which may have been changed to take more. idx: b s -> b v"""
        llama = self.llama
        is_step = cache is not None and 0 < cache.length == idx.shape[1] - 1 < llama.config.max_seq_len
        if more or named or not is_step or len(idx) > 1 or cache.keys.dtype != torch.float32:
            return llama.next_logits(idx, cache, *more, **named)
        return self._engine.next_logits(idx[:, -1:], cache, only_largest, threads)


def asks_largest_alone(temperature: float, settings: dict[str, Any]) -> bool:
    """Whether `Llama.generate` with these settings asks which logit is the largest, and nothing of the others."""
    return temperature == 0.0 and settings.get("choose") is None


def _agrees(llama: Llama, precision: str) -> bool:
    """Whether a model is what the page makes, and the loops compute what the page says. Raises `NotReady`."""
    stranger = stranger_in(llama)
    if stranger is not None:
        notice(f"text is generated as the model is written, without compiled loops: {stranger}")
        return False
    proof = _proof(tuple(vars(llama.config).items()), precision)
    return all(each.holds() for each in (RMS_NORM, FEED_FORWARD, scores_proof("cpu"), proof))


@lru_cache(maxsize=16)
def _proof(config: tuple[tuple[str, Any], ...], precision: str) -> EquivalenceCheck:
    """That the loops for one number format agree with a model of this shape."""
    engine, kernel = compiled.load(precision), compiled.FORMATS[precision]
    sides = partial(engine.sides, LlamaConfig(**dict(config)), kernel)
    return EquivalenceCheck(
        "Llama", PAGE, sides, but=((KVCache, "take"),)
    )  # whose texts the loops are handed like any other


def is_readable(llama: Llama) -> bool:
    """Whether the loops can read a model's weights: float32 on the CPU, no biases."""
    return all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in llama.parameters()) and all(
        getattr(module, "bias", None) is None for module in llama.modules()
    )


def _sides_of_largest() -> Comparison:
    """Texts from logits that are all true, and from logits of which, at temperature 0, the largest alone is."""
    model = Llama(LlamaConfig.from_preset("tiny", attention="causal"))

    def ask(is_page: bool) -> Any:
        def run(idx: torch.Tensor, temperature: float, settings: dict[str, Any]) -> list[torch.Tensor]:
            draw, seen = torch.Generator().manual_seed(1), []

            def next_logits(idx: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
                logits, others = torch.randn(2, len(idx), 30, generator=draw)
                largest = logits.amax(-1, keepdim=True)  # b 1
                if is_page or not asks_largest_alone(temperature, settings):
                    return logits
                return logits.where(logits == largest, largest - 0.1 - others.abs())

            text = model.generate(idx, 40, temperature, next_logits=next_logits, on_token=seen.append, **settings)
            return [text, *seen]

        return run

    def swap(logits: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmin(-1, keepdim=True), torch.arange(len(idx)).flip(0)

    idx, padded = torch.randint(0, 30, (2, 4)), {"pad": torch.tensor([2, 0])}
    cases = [Case("temperature 0", (idx, 0.0, {})), Case("temperature 0, ended", (idx, 0.0, {"stop_ids": [3, 5, 8]}))]
    cases += [Case("texts after padding", (idx, 0.0, padded)), Case("rows exchanged", (idx, 0.0, {"choose": swap}))]
    return Comparison(ask(True), ask(False), [*cases, Case("temperature 1", (idx, 1.0, {}))])


# Of what `generate` does with logits, all but computing them.
LARGEST = EquivalenceCheck(
    "the likeliest token", ((Llama, "generate"),), _sides_of_largest, but=((Llama, "next_logits"), KVCache)
)
