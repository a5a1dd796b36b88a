"""What this machine's processor is and can do."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


def cpu_vendor() -> str:
    """`AuthenticAMD`, `GenuineIntel`, ...; empty where nothing tells."""
    # Windows has no /proc, and says "AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD"
    return _cpuinfo("vendor_id") or platform.processor().rpartition(", ")[2]


def has_bf16_products() -> bool:
    """Whether this CPU multiplies bfloat16 numbers itself, on x86 by AVX-512 or AMX, on ARM by its BF16 extension."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "bf16" in _cpuinfo("Features").split()
    flags = _cpuinfo("flags").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def has_int8_products() -> bool:
    """Whether this CPU sums products of 8-bit integers in one instruction, and oneDNN makes use of it."""
    flags = _cpuinfo("flags").split()
    return "avx512_vnni" in flags or "avx_vnni" in flags


@cache
def _cpuinfo(field: str) -> str:
    """A line of Linux's description of the first processor; empty on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(values, "")
