"""Continuing texts token by token, with all that `Llama.generate` does not have: a cache, stop tokens, other choices.

From logits to the next token: temperature, truncated sampling, a penalty on repetition. From a prompt to its text:
`continue_texts`; `why_own_generate` says whether that is the text of `Llama.generate` as it stands.

Shapes:  b texts   s positions   r rows   v vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from config import SAMPLINGS, LlamaConfig
from engine.context import KVCache, why_no_context
from engine.equivalence import Case, Comparison, EquivalenceCheck
from llama import Llama
from utils import UserError

# logits b v, idx b s -> b 1; or r 1 with row numbers r, see `continue_texts`
Choose = Callable[[torch.Tensor, torch.Tensor], "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"]

LEAST_TEMPERATURE = 1e-30  # by a smaller one float32 cannot divide; the likeliest token alone is drawn either way


@dataclass(frozen=True)
class Sampling:
    """The settings by which a next token is chosen. Raises `ValueError` for a value out of range.

    Temperature 0 takes the most likely token. Otherwise a token is drawn from softmax(logits / temperature), after
    dropping those outside the `top_k` most likely ones, those outside the smallest set whose probabilities reach
    `top_p` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751, section 3.1), those less likely than `min_p`
    times the most likely one (Nguyen et al. 2024, arXiv:2407.01082), and those less likely than `epsilon` (Hewitt et
    al. 2022, arXiv:2210.15191, section 4.1) among the remaining ones, in that order. The most likely is never dropped.
    Before all that, at temperature 0 as well, the `repetition_penalty` changes the logits: see `penalize_repeats`.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    epsilon: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be at least 0 and finite")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.epsilon is not None and not 0.0 <= self.epsilon < 1.0:
            raise ValueError(f"epsilon={self.epsilon} must be from 0 to below 1")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p} must be from 0 to 1")
        if self.repetition_penalty is not None and not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0 and finite")

    @property
    def is_plain(self) -> bool:
        """Whether only the temperature is set, so that `sample_next` gives the same tokens."""
        return self.repetition_penalty is None and (self.temperature == 0.0 or self.limits == (None,) * 4)

    @property
    def limits(self) -> tuple[int | None, float | None, float | None, float | None]:
        """The arguments of `truncate` after the probabilities."""
        return self.top_k, self.top_p, self.epsilon, self.min_p


def sample_next(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Choose the next token of each row, b v -> b 1; without a random number at temperature 0. Raises `ValueError`."""
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be at least 0 and finite")
    best, largest = likeliest(logits)
    if temperature == 0.0:
        return best
    return torch.multinomial(softened(logits, largest, temperature), num_samples=1)  # b 1


def softened(logits: torch.Tensor, largest: torch.Tensor, temperature: float) -> torch.Tensor:
    """The probabilities at a temperature above 0. logits: b v, largest: b 1, see `likeliest` -> b v"""
    # the maximum is subtracted first, so that a very small temperature does not overflow
    return ((logits.float() - largest.float()) / max(temperature, LEAST_TEMPERATURE)).softmax(dim=-1)


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row and its logit. b v -> b 1, b 1. Raises `UserError` if a logit is not finite."""
    best = logits.argmax(dim=-1, keepdim=True)  # b 1
    largest = logits.gather(-1, best)  # b 1: NaN if any logit of the row is
    if not torch.isfinite(largest).all():
        raise UserError("the model's logits are not finite: its weights are damaged, or the code computes them wrongly")
    return best, largest


def chooser(sampling: Sampling) -> Choose:
    """A function that replaces `sample_next`, for the argument `choose` of `continue_texts`."""

    def choose(logits: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        logits = penalize_repeats(logits, idx, sampling.repetition_penalty)
        if sampling.temperature > 0.0:
            logits = drop(logits, sampling)
        return sample_next(logits, sampling.temperature)

    return choose


def penalize_repeats(logits: torch.Tensor, idx: torch.Tensor, penalty: float | None) -> torch.Tensor:
    """Make the tokens of the text less likely (Keskar et al. 2019, CTRL, arXiv:1909.05858, section 4.1).

    logits: b v, idx: b s -> b v. The penalty divides a positive logit and multiplies a negative logit, once per token,
    however often it occurs. (The paper divides both, which would make an unlikely token more likely.) A penalty of 1 or
    None changes nothing, below 1 it rewards repetition. Raises `UserError` as `likeliest` does.
    """
    if penalty is None:
        return logits
    likeliest(logits)  # raises the error for logits that are not finite, before they are changed
    seen = logits.gather(-1, idx)  # b s
    largest = torch.finfo(logits.dtype).max  # an infinite penalty times a logit of 0 would be NaN
    penalty = min(penalty, largest)
    penalized = torch.where(seen > 0, seen / penalty, seen * penalty).clamp(-largest, largest)  # b s
    return logits.scatter(-1, idx, penalized)


def drop(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits with -inf for the tokens that `sampling` drops. b v -> b v. Raises `UserError` as `likeliest` does."""
    if sampling.limits == (None,) * 4:
        return logits
    _, largest = likeliest(logits)
    probs = softened(logits, largest, sampling.temperature)  # b v
    return logits.masked_fill(truncate(probs, *sampling.limits) == 0.0, -math.inf)


def truncate(
    probs: torch.Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
    epsilon: float | None = None,
    min_p: float | None = None,
) -> torch.Tensor:
    """Set the probabilities of dropped tokens to 0; the sum is not scaled to 1. b v -> b v. See `Sampling`."""
    dropped = torch.zeros_like(probs, dtype=torch.bool)
    if top_k is not None or top_p is not None:
        sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
        rank = order.argsort(dim=-1)  # b v: 0 for the most likely token
        if top_k is not None:
            dropped |= rank >= min(top_k, probs.shape[-1])
            sorted_probs = sorted_probs.masked_fill(dropped.gather(-1, order), 0.0)
        if top_p is not None:
            sorted_probs = sorted_probs / sorted_probs.sum(-1, keepdim=True)
            mass_before = sorted_probs.cumsum(-1) - sorted_probs  # b v: the sum over the more likely tokens
            dropped |= (mass_before >= top_p).gather(-1, rank)
    if min_p is not None:
        dropped |= probs < min_p * probs.amax(-1, keepdim=True)
    if epsilon is not None:
        kept = probs.masked_fill(dropped, 0.0)
        dropped |= kept < epsilon * kept.sum(-1, keepdim=True)
    return probs.masked_fill(dropped.scatter(-1, probs.argmax(-1, keepdim=True), False), 0.0)


# ------------------------------------------------------------------------------------------------------- token by token

NextLogits = Callable[[torch.Tensor, "KVCache | None"], torch.Tensor]  # idx b s -> b v
TEXTS, VOCABULARY = 300, 100  # of the comparison with `Llama.generate`


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
    if cache is not None and length <= limit:
        return cache.read(idx[:, cache.length :])[0][:, -1]
    # Where the window slides, all stored keys and values depend on the dropped token: they are computed anew.
    return llama(idx[:, -limit:])[0][:, -1]


@torch.inference_mode()
def continue_texts(
    llama: Llama,
    idx: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    *,
    stop_ids: Collection[int] = (),
    use_cache: bool = True,
    on_token: Callable[[torch.Tensor], None] | None = None,
    choose: Choose | None = None,
    next_logits: NextLogits | None = None,
) -> torch.Tensor:
    """Continue `idx` by at most `max_new_tokens` tokens, each chosen by `sample_next` at this temperature.

    idx: b s -> b (s + new). A causal model keeps keys and values until the text is longer than `max_seq_len`, if
    `engine.context` finds that its code allows it; else the tokens in reach are computed anew, with the same result.
    on_token: called with each new column, b 1.
    A row that produced one of `stop_ids` repeats it; generation ends early when every row has produced one.
    choose: replaces `sample_next` (logits b v, idx b s -> b 1), and what the config's `sampling` drops; with new tokens
    r 1 it may return row numbers r: row i of the result then continues row number r[i] of `idx`. next_logits: replaces
    `logits_after` of this model.
    """
    cache = _new_cache(llama, idx, max_new_tokens) if use_cache else None
    next_logits = next_logits or partial(logits_after, llama)
    choose = choose or chooser(Sampling(temperature, **SAMPLINGS[llama.config.sampling]))
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


def _new_cache(llama: Llama, idx: torch.Tensor, max_new_tokens: int) -> KVCache | None:
    if not llama.config.is_causal or why_no_context(llama) is not None:
        return None
    return KVCache(llama, len(idx), min(idx.shape[1] + max_new_tokens, llama.config.max_seq_len))


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
