"""Host memory between the steps of a CPU rank."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_LARGEST_INT = 2**31 - 1
#: Whoever sets one of these wants something else.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@contextmanager
def kept_memory() -> Iterator[None]:
    """Let glibc keep what a step frees for the next one; what is left goes back to the system at the end.

    By default it returns the memory of large tensors to the kernel, and each step gets it again page by page, or
    not, as the history of the process has it: with HAR's CNN a step took up to 40 % longer in some processes than in
    others (``benchmarks/peers.py --models cnn``). Blocks of more than 32 MiB, the largest threshold that mallopt(3)
    takes, still go back. glibc has no call that makes it adjust its thresholds again, so they stay after the end.

    Without glibc, and where its variables are set, nothing happens.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt") or any(name in os.environ for name in _VARIABLES):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
    try:
        yield
    finally:
        libc.malloc_trim(0)
