"""The measurements behind the names of `targets.LINES`. README.md here says what each line means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks import decoding, encoders, learning, processes
from benchmarks.table import Bench, Line
from benchmarks.targets import LINES


def measurements() -> dict[str, Callable[[Bench], list[Line]]]:
    """The function behind each name."""
    functions: Sequence[Callable[[Bench], list[Line]]] = (
        decoding.decode_fp32,
        decoding.decode_int8,
        decoding.decode_together,
        decoding.generate_bidirectional,
        decoding.busy,
        processes.first_run,
        learning.forward,
        learning.train_fp32,
        learning.train_bf16,
        learning.epoch_causal,
        learning.epoch_bidirectional,
        learning.peak_memory,
        encoders.classify,
        encoders.train,
    )
    return dict(zip(LINES, functions, strict=True))
