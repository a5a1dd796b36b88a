"""Searching for a text instead of drawing one: beam search, and contrastive search.

*Beam search* (Sutskever et al. 2014, arXiv:1409.3215, section 3.2) keeps the N likeliest beginnings of a text, by

    S(y) = log p(y_1) + ... + log p(y_n | y_1 ... y_n-1),

continues each of them by every token, and keeps the N likeliest results. If one of these N ends with a stop token, it
is set aside, and the next likeliest takes its place. When N have been set aside, or enough tokens have been made, the
text is the one that maximises

    S(y) / n^alpha          (Wu et al. 2016, arXiv:1609.08144, section 7: the first form that it gives)

among those set aside and, if they are fewer than N, the others. n counts the new tokens, also the stop token:
alpha = 1 compares means, alpha = 0 sums, which prefer short texts. N = 1 is greedy decoding.

*Contrastive search* (Su et al. 2022, arXiv:2202.06417, equation 5) takes among the K likeliest tokens V one that is
likely and whose state is unlike those of the text so far:

    x_t = argmax over v in V of  (1 - alpha) p(v | x_<t) - alpha max over j < t of cos(h_v, h_j)

h are hidden states after the final norm: h_j of each token of the text, prompt included, and h_v of the candidate at
the end of the text. alpha = 0 and K = 1 are greedy decoding.

Shapes: b texts   n beams   k candidates   r rows (b n, or b k)   s position   v vocabulary   D model dim
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F

from advanced.table import CONTRASTIVE_WHY
from engine.context import KVCache
from engine.decoding import Sampling, continue_texts, likeliest, logits_after, penalize_repeats
from engine.programs import NeedsCausal
from llama import Llama


class BeamSearch:
    """generator: an `engine.decoding.Decoder`. beams: N. alpha: the exponent of the length.

    Raises `ValueError` for a value out of range.
    """

    def __init__(self, generator: Any, beams: int, alpha: float = 1.0):
        if beams < 1:
            raise ValueError(f"beams={beams} must be at least 1")
        if not 0.0 <= alpha < math.inf:
            raise ValueError(f"alpha={alpha} must be at least 0 and finite")
        self.generator, self.beams, self.alpha = generator, beams, alpha

    def generate(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        *,
        stop_ids: Collection[int] = (),
        repetition_penalty: float | None = None,
        **settings: Any,
    ) -> torch.Tensor:
        """The best text for each prompt. idx: b s -> b (s + new). stop_ids, settings: of `continue_texts`.

        repetition_penalty: see `engine.decoding.penalize_repeats`. A text that ends earlier than the longest one
        repeats its stop token.
        """
        Sampling(repetition_penalty=repetition_penalty)  # raises `ValueError` where it is out of range
        beams = Beams(self, idx, stop_ids, repetition_penalty)
        live = self.generator.generate(idx, max_new_tokens, 0.0, stop_ids=stop_ids, choose=beams.choose, **settings)
        return beams.best(live)


class Beams:
    """The beams of a search and the texts that ended. Scores are float64, on the CPU, because MPS has no float64."""

    def __init__(self, search: BeamSearch, idx: torch.Tensor, stop_ids: Collection[int], penalty: float | None = None):
        self.search, self.prompt_len, self.penalty = search, idx.shape[1], penalty
        self.stops = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64)
        self.scores = torch.zeros(len(idx), 1, dtype=torch.float64)  # b 1, and b n once there are beams
        self.ended: list[list[tuple[float, torch.Tensor]]] = [[] for _ in idx]  # of each text, with their final scores

    def choose(self, logits: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Continue the beams, best first. logits: r v, idx: r s -> tokens, r 1, and the rows that they continue, r

        The first call has one row for each text; later calls have n.
        """
        (b, before), n, v = self.scores.shape, self.search.beams, logits.shape[-1]
        logits = penalize_repeats(logits, idx, self.penalty)
        likeliest(logits)  # raises where they are not finite
        log_probs = logits.cpu().double().log_softmax(-1).unflatten(0, (b, before))  # b n v
        totals = (self.scores[..., None] + log_probs).flatten(1)  # b nv
        count = n * (1 + len(self.stops))  # among so many candidates n do not end
        totals = F.pad(totals, (0, max(0, count - totals.shape[1])), value=-math.inf)  # a prompt may have fewer
        totals, order = totals.topk(count)  # b ..., in descending order
        rows, tokens = (order // v).clamp(max=before - 1), order % v
        rows += before * torch.arange(b)[:, None]
        is_end = torch.isin(tokens, self.stops)
        self._set_aside(totals[:, :n], is_end[:, :n], idx, rows, tokens)
        self.scores, kept = totals.masked_fill(is_end, -math.inf).topk(n)  # b n
        rows, tokens = rows.gather(1, kept), tokens.gather(1, kept)
        for text in range(b):
            if self._is_done(text):
                tokens[text] = self.stops[0]  # for `continue_texts`, which ends when all rows have stopped
        return tokens.flatten()[:, None].to(idx), rows.flatten().to(idx.device)

    def _set_aside(
        self, totals: torch.Tensor, is_end: torch.Tensor, idx: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Keep the ended ones of the n likeliest. totals, is_end: b n; rows and tokens may have more columns."""
        is_open = torch.tensor([not self._is_done(text) for text in range(len(totals))])
        scores = self._normalized(totals, idx.shape[1] + 1)
        for text, place in (is_end & totals.isfinite() & is_open[:, None]).nonzero().tolist():
            ids = torch.cat((idx[rows[text, place]], tokens[text, place, None].to(idx)))  # s+1
            self.ended[text].append((scores[text, place].item(), ids))

    def _is_done(self, text: int) -> bool:
        return len(self.ended[text]) >= self.search.beams

    def _normalized(self, totals: torch.Tensor, length: int) -> torch.Tensor:
        return totals / (length - self.prompt_len) ** self.search.alpha

    def best(self, live: torch.Tensor) -> torch.Tensor:
        """The best text of each prompt. live: r s, the beams at the end -> b s"""
        if live.shape[1] == self.prompt_len:  # max_new_tokens is 0
            return live
        scores = self._normalized(self.scores[:, 0], live.shape[1]).tolist()
        texts = []
        for text, ended in enumerate(self.ended):
            going_on = [] if self._is_done(text) else [(scores[text], live[text * self.search.beams])]
            texts.append(max(ended + going_on, key=lambda found: found[0])[1])
        longest = max(map(len, texts))
        return torch.stack([torch.cat((ids, ids[-1:].expand(longest - len(ids)))) for ids in texts])


class ContrastiveSearch:
    """alpha: how much repetition counts, from 0 to 1. candidates: K.

    Raises `ValueError` for a value out of range, and `NeedsCausal` for a bidirectional model, in which a candidate
    changes the hidden states of all other tokens.
    """

    def __init__(self, llama: Llama, alpha: float = 0.6, candidates: int = 5):
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha={alpha} must be from 0 to 1")
        if candidates < 1:
            raise ValueError(f"candidates={candidates} must be at least 1")
        if not llama.config.is_causal:
            raise NeedsCausal(CONTRASTIVE_WHY)
        self.llama, self.alpha, self.candidates = llama, alpha, candidates

    def generate(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        *,
        repetition_penalty: float | None = None,
        **settings: Any,
    ) -> torch.Tensor:
        """The text for each prompt. idx: b s -> b (s + new). settings: of `continue_texts`.

        repetition_penalty: see `engine.decoding.penalize_repeats`.
        """
        Sampling(repetition_penalty=repetition_penalty)  # raises `ValueError` where it is out of range
        ahead = LookAhead(self, repetition_penalty)
        choices = {"choose": ahead.choose, "next_logits": ahead.next_logits}
        return continue_texts(self.llama, idx, max_new_tokens, 0.0, **choices, **settings)


class LookAhead:
    """The state of a contrastive search: hidden states of the texts, and logits after the chosen candidates.

    One pass over all candidates computes their hidden states, and also the logits after the candidate that is then
    chosen. While the texts fit into the model, keys and values of all candidates are kept; `rows` are the chosen ones.
    """

    def __init__(self, search: ContrastiveSearch, penalty: float | None = None):
        self.search, self.llama, self.penalty = search, search.llama, penalty
        self.limit = search.llama.config.max_seq_len
        self.logits: torch.Tensor | None = None  # b v
        self.cache: KVCache | None = None
        self.rows: torch.Tensor | None = None  # b
        self.hidden: torch.Tensor | None = None  # b s D, of length 1

    def next_logits(self, idx: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        """Replaces the model's method. idx: b s -> b v"""
        if self.logits is not None:
            return self.logits
        if cache is None or idx.shape[1] >= self.limit:
            return logits_after(self.llama, idx, cache)
        logits, h = cache.read(idx)
        self.cache, self.rows = cache, torch.arange(len(idx), device=idx.device)
        self.hidden = F.normalize(h.float(), dim=-1)
        return logits[:, -1]

    def choose(self, logits: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        """Equation 5. logits: b v, idx: b s -> b 1"""
        logits = penalize_repeats(logits, idx, self.penalty)
        likeliest(logits)  # raises where they are not finite
        candidates = logits.topk(min(self.search.candidates, logits.shape[-1])).indices  # b k
        probs = logits.float().softmax(-1).gather(-1, candidates)  # b k
        fits = self.cache is not None and idx.shape[1] < self.limit
        following, h_v, h_text = self._continue(candidates) if fits else self._read(idx, candidates)
        similarity = (h_text @ h_v[..., None])[..., 0]  # b k s
        alpha = self.search.alpha
        best = ((1 - alpha) * probs - alpha * similarity.amax(-1)).argmax(-1)  # b
        texts = torch.arange(len(idx), device=idx.device)
        self.logits = following[texts, best]  # b v
        if fits:
            self.rows = candidates.shape[1] * texts + best
            self.hidden = torch.cat((self.hidden, h_v[texts, best][:, None]), dim=1)  # b s+1 D
        return candidates[texts, best][:, None]

    def _continue(self, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read the candidates after the cached texts. b k -> logits b k v, states b k D, states of the texts b 1 s D"""
        self.cache = self.cache.take(self.rows.repeat_interleave(candidates.shape[1]))
        logits, h = self.cache.read(candidates.reshape(-1, 1))  # r 1 v, r 1 D
        h = F.normalize(h.float(), dim=-1)
        return logits.view(*candidates.shape, -1), h.view(*candidates.shape, -1), self.hidden[:, None]

    def _read(self, idx: torch.Tensor, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read each text with each candidate, without a cache. b s, b k -> b k v, b k D, and b k s D of the texts"""
        k = candidates.shape[1]
        texts = torch.cat((idx.repeat_interleave(k, dim=0), candidates.reshape(-1, 1)), dim=1)[:, -self.limit :]
        logits, h = self.llama(texts)  # r 1 v, r s D
        h = F.normalize(h.float(), dim=-1).unflatten(0, candidates.shape)
        return logits.view(*candidates.shape, -1), h[:, :, -1], h[:, :, :-1]
