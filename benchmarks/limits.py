"""The machine's limit: the least work that an answer takes, and what this machine does at best.

Work is operations of matrix products, and weights that must be read for it. A product of an m x k by a k x n matrix is
2 m k n operations: a multiplication and an addition each. Nothing else is counted; norms, gates, softmax and rotations
are below a percent of it and are done while the products wait for memory. Results that the answer does not use are not
counted: hidden scores of a causal model, logits of other positions than the last, and, if only some positions are
used, the last layer's queries, outputs and feed-forward at the others.

Rates are bytes read from memory and matrix products, by every library at hand: the fastest counts, because a limit
that is measured too low flatters. The speed of memory drifts on a shared machine: a run measures before and after
everything else.

Letters: D model dim, f feed-forward dim, h query heads, g key/value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.measure import Turns
from config import LlamaConfig

BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 4.5 / 8}  # of a weight, with the scale of a group
MEMORY_ROWS, WIDTH = 2**17, 512  # 256 MiB of float32 numbers, beyond every cache
STREAMS = (2, 4, 8)
# tokens, inputs, outputs: stories42M's feed-forward, and a larger one
PRODUCT_SHAPES = ((4096, 512, 1376), (1024, 2048, 2048))
READ = "read"  # the kind of a rate in bytes


# ------------------------------------------------------------------------------------------------ the least work


class Pass(NamedTuple):
    """One time through the model: what is to be computed, and how many weights are read once for it."""

    operations: int
    weights: int


def forward_pass(
    config: LlamaConfig, rows: int, new: int, *, before: int = 0, read: int = 1, outputs: int | None = None
) -> Pass:
    """`rows` texts of `new` positions, after `before` whose keys and values are there already.

    read: how many of the last positions of each text are wanted. outputs: of the head, else the vocabulary's size.
    """
    outputs = config.vocab_size if outputs is None else outputs
    dim, kv_dim, ffn_dim, layers = config.dim, config.n_kv_heads * config.head_dim, config.hidden_dim, config.n_layers
    asking = (layers - 1) * new + read  # positions over all layers that have a query
    pairs = (layers - 1) * visible_pairs(config, before + new, new) + visible_pairs(config, before + new, read)
    keys_values = 2 * layers * new * dim * 2 * kv_dim
    query_output = 2 * asking * dim * 2 * dim
    attention = 2 * 2 * pairs * dim  # scores, and sums weighted by them: h d = D
    feed_forward = 2 * asking * 3 * dim * ffn_dim
    head = 2 * read * dim * outputs
    matrices = layers * (2 * dim * dim + 2 * dim * kv_dim + 3 * dim * ffn_dim) + dim * outputs
    return Pass(rows * (keys_values + query_output + attention + feed_forward + head), matrices)


def visible_pairs(config: LlamaConfig, length: int, asking: int) -> int:
    """Pairs of a query and a key that it sees, of one head: queries are the last `asking` of `length` positions."""
    hidden = asking * (asking - 1) // 2 if config.is_causal else 0
    return asking * length - hidden


def decoding(config: LlamaConfig, rows: int, prompt: int, new: int) -> list[Pass]:
    """Greedy continuation with a cache: the prompt gives the first new token, each later one is a step."""
    first = forward_pass(config, rows, prompt)
    return [first, *(forward_pass(config, rows, 1, before=prompt + step) for step in range(new - 1))]


def recomputing(config: LlamaConfig, rows: int, prompt: int, new: int) -> list[Pass]:
    """Continuation where a token changes what was computed before it: the whole text for every one."""
    return [forward_pass(config, rows, prompt + step) for step in range(new)]


def classifying(config: LlamaConfig, rows: int, length: int, classes: int) -> list[Pass]:
    """One position of each text is read."""
    return [forward_pass(config, rows, length, outputs=classes)]


def training(config: LlamaConfig, rows: int, length: int, classes: int) -> list[Pass]:
    """Forward, and backward with two products for each of its: the gradients of the weight and of the input."""
    ((operations, weights),) = classifying(config, rows, length, classes)
    return [Pass(3 * operations, weights)]


class Rates(NamedTuple):
    """What this machine does at best: bytes/s read from memory, operations/s of products by precision."""

    read: float
    products: dict[str, float]

    def product(self, precision: str) -> float:
        """Numbers in fewer bits can be widened, so no precision is slower than float32."""
        return max(self.products.get(precision, 0.0), self.products["fp32"])


def limit_seconds(passes: list[Pass], precision: str, rates: Rates) -> float:
    """No program can take less: each pass waits for memory or for arithmetic, whichever takes longer."""
    return sum(
        max(weights * BYTES_PER_WEIGHT[precision] / rates.read, operations / rates.product(precision))
        for operations, weights in passes
    )


# ------------------------------------------------------------------------------------------ what a machine does


class Candidate(NamedTuple):
    """A way to meet a limit. kind: `read`, or a precision. amount: bytes or operations of one `run`."""

    kind: str
    name: str
    amount: float
    run: Callable[[], object]


class Measured(NamedTuple):
    """The best of all rounds of one candidate, bytes/s or operations/s; None where it does not run here."""

    kind: str
    name: str
    rate: float | None


@torch.inference_mode()
def measure(turns: Turns, *, shrink: int = 1) -> list[Measured]:
    """Every candidate. shrink: divides the sizes."""
    with ThreadPoolExecutor(max(STREAMS)) as pool:
        candidates = [*_readers(shrink, pool), *_products(shrink)]
        able = [candidate for candidate in candidates if _runs(candidate.run)]
        costs = turns.take({candidate.name: candidate.run for candidate in able})
    best = {candidate.name: candidate.amount / min(costs[candidate.name]) for candidate in able}
    return [Measured(candidate.kind, candidate.name, best.get(candidate.name)) for candidate in candidates]


def best_of(first: list[Measured], second: list[Measured]) -> list[Measured]:
    """The faster of two measurements of the same candidates, one by one."""
    return [max(pair, key=lambda measured: measured.rate or 0.0) for pair in zip(first, second, strict=True)]


def limits(measured: list[Measured]) -> Rates:
    """The fastest candidate of each kind."""
    best: dict[str, float] = {}
    for kind, _, rate in measured:
        if rate is not None:
            best[kind] = max(rate, best.get(kind, 0.0))
    return Rates(best.pop(READ), best)


def _runs(work: Callable[[], object]) -> bool:
    try:
        work()
    except (AttributeError, NotImplementedError, RuntimeError):  # a build, or a processor, without it
        return False
    return True


def _readers(shrink: int, pool: ThreadPoolExecutor) -> Iterator[Candidate]:
    memory = torch.ones(MEMORY_ROWS // shrink, WIDTH)
    vector = torch.ones(WIDTH)
    ways: dict[str, Callable[[], object]] = {
        "sum": memory.sum,
        "matrix by vector": partial(memory.mv, vector),
        "oneDNN matrix by vector": partial(_onednn, vector[None], memory),
    }
    target = np.empty(memory.numel(), np.float32)
    for streams in STREAMS:
        ways[f"{streams} sums"] = partial(memory.view(streams, -1).sum, 1)
        parts = memory.view(-1).chunk(streams)
        ways[f"{streams} sums in {streams} threads"] = partial(_together, pool, torch.sum, parts)
        ways[f"copy in {streams} threads"] = partial(
            _together, pool, np.copyto, np.split(target, streams), [part.numpy() for part in parts]
        )
    for name, run in ways.items():
        yield Candidate(READ, f"read, {name}", memory.nbytes, run)


def _together(pool: ThreadPoolExecutor, work: Callable[..., object], *parts: object) -> None:
    for _ in pool.map(work, *parts):
        pass


def _products(shrink: int) -> Iterator[Candidate]:
    for tokens, inputs, outputs in PRODUCT_SHAPES:
        tokens = tokens // shrink
        size, operations = f"{tokens}x{inputs}x{outputs}", 2.0 * tokens * inputs * outputs
        for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            x = torch.ones(tokens, inputs, dtype=dtype)
            weight = torch.ones(outputs, inputs, dtype=dtype)
            yield Candidate(precision, f"{precision}, F.linear {size}", operations, partial(F.linear, x, weight))
            yield Candidate(precision, f"{precision}, oneDNN {size}", operations, partial(_onednn, x, weight))
            packed = partial(_onednn_packed, x, weight, {})
            yield Candidate(precision, f"{precision}, oneDNN packed {size}", operations, packed)
        a = torch.ones(tokens, inputs, dtype=torch.int8)
        b = torch.ones(outputs, inputs, dtype=torch.int8).t()
        yield Candidate("int8", f"int8, torch._int_mm {size}", operations, partial(_int8, a, b))


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _onednn_packed(x: torch.Tensor, weight: torch.Tensor, packed: dict[str, torch.Tensor]) -> torch.Tensor:
    """packed: keeps the weight in oneDNN's own layout from the first call on."""
    if not packed:
        packed["weight"] = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
    return _onednn(x, packed["weight"])


def _int8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sums are 32-bit integers. a: m k, b: k n -> m n"""
    return torch._int_mm(a, b)
