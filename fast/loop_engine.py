"""One more token for one text, in compiled loops: the weights that they read, and their comparison with llama.py.

Decoding one text reads every weight once for each token and does little with it, so it is as fast as memory is read.
PyTorch's kernels for one row are not. Importing this module imports numba.

Shapes:
    L layers   g key/value heads   t key position   d head dim   D model dim   v vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import nn

from config import LlamaConfig
from engine.context import KVCache
from engine.decoding import logits_after
from engine.equivalence import Case, Comparison
from fast import loops
from fast.compact import widened
from fast.kernel import replace
from fast.linear import Bf16Linear, Int4Linear, Int8Linear, KernelLinear, RoundedLinear, quantise, to_bf16
from fast.loops import LayerWeights, Norm, matvec, rescore
from fast.loops_head import steps_of
from fast.row_sums import Matrix
from llama import Llama, LlamaLayer, RMSNorm
from rope import apply_rotary_emb, rope_table, table_rows


class BestThreads:
    """The number of threads that decodes a token soonest: all of PyTorch's, or one if other programs use the processor.

    Threads wait for each other many times in a token, also for one that another process has displaced. Results do not
    depend on their number. The other number is tried for `TRY` tokens, again after `FIRST` tokens, and after twice as
    many each time that nothing has changed, up to `LAST`.
    """

    TRY, FIRST, LAST = 3, 48, 384

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.most = 0
        self._restart(1)

    def _restart(self, most: int) -> None:
        self.most, self.present, self.tokens, self.pause = most, most, 0, self.FIRST
        self.before = most
        self.seconds: dict[int, list[float]] = {most: [], 1: []}

    @contextmanager
    def timed(self) -> Iterator[int]:
        """Gives the number of threads for one more token, and notes its time."""
        most = torch.get_num_threads()
        if most != self.most:
            self._restart(most)
        start = self.clock()
        yield self.present
        if most > 1:
            self._note(self.clock() - start)

    def _note(self, seconds: float) -> None:
        of_present = self.seconds[self.present]
        of_present.append(seconds)
        del of_present[: -self.TRY]
        self.tokens += 1
        other = 1 if self.present == self.most else self.most
        if self.tokens == self.TRY:  # try the other number
            self.before, self.present, self.seconds[other] = self.present, other, []
        elif self.tokens == 2 * self.TRY:
            self.present = min(self.seconds, key=lambda number: sorted(self.seconds[number])[self.TRY // 2])
            self.pause = min(2 * self.pause, self.LAST) if self.present == self.before else self.FIRST
        elif self.tokens >= self.pause:
            self.tokens = 0


def use_threads(threads: int) -> None:
    """Run the loops on so many threads, and leave PyTorch its own number."""
    of_pytorch = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    # numba's first threads come from OpenMP, where it sets the number of threads for PyTorch as well
    if torch.get_num_threads() != of_pytorch:
        torch.set_num_threads(of_pytorch)


# ------------------------------------------------------------------------------------------------------ the output head
# Greedy decoding needs only the likeliest token: most weights of the head are read as 8-bit numbers.
#
# The head is the largest matrix of a small model. Logits of an 8-bit copy, with a bound on their error that holds for
# every input, show which few tokens can be the likeliest. Only those are computed from the weights themselves.

MAX_CANDIDATES = 1 / 16  # of the vocabulary: beyond that, computing all logits is faster than picking
ROWS_TOGETHER = 2048  # that fit into the processor's cache


class ScreenedHead:
    """A head and its 8-bit copy, with the bound on how far the copy's logits can be from the true ones.

    With w = s q + e for a row of the head, w.x and s (q.x) differ by e.x, at most |e| |x| (Cauchy-Schwarz). The true
    logit and the other are float32 sums of D products, in whatever order, and so off by at most D u / (1 - D u) times
    |w| |x| and |s q| |x|, u = 2^-24 (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1).
    The copy meets inputs of 24 bits (`row_sums.in_two_parts`): each is off by little more than u max|x| up to 8192
    inputs, D / 8192 times that beyond, which in s (q.x) is less than D u |s q| |x|. Of several texts it meets inputs of
    16 bits (`loops_head.in_pairs`): each is off by half a step, max|x| / r, and so all by at most sqrt(D) |x| / 2r.
    """

    def __init__(self, weight: torch.Tensor, rows: np.ndarray):
        """weight: v D, float32 or bfloat16; rows: the same numbers, as `Matrix` stores them."""
        self.rows = rows
        parts = [_bound(piece.float()) for piece in weight.split(ROWS_TOGETHER)]
        quantised, scale, error = (torch.cat(part) for part in zip(*parts, strict=True))  # v D, v, v
        self.copy = Matrix(quantised.numpy(), scale.numpy())
        self.error = error.numpy()

    def logits(self, x: np.ndarray) -> np.ndarray | None:
        """The largest is exact, others are approximate and smaller; None if too many can be the largest. x: D -> v"""
        return self.pick(x, self.approximate(x))

    def approximate(self, x: np.ndarray) -> np.ndarray:
        """The copy's logits. x: D -> v"""
        logits = np.empty(len(self.error), np.float32)
        matvec(self.copy, x, logits)
        return logits

    def pick(
        self, x: np.ndarray, logits: np.ndarray, at_most: int | None = None, *, by: Callable[..., bool] = rescore
    ) -> np.ndarray | None:
        """`logits`, of which all that can be the largest are made exact; None if they are more than `at_most`.

        by: `rescore` for one text, x: D and logits: v, or a loop over several that calls it, x: n D and logits: n v.
        """
        at_most = int(MAX_CANDIDATES * len(self.error)) if at_most is None else at_most
        norm = np.linalg.norm(x.astype(np.float64), axis=-1) * (1 + 1e-6)  # the comparison is made in float32
        return logits if by(self.rows, x, self.error, norm, logits, at_most) else None


def _bound(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The 8-bit copy of some rows, r D, its scales, and the bound for inputs of length 1, r each."""
    quantised, scale = quantise(weight)
    lost = weight - quantised * scale[:, None]  # r D: s q is rounded, which `rounding` covers
    size = torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float64)  # r: |s q| is at most |w| + |e|
    error = torch.linalg.vector_norm(lost, dim=-1, dtype=torch.float64)
    # D products and their sum, D inputs, two scales, s q here, its distance from w, the norm
    terms = (2 * weight.shape[1] + 8) * 2.0**-24
    rounding = terms / (1 - terms) * (2 * size + error)
    coarse = 0.51 * weight.shape[1] ** 0.5 / steps_of(weight.shape[1]) * (size + error)  # 0.01: x / step is rounded too
    more = 1 + 1e-5  # the comparison is made in float32 as well
    return quantised, scale, ((error + rounding + coarse) * more).float()


# ----------------------------------------------------------------------------------------------------------- the engine


class DecodeEngine:
    """A Llama's weights as the loops read them: its own float32 ones, copies in fewer bits."""

    def __init__(self, llama: Llama):
        self.config = llama.config
        self.embeddings = llama.tok_embeddings.weight.detach()  # v D
        self.layers = [_layer_weights(layer) for layer in llama.layers]
        self.norm = _norm(llama.norm)
        self.head = _matrix(llama.output)
        self.screen: ScreenedHead | None = None  # made for the first text at temperature 0
        self.fastest: dict[int, bool] = {}  # whether the loops are that for so many texts, see `fast.together`

    def next_logits(
        self, idx: torch.Tensor, cache: KVCache, only_largest: bool = False, threads: BestThreads | None = None
    ) -> torch.Tensor:
        """The logits after one more token, which is added to the cache. idx: 1 s, of which the last is new -> 1 v

        only_largest: all but the largest may be approximate, and are smaller. threads: chosen for this text.
        Raises `RuntimeError` if the cache is full: the loops check no bounds.
        """
        if cache.length >= cache.shape[3]:
            raise RuntimeError(f"the cache is for {cache.shape[3]} tokens, not {cache.length + 1}")
        with (threads or BestThreads()).timed() as number:
            use_threads(number)
            x = self.embeddings[int(idx[0, -1])].numpy().copy()  # D
            position = cache.length
            angle = self.angles(position)
            keys, values = cache.keys.numpy(), cache.values.numpy()  # L 1 g t d
            for layer, weights in enumerate(self.layers):
                loops.layer_step_row(x, weights, angle, keys[layer, 0], values[layer, 0], position + 1)
            cache.length += 1  # not extend(): it makes masks, which the loops have no use for
            return torch.from_numpy(self._head(loops.norm_row(x, self.norm), only_largest))[None]

    def angles(self, position: int | torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of a position, d/2 each, or of several, n: n d/2 each."""
        config = self.config
        rows = table_rows(int(torch.as_tensor(position).max()) + 1, config.max_seq_len)
        tables = rope_table(config.head_dim, rows, config.rope_theta, scaling=config.rope_scaling)
        return tuple(table[position].numpy() for table in tables)

    def screened(self) -> ScreenedHead | None:
        """The head with its 8-bit copy, made once; None for one of 8 bits, which is read as it is, or too large."""
        if self.screen is None and self.head.rows.dtype != np.int8 and self.head.rows.size <= LARGEST_SCREENED:
            self.screen = _screen(self.head)
        return self.screen

    def _head(self, x: np.ndarray, only_largest: bool) -> np.ndarray:
        """x: D -> v"""
        if only_largest and (screen := self.screened()) is not None:
            logits = screen.logits(x)
            if logits is not None:
                return logits
        logits = np.empty(len(self.head.scale), np.float32)
        loops.matvec(self.head, x, logits)
        return logits


def _matrix(linear: nn.Linear) -> Matrix:
    weight = linear.weight.detach().contiguous()  # code for LLVM finds a row by the length of one
    if isinstance(linear, Int8Linear):
        stored, scale = linear.in_few_bits(weight)
        return Matrix(stored.numpy(), (scale if scale.dtype == torch.float32 else scale.view(torch.uint16)).numpy())
    rows = to_bf16(weight).view(torch.uint16) if isinstance(linear, (Bf16Linear, RoundedLinear)) else weight
    return Matrix(rows.numpy(), np.ones(linear.out_features, np.float32))


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight.detach().numpy(), float(norm.eps))


def _screen(head: Matrix) -> ScreenedHead:
    weight = torch.from_numpy(head.rows)
    return ScreenedHead(weight.view(torch.bfloat16) if weight.dtype == torch.uint16 else weight, head.rows)


def _layer_weights(layer: LlamaLayer) -> LayerWeights:
    attention, feed_forward = layer.attention, layer.feed_forward
    heads = (attention.compute_query, attention.compute_key, attention.compute_value, attention.compute_output)
    gates = (feed_forward.w1, feed_forward.w2, feed_forward.w3)
    w1, w2, w3 = map(_matrix, gates)
    return LayerWeights(_norm(layer.attention_norm), *map(_matrix, heads), _norm(layer.ffn_norm), w1, w2, w3)


# ------------------------------------------------------------------------------------------- comparison with llama.py

LARGEST_SCREENED = 2**25  # numbers of a head; to screen a larger one takes seconds, and saves little of a large model
LONGEST_COMPARED = 4096  # positions of a compared model: its keys and values take memory


class EnginePair(NamedTuple):
    """A model, and the engine of a model that has the same numbers."""

    model: Llama
    engine: DecodeEngine


def sides(
    config: LlamaConfig,
    kernel: type[nn.Linear],
    more_parts: Mapping[str, Callable[..., list[torch.Tensor]]] = MappingProxyType({}),
    more_cases: Iterable[Case] = (),
) -> Comparison:
    """A model and the loops: a rotation, a layer, and the next token, also of a model as deep as `config` says.

    kernel: of the linear layers, whose number format the loops read; the model computes with float32 numbers on that
    format's grid. more_parts, more_cases: of other loops, by name.
    """
    small = {"dim": 32, "n_heads": 4, "vocab_size": 50, "hidden_dim": 24, "dropout": 0.0, "attention": "causal"}
    if kernel is Int4Linear:  # whose rows have multiples of 32 numbers
        small["hidden_dim"] = 96
    grouped = LlamaConfig(**{**vars(config), **small, "n_kv_heads": 2, "max_seq_len": 8, "n_layers": 2})
    longest = min(config.max_seq_len, LONGEST_COMPARED)
    long = LlamaConfig(**{**vars(config), **small, "n_kv_heads": 4, "max_seq_len": longest})
    pairs = {"grouped": make_pair(grouped, kernel), "long": make_pair(long, kernel)}
    parts = {"a rotation": _rotation, "a layer": _layer, "the next token": _next_tokens, "no cache": _uncached}
    parts |= more_parts

    def ask(is_plain: bool) -> Callable[..., list[torch.Tensor]]:
        def run(part: str, which: str, *settings: Any) -> list[torch.Tensor]:
            with torch.no_grad():
                return parts[part](pairs[which], is_plain, *settings)

        return run

    return Comparison(ask(True), ask(False), [*_cases(long.max_seq_len), *more_cases])


def make_pair(config: LlamaConfig, kernel: type[nn.Linear]) -> EnginePair:
    """A random model of this shape, with numbers on the grid of a kernel's format, and its engine."""
    model = Llama(config).eval().requires_grad_(False)
    model.output.weight = nn.Parameter(model.output.weight.clone(), requires_grad=False)  # embeddings are not rounded
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4 if parameter.dim() == 2 else 1.0)
    if kernel is not nn.Linear:
        kinds = {model.output: Int8Linear} if kernel is Int4Linear else {}
        linears = [part for part in model.modules() if type(part) is nn.Linear]
        replace(model, {part: kinds.get(part, kernel).from_linear(part) for part in linears})
    for linear in model.modules():
        if isinstance(linear, nn.Linear):
            linear.weight.copy_(_numbers(_matrix(linear)))  # rounding them again changes nothing
    engine = DecodeEngine(model)
    replace(model, {part: part.without_kernel() for part in model.modules() if isinstance(part, KernelLinear)})
    return EnginePair(model, engine)


def _numbers(matrix: Matrix) -> torch.Tensor:
    rows, scale = (
        torch.from_numpy(each).view(torch.bfloat16) if each.dtype == np.uint16 else torch.from_numpy(each)
        for each in matrix
    )
    return widened(rows, scale)


def _cases(max_seq_len: int) -> Iterator[Case]:
    yield Case("rope.apply_rotary_emb", ("a rotation", "long"))
    yield Case("LlamaLayer", ("a layer", "grouped"))
    # which model, how many tokens before, only the likeliest?
    yield Case("the next token", ("the next token", "long", 4, False))
    yield Case("the next token of grouped queries", ("the next token", "grouped", 3, False))
    yield Case("the likeliest token", ("the next token", "grouped", 2, True))
    yield Case("the next token of a text that outgrows the model", ("the next token", "grouped", 7, False))
    yield Case("the next token, everything computed anew", ("no cache", "grouped", 5))
    if max_seq_len > 16:
        yield Case("the last token of a long text", ("the next token", "long", max_seq_len - 2, False))


def _rotation(pair: EnginePair, is_plain: bool) -> list[torch.Tensor]:
    config, position = pair.model.config, pair.model.config.max_seq_len - 1
    x = torch.randn(1, 1, config.n_heads, config.head_dim)  # b s h d
    if is_plain:
        text = x.expand(-1, position + 1, -1, -1)
        settings = config.head_dim, config.max_seq_len, config.rope_theta, config.rope_scaling
        return [each[0, -1].flatten() for each in apply_rotary_emb(text, text, *settings)]
    row = x.flatten().numpy()
    loops.rotate_row(row, *pair.engine.angles(position))
    return [torch.from_numpy(row)] * 2


def _layer(pair: EnginePair, is_plain: bool) -> list[torch.Tensor]:
    """A layer's output for a text of four positions."""
    config, layer = pair.model.config, pair.model.layers[0]
    x = torch.randn(1, 4, config.dim)
    if is_plain:
        return [layer(x)[0]]
    _layer_steps(pair, x[0], 0, *torch.zeros(2, config.n_kv_heads, 4, config.head_dim))
    return [x[0]]


def _layer_steps(pair: EnginePair, x: torch.Tensor, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """The first layer in compiled loops, one position after another, in place. x: s D; keys, values: g t d"""
    for position, row in enumerate(x.numpy(), start):
        angle = pair.engine.angles(position)
        loops.layer_step_row(row, pair.engine.layers[0], angle, keys.numpy(), values.numpy(), position + 1)


def _next_tokens(pair: EnginePair, is_plain: bool, length: int, only_largest: bool) -> list[torch.Tensor]:
    """Logits of two more tokens of a text of `length` tokens, and their keys."""
    model, limit = pair.model, pair.model.config.max_seq_len
    idx = torch.randint(0, model.config.vocab_size, (1, length + 2))
    cache = filled_cache(model, idx[:, :length])
    answers = []
    for end in (length + 1, length + 2):
        if is_plain or end > limit:  # where the window slides, the model computes for both sides
            logits = logits_after(model, idx[:, :end], cache)
        else:
            logits = pair.engine.next_logits(idx[:, :end], cache, only_largest)
        answers += [logits.max(-1).values, logits.argmax(-1)] if only_largest else [logits]
    return [*answers, cache.keys[:, :, :, length : length + 2]]


def _uncached(pair: EnginePair, is_plain: bool, length: int) -> list[torch.Tensor]:
    """The logits after a text, with those of all positions and with those of the last alone."""
    model, idx = pair.model, torch.randint(0, pair.model.config.vocab_size, (1, length))
    if is_plain:
        return [model(idx)[0][:, -1], model(idx, idx)[0][:, -1]]
    return [pair.engine.next_logits(idx, filled_cache(model, idx[:, :-1]))] * 2


def filled_cache(model: Llama, tokens: torch.Tensor) -> KVCache:
    """The cache after texts: the model reads up to 16 tokens; longer texts have random keys and values. tokens: b s"""
    config, (texts, length) = model.config, tokens.shape
    cache = KVCache(model, texts, config.max_seq_len)
    if length > 16:
        cache.keys, cache.values = torch.randn(2, *cache.shape)
        cache.length = length
    else:
        cache.read(tokens)
    return cache


def warm_up(kernel: type[nn.Linear]) -> None:
    """Run every loop once in one number format, which loads or compiles it."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        pair = make_pair(LlamaConfig.from_preset("tiny", attention="causal"), kernel)
        for only_largest in (False, True):
            cache = filled_cache(pair.model, torch.tensor([[1, 2]]))
            pair.engine.next_logits(torch.tensor([[1]]), cache, only_largest)
        _rotation(pair, is_plain=False)
