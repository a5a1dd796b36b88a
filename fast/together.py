"""One more token for each of several texts, in compiled loops that read every weight once for all of them.

Importing this module imports numba.

Shapes:
    b texts   s positions   i features   v vocabulary   P panels and l lanes, in which texts are computed
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import nn

from config import LlamaConfig
from engine.context import KVCache
from engine.decoding import logits_after
from engine.equivalence import Case, Comparison
from fast import loop_engine, loops_head, loops_together
from fast.loop_engine import BestThreads, DecodeEngine, EnginePair, filled_cache, make_pair, use_threads
from fast.measure import fastest
from llama import Llama

KERNELS = "PyTorch's kernels"
MEASURED_LENGTH = 64  # tokens of the texts that are measured
MEASURED_WEIGHTS = 10**7  # in the layers that are measured: more than the processor's cache holds, milliseconds of work


def next_logits(
    engine: DecodeEngine,
    idx: torch.Tensor,
    cache: KVCache,
    only_largest: bool = False,
    threads: BestThreads | None = None,
) -> torch.Tensor:
    """`DecodeEngine.next_logits` for several texts. idx: b s, of which the last token is new -> b v"""
    if cache.length >= cache.shape[3]:
        raise RuntimeError(f"the cache is for {cache.shape[3]} tokens, not {cache.length + 1}")
    with (threads or BestThreads()).timed() as number:
        use_threads(number)
        x = to_panels(engine.embeddings[idx[:, -1]])  # P D l
        layer_steps(engine, x, cache)
        return _head(engine, loops_together.norm_together(x, engine.norm), len(idx), only_largest)


def layer_steps(engine: DecodeEngine, x: np.ndarray, cache: KVCache) -> None:
    """The layers that a cache is for, at one more position, which is added to it. x: P D l, in place"""
    position = torch.full(cache.shape[1:2], cache.length)
    angles = tuple(to_panels(torch.from_numpy(table)) for table in engine.angles(position))
    keys, values, end = cache.keys.numpy(), cache.values.numpy(), cache.length + 1  # L b g t d
    for layer in range(cache.shape[0]):
        weights = engine.layers[layer]
        loops_together.layer_step_together(x, weights, angles, keys[layer], values[layer], end)
    cache.length = end  # not extend(): it makes masks, which the loops have no use for


def is_fastest(engine: DecodeEngine, llama: Llama, texts: int) -> bool:
    """Whether the loops are not slower than PyTorch's kernels for so many texts: measured on some of the layers."""
    texts = 1 << (texts - 1).bit_length()  # one measurement for 2, one for up to 4, 8, 16, 32
    if texts not in engine.fastest:
        engine.fastest[texts] = _measure(engine, llama, texts)
    return engine.fastest[texts]


def _measure(engine: DecodeEngine, llama: Llama, texts: int) -> bool:
    config = llama.config
    of_layer = sum(weight.numel() for weight in llama.layers[0].parameters())
    cache = KVCache(llama, texts, MEASURED_LENGTH + 1)
    cache.shape = (min(config.n_layers, 1 + MEASURED_WEIGHTS // of_layer), *cache.shape[1:])
    cache.keys, cache.values = torch.zeros(2, *cache.shape)
    x = torch.randn(texts, 1, config.dim, generator=torch.Generator().manual_seed(0))

    def loops(threads: int) -> None:
        cache.length = MEASURED_LENGTH
        use_threads(threads)
        layer_steps(engine, to_panels(x[:, 0]), cache)

    def kernels() -> None:
        cache.length, h = MEASURED_LENGTH, x
        context = cache.extend(1)
        for attention, layer in zip(cache.reader.attentions[: cache.shape[0]], cache.reader.llama.layers, strict=False):
            vars(attention)["context"] = context
            h = layer(h)

    widths = config.dim, config.hidden_dim, config.n_heads, config.n_kv_heads
    question = f"{texts} texts together, widths {widths}, {engine.head.rows.dtype}"
    ways = {f"loops, {threads} threads": partial(loops, threads) for threads in (torch.get_num_threads(), 1)}
    return fastest(question, {**ways, KERNELS: kernels})[0] != KERNELS


def to_panels(rows: torch.Tensor) -> np.ndarray:
    """Put texts into the lanes of panels, the rest of which is 0. b i -> P i l"""
    lanes = 8 if len(rows) <= 8 else 16
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % lanes))
    return rows.unflatten(0, (-1, lanes)).transpose(1, 2).contiguous().numpy()


def to_rows(panels: np.ndarray, texts: int) -> torch.Tensor:
    """P i l -> b i"""
    return torch.from_numpy(panels).transpose(1, 2).flatten(0, 1)[:texts].contiguous()


def _head(engine: DecodeEngine, x: np.ndarray, texts: int, only_largest: bool) -> torch.Tensor:
    """x: P D l -> b v"""
    logits = np.empty((texts, len(engine.head.scale)), np.float32)
    if only_largest and (screen := engine.screened()) is not None:
        loops_head.logits_in_8_bits(screen.copy, x, logits)
        if screen.pick(to_rows(x, texts).numpy(), logits, by=loops_together.rescore_together) is not None:
            return torch.from_numpy(logits)
    loops_together.logits_together(engine.head, x, logits)
    return torch.from_numpy(logits)


# ------------------------------------------------------------------------------------------- comparison with llama.py


def sides(config: LlamaConfig, kernel: type[nn.Linear]) -> Comparison:
    """As `loop_engine.sides`, and several texts together."""
    return loop_engine.sides(config, kernel, {"texts together": _next_tokens}, _cases())


def _cases() -> Iterator[Case]:
    # which model, how many texts, how many tokens before, only the likeliest?
    yield Case("two texts", ("texts together", "long", 2, 4, False))
    yield Case("five texts", ("texts together", "grouped", 5, 4, False))
    yield Case("texts that outgrow the model", ("texts together", "grouped", 3, 7, False))
    yield Case("the likeliest tokens", ("texts together", "grouped", 3, 3, True))


def _next_tokens(pair: EnginePair, is_plain: bool, texts: int, length: int, only_largest: bool) -> list[torch.Tensor]:
    """Logits of two more tokens of texts of `length` tokens, and their keys."""
    model, limit = pair.model, pair.model.config.max_seq_len
    idx = torch.randint(0, model.config.vocab_size, (texts, length + 2))
    cache = filled_cache(model, idx[:, :length])
    answers = []
    for end in (length + 1, length + 2):
        if is_plain or end > limit:  # where the window slides, the model computes for both sides
            logits = logits_after(model, idx[:, :end], cache)
        else:
            logits = next_logits(pair.engine, idx[:, :end], cache, only_largest)
        answers += [logits.max(-1).values, logits.argmax(-1)] if only_largest else [logits]
    return [*answers, cache.keys[:, :, :, length : length + 2]]


def warm_up(kernel: type[nn.Linear]) -> None:
    """Run every loop once in one number format, which loads or compiles it."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        pair = make_pair(LlamaConfig.from_preset("tiny", attention="causal"), kernel)
        for only_largest in (False, True):
            _next_tokens(pair, False, 2, 3, only_largest)
