"""Generating text in compiled loops: the engine that runs them, and the model that generates through it.

Decoding one text reads every weight once for each token and does little with it, so it is as fast as memory is read;
several new positions at once meet the arithmetic limit. PyTorch's kernels reach neither. numba compiles the loops
(`loops.py`) at their first use and keeps them on disk.

Shapes:
    b texts   s new positions of each   r rows: all new positions   n blocks of l lanes (loops.py)   D model dim
    g key/value heads   d head dim   v vocabulary   t key position
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F

from fast import loops
from fast.head import ScreenedHead
from fast.layers import is_untouched
from fast.linear import Bf16Linear, Int8Linear, state_of
from fast.loops import LANES, LayerWeights, Matrix, Rows, Scratch, from_lanes, make_scratch, to_lanes
from llama import KVCache, Llama, LlamaLayer
from rope import rope_table

MAX_ROWS = 256  # of one call; attention is written for few rows, and PyTorch's is better for many


class DecodeEngine:
    """A Llama's weights as the loops read them: float32 ones where the model has them, in fewer bits a copy."""

    def __init__(self, llama: Llama):
        self.config = llama.config
        self.embeddings = llama.tok_embeddings.weight.detach()  # v D
        self.layers, self.layers_for_many = zip(*map(_layer_weights, llama.layers), strict=True)
        self.norm = _array(llama.norm.weight)
        self.head, self.head_for_many = _matrices(llama.output)
        self.screen = _screen(self.head_for_many)
        self.source = source_of(llama)
        self._room: Scratch | None = None
        self._lock = Lock()  # compiled loops let other threads of Python run, which may generate with the same model

    def logits(self, tokens: torch.Tensor, cache: KVCache | None, only_largest: bool = False) -> torch.Tensor:
        """What `Llama.forward` gives as logits of the last position, and what it adds to the cache.

        tokens: b s, those that the cache does not hold yet -> b v. only_largest: all but the largest may be
        approximate, and are smaller.
        """
        with self._lock:
            return self._logits(tokens, cache, only_largest)

    def _logits(self, tokens: torch.Tensor, cache: KVCache | None, only_largest: bool) -> torch.Tensor:
        use_threads_of_pytorch()
        x = F.embedding(tokens.flatten(), self.embeddings).numpy()  # r D
        keys, values = self._stored(tokens.shape, cache)
        is_step = tokens.numel() == 1 and cache is not None
        x = self._step(x, cache, keys, values) if is_step else self._steps(x, tokens.shape, cache, keys, values)  # b D
        if cache is not None:
            cache.length += tokens.shape[1]  # not begin() and end(): they make masks, which the loops have no use for
        return torch.from_numpy(self._head(x, only_largest))

    def _step(self, x: np.ndarray, cache: KVCache, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """One new position of one text. x: 1 D, keys and values: L 1 g t d. Returns the normalised output, 1 D."""
        position, eps = cache.length, self.config.layer_norm_eps
        first = 0 if cache.pad is None else min(int(cache.pad), position)  # padding sees itself, as in _rows
        seen = first, position + 1
        angle = self._angles(np.array(position - first), position + 1)  # d/2 each
        x = x[0].copy()  # D
        for layer, weights in enumerate(self.layers):
            loops.layer_step_row(x, weights, eps, angle, keys[layer, 0], values[layer, 0], seen)
        return loops.norm_row(x, self.norm, eps)[None]

    def _steps(
        self, x: np.ndarray, shape: tuple[int, int], cache: KVCache | None, keys: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        """Several new positions. x: r D, shape: b s, keys and values: L b g t d. Returns each text's last, b D."""
        (batch, new), eps = shape, self.config.layer_norm_eps
        pad = np.zeros(batch, np.int64) if cache is None or cache.pad is None else cache.pad.numpy()
        rows = self._rows(new, 0 if cache is None else cache.length, pad)
        lanes = to_lanes(x)  # n D l
        room = self._scratch(len(lanes))
        *earlier, last = self.layers_for_many
        for layer, weights in enumerate(earlier):
            place = layer % len(keys)
            loops.layer_step_lanes(lanes, weights, eps, rows, keys[place], values[place], room)
        loops.store_layer_lanes(lanes, last, eps, rows, keys[-1], values[-1], room)
        if new > 1:  # from here on only the last position of each text is read
            x = from_lanes(lanes, batch * new)[new - 1 :: new]  # b D
            if batch == 1:
                return self._finish_one(x[0], rows, keys[-1, 0], values[-1, 0])
            lanes, rows = to_lanes(x), self._rows(1, int(rows.position[-1]), pad)
            room = self._scratch(len(lanes))
        loops.finish_layer_lanes(lanes, last, eps, rows, keys[-1], values[-1], room)
        loops.norm_lanes(lanes, self.norm, eps, room.normed)
        return from_lanes(room.normed, batch)

    def _finish_one(self, x: np.ndarray, rows: Rows, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The last layer, and the norm after it, for the last row of one text. x: D, keys, values: g t d -> 1 D"""
        eps, seen = self.config.layer_norm_eps, (int(rows.first[-1]), int(rows.end[-1]))
        block, lane = divmod(len(rows.text) - 1, LANES)
        angle = rows.cos[block, :, lane].copy(), rows.sin[block, :, lane].copy()  # d/2 each
        loops.finish_layer_row(x, self.layers[-1], eps, angle, keys, values, seen)
        return loops.norm_row(x, self.norm, eps)[None]

    def _rows(self, new: int, start: int, pad: np.ndarray) -> Rows:
        """The positions from `start` to before `start + new` of texts that begin after `pad` positions. pad: b"""
        text = np.repeat(np.arange(len(pad)), new)  # r
        position = np.tile(np.arange(start, start + new), len(pad))  # r
        first = np.minimum(pad[text], position)  # padding sees itself, or it would divide by zero
        end = position + 1 if self.config.is_causal else np.full_like(position, start + new)
        cos, sin = self._angles(position - pad[text], start + new)  # r d/2 each
        return Rows(text, position, first, end, to_lanes(cos), to_lanes(sin))

    def _angles(self, position: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of a text's positions below `length`, 0 in the padding before it. position: ... -> ... d/2"""
        config = self.config
        tables = rope_table(config.head_dim, max(config.max_seq_len, length), config.rope_theta)
        cos, sin = (table.numpy()[np.maximum(position, 0)] for table in tables)
        return cos, sin

    def _stored(self, shape: tuple[int, int], cache: KVCache | None) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values, L b g t d; without a cache all layers share one place, 1 b g s d. shape: b s"""
        config = self.config
        if cache is None:
            shape = (1, shape[0], config.n_kv_heads, shape[1], config.head_dim)
            return np.empty(shape, np.float32), np.empty(shape, np.float32)
        if shape[0] != cache.shape[1]:  # the loops check no bounds
            raise RuntimeError(f"the cache is for {cache.shape[1]} texts, not {shape[0]}")
        cache.check_room(shape[1])
        cache.allocate(torch.float32, torch.device("cpu"))
        return cache.keys.numpy(), cache.values.numpy()

    def _scratch(self, blocks: int) -> Scratch:
        if self._room is None or len(self._room.normed) < blocks:
            self._room = make_scratch(blocks, self.layers_for_many[0])
        return Scratch(*(part[:blocks] for part in self._room))

    def _head(self, x: np.ndarray, only_largest: bool) -> np.ndarray:
        """x: b D -> b v"""
        is_screened = only_largest and (len(x) > 1 or self.head.rows.dtype != np.int8)  # 8 bits are read as they are
        logits = self.screen.logits(x) if is_screened else None
        if logits is not None:
            return logits
        if len(x) == 1:
            logits = np.empty((1, len(self.head.scale)), np.float32)
            loops.matvec(self.head, x[0], logits[0])
            return logits
        lanes = to_lanes(x)  # n D l
        blocks, _, width = lanes.shape
        logits = np.empty((blocks, len(self.head.scale), width), np.float32)
        loops.matmul(self.head_for_many, lanes, logits)
        return from_lanes(logits, len(x))


def use_threads_of_pytorch() -> None:
    """As many as PyTorch has, here and afterwards there."""
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    # numba's first threads come from OpenMP, where it then sets the number for all who use it; PyTorch is one of them
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def source_of(llama: Llama) -> list[Any]:
    """Changes when a weight is replaced or written to, or a module is replaced."""
    return [state_of(weight) for weight in llama.parameters()] + [type(module) for module in llama.modules()]


def is_readable(llama: Llama) -> bool:
    """Whether the loops compute what the model would: all of it known, float32 on the CPU, no biases."""
    weights = llama.parameters()
    return (
        is_untouched(llama)
        and all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
        and all(getattr(module, "bias", None) is None for module in llama.modules())
    )


def _array(weight: torch.Tensor) -> np.ndarray:
    return weight.detach().numpy()


def _matrices(linear: torch.nn.Linear) -> tuple[Matrix, Matrix]:
    """A weight for one row and for many, for which float32 numbers are read sooner than 8-bit ones are converted."""
    weight, ones = linear.weight.detach(), np.ones(linear.out_features, np.float32)
    if isinstance(linear, Int8Linear):
        in_8_bits, scale = linear.eight_bits()
        rounded = in_8_bits * scale[:, None]
        if torch.equal(weight, rounded):  # else it was loaded after the model's were rounded
            rounded = weight
        return Matrix(in_8_bits.numpy(), scale.numpy()), Matrix(rounded.numpy(), ones)
    rows = weight.bfloat16().view(torch.uint16) if isinstance(linear, Bf16Linear) else weight
    matrix = Matrix(rows.numpy(), ones)
    return matrix, matrix


def _screen(head: Matrix) -> ScreenedHead:
    weight = torch.from_numpy(head.rows)
    return ScreenedHead(weight.view(torch.bfloat16).float() if weight.dtype == torch.uint16 else weight, head.rows)


def _layer_weights(layer: LlamaLayer) -> tuple[LayerWeights, LayerWeights]:
    """For one row and for many."""
    norms, attention, feed_forward = (layer.attention_norm, layer.ffn_norm), layer.attention, layer.feed_forward
    heads = (attention.compute_query, attention.compute_key, attention.compute_value, attention.compute_output)
    gates = (feed_forward.w1, feed_forward.w2, feed_forward.w3)
    first, second = (_array(norm.weight) for norm in norms)
    for_one, for_many = zip(*map(_matrices, heads + gates), strict=True)
    return tuple(LayerWeights(first, *parts[:4], second, *parts[4:]) for parts in (for_one, for_many))


class DecodingLlama(Llama):
    """A `Llama` that generates through a `DecodeEngine`, which is made when needed."""

    _engine: DecodeEngine | None = None

    def train(self, mode: bool = True) -> DecodingLlama:
        self.drop_decoder()
        return super().train(mode)

    def drop_decoder(self) -> None:
        self._engine = None

    def hidden_states(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        self._expect_training()
        return super().hidden_states(tokens, cache)

    def hidden_state_at(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self._expect_training()
        return super().hidden_state_at(tokens, at)

    def _expect_training(self) -> None:
        """PyTorch does not count the changes that its fused optimizers make, but they need gradients first."""
        if torch.is_grad_enabled():
            self.drop_decoder()

    def _next_logits(self, idx: torch.Tensor, cache: KVCache | None, only_largest: bool = False) -> torch.Tensor:
        """As in `Llama`; the uncached causal model, autocast, and what does not fit, is left to it."""
        begins = cache is None or cache.length == 0  # a text; the weights cannot change before it ends
        if begins and self._engine is not None and not (is_readable(self) and self._engine.source == source_of(self)):
            self.drop_decoder()
        new = idx if cache is None else idx[:, cache.length :]
        is_plain = self.training or torch.is_autocast_enabled("cpu") or (self.config.is_causal and cache is None)
        if is_plain or idx.shape[1] > self.config.max_seq_len or new.numel() > MAX_ROWS:
            return super()._next_logits(idx, cache, only_largest)
        engine = self._engine  # which another thread may drop
        if engine is None:
            if not is_readable(self):
                return super()._next_logits(idx, cache, only_largest)
            engine = self._engine = DecodeEngine(self)
        return engine.logits(new, cache, only_largest)

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and `torch.save` take along."""
        return {name: value for name, value in self.__dict__.items() if name != "_engine"}
