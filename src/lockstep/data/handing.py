"""Batches on their way from a loader worker to its rank.

torch pickles a batch in a thread of the worker's queue. What fails there (no file descriptor left, a socket whose path
is too long, a value that cannot be pickled) is printed, and the rank waits for that batch for ever. So a worker pickles
its batches itself, and hands over the error in place of a batch.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import current_process
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from lockstep._compat.torch import pinned
from lockstep.errors import DataError, LockstepError

#: Bytes that the path of a Unix socket may have: 107 on Linux, less on other systems.
MAX_SOCKET_PATH = 100
#: Bytes of a socket's name in its folder, at most.
_SOCKET_NAME = 40


class HandOverError(DataError):
    """A loader worker has made a batch that does not reach its rank."""


class HandedOver:
    """A batch, pickled in a loader worker. ``pin_memory()``: called by ``DataLoader``, returns the batch itself."""

    def __init__(self, batch: Any) -> None:
        self._pickle = bytes(ForkingPickler.dumps(batch))

    def batch(self) -> Any:
        try:
            return pickle.loads(self._pickle)
        except Exception as error:
            raise _failed(error) from error

    def pin_memory(self) -> Any:
        return pinned(self.batch())


def handed_over(batch: Any) -> HandedOver | LockstepError:
    """Return ``batch`` as a loader worker returns it, or the error that its rank raises."""
    try:
        return HandedOver(batch)
    except Exception as error:
        return _failed(error)


def received(value: Any) -> Any:
    """Unpack the batch that a loader returns, or raise the :class:`LockstepError` of its worker."""
    if isinstance(value, LockstepError):
        raise value
    return value.batch() if isinstance(value, HandedOver) else value


def _failed(error: Exception) -> HandOverError:
    """Make the error of a batch that could not be handed over because of ``error``."""
    fix = "return what can be pickled from the data set and collate, or load without worker processes (--num-workers 0)"
    if "open files" in str(error):
        fix = "make a batch of fewer tensors, raise the limit (`ulimit -n`), or load without worker processes "
        fix += "(--num-workers 0): each tensor takes two files on its way"
    return HandOverError("a loader worker could not hand over a batch", why=f"{type(error).__name__}: {error}", fix=fix)


class HandingCollate:
    """``collate`` of a ``DataLoader``, whose batches are handed over by its workers, if it has any."""

    def __init__(self, collate: Any) -> None:
        self.collate: Any = collate.collate if isinstance(collate, HandingCollate) else collate

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        return batch if get_worker_info() is None else handed_over(batch)


@contextmanager
def short_path(folder: str | Path) -> Iterator[str]:
    """Yield a path to ``folder`` for Unix sockets: short, for this user's other processes as well."""
    if len(os.fsencode(folder)) + _SOCKET_NAME <= MAX_SOCKET_PATH or not Path("/proc/self/fd").exists():
        yield str(folder)
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextmanager
def short_socket_paths() -> Iterator[None]:
    """Let processes that are started inside exchange tensors, however long ``TMPDIR`` is."""
    settings: dict[str, Any] = getattr(current_process(), "_config", {})
    folder = settings.get("tempdir") or tempfile.gettempdir()
    if len(os.fsencode(folder)) + 2 * _SOCKET_NAME <= MAX_SOCKET_PATH:
        yield
        return
    before = settings.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="pymp-", ignore_cleanup_errors=True) as folder, short_path(folder) as short:
        settings["tempdir"] = short
        try:
            yield
        finally:
            settings["tempdir"] = before
