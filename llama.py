"""Llama 2 (Touvron et al. 2023, arXiv:2307.09288), written to be read.

What is particular here:
- the token embedding and the output projection are one matrix (weight tying), unless the config says otherwise;
- RoPE turns *interleaved* pairs; keys and values may have fewer heads than queries (arXiv:2305.13245);
- `attention="bidirectional"` has no causal mask: every position sees every other, padding as well. That is the
  assignment's reference. The weights were pretrained with `attention="causal"`.

Shapes:
    b batch      s query position   t key position   h query heads   g key/value heads
    d head dim   D model dim        f feed-forward dim               v vocabulary
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import nn

from base_llama import AttentionContext, KVCache, LayerNorm, LlamaPreTrainedModel, causal_mask, with_norm_biases
from config import LlamaConfig, swiglu_hidden_dim
from rope import apply_rotary_emb
from utils import UserError

# The names of the attention matrices in the checkpoints of Meta and llama2.c; all other names are the same there.
META_NAMES = {"wq": "compute_query", "wk": "compute_key", "wv": "compute_value", "wo": "compute_output"}


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang & Sennrich 2019, arXiv:1910.07467, equation 4)."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ... D -> ... D. The mean is taken in float32 for every dtype of x: half precision overflows early."""
        return self._norm(x.float()).type_as(x) * self.weight


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, layer_id: int = 0):
        super().__init__()
        self.layer_id = layer_id
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.n_rep = config.n_heads // config.n_kv_heads
        self.max_seq_len, self.is_causal = config.max_seq_len, config.is_causal
        self.rope_theta, self.rope_scaling = config.rope_theta, config.rope_scaling
        self.compute_query = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.compute_key = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.compute_value = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.compute_output = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)

    def compute_query_key_value_scores(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762, equation 1).

        query: b h s d, key and value: b h t d -> b h s d. mask: bool, broadcasts to b h s t, True where a query may
        see a key. Without a mask, a query sees every key; in a causal model it sees the keys up to its own position
        (the last query is at the position of the last key).
        """
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)  # b h s t
        if mask is None and self.is_causal:
            mask = causal_mask(query.shape[-2], key.shape[-2], query.device)  # s t
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = self.attn_dropout(scores.float().softmax(dim=-1).type_as(query))  # b h s t
        return weights @ value  # b h s d

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """x: b s D -> b s D, or b 1 D if the context has one query in each row. No context: x is a whole text."""
        if context is None:
            context = AttentionContext.of_text(x.shape[1], self.is_causal, x.device)
        heads = (-1, self.head_dim)
        query = self.compute_query(context.queries(x)).unflatten(-1, heads)  # b s h d
        key, value = (linear(x).unflatten(-1, heads) for linear in (self.compute_key, self.compute_value))  # b s g d
        positions = {"start_pos": context.start, "query_start": context.query_start, "scaling": self.rope_scaling}
        query, key = apply_rotary_emb(query, key, self.head_dim, self.max_seq_len, self.rope_theta, **positions)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # b h s d, b g s d
        if context.cache is not None:
            key, value = context.cache.store(self.layer_id, key, value)  # b g t d
        if self.n_rep > 1:  # each key/value head serves n_rep query heads
            key, value = (x.repeat_interleave(self.n_rep, dim=1) for x in (key, value))  # b h t d
        seen = () if context.mask is None else (context.mask,)  # no mask: the call has the assignment's three arguments
        output = self.compute_query_key_value_scores(query, key, value, *seen)  # b h s d
        return self.resid_dropout(self.compute_output(output.transpose(1, 2).flatten(-2)))  # b s D


class FeedForward(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202, equation 6): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int | None, multiple_of: int, dropout: float):
        super().__init__()
        if hidden_dim is None:
            hidden_dim = swiglu_hidden_dim(dim, multiple_of)
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: b s D -> b s D, through b s f"""
        return self.dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class LlamaLayer(nn.Module):
    """One transformer layer, pre-norm: each half normalises its input and adds its output to the residual stream."""

    def __init__(self, layer_id: int, config: LlamaConfig):
        super().__init__()
        self.layer_id = layer_id
        self.attention = Attention(config, layer_id)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim, config.multiple_of, config.dropout)
        norm = RMSNorm if config.norm == "rms" else LayerNorm
        self.attention_norm = norm(config.dim, eps=config.layer_norm_eps)
        self.ffn_norm = norm(config.dim, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """x: b s D -> b s D, or b 1 D if the context has one query in each row. No context: x is a whole text."""
        residual = x if context is None else context.queries(x)
        h = residual + self.attention(self.attention_norm(x), context)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(LlamaPreTrainedModel):
    """The language model: from token ids to next-token logits and hidden states."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.params = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(LlamaLayer(layer_id, config) for layer_id in range(config.n_layers))
        norm = RMSNorm if config.norm == "rms" else LayerNorm
        self.norm = norm(config.dim, eps=config.layer_norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:  # Press & Wolf 2017, arXiv:1608.05859
            self.tok_embeddings.weight = self.output.weight
        self.init_weights()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token embeddings, the input of the first layer. tokens: b s -> b s D"""
        tokens = tokens.masked_fill(tokens == -1, 0)  # -1: padding of a vocabulary that has no piece for it
        return self.dropout(self.tok_embeddings(tokens))

    def encode(
        self, h: torch.Tensor, context: AttentionContext | None = None, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the layers and the final norm. h: b s D -> b s D, or b 1 D: only the position `at` (b) of each row.

        Without a context, h holds whole texts. With `at`, the last layer computes only keys and values elsewhere.
        """
        if context is None:
            context = AttentionContext.of_text(h.shape[1], self.config.is_causal, h.device)
        *earlier, last = self.layers
        for layer in earlier:
            h = layer(h, context)
        h = last(h, context if at is None else context.queried_at(at))
        return self.norm(h)

    def hidden_states(
        self, tokens: torch.Tensor, cache: KVCache | None = None, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The normalised output of the last layer. tokens: b s -> b s D, or b 1 D: see `encode`."""
        context = None if cache is None else cache.extend(tokens.shape[1])
        return self.encode(self.embed(tokens), context, at)

    def hidden_state_at(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """`hidden_states` at one position of each row. tokens: b s, at: b -> b D"""
        return self.hidden_states(tokens, at=at)[:, 0]

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None, *, cache: KVCache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Next-token logits and hidden states. With a cache, `tokens` are the tokens that the cache does not hold yet.

        tokens: b s. If `targets` is given (its values are not read), the logits of every position are computed, else
        only those of the last position: generation and classification need no others.
        Returns logits (b s v, or b 1 v) and hidden states (b s D).
        """
        h = self.hidden_states(tokens, cache)
        logits = self.output(h if targets is not None else h[:, [-1], :])
        return logits, h

    def next_logits(self, idx: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Logits after the last token of `idx`; the model sees its last `max_seq_len` tokens. idx: b s -> b v"""
        limit, length = self.config.max_seq_len, idx.shape[1]
        if cache is None:
            return self(idx[:, -limit:])[0][:, -1]
        if length <= limit:
            return self(idx[:, cache.length :], cache=cache)[0][:, -1]
        # The window slides: all stored keys and values depend on the dropped token, so they are computed anew.
        pad = None if cache.pad is None else (cache.pad - (length - limit)).clamp(min=0)
        return self(idx[:, -limit:], cache=KVCache(self, len(idx), limit, pad))[0][:, -1]

    @torch.inference_mode()
    def generate(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        *,
        stop_ids: Collection[int] = (),
        generator: torch.Generator | None = None,
        pad: torch.Tensor | None = None,
        use_cache: bool = True,
        on_token: Callable[[torch.Tensor], None] | None = None,
        choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | tuple[torch.Tensor, torch.Tensor]] | None = None,
        next_logits: Callable[[torch.Tensor, KVCache | None], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Continue `idx` by at most `max_new_tokens` tokens, each chosen by `sample_next` at this temperature.

        idx: b s -> b (s + new). A causal model caches keys and values until the text is longer than `max_seq_len`.
        Without a cache, the last `max_seq_len` tokens are computed anew for each new token; the result is the same.
        pad: b, the number of padding tokens at the start of each row. on_token: called with each new column, b 1.
        A row that produced one of `stop_ids` repeats it; generation ends early when every row has produced one.
        choose: replaces `sample_next` (logits b v, idx b s -> b 1). It may return new tokens r 1 with row numbers r:
        then row i of the result continues row number r[i] of `idx`. next_logits: replaces the method of that name.
        Raises `ValueError` for `pad` without a cache, so also for `pad` with a bidirectional model.
        """
        if pad is not None and not (self.config.is_causal and use_cache):
            raise ValueError("padding before a text can be hidden from a causal model with a cache only")
        cache = None
        if self.config.is_causal and use_cache:
            cache = KVCache(self, len(idx), min(idx.shape[1] + max_new_tokens, self.config.max_seq_len), pad)
        stops = torch.tensor(sorted(stop_ids), dtype=idx.dtype, device=idx.device)
        stopped = torch.zeros_like(idx[:, :1], dtype=torch.bool)  # b 1
        for _ in range(max_new_tokens):
            logits = (next_logits or self.next_logits)(idx, cache)  # b v
            logits = logits if choose or self.config.sampling == "plain" else self.kept(logits, temperature)  # b v
            idx_next = choose(logits, idx) if choose else sample_next(logits, temperature, generator)  # b 1
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


def sample_next(
    logits: torch.Tensor, temperature: float = 1.0, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Choose the next token of each row, b v -> b 1; without a random number at temperature 0. Raises `ValueError`."""
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be at least 0 and finite")
    best, largest = likeliest(logits)
    if temperature == 0.0:
        return best
    # the maximum is subtracted first, so that a very small temperature does not overflow
    probs = ((logits.float() - largest.float()) / temperature).softmax(dim=-1)  # b v
    return torch.multinomial(probs, num_samples=1, generator=generator)  # b 1


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row and its logit. b v -> b 1, b 1. Raises `UserError` if a logit is not finite."""
    best = logits.argmax(dim=-1, keepdim=True)  # b 1
    largest = logits.gather(-1, best)  # b 1: NaN if any logit of the row is
    if not torch.isfinite(largest).all():
        raise UserError("the model's logits are not finite: its weights are damaged, or the code computes them wrongly")
    return best, largest


def load_pretrained(path: str | os.PathLike, *, attention: str | None = None, norm: str | None = None) -> Llama:
    """Load a Llama from a checkpoint `{'model': state_dict, 'model_args': {...}, ...}`, in float32 on the CPU.

    Names may be the assignment's or Meta's, also with the prefix `_orig_mod.` of `torch.compile`. attention, norm:
    replace the checkpoint's own settings. `engine.weights.load_pretrained` also explains what is wrong with a file.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    changes = {name: value for name, value in (("attention", attention), ("norm", norm)) if value is not None}
    model = Llama(LlamaConfig.from_checkpoint(checkpoint["model_args"], **changes))
    state = with_norm_biases({own_name(name): tensor for name, tensor in checkpoint["model"].items()}, model.config)
    for name, twin in (("output.weight", "tok_embeddings.weight"), ("tok_embeddings.weight", "output.weight")):
        if model.config.tied and twin in state:  # the shared matrix may be stored under one of its two names
            state.setdefault(name, state[twin])
    model.load_state_dict(state)
    return model.eval()


def own_name(name: str) -> str:
    """This module's name for a tensor, from its name in a checkpoint."""
    return ".".join(META_NAMES.get(part, part) for part in name.removeprefix("_orig_mod.").split("."))
