"""What is measured, against whom, and the ratios aimed at. Nothing here needs PyTorch."""

from __future__ import annotations

from typing import NamedTuple

OURS, PLAIN, COURSE, LLAMA2C, ONE_BY_ONE = "min-llama", "plain path", "course's way", "llama2.c", "one after another"
HF, HF_BF16 = "HF transformers", "HF, bf16"  # in float32, which is its default; in bfloat16


class Target(NamedTuple):
    """The least ratio that is acceptable, and the one aimed at; None where nothing is promised."""

    floor: float | None = None
    goal: float | None = None


NOTHING = Target()
NEVER_SLOWER = Target(floor=1.0)  # than the same model without chosen kernels

# A measurement, named on the command line, fills one or more lines of the table; each line has several contenders.
LINES: dict[str, dict[str, dict[str, Target]]] = {
    "decode-fp32": {
        "decode, fp32": {
            LLAMA2C: Target(1.0, 1.3),
            HF: Target(4.5, 6.0),
            COURSE: Target(12.0, 16.0),
            PLAIN: NEVER_SLOWER,
        },
    },
    "decode-int8": {
        "decode, int8": {LLAMA2C: Target(1.7, 2.2), PLAIN: NEVER_SLOWER},
        "decode, bf16": {LLAMA2C: NOTHING, PLAIN: NEVER_SLOWER},
    },
    "decode-together": {"decode, 16 together, fp32": {ONE_BY_ONE: Target(5.0, 7.0), PLAIN: NEVER_SLOWER}},
    "generate-bidirectional": {
        "bidirectional generate, fp32": {COURSE: Target(2.4, 3.0), PLAIN: NEVER_SLOWER},
    },
    "forward": {
        f"forward {shape}, {precision}": {**against, PLAIN: NEVER_SLOWER}
        for precision, against in (
            ("fp32", {HF: Target(2.0, 2.4)}),
            ("bf16", {HF: Target(3.6, 4.5), HF_BF16: NOTHING}),
        )
        for shape in ("10x45", "64x45")
    },
    "train-fp32": {
        f"training step {shape}, fp32": {COURSE: Target(2.0, 2.5), HF: Target(1.8, 2.2), PLAIN: NEVER_SLOWER}
        for shape in ("80x50", "10x300")
    },
    "train-bf16": {
        f"training step {shape}, bf16": {HF: Target(2.6, 3.5), HF_BF16: NOTHING, PLAIN: NEVER_SLOWER}
        for shape in ("80x50", "10x300")
    },
    "epoch-causal": {"SST epoch, causal, bf16, buckets": {COURSE: Target(6.0, 10.0), HF: NOTHING}},
    "epoch-bidirectional": {"SST epoch, bidirectional, fp32": {COURSE: Target(2.0, 2.5)}},
}
MEMORY_LINES = {  # ours / theirs: lower is better
    "memory": {
        "peak memory 80x50, bidirectional, fp32": {COURSE: Target(0.8, 0.5)},
        "peak memory 80x50, causal, bf16": {COURSE: NOTHING, HF: NOTHING},
    },
}
CURVES = {
    "context": "tokens/s while the context grows",
    "batches": "sentences/s over length and batch size",
}
MEASUREMENTS = (*LINES, *MEMORY_LINES, *CURVES)
ON_CUDA = ("decode-fp32", "epoch-causal", "epoch-bidirectional")
