"""Peak memory of fine-tuning: each contender alone in a fresh process, which prints its peak in bytes.

python -m benchmarks.memory CONTENDER CHECKPOINT ROWS LENGTH THREADS     # what `peak_memory` runs
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults import OwnFault, ending_of
from utils import ROOT

OUR_CONTENDERS = ("ours-fp32-bidirectional", "ours-bf16-causal")  # beside them "naive" and "hf-bf16"
# `run_llama.py`, which then says how many bytes it had in memory at most.
RUN_AND_TELL = """import sys, run_llama
from benchmarks.memory import own_peak
status = run_llama.start()
print(own_peak())
sys.exit(status)"""
MEASURED_STEPS = 2  # the second has the optimizer's state, which the first allocates


def peak_memory(contender: str, checkpoint: Path, rows: int, length: int, threads: int) -> int:
    """Bytes. Raises as `run_and_ask`."""
    command = ["-m", "benchmarks.memory", contender, checkpoint, rows, length, threads]
    return run_and_ask(f"the process that measures the memory of {contender}", command, threads)


def run_and_ask(what: str, command: Sequence[object], threads: int) -> int:
    """Run Python on a program that prints its peak memory last; returns that, in bytes. what: for errors.

    Raises `OwnFault`, with the last that the process said, if it fails; `RuntimeError` if it is killed.
    """
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        raise (RuntimeError if done.returncode < 0 else OwnFault)(f"{what} {ending_of(done)}")
    return int(done.stdout.split()[-1])


def own_peak() -> int:
    """The largest resident set that this process had, in bytes.

    On Linux not `ru_maxrss`: a process that was started without a copy of its parent's memory inherits the parent's
    peak there. `VmHWM` is its own.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def fine_tune(contender: str, checkpoint: str, rows: int, length: int) -> None:
    """Two training steps and one batch of evaluation on a batch of random ids without padding, each in its own way."""
    import torch

    from benchmarks import peers
    from engine.weights import load_llama_model

    contenders = peers.Peers(load_llama_model(checkpoint))
    make_optimizer = peers.our_optimizer
    if contender == "naive":
        model, make_optimizer = contenders.naive_classifier(), peers.naive_optimizer
    elif contender == "hf-bf16":
        model, make_optimizer = peers.Autocast(contenders.hf_classifier()), peers.hf_optimizer
    else:
        _, precision, attention = contender.split("-")
        model = contenders.our_classifier(precision, attention, training=True)
    vocab_size = contenders.config.vocab_size
    del contenders  # and with it the weights that the model was made from
    optimizer = make_optimizer(model)
    token_ids = torch.randint(259, vocab_size, (rows, length))
    labels = torch.randint(0, peers.NUM_LABELS, (rows,))
    for _ in range(MEASURED_STEPS):
        peers.train_step(model, optimizer, token_ids, labels)
    with torch.inference_mode(contender != "naive"):  # the course evaluates without it
        model.eval()(token_ids)


def main() -> None:
    import torch

    contender, checkpoint, *numbers = sys.argv[1:]
    rows, length, threads = map(int, numbers)
    torch.set_num_threads(threads)
    fine_tune(contender, checkpoint, rows, length)
    print(own_peak())


if __name__ == "__main__":
    main()
