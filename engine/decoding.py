"""Continuing texts token by token, with all that `Llama.generate` does not have: a cache, stop tokens, other choices.

Shapes:  b texts   s positions   r rows   v vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from config import SAMPLINGS, LlamaConfig
from engine.cache import KVCache
from engine.equivalence import Case, Comparison, EquivalenceCheck
from engine.passes import why_no_context
from engine.sampling import Sampling, chooser
from llama import Llama

NextLogits = Callable[[torch.Tensor, "KVCache | None"], torch.Tensor]  # idx b s -> b v
TEXTS, VOCABULARY = 300, 100  # of the comparison with `Llama.generate`
Choose = Callable[[torch.Tensor, torch.Tensor], "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"]


class Decoder:
    """Continues texts by the code of a model; a subclass computes some of it in the model's place."""

    def __init__(self, llama: Llama):
        self.llama = llama

    def generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0, **settings: Any
    ) -> torch.Tensor:
        """The text that `continue_texts` gives for the same arguments. idx: b s -> b (s + new)"""
        return continue_texts(self.llama, idx, max_new_tokens, temperature, **settings)


def logits_after(llama: Llama, idx: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
    """Logits after the last token of `idx`; the model sees its last `max_seq_len` tokens. idx: b s -> b v

    cache: of the texts' beginnings; it then holds all of `idx`, unless this is longer than `max_seq_len`.
    """
    limit, length = llama.config.max_seq_len, idx.shape[1]
    if cache is None:
        return llama(idx[:, -limit:])[0][:, -1]
    if length <= limit:
        return cache.read(idx[:, cache.length :])[0][:, -1]
    # The window slides: all stored keys and values depend on the dropped token, so they are computed anew.
    if cache.pad is None:
        return llama(idx[:, -limit:])[0][:, -1]
    window = KVCache(llama, len(idx), limit, (cache.pad - (length - limit)).clamp(min=0))
    return window.read(idx[:, -limit:])[0][:, -1]


@torch.inference_mode()
def continue_texts(
    llama: Llama,
    idx: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    *,
    stop_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
    pad: torch.Tensor | None = None,
    use_cache: bool = True,
    on_token: Callable[[torch.Tensor], None] | None = None,
    choose: Choose | None = None,
    next_logits: NextLogits | None = None,
) -> torch.Tensor:
    """Continue `idx` by at most `max_new_tokens` tokens, each chosen by `sampling.sample_next` at this temperature.

    idx: b s -> b (s + new). A causal model keeps keys and values until the text is longer than `max_seq_len`, if
    `engine.passes` finds that its code allows it; else the tokens in reach are computed anew, with the same result.
    pad: b, the number of padding tokens at the start of each row. on_token: called with each new column, b 1.
    A row that produced one of `stop_ids` repeats it; generation ends early when every row has produced one.
    choose: replaces `sample_next` (logits b v, idx b s -> b 1), and what the config's `sampling` drops; with new tokens
    r 1 it may return row numbers r: row i of the result then continues row number r[i] of `idx`. next_logits: replaces
    `logits_after` of this model. Raises `ValueError` for `pad` without a cache.
    """
    cache = _new_cache(llama, idx, max_new_tokens, pad) if use_cache else None
    if pad is not None and cache is None:
        raise ValueError("padding before a text can be hidden from a causal model with a cache only")
    next_logits = next_logits or partial(logits_after, llama)
    choose = choose or chooser(Sampling(temperature, **SAMPLINGS[llama.config.sampling]), generator)
    stops = torch.tensor(sorted(stop_ids), dtype=idx.dtype, device=idx.device)
    stopped = torch.zeros_like(idx[:, :1], dtype=torch.bool)  # b 1
    for _ in range(max_new_tokens):
        logits = next_logits(idx, cache)  # b v
        idx_next = choose(logits, idx)  # b 1
        if isinstance(idx_next, tuple):
            idx_next, rows = idx_next  # r 1, r
            idx, stopped, cache = idx[rows], stopped[rows], cache and cache.take(rows)
        idx_next = torch.where(stopped, idx[:, -1:], idx_next)
        idx = torch.cat((idx, idx_next), dim=1)  # b s+1
        if on_token is not None:
            on_token(idx_next)
        if stop_ids and (stopped := stopped | torch.isin(idx_next, stops)).all():
            break
    return idx


def _new_cache(llama: Llama, idx: torch.Tensor, max_new_tokens: int, pad: torch.Tensor | None) -> KVCache | None:
    if not llama.config.is_causal or why_no_context(llama) is not None:
        return None
    return KVCache(llama, len(idx), min(idx.shape[1] + max_new_tokens, llama.config.max_seq_len), pad)


# --------------------------------------------------------------------------------------- the model's own `generate`


def why_own_generate(llama: Llama) -> str | None:
    """Why a model's own `generate` gives another text than `continue_texts`; None if both give the same."""
    if type(llama).generate is not Llama.generate or "generate" in vars(llama):
        return "it has a generate of its own"
    return generate_check().difference()


@lru_cache(maxsize=1)
def generate_check() -> EquivalenceCheck:
    """Whether `continue_texts` agrees with `Llama.generate`, as llama.py stands."""
    return EquivalenceCheck("Llama.generate", ((Llama, "generate"),), _sides, instead=None)


def _sides() -> Comparison:
    """A model whose logits are drawn for each text that it reads: only what `generate` does with them is compared."""
    model = Llama(LlamaConfig.from_preset("tiny", n_layers=1, max_seq_len=6)).eval()
    table = torch.randn(2 * VOCABULARY, VOCABULARY) * 0.8  # every token is likely enough to be drawn

    def forward(tokens: torch.Tensor, targets: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(1, tokens.shape[1] + 1) * tokens  # b s: other tokens, or in another order
        return table[places.sum(dim=1, keepdim=True) % len(table)], tokens

    vars(model)["forward"] = forward  # of logits b 1 v alone: a `generate` that reads more of the model differs

    def ours(*settings: Any) -> torch.Tensor:
        return continue_texts(model, *settings, use_cache=False)

    return Comparison(model.generate, ours, list(_cases()))


def _cases() -> Iterator[Case]:
    """Many texts: of a probability that an edit moves by a hundredth, few draws would tell nothing."""
    for temperature in (0.0, 0.7, 1.0):
        yield Case(f"temperature {temperature}", (torch.randint(0, VOCABULARY, (TEXTS, 4)), 5, temperature))
    yield Case("one longer text", (torch.randint(0, VOCABULARY, (1, 4)), 40, 1.0))
