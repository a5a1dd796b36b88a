"""The next token of texts that are computed anew for every token, as bidirectional attention asks.

The weights stay while a text is generated, so they are laid out once: queries, keys and values are one product. The
last layer computes keys and values of all positions, and the rest at the last one.

Shapes:
    b texts   s positions   h query heads   g key/value heads   d head dim   D model dim   v vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from config import LlamaConfig
from engine.context import LIMIT, LONG_TEXT
from engine.equivalence import Case, Comparison, EquivalenceCheck
from engine.weights import computable_kinds
from fast.last_position import ASKED, compared_models
from fast.linear import OneDNNLinear, is_small, onednn_linear, pack
from llama import NORMS, Llama, LlamaLayer
from rope import rope_table, table_rows

FLOAT32 = (nn.Linear, OneDNNLinear)  # layers that multiply float32 numbers


class JoinedProduct:
    """x W^T for the weights of layers that read the same x, side by side; in oneDNN's layout where the layers are."""

    def __init__(self, *linears: nn.Linear):
        self.weights = [linear.weight.detach() for linear in linears]
        is_packed = all(type(linear) is OneDNNLinear and linear.packs for linear in linears)
        self.packed = pack(torch.cat(self.weights)) if is_packed else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: ... i -> ... o, the outputs of all layers one after another"""
        if self.packed is not None and not is_small(x, self.weights[0]):
            return onednn_linear(x, self.packed)
        products = [F.linear(x, weight) for weight in self.weights]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


class LayerParts(NamedTuple):
    """The weights of a `LlamaLayer`, as the engine reads them."""

    attention_norm: nn.Module
    heads: JoinedProduct  # queries, keys and values
    output: JoinedProduct
    ffn_norm: nn.Module
    gate: JoinedProduct
    factor: JoinedProduct
    down: JoinedProduct


def is_in_float32(llama: Llama) -> bool:
    """Whether every layer multiplies float32 numbers, without biases, on the CPU."""
    linears = (part for part in llama.modules() if isinstance(part, nn.Linear))
    is_plain = all(type(linear) in FLOAT32 and linear.bias is None for linear in linears)
    return is_plain and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in llama.parameters())


class WholeTextEngine:
    """Next-token logits of a Llama whose linear layers multiply float32 numbers, see `is_in_float32`.

    It reads the weights that the model has when the engine is made.
    """

    def __init__(self, llama: Llama):
        *earlier, last = llama.layers
        self.config, self.embeddings = llama.config, llama.tok_embeddings.weight.detach()  # v D
        self.layers = [_layer(layer) for layer in earlier]
        attention = last.attention
        self.last = _layer(last)._replace(heads=JoinedProduct(attention.compute_key, attention.compute_value))
        self.last_query = JoinedProduct(attention.compute_query)
        self.norm, self.head = llama.norm, JoinedProduct(llama.output)

    @torch.no_grad()
    def next_logits(self, idx: torch.Tensor) -> torch.Tensor:
        """The logits after each text, of which the model sees the last `max_seq_len` tokens. idx: b s -> b v"""
        tokens = idx[:, -self.config.max_seq_len :]
        h = F.embedding(tokens.masked_fill(tokens == -1, 0), self.embeddings)  # b s D
        angles = self._angles(tokens.shape[1])  # s 1 d/2
        for layer in self.layers:
            h = self._rest(layer, h, self._attended(*self._heads(layer, h, angles)))
        return self.head(self.norm(self._at_last(h, angles)))[:, 0]

    def _angles(self, length: int) -> torch.Tensor:
        """cos + i sin of each position. s 1 d/2"""
        config = self.config
        rows = table_rows(length, config.max_seq_len)
        cos, sin = rope_table(config.head_dim, rows, config.rope_theta, self.embeddings.device, config.rope_scaling)
        return torch.complex(cos[:length], sin[:length])[:, None]

    def _heads(self, layer: LayerParts, h: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values. h: b s D -> b s h d, b s g d twice"""
        config = self.config
        heads = layer.heads(layer.attention_norm(h)).unflatten(-1, (-1, config.head_dim))  # b s h+2g d
        turn(heads[:, :, : config.n_heads + config.n_kv_heads], angles)
        return heads.split([config.n_heads, config.n_kv_heads, config.n_kv_heads], dim=2)

    def _attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query: b s h d, or b 1 h d at the last position; key, value: b s g d -> b s D or b 1 D"""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        config = self.config
        settings = {"is_causal": config.is_causal and query.shape[2] > 1, "enable_gqa": config.n_heads > key.shape[1]}
        return F.scaled_dot_product_attention(query, key, value, **settings).transpose(1, 2).flatten(-2)

    def _rest(self, layer: LayerParts, h: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """A layer from the output of its attention on. h, attended: b s D, or b 1 D -> the same"""
        h = h + layer.output(attended)
        x = layer.ffn_norm(h)
        return h + layer.down(F.silu(layer.gate(x), inplace=True).mul_(layer.factor(x)))

    def _at_last(self, h: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """The last layer at the last position. h: b s D -> b 1 D"""
        x = self.last.attention_norm(h)
        key, value = self.last.heads(x).unflatten(-1, (-1, self.config.head_dim)).chunk(2, dim=2)
        query = self.last_query(x[:, -1]).unflatten(-1, (1, -1, self.config.head_dim))  # b 1 h d
        turn(key, angles)
        turn(query, angles[-1:])
        return self._rest(self.last, h[:, -1:], self._attended(query, key, value))


def turn(x: torch.Tensor, angles: torch.Tensor) -> None:
    """`rope.apply_rotary_emb` of one tensor, in place. x: b s h d, angles: s 1 d/2"""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(angles)


def _layer(layer: LlamaLayer) -> LayerParts:
    attention, feed_forward = layer.attention, layer.feed_forward
    heads = JoinedProduct(attention.compute_query, attention.compute_key, attention.compute_value)
    gates = (JoinedProduct(linear) for linear in (feed_forward.w1, feed_forward.w3, feed_forward.w2))
    return LayerParts(layer.attention_norm, heads, JoinedProduct(attention.compute_output), layer.ffn_norm, *gates)


# ------------------------------------------------------------------------------------------- comparison with llama.py


@lru_cache(maxsize=16)
def whole_text_check(config: tuple[tuple[str, Any], ...]) -> EquivalenceCheck:
    """Whether the engine agrees with a model of these settings, as llama.py stands."""
    made = LlamaConfig(**dict(config))
    said = "text is generated as the model is written"
    return EquivalenceCheck("Llama.forward", (*ASKED, NORMS[made.norm]), partial(_sides, made), instead=said)


def _sides(config: LlamaConfig) -> Comparison:
    models = compared_models(config)

    def plain(which: tuple[str, int], idx: torch.Tensor) -> list[torch.Tensor]:
        tokens = idx[:, -which[1] :]
        with torch.no_grad():
            return [models[which](tokens)[0][:, -1], models[which](tokens, tokens)[0][:, -1]]

    def kernel(which: tuple[str, int], idx: torch.Tensor) -> list[torch.Tensor]:
        return [WholeTextEngine(models[which]).next_logits(idx)] * 2

    return Comparison(plain, kernel, list(_cases(models)))


def _cases(models: dict[tuple[str, int], Llama]) -> Iterator[Case]:
    """Which model, and texts: also padding, and more tokens than the model sees."""
    deep, other, long = models
    padded = torch.tensor([[1, 7, -1, -1], [1, 2, 3, 4]])
    yield Case(f"{deep[0]}, two texts", (deep, padded))
    yield Case(f"{deep[0]}, one token", (deep, torch.randint(0, 50, (1, 1))))
    yield Case(f"{deep[0]}, a text that outgrows the model", (deep, torch.randint(0, 50, (1, LIMIT + 3))))
    if other[0] in computable_kinds():
        yield Case(f"{other[0]}, two texts", (other, torch.randint(0, 50, (2, LIMIT))))
    yield Case(f"{LONG_TEXT} tokens", (long, torch.randint(0, 50, (1, LONG_TEXT))))
