"""The keys and values that a causal model has computed so far, so that every token is computed once.

Shapes:
    b batch      s query position   t key position   L layers   g key/value heads   d head dim   v vocabulary
"""

from __future__ import annotations

import copy

import torch

from base_llama import causal_mask
from engine.context import AttentionContext, ContextLlama
from llama import Llama


class KVCache:
    """Keys and values of texts, and the model that reads what comes next: `read`.

    The code that generates text owns the cache; the model keeps no state. The buffers are made once, for `max_len`
    positions. All rows hold the same number of positions; a shorter text begins with padding.
    pad: b, the number of padding tokens at the start of each row. Raises `ValueError` for a bidirectional model,
    where each new token would change the keys and values of all earlier tokens.
    """

    def __init__(self, llama: Llama, batch_size: int, max_len: int, pad: torch.Tensor | None = None):
        config = llama.config
        if not config.is_causal:
            raise ValueError('a key/value cache needs attention="causal"')
        self.shape = (config.n_layers, batch_size, config.n_kv_heads, max_len, config.head_dim)
        self.keys: torch.Tensor | None = None  # L b g t d, once something is stored
        self.values: torch.Tensor | None = None
        self.pad = None if pad is None or not pad.any() else pad
        self.device = next(llama.parameters()).device
        self.length = 0
        self.reader = ContextLlama(llama)

    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Llama.forward` for the next tokens of each text, which the cache then holds.

        tokens: b s -> logits b 1 v, hidden states b s D of these tokens. Raises `RuntimeError` as `extend` does.
        """
        return self.reader(tokens, self.extend(tokens.shape[1]))

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
            mask = last_rows(new, length, self.device)  # s t
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


def last_rows(query_len: int, key_len: int, device: torch.device | None = None) -> torch.Tensor:
    """The last rows of `causal_mask`: the last query sees every key. Returns bool s t; do not write to it."""
    return causal_mask(key_len, device)[key_len - query_len :] if query_len < key_len else causal_mask(key_len, device)


def padded_causal_mask(pad: torch.Tensor, query_len: int, key_len: int) -> torch.Tensor:
    """`last_rows` for texts that begin with padding. No text token sees padding; a padding token sees itself.

    (If it saw no key, its softmax would be NaN, and the NaN would spread.)
    pad: b, the number of padding tokens at the start of each row. Returns bool b 1 s t.
    """
    keys = torch.arange(key_len, device=pad.device)
    queries = keys[key_len - query_len :]
    is_real = keys >= pad[:, None]  # b t
    sees_itself = queries[:, None] == keys  # s t
    visible = last_rows(query_len, key_len, pad.device) & is_real[:, None, :] | sees_itself  # b s t
    return visible[:, None]
