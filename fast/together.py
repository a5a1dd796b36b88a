"""One more token for each of several texts, in compiled loops that read every weight once for all of them.

Importing this module imports numba.

Shapes:
    b texts   s positions   n d/2 the angles of each text   v vocabulary   N texts, to the next multiple of four
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from base_llama import KVCache
from config import LlamaConfig
from fast import loop_engine, loops_together
from fast.equivalence import Case, Comparison
from fast.loop_engine import DecodeEngine, EnginePair, filled_cache, make_pair
from fast.threads import BestThreads, use_threads


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
        x = _to_whole_blocks(engine.embeddings[idx[:, -1]])
        layer_steps(engine, x, cache)
        logits = _head(engine, loops_together.norm_together(x, engine.norm), len(idx), only_largest)
        return torch.from_numpy(logits[: len(idx)])


def layer_steps(engine: DecodeEngine, x: np.ndarray, cache: KVCache) -> None:
    """All layers for one more position, which is added to the cache. x: N D, in place"""
    position = torch.full(cache.shape[1:2], cache.length)
    first = torch.zeros_like(position) if cache.pad is None else cache.pad.minimum(position)  # padding sees itself
    angles, end = engine.angles(position - first), cache.length + 1
    keys, values = cache.keys.numpy(), cache.values.numpy()  # L b g t d
    for layer, weights in enumerate(engine.layers):
        loops_together.layer_step_together(x, weights, angles, keys[layer], values[layer], first.numpy(), end)
    cache.length = end  # not extend(): it makes masks, which the loops have no use for


def _to_whole_blocks(x: torch.Tensor) -> np.ndarray:
    """Copy rows, and add zeros to the next multiple of four. b D -> N D"""
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % loops_together.TEXTS)).numpy().copy()


def _head(engine: DecodeEngine, x: np.ndarray, texts: int, only_largest: bool) -> np.ndarray:
    """x: N D -> N v"""
    logits = np.empty((len(x), len(engine.head.scale)), np.float32)
    if only_largest and (screen := engine.screened()) is not None:
        loops_together.matmul(screen.copy, x, logits)
        if all(screen.pick(*each) is not None for each in zip(x[:texts], logits[:texts], strict=True)):
            return logits
    loops_together.matmul(engine.head, x, logits)
    return logits


# ------------------------------------------------------------------------------------------- comparison with llama.py


def sides(config: LlamaConfig, kernel: type[nn.Linear]) -> Comparison:
    """As `loop_engine.sides`, and several texts together."""
    return loop_engine.sides(config, kernel, {"texts together": _next_tokens}, _cases())


def _cases() -> Iterator[Case]:
    # which model, how many tokens before, how many of them padding in each text, only the likeliest?
    yield Case("two texts", ("texts together", "long", 4, (0, 0), False))
    yield Case("texts of several lengths", ("texts together", "grouped", 4, (0, 3, 1, 4, 2), False))
    yield Case("texts that outgrow the model", ("texts together", "grouped", 7, (0, 3, 0), False))
    yield Case("the likeliest tokens", ("texts together", "grouped", 3, (0, 1, 0), True))


def _next_tokens(
    pair: EnginePair, is_plain: bool, length: int, pad: tuple[int, ...], only_largest: bool
) -> list[torch.Tensor]:
    """Logits of two more tokens of texts of `length` tokens, and their keys."""
    model, limit = pair.model, pair.model.config.max_seq_len
    idx = torch.randint(0, model.config.vocab_size, (len(pad), length + 2))
    cache = filled_cache(model, idx[:, :length], pad)
    answers = []
    for end in (length + 1, length + 2):
        if is_plain or end > limit:  # where the window slides, the model computes for both sides
            logits = model.next_logits(idx[:, :end], cache)
        else:
            logits = next_logits(pair.engine, idx[:, :end], cache, only_largest)
        answers += [logits.max(-1).values, logits.argmax(-1)] if only_largest else [logits]
    return [*answers, cache.keys[:, :, :, length : length + 2]]


def warm_up(kernel: type[nn.Linear]) -> None:
    """Run every loop once in one number format, which loads or compiles it."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        pair = make_pair(LlamaConfig.from_preset("tiny", attention="causal"), kernel)
        for only_largest in (False, True):
            _next_tokens(pair, False, 3, (0, 1), only_largest)
