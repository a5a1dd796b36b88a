"""What this machine does at best: bytes read from memory, and matrix products, by every library at hand.

Lines are compared with these limits, so the fastest library counts: a limit that is measured too low flatters. The
speed of memory drifts on a shared machine: a run measures twice, before and after everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.measure import Contender, Turns
from benchmarks.work import Rates

MEMORY_ROWS, WIDTH = 2**17, 512  # 256 MiB of float32 numbers, beyond every cache
STREAMS = (2, 4, 8)
# tokens, inputs, outputs: stories42M's feed-forward, and a larger one
PRODUCT_SHAPES = ((4096, 512, 1376), (1024, 2048, 2048))
READ = "read"


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
        costs = turns.take([Contender(candidate.name, partial(_drop_result, candidate.run)) for candidate in able])
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


def _drop_result(work: Callable[[], object]) -> None:
    """What a contender returns is read as its cost."""
    work()


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
