"""The machine that the ratios were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

from utils import ROOT

REPORTED_PACKAGES = (
    "torch", "numpy", "numba", "transformers", "llama-cpp-python", "ctranslate2", "openvino", "matplotlib"
)  # fmt: skip


def describe() -> dict[str, object]:
    """Machine, versions, commit and date."""
    facts: dict[str, object] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "device": "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    for package in REPORTED_PACKAGES:
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
