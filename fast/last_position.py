"""The next token of a text that is computed anew for every token: the last layer asks at the last position alone.

`Llama.next_logits` reads one position of all those that `Llama.forward` returns. A classifier reads no other either,
through `Llama.hidden_state_at`, whose last layer computes only keys and values elsewhere. For stories42M's shape that
is a tenth of the products.

Shapes:  b texts   s positions   v vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from base_llama import KVCache
from config import LlamaConfig
from fast.as_made import NORMS
from fast.equivalence import Case, Comparison, EquivalenceCheck
from llama import Attention, FeedForward, Llama, LlamaLayer

PASSES = ("embed", "encode", "hidden_states", "forward", "next_logits")  # methods of `Llama`
ASKED = (LlamaLayer, Attention, FeedForward, *((Llama, name) for name in (*PASSES, "hidden_state_at")))
LIMIT, LONG_TEXT = 8, 300  # positions of the models that are compared


def next_logits(
    llama: Llama, idx: torch.Tensor, cache: KVCache | None = None, *more: Any, **named: Any
) -> torch.Tensor:
    """As `Llama.next_logits`, which an edit may give more arguments. idx: b s -> b v"""
    if cache is not None or more or named:
        return llama.next_logits(idx, cache, *more, **named)
    tokens = idx[:, -llama.config.max_seq_len :]
    return llama.output(llama.hidden_state_at(tokens, torch.full_like(tokens[:, 0], tokens.shape[1] - 1)))


@lru_cache(maxsize=16)
def last_position_check(config: tuple[tuple[str, Any], ...]) -> EquivalenceCheck:
    """Whether `next_logits` agrees with a model of these settings, as llama.py stands."""
    made = LlamaConfig(**dict(config))
    return EquivalenceCheck("Llama.next_logits", (*ASKED, NORMS[made.norm]), partial(_sides, made), but=(KVCache,))


def _sides(config: LlamaConfig) -> Comparison:
    """A small model as deep as `config` says, because an edit may concern one layer, and two of two layers."""
    small = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 50, "hidden_dim": 24, "dropout": 0.0}
    depths = {("bidirectional", LIMIT): config.n_layers, ("causal", LIMIT): 2, ("bidirectional", LONG_TEXT): 2}
    models = {}
    for (kind, limit), depth in depths.items():
        settings = {**vars(config), **small, "max_seq_len": limit, "n_layers": depth, "attention": kind}
        models[kind, limit] = Llama(LlamaConfig(**settings)).eval().requires_grad_(False)
        for parameter in models[kind, limit].parameters():
            nn.init.normal_(parameter, std=0.4 if parameter.dim() == 2 else 1.0)

    def ask(logits: Callable[..., torch.Tensor], is_plain: bool) -> Callable[..., list[torch.Tensor]]:
        def run(which: tuple[str, int], idx: torch.Tensor, held: int) -> list[torch.Tensor]:
            model, cache = models[which], None
            if held:
                cache = KVCache(model, len(idx), LIMIT)
                model.hidden_states(idx[:, :held], cache)
            found, alone = logits(model, idx, cache), model.layers[0](model.embed(idx))  # which makes its own context
            if not is_plain:
                return [found, found, alone]
            tokens = idx[:, -model.config.max_seq_len :]  # llama.py has two ways to compute them
            at = torch.full((len(idx),), tokens.shape[1] - 1)
            return [found, model.output(model.hidden_state_at(tokens, at)), alone]

        return run

    plain = ask(lambda model, *inputs: model.next_logits(*inputs), True)
    return Comparison(plain, ask(next_logits, False), [*_cases()])


def _cases() -> Iterator[Case]:
    """Which model, a text, and how many of its tokens a cache holds."""

    def tokens(texts: int, length: int) -> torch.Tensor:
        return torch.randint(0, 50, (texts, length))

    for kind, texts, length in (
        ("bidirectional", 3, 4),
        ("bidirectional", 1, 1),
        ("bidirectional", 2, LIMIT + 3),
        ("causal", 1, 5),
    ):
        yield Case(f"{kind}, {texts} x {length}", ((kind, LIMIT), tokens(texts, length), 0))
    for length, held in ((5, 4), (LIMIT + 1, LIMIT)):
        yield Case(f"{length} tokens with a cache", (("causal", LIMIT), tokens(1, length), held))
    yield Case(f"{LONG_TEXT} tokens", (("bidirectional", LONG_TEXT), tokens(1, LONG_TEXT), 0))
