"""A temporary folder that the next process removes when this one was killed before it could."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: A folder younger than this may be one whose maker has not locked it yet.
_YOUNG_S = 60.0


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder, gone on leaving; those of the same ``prefix`` that killed processes of this user left go, too.

    Its maker holds a lock on it, which the system gives back however the maker ends.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            _remove_abandoned(path)
    path = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(path: Path) -> None:
    """Raises :class:`OSError` where there is somebody, or nothing of this user's."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(lock)
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > _YOUNG_S:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(lock)
