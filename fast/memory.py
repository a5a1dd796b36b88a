"""Memory that a process has freed is kept for what it computes next, instead of going back to the system.

A step frees its results, and the next one needs as much memory again. If the system takes freed memory back, it gives
it out again in pages of some kilobytes and clears each one: with some hundred megabytes a step, that takes longer than
the computation.
"""

from __future__ import annotations

import ctypes
import os

# Of glibc's malloc.h. Without these calls both thresholds move by themselves, up to 32 MiB and 64 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_PIECE = 32 * 2**20  # bytes that are kept: glibc takes no higher threshold
KEPT_BYTES = 2**31 - 1  # at the end of the heap
USERS_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep freed pieces of up to 32 MiB, if the C library is glibc. Returns whether they are kept.

    Another C library, or a user's own settings of glibc, stay as they are.
    """
    if any(name in os.environ for name in USERS_SETTINGS):
        return False
    try:
        libc = ctypes.CDLL(None)
        _, mallopt = libc.gnu_get_libc_version, libc.mallopt
    except (AttributeError, OSError, TypeError):  # not Linux, or a C library without it
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_PIECE) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
