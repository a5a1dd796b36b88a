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

import torch
import torch.nn.functional as F
from torch import nn

from base_llama import LayerNorm, LlamaPreTrainedModel, causal_mask
from config import LlamaConfig, swiglu_hidden_dim
from rope import apply_rotary_emb

# The names of the attention matrices in the checkpoints of Meta and llama2.c; all other names are the same there.
META_NAMES = {"wq": "compute_query", "wk": "compute_key", "wv": "compute_value", "wo": "compute_output"}


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang & Sennrich 2019, arXiv:1910.07467, equation 4)."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps), the mean over the last dimension. x: ... D -> ... D

        For x = (3, 4) and a tiny eps: mean(x^2) = 12.5, so the result is (0.849, 1.131).
        """
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ... D -> ... D. The mean is taken in float32 for every dtype of x: half precision overflows early."""
        return self._norm(x.float()).type_as(x) * self.weight


NORMS = {"rms": RMSNorm, "layer": LayerNorm}  # of a config's `norm`


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.n_rep = config.n_heads // config.n_kv_heads
        self.max_seq_len, self.is_causal = config.max_seq_len, config.is_causal
        self.rope = (config.rope_theta,) if config.rope_scaling is None else (config.rope_theta, config.rope_scaling)
        self.compute_query = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.compute_key = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.compute_value = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.compute_output = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)

    def compute_query_key_value_scores(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """softmax(query key^T / sqrt(d)) value for all heads at once (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

        query: b h s d, key and value: b h t d -> b h s d. `attn_dropout` acts on the weights, before they meet the
        values. A query of zeros gives every key the weight 1/t, so its output is the mean of the values.
        mask: bool, broadcasts to b h s t, True where a query may see a key; None: every query sees every key.
        """
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)  # b h s t
        if mask is not None:  # only a causal model gives one
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = self.attn_dropout(scores.float().softmax(dim=-1).type_as(query))  # b h s t
        return weights @ value  # b h s d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: b s D -> b s D"""
        heads = (self.compute_query, self.compute_key, self.compute_value)
        query, key, value = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in heads)  # b s h d, b s g d twice
        query, key = apply_rotary_emb(query, key, self.head_dim, self.max_seq_len, *self.rope)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # b h s d, b g s d
        if self.n_rep > 1:  # each key/value head serves n_rep query heads
            key, value = (part.repeat_interleave(self.n_rep, dim=1) for part in (key, value))  # b h s d
        mask = (causal_mask(x.shape[1], x.device),) if self.is_causal else ()  # else the assignment's three arguments
        output = self.compute_query_key_value_scores(query, key, value, *mask)  # b h s d
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
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim, config.multiple_of, config.dropout)
        self.attention_norm = NORMS[config.norm](config.dim, eps=config.layer_norm_eps)
        self.ffn_norm = NORMS[config.norm](config.dim, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """h = x + attention(attention_norm(x)), and then h + feed_forward(ffn_norm(h)). x: b s D -> b s D

        Both sums add what was there *before* the norm. With weights of 0 in `compute_output` and `w2` the layer
        returns x itself.
        """
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(LlamaPreTrainedModel):
    """The language model: from token ids to next-token logits and hidden states."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.params = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(LlamaLayer(layer_id, config) for layer_id in range(config.n_layers))
        self.norm = NORMS[config.norm](config.dim, eps=config.layer_norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:  # Press & Wolf 2017, arXiv:1608.05859
            self.tok_embeddings.weight = self.output.weight
        self.init_weights()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Next-token logits and hidden states, after the final norm.

        tokens: b s; -1 is padding of a vocabulary that has no piece for it. If `targets` is given (its values are not
        read), the logits of every position are computed, else only those of the last position.
        Returns logits (b s v, or b 1 v) and hidden states (b s D).
        """
        h = self.dropout(self.tok_embeddings(tokens.masked_fill(tokens == -1, 0)))  # b s D
        for layer in self.layers:
            h = layer(h)
        h = self.norm(h)
        logits = self.output(h if targets is not None else h[:, [-1], :])
        return logits, h

    @torch.inference_mode()
    def generate(self, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0) -> torch.Tensor:
        """Continue each text by `max_new_tokens` tokens; the model reads the last `max_seq_len` tokens of a text.

        idx: b s -> b (s + max_new_tokens). Each new token is, at temperature 0, the likeliest; else it is drawn from
        softmax(logits / temperature). For logits (0, 1) the second token is drawn with probability 0.73 at
        temperature 1, and with 0.88 at 0.5.
        """
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.max_seq_len :])
            logits = logits[:, -1, :]  # b v: after the last token
            if temperature == 0.0:
                idx_next = logits.argmax(dim=-1, keepdim=True)  # b 1
            else:
                probs = F.softmax(logits / temperature, dim=-1)  # b v
                idx_next = torch.multinomial(probs, num_samples=1)  # b 1
            idx = torch.cat((idx, idx_next), dim=1)
        return idx


def load_pretrained(path: str | os.PathLike, *, attention: str | None = None, norm: str | None = None) -> Llama:
    """Load a Llama from a checkpoint `{'model': state_dict, 'model_args': {...}, ...}`, in float32 on the CPU.

    Names may be the assignment's or Meta's, also with the prefix `_orig_mod.` of `torch.compile`. attention, norm:
    replace the checkpoint's own settings. `engine.weights.load_llama_model` also explains what is wrong with a file.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    changes = {name: value for name, value in (("attention", attention), ("norm", norm)) if value is not None}
    model = Llama(LlamaConfig.from_checkpoint(checkpoint["model_args"], **changes))
    biases = {name: zeros for name, zeros in model.state_dict().items() if name.endswith("norm.bias")}
    # as in the course, a LayerNorm takes the weights of an RMSNorm, which has no biases: they stay 0
    state = biases | {own_name(name): tensor for name, tensor in checkpoint["model"].items()}
    for name, twin in (("output.weight", "tok_embeddings.weight"), ("tok_embeddings.weight", "output.weight")):
        if model.config.tied and twin in state:  # the shared matrix may be stored under one of its two names
            state.setdefault(name, state[twin])
    model.load_state_dict(state)
    return model.eval()


def own_name(name: str) -> str:
    """This module's name for a tensor, from its name in a checkpoint."""
    return ".".join(META_NAMES.get(part, part) for part in name.removeprefix("_orig_mod.").split("."))
