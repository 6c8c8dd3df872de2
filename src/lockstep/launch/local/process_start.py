"""Variables that count when a process starts, or imports torch. This module imports nothing."""

from __future__ import annotations

from collections.abc import MutableMapping


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Set what the user has not set of these variables."""
    # Threads that spin while they wait for each other slow a step 10 to 100 times where other programs use the cores.
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    # The order of a set of strings is the same on all ranks then, and in every attempt: a vocabulary, for example.
    environ.setdefault("PYTHONHASHSEED", "0")
    if "TORCH_DISTRIBUTED_DEBUG" not in environ:
        # Every rank's native code logs the loss of the one that failed; only that one matters.
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
