"""Decoding one text, one token at a time, in loops that numba compiles.

Each token reads every weight once and does little with it, so decoding is as fast as memory is read. PyTorch's product
of a matrix and one vector reaches a fraction of that, and its many small operations add to it. Here a layer is a
handful of loops. The largest matrix, the output head, is not read at all when only the likeliest token is wanted: a
copy in 8 bits tells which few tokens can be the likeliest, by a bound that holds for every input, and only those are
computed.

Shapes, for a single position:
    D model dim   h query heads   g key/value heads   d head dim   f feed-forward dim   v vocabulary   t key position
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import torch
from numba import njit, prange

from fast.linear import Int8Linear, quantise
from llama import KVCache, Llama, LlamaLayer
from rope import rope_table

# What a compiler may do to sums of floats, short of taking infinities and NaNs for impossible: a damaged checkpoint
# must show.
LOOSE_SUMS = {"reassoc", "contract", "arcp", "nsz"}
MAX_CANDIDATES = 1 / 16  # of the vocabulary: beyond that, computing all logits is faster than picking


class Matrix(NamedTuple):
    """A weight as rows times a scale for each row. rows: o i, float32 or int8; scale: o, float32."""

    rows: np.ndarray
    scale: np.ndarray


class LayerWeights(NamedTuple):
    attention_norm: np.ndarray
    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    ffn_norm: np.ndarray
    w1: Matrix
    w2: Matrix
    w3: Matrix


# ------------------------------------------------------------------------------------------------------ loops


@njit(parallel=True, fastmath=LOOSE_SUMS, cache=True)
def matvec(weight: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """y = W x. Rows far apart are read at the same time, because four streams keep the memory busier than one."""
    rows, scale = weight
    quarter = len(y) // 4
    for r in prange(quarter):
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(len(x)):
            a += np.float32(rows[r, i]) * x[i]
            b += np.float32(rows[r + quarter, i]) * x[i]
            c += np.float32(rows[r + 2 * quarter, i]) * x[i]
            d += np.float32(rows[r + 3 * quarter, i]) * x[i]
        y[r] = a * scale[r]
        y[r + quarter] = b * scale[r + quarter]
        y[r + 2 * quarter] = c * scale[r + 2 * quarter]
        y[r + 3 * quarter] = d * scale[r + 3 * quarter]
    for r in range(4 * quarter, len(y)):
        y[r] = dot(rows[r], x) * scale[r]


@njit(fastmath=LOOSE_SUMS, cache=True)
def dot(row: np.ndarray, x: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(len(x)):
        total += np.float32(row[i]) * x[i]
    return total


@njit(parallel=True, fastmath=LOOSE_SUMS, cache=True)
def swiglu(w1: Matrix, w3: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """y = silu(w1 x) * w3 x. x: D, y: f"""
    half = (len(y) + 1) // 2
    for r in prange(half):
        s = min(r + half, len(y) - 1)  # with an odd f the last row is computed twice
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(len(x)):
            a += np.float32(w1.rows[r, i]) * x[i]
            b += np.float32(w1.rows[s, i]) * x[i]
            c += np.float32(w3.rows[r, i]) * x[i]
            d += np.float32(w3.rows[s, i]) * x[i]
        a, b = a * w1.scale[r], b * w1.scale[s]
        y[r] = a / (np.float32(1) + np.exp(-a)) * (c * w3.scale[r])
        y[s] = b / (np.float32(1) + np.exp(-b)) * (d * w3.scale[s])


@njit(fastmath=LOOSE_SUMS, cache=True)
def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, y: np.ndarray) -> None:
    square = np.float32(0)
    for i in range(len(x)):
        square += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(square / np.float32(len(x)) + np.float32(eps))
    for i in range(len(x)):
        y[i] = x[i] * scale * weight[i]


@njit(fastmath=LOOSE_SUMS, cache=True)
def rotate_heads(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """RoPE in place, see rope.py. heads: h d; cos, sin: d/2"""
    for head in heads:
        for pair in range(len(cos)):
            real, imag = head[2 * pair], head[2 * pair + 1]
            head[2 * pair] = real * cos[pair] - imag * sin[pair]
            head[2 * pair + 1] = real * sin[pair] + imag * cos[pair]


@njit(parallel=True, fastmath=LOOSE_SUMS, cache=True)
def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, length: int, y: np.ndarray) -> None:
    """Attention of one position to the first `length`. query, y: h d; keys, values: g t d"""
    heads, dim = query.shape
    for h in prange(heads):
        group = h * len(keys) // heads
        weights = np.empty(length, np.float32)
        largest = np.float32(-np.inf)
        for t in range(length):
            weights[t] = dot(keys[group, t], query[h]) / np.sqrt(np.float32(dim))
            largest = max(largest, weights[t])
        total = np.float32(0)
        for t in range(length):
            weights[t] = np.exp(weights[t] - largest)
            total += weights[t]
        y[h, :] = 0
        for t in range(length):
            weight = weights[t] / total
            for i in range(dim):
                y[h, i] += weight * values[group, t, i]


@njit(cache=True)
def layer_step(
    x: np.ndarray,
    weights: LayerWeights,
    eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    position: int,
) -> None:
    """`LlamaLayer.forward` for one new position; adds to x (D) and writes to keys and values (g t d)."""
    groups, _, dim = keys.shape
    normed, added = np.empty_like(x), np.empty_like(x)
    query, attended = np.empty_like(x), np.empty_like(x)
    key, value = np.empty(groups * dim, np.float32), np.empty(groups * dim, np.float32)
    gate = np.empty(len(weights.w1.rows), np.float32)

    rms_norm(x, weights.attention_norm, eps, normed)
    matvec(weights.query, normed, query)
    matvec(weights.key, normed, key)
    matvec(weights.value, normed, value)
    heads = query.reshape(-1, dim)
    rotate_heads(heads, cos, sin)
    rotate_heads(key.reshape(groups, dim), cos, sin)
    keys[:, position] = key.reshape(groups, dim)
    values[:, position] = value.reshape(groups, dim)
    attend(heads, keys, values, position + 1, attended.reshape(-1, dim))
    matvec(weights.output, attended, added)
    x += added

    rms_norm(x, weights.ffn_norm, eps, normed)
    swiglu(weights.w1, weights.w3, normed, gate)
    matvec(weights.w2, gate, added)
    x += added


@njit(fastmath=LOOSE_SUMS, cache=True)
def rescore(rows: np.ndarray, x: np.ndarray, error: np.ndarray, logits: np.ndarray, at_most: int) -> bool:
    """Make the largest of approximate logits the true one: compute anew those that can be the largest.

    rows: v D; error: v, so that logits[v] is within error[v] * |x| of the true logit. False, with nothing done, if more
    than `at_most` can be.
    """
    norm = np.float32(np.sqrt(np.sum(x.astype(np.float64) ** 2)) * (1 + 1e-6))
    floor = np.max(logits - error * norm)
    candidates = np.flatnonzero(logits + error * norm >= floor)
    if len(candidates) > at_most:
        return False
    for v in candidates:
        logits[v] = dot(rows[v], x)
    return True


# ----------------------------------------------------------------------------------------------------- engine


class DecodeEngine:
    """A Llama's weights as the loops read them. They are the model's own memory, but for the 8-bit copy of the head."""

    def __init__(self, llama: Llama):
        self.config = llama.config
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        self.embeddings = _array(llama.tok_embeddings.weight)  # v D
        self.layers = [_layer_weights(layer) for layer in llama.layers]
        self.norm = _array(llama.norm.weight)
        self.head = _matrix(llama.output)
        self.screen, self.screen_error = None, None
        if not isinstance(llama.output, Int8Linear):
            self.screen, self.screen_error = screened(llama.output.weight.detach())
        self.logits = np.empty(self.config.vocab_size, np.float32)
        self.source = state_of(llama)
        self.cache: KVCache | None = None
        self.stored: list[tuple[np.ndarray, np.ndarray]] = []

    def step(self, token: int, cache: KVCache, only_largest: bool) -> torch.Tensor:
        """The logits after one more token, 1 v; with `only_largest` the others are approximate, and smaller."""
        if cache is not self.cache:
            self.cache = cache
            layers = zip(cache.keys[:, 0], cache.values[:, 0], strict=True)  # g t d each
            self.stored = [(keys.numpy(), values.numpy()) for keys, values in layers]
        config, position = self.config, cache.length
        cos, sin = rope_table(config.head_dim, config.max_seq_len, config.rope_theta, cache.keys.device)
        cos, sin = cos[position].numpy(), sin[position].numpy()  # d/2
        x = self.embeddings[token].copy()  # D
        for weights, (keys, values) in zip(self.layers, self.stored, strict=True):
            layer_step(x, weights, config.layer_norm_eps, cos, sin, keys, values, position)
        cache.begin(1)
        cache.end()
        rms_norm(x, self.norm, config.layer_norm_eps, x)
        self._compute_logits(x, only_largest and self.screen is not None)
        return torch.from_numpy(self.logits.copy())[None]

    def _compute_logits(self, x: np.ndarray, only_largest: bool) -> None:
        if only_largest:
            matvec(self.screen, x, self.logits)
            at_most = int(MAX_CANDIDATES * len(self.logits))
            if rescore(self.head.rows, x, self.screen_error, self.logits, at_most):
                return
        matvec(self.head, x, self.logits)


def screened(weight: torch.Tensor) -> tuple[Matrix, np.ndarray]:
    """An 8-bit copy of a head, and how far its logits can be from the true ones. weight: v D

    With w = s q + e for a row, its true logit w.x and the approximate one s (q.x) differ by e.x, at most |e| |x|
    (Cauchy-Schwarz). Each of the two is a float32 sum of D products, in whatever order, and so off by at most
    D u / (1 - D u) times |w| |x| and |s q| |x|, u = 2^-24 (Higham 2002, "Accuracy and Stability of Numerical
    Algorithms", section 3.1). Returns the copy and, for each row, the sum of these bounds over |x|, v.
    """
    quantised, scale = quantise(weight)
    rounded = quantised.double() * scale.double()[:, None]  # v D
    error = (weight.double() - rounded).norm(dim=-1)  # v
    terms = (weight.shape[1] + 4) * 2.0**-24  # D products, their sum, the scale and the norm
    rounding = terms / (1 - terms) * (weight.double().norm(dim=-1) + rounded.norm(dim=-1))
    bound = (error + rounding) * (1 + 1e-5)  # the comparison is made in float32 as well
    return Matrix(quantised.numpy(), scale.numpy()), bound.float().numpy()


def state_of(llama: Llama) -> list[tuple[int, int]]:
    """Changes when a weight is replaced or written to."""
    return [(weight.data_ptr(), weight._version) for weight in llama.parameters()]


def _array(weight: torch.Tensor) -> np.ndarray:
    return weight.detach().numpy()


def _matrix(linear: torch.nn.Linear) -> Matrix:
    if isinstance(linear, Int8Linear):
        return Matrix(linear.quantised.numpy(), linear.scale.numpy())
    return Matrix(_array(linear.weight), np.ones(linear.out_features, np.float32))


def _layer_weights(layer: LlamaLayer) -> LayerWeights:
    attention, feed_forward = layer.attention, layer.feed_forward
    return LayerWeights(
        _array(layer.attention_norm.weight),
        _matrix(attention.compute_query),
        _matrix(attention.compute_key),
        _matrix(attention.compute_value),
        _matrix(attention.compute_output),
        _array(layer.ffn_norm.weight),
        _matrix(feed_forward.w1),
        _matrix(feed_forward.w2),
        _matrix(feed_forward.w3),
    )


class DecodingLlama(Llama):
    """A `Llama` whose `generate` decodes a single causal text through a `DecodeEngine`, which is made when needed."""

    _engine: DecodeEngine | None = None

    def train(self, mode: bool = True) -> DecodingLlama:
        self._engine = None
        return super().train(mode)

    def _next_logits(self, idx: torch.Tensor, cache: KVCache | None, only_largest: bool = False) -> torch.Tensor:
        is_step = cache is not None and len(idx) == 1 and cache.pad is None
        if not is_step or not 0 < cache.length == idx.shape[1] - 1 < self.config.max_seq_len:
            return super()._next_logits(idx, cache, only_largest)
        if self._engine is None or (cache is not self._engine.cache and self._engine.source != state_of(self)):
            self._engine = DecodeEngine(self)
        return self._engine.step(int(idx[0, -1]), cache, only_largest)
