"""Generating text in loops that numba compiles.

Decoding one text reads every weight once for each token and does little with it, so it is as fast as memory is read;
PyTorch's product of a matrix and one vector reaches a fraction of that. Some tens of rows (a prompt, several texts
together, a bidirectional model's whole sequence) are few enough that PyTorch's kernels wait for memory as well, where
these loops reach the arithmetic limit. The largest matrix, the output head, is not read at all when only the likeliest
token of one text is wanted: a copy in 8 bits tells which few tokens can be the likeliest, by a bound that holds for
every input, and only those are computed.

Shapes:
    n blocks   l lanes: a block holds 1 row or 16 of them side by side, so that one instruction serves all
    r rows: the new positions of all texts   b texts   D model dim   h query heads   g key/value heads   d head dim
    f feed-forward dim   v vocabulary   t key position   i, o a matrix's input and output features
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange
from torch import nn

from fast.layers import FusedFeedForward, FusedRMSNorm
from fast.linear import Int8Linear, OneDNNLinear, quantise, state_of
from llama import Attention, FeedForward, KVCache, Llama, LlamaLayer, RMSNorm
from rope import rope_table

LANES = 16  # float32 numbers in a vector register of AVX-512, and in two or four of other processors
MAX_ROWS = 256  # of one call; attention is written for few rows, and PyTorch's is better for many
MAX_CANDIDATES = 1 / 16  # of the vocabulary: beyond that, computing all logits is faster than picking
# What a compiler may do to sums of floats, short of taking infinities and NaNs for impossible: a damaged checkpoint
# must show.
LOOSE_SUMS = {"reassoc", "contract", "arcp", "nsz"}


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


class Rows(NamedTuple):
    """What the rows are: r each, but for the rotation, which stands in lanes as the activations do."""

    text: np.ndarray  # which text
    position: np.ndarray  # where its key and value are stored
    first: np.ndarray  # it sees the stored keys from here
    end: np.ndarray  # to before here
    cos: np.ndarray  # n d/2 l
    sin: np.ndarray


# --------------------------------------------------------------------------------------------------- products


@njit(fastmath=LOOSE_SUMS, cache=True)
def project(weight: Matrix, x: np.ndarray) -> np.ndarray:
    """W x for every lane. x: n i l -> n o l"""
    y = np.empty((x.shape[0], len(weight.scale), x.shape[2]), np.float32)
    if x.shape[2] == 1:
        matvec(weight, x.reshape(-1), y.reshape(-1))
    else:
        matmul(weight, x, y)
    return y


@njit(parallel=True, fastmath=LOOSE_SUMS, cache=True)
def matvec(weight: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """y = W x. x: i, y: o. Rows far apart are read together, because four streams keep the memory busier than one."""
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


@njit(parallel=True, fastmath=LOOSE_SUMS, cache=True)
def matmul(weight: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """y = W x, 16 lanes at a time. x: n i 16, y: n o 16. The sums of four rows of W stay in registers."""
    rows, scale = weight
    quarter = len(rows) // 4
    for r in prange(quarter):
        for n in range(len(x)):
            sums = np.zeros((4, LANES), np.float32)
            for i in range(x.shape[1]):
                a, b = np.float32(rows[r, i]), np.float32(rows[r + quarter, i])
                c, d = np.float32(rows[r + 2 * quarter, i]), np.float32(rows[r + 3 * quarter, i])
                for lane in range(LANES):
                    sums[0, lane] += a * x[n, i, lane]
                    sums[1, lane] += b * x[n, i, lane]
                    sums[2, lane] += c * x[n, i, lane]
                    sums[3, lane] += d * x[n, i, lane]
            for lane in range(LANES):
                y[n, r, lane] = sums[0, lane] * scale[r]
                y[n, r + quarter, lane] = sums[1, lane] * scale[r + quarter]
                y[n, r + 2 * quarter, lane] = sums[2, lane] * scale[r + 2 * quarter]
                y[n, r + 3 * quarter, lane] = sums[3, lane] * scale[r + 3 * quarter]
    for r in range(4 * quarter, len(rows)):
        for n in range(len(x)):
            for lane in range(LANES):
                y[n, r, lane] = dot(rows[r], x[n, :, lane]) * scale[r]


@njit(fastmath=LOOSE_SUMS, cache=True)
def dot(row: np.ndarray, x: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(len(x)):
        total += np.float32(row[i]) * x[i]
    return total


# ------------------------------------------------------------------------------------------------ one layer


@njit(fastmath=LOOSE_SUMS, cache=True)
def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x: n D l -> n D l"""
    y = np.empty_like(x)
    blocks, dim, lanes = x.shape
    for n in range(blocks):
        squares = np.zeros(lanes, np.float32)
        for i in range(dim):
            for lane in range(lanes):
                squares[lane] += x[n, i, lane] * x[n, i, lane]
        scale = np.float32(1) / np.sqrt(squares / np.float32(dim) + np.float32(eps))
        for i in range(dim):
            for lane in range(lanes):
                y[n, i, lane] = x[n, i, lane] * scale[lane] * weight[i]
    return y


@njit(fastmath=LOOSE_SUMS, cache=True)
def rotate_heads(x: np.ndarray, rows: Rows) -> None:
    """RoPE in place, see rope.py. x: n (h d) l"""
    blocks, features, lanes = x.shape
    half = rows.cos.shape[1]
    for n in range(blocks):
        for pair in range(features // 2):
            for lane in range(lanes):
                cos, sin = rows.cos[n, pair % half, lane], rows.sin[n, pair % half, lane]
                real, imag = x[n, 2 * pair, lane], x[n, 2 * pair + 1, lane]
                x[n, 2 * pair, lane] = real * cos - imag * sin
                x[n, 2 * pair + 1, lane] = real * sin + imag * cos


@njit(cache=True)
def store(x: np.ndarray, rows: Rows, stored: np.ndarray) -> None:
    """Put each row's keys or values where they belong. x: n (g d) l; stored: b g t d"""
    lanes, dim = x.shape[2], stored.shape[3]
    for r in range(len(rows.text)):
        for group in range(stored.shape[1]):
            for i in range(dim):
                stored[rows.text[r], group, rows.position[r], i] = x[r // lanes, group * dim + i, r % lanes]


@njit(parallel=True, fastmath=LOOSE_SUMS, cache=True)
def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, rows: Rows) -> np.ndarray:
    """Each row's attention to the stored positions that it sees.

    query: n (h d) l; keys, values: b g t d. Returns n (h d) l
    """
    y = np.zeros_like(query)
    lanes, dim = query.shape[2], keys.shape[3]
    heads = query.shape[1] // dim
    for task in prange(len(rows.text) * heads):
        r, h = task // heads, task % heads
        text, group = rows.text[r], h * keys.shape[1] // heads
        seen = slice(rows.first[r], rows.end[r])
        head = np.empty(dim, np.float32)
        for i in range(dim):
            head[i] = query[r // lanes, h * dim + i, r % lanes] / np.sqrt(np.float32(dim))
        weights = scores(keys[text, group, seen], head)
        weights = np.exp(weights - weights.max())
        mean(values[text, group, seen], weights / weights.sum(), head)
        for i in range(dim):
            y[r // lanes, h * dim + i, r % lanes] = head[i]
    return y


@njit(fastmath=LOOSE_SUMS, cache=True)
def scores(keys: np.ndarray, query: np.ndarray) -> np.ndarray:
    """The product of each key and a query, four at a time. keys: t d, query: d -> t"""
    y = np.empty(len(keys), np.float32)
    whole = len(keys) // 4 * 4
    for t in range(0, whole, 4):
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(len(query)):
            a += keys[t, i] * query[i]
            b += keys[t + 1, i] * query[i]
            c += keys[t + 2, i] * query[i]
            d += keys[t + 3, i] * query[i]
        y[t], y[t + 1], y[t + 2], y[t + 3] = a, b, c, d
    for t in range(whole, len(keys)):
        y[t] = dot(keys[t], query)
    return y


@njit(fastmath=LOOSE_SUMS, cache=True)
def mean(values: np.ndarray, weights: np.ndarray, y: np.ndarray) -> None:
    """The weighted mean of values, four at a time. values: t d, weights: t, y: d"""
    y[:] = 0
    whole = len(values) // 4 * 4
    for t in range(0, whole, 4):
        a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for i in range(len(y)):
            y[i] += a * values[t, i] + b * values[t + 1, i] + c * values[t + 2, i] + d * values[t + 3, i]
    for t in range(whole, len(values)):
        for i in range(len(y)):
            y[i] += weights[t] * values[t, i]


@njit(parallel=True, fastmath=LOOSE_SUMS, cache=True)
def swiglu(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """silu(a) * b. n f l each"""
    y = np.empty_like(a)
    blocks, features, lanes = a.shape
    for i in prange(features):
        for n in range(blocks):
            for lane in range(lanes):
                y[n, i, lane] = a[n, i, lane] / (np.float32(1) + np.exp(-a[n, i, lane])) * b[n, i, lane]
    return y


@njit(cache=True)
def store_layer(
    x: np.ndarray, weights: LayerWeights, eps: float, rows: Rows, keys: np.ndarray, values: np.ndarray
) -> None:
    """What other positions need of each row: its key and value. x: n D l; keys, values: b g t d"""
    normed = rms_norm(x, weights.attention_norm, eps)
    key = project(weights.key, normed)
    rotate_heads(key, rows)
    store(key, rows, keys)
    store(project(weights.value, normed), rows, values)


@njit(cache=True)
def finish_layer(
    x: np.ndarray, weights: LayerWeights, eps: float, rows: Rows, keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """`LlamaLayer.forward` for rows whose keys and values are stored. x: n D l -> n D l"""
    query = project(weights.query, rms_norm(x, weights.attention_norm, eps))
    rotate_heads(query, rows)
    x = x + project(weights.output, attend(query, keys, values, rows))
    normed = rms_norm(x, weights.ffn_norm, eps)
    return x + project(weights.w2, swiglu(project(weights.w1, normed), project(weights.w3, normed)))


@njit(cache=True)
def layer_step(
    x: np.ndarray, weights: LayerWeights, eps: float, rows: Rows, keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """`LlamaLayer.forward`. x: n D l -> n D l; keys, values: b g t d"""
    store_layer(x, weights, eps, rows, keys, values)
    return finish_layer(x, weights, eps, rows, keys, values)


@njit(fastmath=LOOSE_SUMS, cache=True)
def rescore(rows: np.ndarray, x: np.ndarray, error: np.ndarray, logits: np.ndarray, at_most: int) -> bool:
    """Make the largest of approximate logits the true one: compute anew those that can be the largest.

    rows: v D; x: D; error: v, so that logits[v] is within error[v] * |x| of the true logit. Returns False, with nothing
    done, if more than `at_most` can be.
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


def to_lanes(x: np.ndarray) -> np.ndarray:
    """Rows side by side, the last block filled up with zeros; one row stays alone. x: r i -> n i l"""
    lanes = 1 if len(x) == 1 else LANES
    blocks = -(-len(x) // lanes)
    padded = np.zeros((blocks * lanes, x.shape[1]), x.dtype)
    padded[: len(x)] = x
    return np.ascontiguousarray(padded.reshape(blocks, lanes, -1).transpose(0, 2, 1))


def from_lanes(x: np.ndarray, rows: int) -> np.ndarray:
    """x: n i l -> r i"""
    return x.transpose(0, 2, 1).reshape(-1, x.shape[1])[:rows]


def use_threads_of_pytorch() -> None:
    """As many as PyTorch has, here and afterwards there."""
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    # numba's first threads come from OpenMP, where it then sets the number for all who use it; PyTorch is one of them
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


class DecodeEngine:
    """A Llama's weights as the loops read them. They are the model's own memory, but for the 8-bit copy of the head."""

    def __init__(self, llama: Llama):
        self.config = llama.config
        self.embeddings = llama.tok_embeddings.weight.detach()  # v D
        self.layers = [_layer_weights(layer) for layer in llama.layers]
        self.norm = _array(llama.norm.weight)
        self.head = _matrix(llama.output)
        self.screen, self.screen_error = None, None
        if not isinstance(llama.output, Int8Linear):
            self.screen, self.screen_error = screened(llama.output.weight.detach())
        self.source = source_of(llama)

    def logits(self, tokens: torch.Tensor, cache: KVCache | None, only_largest: bool = False) -> torch.Tensor:
        """What `Llama.forward` gives as logits of the last position, and what it adds to the cache.

        tokens: b s, those that the cache does not hold yet -> b v. only_largest: all but the largest may be
        approximate, and are smaller.
        """
        use_threads_of_pytorch()
        batch, new = tokens.shape
        rows, last = self._rows(batch, new, cache)
        stored = self._stored(batch, new, cache)
        x = to_lanes(F.embedding(tokens.reshape(-1), self.embeddings).numpy())  # n D l
        eps = self.config.layer_norm_eps
        for weights, (keys, values) in zip(self.layers[:-1], stored, strict=False):
            x = layer_step(x, weights, eps, rows, keys, values)
        store_layer(x, self.layers[-1], eps, rows, *stored[-1])
        if new > 1:  # from here on only the last position of each text is read
            x = to_lanes(from_lanes(x, batch * new)[new - 1 :: new])
        x = finish_layer(x, self.layers[-1], eps, last, *stored[-1])
        if cache is not None:
            cache.length += new  # not begin() and end(): they make masks, which the loops have no use for
        return self._head(rms_norm(x, self.norm, eps), batch, only_largest)

    def _rows(self, batch: int, new: int, cache: KVCache | None) -> tuple[Rows, Rows]:
        """All new positions, and the last one of each text."""
        start = 0 if cache is None else cache.length
        pad = np.zeros(batch, np.int64) if cache is None or cache.pad is None else cache.pad.numpy()
        text = np.repeat(np.arange(batch), new)  # r
        position = np.tile(np.arange(start, start + new), batch)  # r
        first = np.minimum(pad[text], position)  # padding sees itself, or it would divide by zero
        end = position + 1 if self.config.is_causal else np.full_like(position, new)
        config = self.config
        tables = rope_table(config.head_dim, max(config.max_seq_len, start + new), config.rope_theta)
        angles = [table.numpy()[(position - pad[text]).clip(min=0)] for table in tables]  # r d/2 each
        per_row = (text, position, first, end, *angles)
        chosen = (values[new - 1 :: new] for values in per_row)
        return _make_rows(*per_row), _make_rows(*chosen)

    def _stored(self, batch: int, new: int, cache: KVCache | None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and values of each layer, b g t d; without a cache all layers share one place."""
        config = self.config
        if cache is None:
            shape = (batch, config.n_kv_heads, new, config.head_dim)
            return [(np.empty(shape, np.float32), np.empty(shape, np.float32))] * config.n_layers
        cache.allocate(torch.float32, torch.device("cpu"))
        return [(keys.numpy(), values.numpy()) for keys, values in zip(cache.keys, cache.values, strict=True)]

    def _head(self, x: np.ndarray, batch: int, only_largest: bool) -> torch.Tensor:
        """x: n D l -> b v"""
        if only_largest and batch == 1 and self.screen is not None:
            logits = project(self.screen, x).reshape(-1)  # v
            at_most = int(MAX_CANDIDATES * len(logits))
            if rescore(self.head.rows, x.reshape(-1), self.screen_error, logits, at_most):
                return torch.from_numpy(logits)[None]
        return torch.from_numpy(from_lanes(project(self.head, x), batch))


def _make_rows(
    text: np.ndarray, position: np.ndarray, first: np.ndarray, end: np.ndarray, cos: np.ndarray, sin: np.ndarray
) -> Rows:
    return Rows(*map(np.ascontiguousarray, (text, position, first, end)), to_lanes(cos), to_lanes(sin))


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


def source_of(llama: Llama) -> list[Any]:
    """Changes when a weight is replaced or written to, or a module is replaced."""
    return [state_of(weight) for weight in llama.parameters()] + [type(module) for module in llama.modules()]


def is_readable(llama: Llama) -> bool:
    """Whether the loops compute what the model would: float32 on the CPU, no module replaced, none with a hook."""
    return all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in llama.parameters()) and all(
        type(module) in READABLE
        and getattr(module, "bias", None) is None
        and not (module._forward_hooks or module._forward_pre_hooks)
        for module in llama.modules()
    )


def _array(weight: torch.Tensor) -> np.ndarray:
    return weight.detach().numpy()


def _matrix(linear: torch.nn.Linear) -> Matrix:
    if isinstance(linear, Int8Linear):
        return Matrix(*(part.numpy() for part in linear.eight_bits()))
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
    """A `Llama` that generates through a `DecodeEngine`, which is made when needed."""

    _engine: DecodeEngine | None = None

    def train(self, mode: bool = True) -> DecodingLlama:
        self._engine = None
        return super().train(mode)

    def hidden_states(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        self._expect_training()
        return super().hidden_states(tokens, cache)

    def hidden_state_at(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self._expect_training()
        return super().hidden_state_at(tokens, at)

    def _expect_training(self) -> None:
        """PyTorch does not count the changes that its fused optimizers make, but they need gradients first."""
        if torch.is_grad_enabled():
            self._engine = None

    def _next_logits(self, idx: torch.Tensor, cache: KVCache | None, only_largest: bool = False) -> torch.Tensor:
        """As in `Llama`; the uncached causal model, and what does not fit, is left to it."""
        begins = cache is None or cache.length == 0  # a text; the weights cannot change before it ends
        if begins and self._engine is not None and not (is_readable(self) and self._engine.source == source_of(self)):
            self._engine = None
        new = idx if cache is None else idx[:, cache.length :]
        is_plain = self.training or (self.config.is_causal and cache is None)
        if is_plain or idx.shape[1] > self.config.max_seq_len or new.numel() > MAX_ROWS:
            return super()._next_logits(idx, cache, only_largest)
        if self._engine is None:
            if not is_readable(self):
                return super()._next_logits(idx, cache, only_largest)
            self._engine = DecodeEngine(self)
        return self._engine.logits(new, cache, only_largest)

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and `torch.save` take along."""
        return {name: value for name, value in self.__dict__.items() if name != "_engine"}


# Modules that the loops compute, or that do nothing while a text is generated
LINEARS = {nn.Linear, OneDNNLinear, Int8Linear}
LAYERS = {LlamaLayer, Attention, FeedForward, FusedFeedForward, RMSNorm, FusedRMSNorm}
READABLE = {DecodingLlama, nn.ModuleList, nn.Embedding, nn.Dropout} | LAYERS | LINEARS
