"""The claim on a run: one process at a time trains it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import RunFolderError
from lockstep.rundir.files import check_own_files, open_own, storing
from lockstep.rundir.folder import RunDir

_HELD_BY_OTHERS = {errno.EACCES, errno.EAGAIN}
_claimed_here: set[Path] = set()
_claiming = threading.Lock()


@contextlib.contextmanager
def claim(run: RunDir, wait_s: float) -> Iterator[None]:
    """Claim a run: the first process to enter the block has it until the block, or the process, ends.

    The claim is a lock of the process (fcntl(2)) on a file in the run folder, which data workers do not inherit. A file
    system without locks has no claims. Raises :class:`RunFolderError`: another process has begun an attempt, or still
    has the claim after ``wait_s`` seconds.
    """
    check_own_files(run.path)
    file = run.path / ".claim"
    key = file.resolve()
    deadline = time.monotonic() + wait_s
    attempt = run.read().attempt
    while (descriptor := _lock(file, key)) is None:
        if time.monotonic() >= deadline or run.read().attempt != attempt:
            raise RunFolderError(
                f"run {run.read().id} is being resumed by another process",
                why="two processes would write one folder",
                fix="wait for it; `lockstep show` prints its progress",
            )
        time.sleep(0.1)
    try:
        yield
    finally:
        with _claiming:
            os.close(descriptor)
            _claimed_here.discard(key)


def _lock(file: Path, key: Path) -> int | None:
    """Claim the run by a descriptor, which holds it; ``None``: another process does. Raises :class:`StorageError`."""
    with _claiming:
        # A process has a lock once: its threads need this set, and must not open and close the file of a claim.
        if key in _claimed_here:
            return None
        with storing(file):
            descriptor = open_own(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD_BY_OTHERS:
                os.close(descriptor)
                return None
        _claimed_here.add(key)
        return descriptor
