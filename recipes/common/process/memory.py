"""What the C library does with memory that a step frees."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt()."""

KEPT_BYTES = 2**30
"""Most freed bytes that a process keeps."""

LARGEST_MMAP_THRESHOLD = 2**25
"""The most that mallopt() takes."""

OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which a user sets the same."""


def keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees for the next step; elsewhere, do nothing.

    By default, it returns more than some MB to the kernel, and the next step gets every page again. On a CPU, that
    may cost a third of a step (docs/benchmarks/choices.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not any(name in os.environ for name in OWN_SETTINGS):
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
