"""Zip archives from elsewhere, unpacked so that nothing lands outside the folder meant for it."""

from __future__ import annotations

import shutil
import stat
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from lockstep.errors import DataError

MAX_UNPACKED_BYTES = 16 * 1024**3


def extract_zip(archive: Path, target: Path, *, max_bytes: int = MAX_UNPACKED_BYTES) -> Path:
    """Unpack ``archive`` into the new folder ``target``, whole or not at all, and return ``target``.

    Raises:
        DataError: a broken or encrypted archive, one that would grow beyond ``max_bytes``, one with an
            entry that leaves the folder or is a link, or a target that exists or cannot be written.
    """
    if target.exists():
        raise DataError(f"{target} exists already", why="unpacking never overwrites", fix="move it away, or use it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            with zipfile.ZipFile(archive) as content:
                _check(archive, content, max_bytes)
                content.extractall(building)
            building.chmod(0o755)
            building.rename(target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise DataError(
            f"{archive} is not a usable zip archive", why=str(error), fix="remove it and fetch it again"
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot unpack {archive} to {target}",
            why=str(error),
            fix="free some space, or choose a folder that you may write to",
        ) from error
    return target


def _check(archive: Path, content: zipfile.ZipFile, max_bytes: int) -> None:
    entries = content.infolist()
    for entry in entries:
        path = PurePosixPath(entry.filename.replace("\\", "/"))
        outside = path.is_absolute() or ".." in path.parts or ":" in entry.filename
        if outside or stat.S_ISLNK(entry.external_attr >> 16):
            raise DataError(
                f"{archive} holds the entry {entry.filename!r}",
                why="it is a link, or would be written outside the folder",
                fix="do not use this archive; fetch it from its publisher",
            )
    total = sum(entry.file_size for entry in entries)
    if total > max_bytes:
        raise DataError(
            f"{archive} would grow to {total} bytes", why=f"the limit is {max_bytes}", fix="check where it comes from"
        )
