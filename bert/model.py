"""BERT (Devlin et al. 2019, arXiv:1810.04805), the encoder: read it beside `llama.py`.

What differs from the Llama there: every position sees every other one, but padding; positions are vectors that are
added to the tokens', not rotations; each half of a layer is normalised after it was added (post-norm), by LayerNorm;
the feed-forward has two matrices and GELU; every matrix has a bias.

Shapes: b batch   s position (of queries)   t position (of keys)   h heads   d head dim   D model dim   f feed-forward
dim   v vocabulary   c classes
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bert.config import BertConfig

BERT_INIT_STD = 0.02  # of all matrices, as in the code published with the paper, which cuts the tails off at 2 std


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), exact or by their tanh; or ReLU.

    The code published with BERT computes by tanh what its settings call "gelu"; transformers and this module compute it
    exactly, with the same weights.
    """
    return {"gelu": F.gelu, "gelu_new": nn.GELU(approximate="tanh"), "relu": F.relu}[name]


def sinusoids(length: int, dim: int) -> torch.Tensor:
    """The table of Vaswani et al. 2017 (arXiv:1706.03762, section 3.5): sine and cosine of each wavelength. s D"""
    rates = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # D/2
    angles = torch.outer(torch.arange(length, dtype=torch.float64), rates)  # s D/2
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


class Embeddings(nn.Module):
    """The sum of three embeddings (section 3, figure 2): which token, where it stands, in which segment.

    The row of [PAD] is drawn and trained like every other one, as in the published code. In transformers it begins as
    zeros, and reading it gives it no gradient.
    """

    def __init__(self, config: BertConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.max_seq_len, config.dim)
        self.segments = nn.Embedding(config.n_segments, config.dim) if config.n_segments else None
        self.first_segment = config.first_segment
        self.norm = nn.LayerNorm(config.dim, eps=config.layer_norm_eps) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: torch.Tensor, segment_ids: torch.Tensor | None = None) -> torch.Tensor:
        """input_ids: b s, segment_ids: b s -> b s D. Without segment_ids all is of the first segment."""
        length, limit = input_ids.shape[1], self.positions.num_embeddings
        if length > limit:
            raise ValueError(f"a text of {length} tokens does not fit into {limit} positions; truncate it")
        x = self.tokens(input_ids) + self.positions.weight[:length]  # b s D
        if self.segments is not None:
            if segment_ids is None:
                segment_ids = torch.full_like(input_ids, self.first_segment)
            x = x + self.segments(segment_ids)
        return self.dropout(self.norm(x))


class BertAttention(nn.Module):
    """Multi-head self-attention, bidirectional (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.n_heads, self.head_dim = config.n_heads, config.head_dim
        self.compute_query = nn.Linear(config.dim, config.dim)
        self.compute_key = nn.Linear(config.dim, config.dim)
        self.compute_value = nn.Linear(config.dim, config.dim)
        self.compute_output = nn.Linear(config.dim, config.dim)
        self.attn_dropout = nn.Dropout(config.attention_dropout)
        self.resid_dropout = nn.Dropout(config.dropout)

    def compute_query_key_value_scores(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """softmax(q k^T / sqrt(d)) v. query, key, value: b h s d -> b h s d. mask: b 1 1 t, true at real tokens."""
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)  # b h s t
        scores = scores.float()
        if mask is not None:  # the lowest finite number: a row of nothing but padding stays free of NaN
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = self.attn_dropout(scores.softmax(dim=-1).type_as(query))  # b h s t
        return weights @ value  # b h s d

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: Any = None) -> torch.Tensor:
        """x: b s D -> b s D. cache: an object whose `store` is given keys and values, and returns those to attend to"""
        projections = (self.compute_query, self.compute_key, self.compute_value)
        heads = (compute(x).unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for compute in projections)
        query, key, value = heads  # b h s d
        if cache is not None:  # see advanced/prefix.py
            key, value = cache.store(0, key, value)  # b h t d
        output = self.compute_query_key_value_scores(query, key, value, mask)  # b h s d
        return self.resid_dropout(self.compute_output(output.transpose(1, 2).flatten(-2)))


class BertFeedForward(nn.Module):
    """w2(gelu(w1 x)), at each position by itself."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim)
        self.w2 = nn.Linear(config.hidden_dim, config.dim)
        self.activation = activation(config.activation)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: b s D -> b s D, through b s f"""
        return self.dropout(self.w2(self.activation(self.w1(x))))


class BertLayer(nn.Module):
    """One transformer layer, post-norm: each half's output is added to its input, and the sum is normalised."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = BertAttention(config)
        self.feed_forward = BertFeedForward(config)
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.layer_norm_eps)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """x: b s D -> b s D"""
        h = self.attention_norm(x + self.attention(x, mask))
        return self.ffn_norm(h + self.feed_forward(h))


class Bert(nn.Module):
    """The encoder: token ids to a hidden state for each token and, with a pooler, a vector for the whole text."""

    kernels = "bert.kernels"  # the module that plans faster replacements, see `fast.apply`

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.n_layers))
        self.pooler = nn.Linear(config.dim, config.dim) if config.has_pooler else None
        self.apply(init_weights)
        if config.positions == "sinusoidal":
            positions = self.embeddings.positions.weight.requires_grad_(False)
            with torch.no_grad():
                positions.copy_(sinusoids(config.max_seq_len, config.dim))

    @property
    def tok_embeddings(self) -> nn.Embedding:
        """The name that a Llama has for it: methods (advanced/) find it so in both."""
        return self.embeddings.tokens

    def init_weights(self, part: nn.Module) -> None:
        """Draw the weights of a part of the model anew, as `LlamaPreTrainedModel.init_weights` does."""
        part.apply(init_weights)

    def forward(
        self,
        input_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The hidden states and the pooled vector: tanh of a linear map of the first token's state, that of [CLS].

        input_ids, segment_ids: b s. Without segment_ids all is of the first segment; a model that has no segments does
        not read them. padding_mask: b s, true (or 1) at real tokens; None means `input_ids != pad_id`.
        Returns hidden states (b s D), and b D or, of a model without a pooler, None. What stands at padding means
        nothing. Raises `ValueError` for a text that is longer than the model's positions.
        """
        if padding_mask is None:
            padding_mask = input_ids != self.config.pad_id
        mask = padding_mask.bool()[:, None, None, :]  # b 1 1 t
        h = self.embeddings(input_ids, segment_ids)  # b s D
        for layer in self.layers:
            h = layer(h, mask)
        return h, None if self.pooler is None else torch.tanh(self.pooler(h[:, 0]))


def init_weights(module: nn.Module) -> None:
    """Matrices from N(0, 0.02^2), biases zero; LayerNorm begins as the identity, as PyTorch makes it."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=BERT_INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
