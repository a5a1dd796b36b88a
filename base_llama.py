"""What Llama-like models share: config, weights, positions of a pass, cache, masks; norm, sampling of later editions.

Shapes:
    b batch      s query position   t key position   D model dim   v vocabulary
    L layers     g key/value heads  d head dim
"""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from config import SAMPLINGS, LlamaConfig

INIT_STD = 0.02


class LlamaPreTrainedModel(nn.Module):
    """Base class: holds the config and draws the initial weights."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.n_layers = config.n_layers

    def init_weights(self, part: nn.Module | None = None) -> None:
        """Draw all weights from N(0, 0.02^2), and `compute_output` and `w2` with a smaller standard deviation.

        part: the module whose weights are drawn; None: the whole model.

        The residual stream sums 2 * n_layers outputs (attention and feed-forward of each layer); dividing the standard
        deviation of their last projections, `compute_output` and `w2`, by sqrt(2 * n_layers) keeps its variance from
        growing with depth (Radford et al. 2019, "GPT-2", section 2.3).
        """
        part = self if part is None else part
        part.apply(self._init_weights)
        narrow = INIT_STD / math.sqrt(2 * self.config.n_layers)
        for name, parameter in part.named_parameters():
            if name.endswith(("compute_output.weight", "w2.weight")):
                nn.init.normal_(parameter, mean=0.0, std=narrow)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def kept(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """Logits with -inf for the tokens that the config's `sampling` never draws. b v -> b v"""
        limits = SAMPLINGS[self.config.sampling]
        if not limits or temperature == 0.0:
            return logits
        probs = ((logits - logits.amax(-1, keepdim=True)).float() / temperature).softmax(dim=-1)  # b v
        return logits.masked_fill(truncate(probs, **limits) == 0.0, -math.inf)


# ------------------------------------------------------------------------- positions of one forward pass, and the cache


class AttentionContext(NamedTuple):
    """Positions and attention mask of one forward pass; every layer gets the same object.

    start: the position of the first token in its text, an int for all rows or a tensor of shape b.
    mask: bool, broadcasts to b h s t, True where a query may see a key; None: every query sees every key.
    at: b, the only query position of each row; None: every position is a query. cache: keys and values so far.
    """

    start: int | torch.Tensor = 0
    mask: torch.Tensor | None = None
    at: torch.Tensor | None = None
    cache: KVCache | None = None

    @classmethod
    def of_text(cls, length: int, is_causal: bool, device: torch.device) -> AttentionContext:
        """The context of a pass over a whole text, from position 0."""
        return cls(mask=causal_mask(length, length, device) if is_causal else None)

    def queried_at(self, at: torch.Tensor) -> AttentionContext:
        """This context with one query in each row, at position `at` (b); it sees the same keys as before."""
        mask = self.mask
        if mask is not None and mask.shape[-2] > 1:  # a mask with one row is the same for all queries
            of_row = mask[at] if mask.dim() == 2 else mask[torch.arange(len(at), device=at.device), 0, at]  # b t
            mask = of_row[:, None, None]  # b 1 1 t
        return self._replace(mask=mask, at=at)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Select the query positions. x: b s D -> b s D, or b 1 D if `at` is set"""
        return x if self.at is None else x[torch.arange(len(self.at), device=self.at.device), self.at][:, None]

    @property
    def query_start(self) -> int | torch.Tensor:
        """The position of the first query in its text."""
        return self.start if self.at is None else self.start + self.at


class KVCache:
    """The keys and values that a causal model has computed so far, so that every token is computed once.

    The code that generates text owns the cache; the model keeps no state. The buffers are made once, for `max_len`
    positions. All rows hold the same number of positions; a shorter text begins with padding.
    pad: b, the number of padding tokens at the start of each row. Raises `ValueError` for a bidirectional model,
    where each new token would change the keys and values of all earlier tokens.
    """

    def __init__(self, model: LlamaPreTrainedModel, batch_size: int, max_len: int, pad: torch.Tensor | None = None):
        config = model.config
        if not config.is_causal:
            raise ValueError('a key/value cache needs attention="causal"')
        self.shape = (config.n_layers, batch_size, config.n_kv_heads, max_len, config.head_dim)
        self.keys: torch.Tensor | None = None  # L b g t d, once something is stored
        self.values: torch.Tensor | None = None
        self.pad = None if pad is None or not pad.any() else pad
        self.device = next(model.parameters()).device
        self.length = 0

    def extend(self, new: int) -> AttentionContext:
        """Make room for `new` positions; returns the context of the pass that computes them.

        Raises `RuntimeError` if the cache would hold more than `max_len` positions.
        """
        length = self.length + new
        if length > self.shape[3]:
            raise RuntimeError(f"the cache is for {self.shape[3]} tokens, not {length}")
        start = self.length if self.pad is None else self.length - self.pad
        mask = None  # a single new token sees everything
        if self.pad is not None:
            mask = padded_causal_mask(self.pad, new, length)  # b 1 s t
        elif new > 1:
            mask = causal_mask(new, length, self.device)  # s t
        self.length = length
        return AttentionContext(start, mask, cache=self)

    def store(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one layer's new keys and values, each b g s d; returns those of all positions, b g t d."""
        if self.keys is None:  # the buffers get the number format of the first key
            self.keys, self.values = (torch.zeros(self.shape, dtype=key.dtype, device=key.device) for _ in range(2))
        start = self.length - key.shape[2]
        self.keys[layer_id, :, :, start : self.length] = key
        self.values[layer_id, :, :, start : self.length] = value
        return self.keys[layer_id, :, :, : self.length], self.values[layer_id, :, :, : self.length]

    def take(self, rows: torch.Tensor) -> KVCache:
        """A new cache with these rows of this one, in this order; a row may be taken several times. rows: r"""
        taken = copy.copy(self)
        taken.shape = (self.shape[0], len(rows), *self.shape[2:])
        taken.pad = None if self.pad is None else self.pad[rows]
        if self.keys is not None:
            taken.keys, taken.values = self.keys.index_select(1, rows), self.values.index_select(1, rows)  # L r g t d
        return taken


# ---------------------------------------------------------------------------------------------------------------- masks


@lru_cache(maxsize=16)
def causal_mask(query_len: int, key_len: int, device: torch.device | None = None) -> torch.Tensor:
    """The mask of a causal model: True where a query may see a key. The last query sees every key.

    Returns a bool tensor of shape (query_len, key_len). All callers share it: do not write to it.
    """
    with torch.inference_mode(False):  # so that training can use it, see `rope_table`
        mask = torch.ones(query_len, key_len, dtype=torch.bool, device=device)
        return mask.tril(diagonal=key_len - query_len)


def padded_causal_mask(pad: torch.Tensor, query_len: int, key_len: int) -> torch.Tensor:
    """`causal_mask` for rows that begin with padding. No text token sees padding; a padding token sees itself.

    (If it saw no key, its softmax would be NaN, and the NaN would spread.)
    pad: b, the number of padding tokens at the start of each row. Returns bool b 1 s t.
    """
    keys = torch.arange(key_len, device=pad.device)
    queries = keys[key_len - query_len :]
    is_real = keys >= pad[:, None]  # b t
    sees_itself = queries[:, None] == keys  # s t
    visible = causal_mask(query_len, key_len, pad.device) & is_real[:, None, :] | sees_itself  # b s t
    return visible[:, None]


def sequence_lengths(token_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """The number of tokens before the right padding of each row.

    token_ids: b s. Returns b, at least 1. Only *trailing* `pad_id`s count as padding.
    """
    positions = torch.arange(1, token_ids.shape[1] + 1, device=token_ids.device)
    return ((token_ids != pad_id) * positions).amax(dim=1).clamp(min=1)  # b


class LayerNorm(nn.Module):
    """Layer normalization (Ba et al. 2016, arXiv:1607.06450, equation 4): mean 0, variance 1, then scale and bias."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ... D -> ... D. Mean and variance are taken in float32 for every dtype of x."""
        return self._norm(x.float()).type_as(x) * self.weight + self.bias


def with_norm_biases(state: dict[str, torch.Tensor], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The state dict; if its norms have no biases and the config has LayerNorm, with biases of 0, as in the course."""
    weights = [name for name in state if config.norm == "layer" and name.endswith("norm.weight")]
    return {f"{name.removesuffix('weight')}bias": torch.zeros_like(state[name]) for name in weights} | state


def truncate(
    probs: torch.Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
    epsilon: float | None = None,
    min_p: float | None = None,
) -> torch.Tensor:
    """Set the probabilities of dropped tokens to 0; the sum is not scaled to 1. b v -> b v. See `engine.sampling`."""
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
