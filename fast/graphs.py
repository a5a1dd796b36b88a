"""Decoding on CUDA: the kernels of one token are recorded once, as a CUDA graph, and then launched all together.

A step of a small model is some hundred kernels of a few microseconds each, and Python launches them more slowly than
the GPU computes them. A graph launches the same kernels with the same arguments at the same addresses, so a step must
be made for it: its tensors keep their place and shape from token to token, and where the token stands in the text is
itself a tensor on the GPU. The step is the model's own forward pass beside a `FixedCache`; everything else (prompts, a
window that slides, training, a bidirectional model) is left to `Llama`.

Shapes:
    L layers   b texts   g key/value heads   t key position   d head dim   v vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from base_llama import AttentionContext, KVCache
from config import LlamaConfig
from fast.apply import Choice
from fast.base_decoder import PASSES, Decoder, kinds_of, stranger_in, why_not_asked
from fast.equivalence import Case, Comparison, EquivalenceCheck
from fast.linear import KernelLinear
from llama import Attention, Llama

MIN_STEPS = 32  # tokens: recording for fewer is not worth it, an estimate: it costs four steps and the graph's making
MIN_POSITIONS = 256  # of the buffers; their length is a power of two, so that texts of like length share a graph
WARM_UP_STEPS = 3  # libraries set themselves up in the first ones, which cannot be recorded


def can_record(device: torch.device) -> bool:
    return device.type == "cuda"


@lru_cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings, because cuBLAS keeps memory for every stream that it has seen."""
    return torch.cuda.Stream(device)


def record(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`run` as a CUDA graph. Returns what launches its kernels again. Raises `RuntimeError` where that cannot be."""
    with torch.cuda.device(device):
        graph, current, aside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), recording_stream(device)
        aside.wait_stream(current)
        try:
            with torch.cuda.stream(aside):  # whose end a failure comes to, unlike that of `torch.cuda.graph`
                for _ in range(WARM_UP_STEPS):
                    run()
                _capture(graph, run, aside)
        finally:
            current.wait_stream(aside)
    return graph.replay


def _capture(graph: torch.cuda.CUDAGraph, run: Callable[[], None], stream: torch.cuda.Stream) -> None:
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    except RuntimeError:
        # A recording that fails leaves the random generator waiting for its end, in most releases of PyTorch, and the
        # next number that is drawn is an error. A copy has the same numbers and waits for nothing.
        generator = torch.cuda.default_generators[stream.device.index]
        generator.graphsafe_set_state(generator.clone_state())
        raise


def fixed_shape(cache: KVCache) -> tuple[int, ...]:
    """L b g t d of the buffers that serve a cache."""
    *before, length, dim = cache.shape
    return (*before, max(MIN_POSITIONS, 1 << (length - 1).bit_length()), dim)


class FixedCache(KVCache):
    """Keys and values for steps of one token, in which nothing but the contents of tensors depends on the position.

    Attention is over all t places, whatever they hold; the mask hides those before a text and those not yet reached.
    """

    def __init__(self, model: Llama, like: KVCache):
        shape, device = fixed_shape(like), like.keys.device
        super().__init__(model, shape[1], shape[3])
        self.keys, self.values = (torch.zeros(shape, dtype=like.keys.dtype, device=device) for _ in range(2))
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # of the new token
        self.pad = torch.zeros(shape[1], dtype=torch.int64, device=device)  # b
        self.places = torch.arange(shape[3], device=device)  # t

    def extend(self, new: int) -> AttentionContext:
        """The position is set from outside, so that a step can be repeated; `new` is 1."""
        first = torch.minimum(self.pad, self.position)  # b: padding sees itself, or its softmax would be NaN
        is_hidden = (self.places > self.position) | (self.places < first[:, None])  # b t
        return AttentionContext(
            self.position - first, is_hidden.logical_not()[:, None, None], cache=self
        )  # mask: b 1 1 t

    def store(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put one layer's new key and value, each b g 1 d, in their place; returns those of all places, b g t d."""
        keys, values = self.keys[layer_id], self.values[layer_id]
        return keys.index_copy_(2, self.position, key), values.index_copy_(2, self.position, value)

    def take_over(self, cache: KVCache) -> None:
        """Hold what `cache` holds, which becomes a view of these buffers, so that each sees what the other adds."""
        for name in ("keys", "values"):
            mine, its = getattr(self, name), getattr(cache, name)
            mine.zero_()  # a damaged model may have left NaN, and NaN times a weight of 0 is NaN
            mine[:, :, :, : cache.length] = its[:, :, :, : cache.length]
            setattr(cache, name, mine[:, :, :, : cache.shape[3]])
        self.pad.copy_(torch.zeros_like(self.pad) if cache.pad is None else cache.pad)


class GraphedStep:
    """One more token for each of b texts, as a graph. It serves one text (or batch of texts) after another."""

    def __init__(self, llama: Llama, cache: KVCache):
        device = cache.keys.device
        self.cache = FixedCache(llama, cache)
        self.tokens = torch.zeros(cache.shape[1], 1, dtype=torch.int64, device=device)
        self.logits: torch.Tensor | None = None  # b v: the graph's own, written by every replay
        self.replay = record(partial(self._run, llama), device)
        # The graph reads weights and what is kept in their stead at their addresses. Copies are held, so that no other
        # ones can come to lie there; weights the decoder holds.
        self.copies = copies_of(llama)
        self.serve(cache)  # which overwrites what the first runs have stored

    def _run(self, llama: Llama) -> None:
        # not `Llama.forward`: picking the last position by a list of indices makes the GPU wait for the CPU
        self.logits = llama.output(llama.hidden_states(self.tokens, self.cache)[:, 0])

    def serve(self, cache: KVCache) -> None:
        """Begin to continue the text of `cache`."""
        self.cache.take_over(cache)

    def fits(self, cache: KVCache) -> bool:
        """Whether it could serve `cache`: it has the shape."""
        return self.cache.shape == fixed_shape(cache) and self.cache.keys.dtype == cache.keys.dtype

    def next_logits(self, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """The logits after one more token. tokens: b 1 -> b v"""
        self.tokens.copy_(tokens)
        self.cache.position.fill_(cache.length)
        self.replay()
        cache.length += 1
        return self.logits.clone()  # the next replay writes over its own


def copies_of(llama: Llama) -> list[Any]:
    """What its linear layers keep instead of their weights."""
    return [module._copy for module in llama.modules() if isinstance(module, KernelLinear)]


def is_recordable(llama: Llama) -> bool:
    """Whether all that a step does is known, agrees with the page, and nothing in it draws random numbers."""
    is_known = stranger_in(llama) is None and not any(module.training for module in llama.modules())
    return is_known and STEPS.holds()


def _sides() -> Comparison:
    """Next-token logits of a text beside a `KVCache` and beside a `FixedCache`."""
    model = Llama(LlamaConfig.from_preset("tiny", attention="causal", max_seq_len=8)).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4 if parameter.dim() == 2 else 1.0)

    def ask(is_page: bool) -> Callable[..., list[torch.Tensor]]:
        return lambda *settings: _next_logits(model, is_page, *settings)

    tokens, pad = torch.randint(0, 300, (2, 10)), torch.tensor([2, 0])
    cases = [Case("texts together", (tokens, 5, None)), Case("padded texts", (tokens, 5, pad))]
    return Comparison(ask(True), ask(False), cases)


@torch.no_grad()
def _next_logits(model: Llama, is_page: bool, tokens: torch.Tensor, length: int, pad: torch.Tensor | None) -> list:
    """After each token from the `length`-th on; where the window slides, and without a cache, the page's for both."""
    cache = KVCache(model, len(tokens), model.config.max_seq_len, pad)
    answers = [model.next_logits(tokens[:, :length], cache)]
    fixed = FixedCache(model, cache)
    fixed.take_over(cache)
    for end in range(length + 1, tokens.shape[1] + 1):
        if is_page or end > model.config.max_seq_len:
            answers.append(model.next_logits(tokens[:, :end], cache))
        else:
            fixed.position.fill_(cache.length)
            answers.append(model.output(model.hidden_states(tokens[:, end - 1 : end], fixed)[:, 0]))
            cache.length += 1
    taken, last = cache.take(torch.tensor([1, 1, 0])), torch.full_like(tokens[:, 0], 3)
    answers += [taken.keys, taken.values, torch.zeros(3) if taken.pad is None else taken.pad]
    whole = model.next_logits(tokens[:, :4], None), model.hidden_state_at(tokens[:, :4], last)
    return [*answers, *whole, model.layers[0](model.embed(tokens))]  # what else there is on the page


STEPS = EquivalenceCheck(
    "KVCache",
    (KVCache, (Attention, "forward"), *((Llama, name) for name in PASSES)),
    _sides,
)


class GraphDecoder(Decoder):
    """Continues texts through a `GraphedStep`, which is recorded when one is long enough to be worth it."""

    def __init__(self, llama: Llama, choice: Choice):
        super().__init__(llama, choice)
        self._kinds = kinds_of(llama)
        self._idle: GraphedStep | None = None  # the last text's, for the next one
        self._has_failed = False

    def _generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float, settings: dict[str, Any]
    ) -> torch.Tensor:
        is_plain = torch.is_autocast_enabled() or self._kinds != kinds_of(self.llama) or why_not_asked(self.llama)
        if is_plain or not can_record(idx.device) or not is_recordable(self.llama):
            return super()._generate(idx, max_new_tokens, temperature, settings)
        text = Text(self)
        settings["next_logits"] = text.next_logits
        try:
            return self.llama.generate(idx, max_new_tokens, temperature, **settings)
        finally:
            self._idle = text.step or self._idle

    def step_for(self, cache: KVCache) -> GraphedStep | None:
        """What continues a text whose beginning is stored, if a graph can and is worth it. It is that text's alone."""
        step, self._idle = self._idle, None
        if step is not None and step.fits(cache):
            step.serve(cache)
            return step
        if cache.shape[3] - cache.length < MIN_STEPS or self._has_failed:
            self._idle = step
            return None
        del step  # before another one needs memory
        try:
            # recording makes tensors that PyTorch uses for every graph, also for one outside of inference mode
            with torch.inference_mode(False), torch.no_grad():
                return GraphedStep(self.llama, cache)
        except RuntimeError:  # the text is continued without a graph, and so are all others
            self._has_failed = True
            return None


class Text:
    """One text (or batch of texts): its beginning is read by the model, its new tokens by a graph."""

    def __init__(self, decoder: GraphDecoder):
        self.decoder = decoder
        self.cache: KVCache | None = None
        self.step: GraphedStep | None = None

    def next_logits(self, idx: torch.Tensor, cache: KVCache | None = None, *more: Any, **named: Any) -> torch.Tensor:
        """As `Llama.next_logits`, which may have been changed to take more. idx: b s -> b v"""
        llama = self.decoder.llama
        if self.step is not None and cache is self.cache and not more and not named:
            # beyond its own length a cache raises, though the graph's buffers are longer
            if idx.shape[1] == cache.length + 1 <= min(llama.config.max_seq_len, cache.shape[3]):
                return self.step.next_logits(idx[:, -1:], cache)
        begins = cache is not None and cache.length == 0
        logits = llama.next_logits(idx, cache, *more, **named)
        if begins and cache.length > 0 and self.cache is None:
            self.cache, self.step = cache, self.decoder.step_for(cache)
        return logits
