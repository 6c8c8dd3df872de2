"""A place for the reports of a failure where the run folder cannot be written: full, read-only or gone.

A folder of the user's own in the system's temporary folder, made when it is needed, and emptied by the next launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import StorageError
from lockstep.telemetry.rundir import write_json


def write(path: Path, content: Any) -> None:
    """Write ``content`` as JSON to ``path``, a file in ``logs/``, or else to the spare place.

    Raises:
        StorageError: of ``path``, when there is no room in either.
    """
    spare = _place(path.parent) / path.name
    try:
        write_json(path, content)
    except StorageError:
        try:
            spare.parent.mkdir(mode=0o700, exist_ok=True)
            if not _is_own(spare.parent):
                raise
            write_json(spare, content, durable=False)
        except (OSError, StorageError):
            pass
        else:
            return
        raise
    with contextlib.suppress(OSError):
        spare.unlink(missing_ok=True)


def find(logs: Path, pattern: str) -> Iterator[Path]:
    """Files of ``logs`` by pattern; one that had to be written to the spare place takes its namesake's."""
    place = _place(logs)
    spare = {path.name: path for path in place.glob(pattern)} if _is_own(place) else {}
    yield from (path for path in logs.glob(pattern) if path.name not in spare)
    yield from spare.values()


def clear(logs: Path) -> None:
    """Remove what was written to the spare place."""
    if _is_own(_place(logs)):
        shutil.rmtree(_place(logs), ignore_errors=True)


def _place(logs: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(logs))).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}-{name}"


def _is_own(place: Path) -> bool:
    """Whether it is there and nobody else's: the temporary folder is open to all users."""
    try:
        status = place.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and place.is_dir() and not place.is_symlink()
