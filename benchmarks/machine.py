"""The machine that the ratios were measured on, and its ceilings: how fast memory and matrix products are at best."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.measure import Contender, Turns
from utils import ROOT

TOKENS, WIDTH, HIDDEN = 4096, 512, 1376  # the feed-forward of stories42M on a batch of about 80 sentences
READ = "memory read, sum, GB/s"
PACKAGES = ("torch", "transformers", "numpy", "matplotlib")


def describe(device: torch.device) -> dict[str, object]:
    """Machine, versions, commit and date."""
    facts: dict[str, object] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of this folder, with a plus sign where files differ from it; "unknown" outside a repository."""
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    if commit.returncode != 0:
        return "unknown"
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


@torch.inference_mode()
def ceilings(turns: Turns, device: torch.device, *, shrink: int = 1) -> dict[str, float]:
    """The best of all rounds on `device`: GB/s read from memory, GFLOP/s of products. shrink: divides all sizes."""
    rows = 2**17 // shrink
    memory = torch.ones(rows, WIDTH, device=device)  # 256 MiB, beyond every cache
    vector = torch.ones(WIDTH, device=device)
    work: list[tuple[str, float, Callable[[], object]]] = [
        (READ, memory.nbytes / 1e9, memory.sum),
        ("memory read, matrix by vector, GB/s", memory.nbytes / 1e9, partial(memory.mv, vector)),
    ]
    tokens = TOKENS // shrink
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x, weight = (torch.ones(count, WIDTH, dtype=dtype, device=device) for count in (tokens, HIDDEN))
        gflop = 2 * tokens * WIDTH * HIDDEN / 1e9
        work.append((f"F.linear {name}, GFLOP/s", gflop, partial(F.linear, x, weight)))
        if _has_onednn(x, weight):
            work.append((f"oneDNN linear {name}, GFLOP/s", gflop, partial(_onednn, x, weight)))
    contenders = [Contender(name, partial(_run, run)) for name, _, run in work]
    costs = turns.take(contenders)
    return {name: amount / min(costs[name]) for name, amount, _ in work}



def _run(work: Callable[[], object]) -> None:
    """Drops the result: what a contender returns is read as its cost."""
    work()


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _has_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    try:
        _onednn(x[:1], weight)
    except (AttributeError, RuntimeError):  # a build, or a processor, without it
        return False
    return True
