"""Memory that a process has freed is kept for what it computes next, instead of going back to the system.

A step frees what it has computed, and the next one computes as much again. Where the system takes such memory back, it
hands it out again page by page, each cleared at its first touch: with some hundred megabytes a step that takes longer
than what is computed in them.
"""

from __future__ import annotations

import ctypes
import os

# Of glibc's malloc.h. Both move by themselves otherwise, and never further than to 32 MiB and twice that.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 32 * 2**20  # bytes of a piece that is kept: glibc takes no higher threshold
KEPT = 2**31 - 1  # bytes at the end of the heap
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")  # with which a user decides


def keep_freed_memory() -> bool:
    """Keep what is freed, pieces of up to 32 MiB, where the C library is glibc. Returns whether it is kept.

    Another C library, or somebody's own settings of this one, stay as they are.
    """
    if any(name in os.environ for name in SETTINGS):
        return False
    try:
        libc = ctypes.CDLL(None)
        _, mallopt = libc.gnu_get_libc_version, libc.mallopt
    except (AttributeError, OSError, TypeError):  # not Linux, or a C library without it
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, KEPT))
