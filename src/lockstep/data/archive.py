"""Zip and tar archives from elsewhere, unpacked so that nothing lands outside the folder meant for it."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lockstep.errors import DataError

MAX_UNPACKED_BYTES = 16 * 1024**3

_BROKEN = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError),
    *(EOFError, RuntimeError, NotImplementedError),
)


class _Entry(NamedTuple):
    """``is_folder``: ``None`` for what is neither a folder nor a file. ``open`` gives the content of a file."""

    name: str
    size: int
    is_folder: bool | None
    open: Callable[[], Any]


def extract_zip(archive: Path, target: Path, *, max_bytes: int = MAX_UNPACKED_BYTES) -> Path:
    """Unpack ``archive`` into the new folder ``target``, whole or not at all, and return ``target``.

    Of an entry, only name and content are taken.

    Raises:
        DataError: a broken or encrypted archive, one that would grow beyond ``max_bytes``, one with an
            entry that leaves the folder or is a link, or a target that exists or cannot be written.
    """
    return _extract(archive, target, "zip", _of_zip(archive), max_bytes)


def extract_tar(archive: Path, target: Path, *, max_bytes: int = MAX_UNPACKED_BYTES) -> Path:
    """Like :func:`extract_zip` for a tar archive, compressed by gzip, bzip2, xz or not at all."""
    return _extract(archive, target, "tar", _of_tar(archive), max_bytes)


def _of_zip(archive: Path) -> Generator[_Entry, None, None]:
    with zipfile.ZipFile(archive) as content:
        for entry in content.infolist():
            is_folder = None if stat.S_ISLNK(entry.external_attr >> 16) else entry.is_dir()
            yield _Entry(entry.filename, entry.file_size, is_folder, partial(content.open, entry))


def _of_tar(archive: Path) -> Generator[_Entry, None, None]:
    with tarfile.open(archive) as content:
        for entry in content:
            is_folder = entry.isdir() if entry.isreg() or entry.isdir() else None
            yield _Entry(entry.name, entry.size, is_folder, partial(content.extractfile, entry))
        # tarfile stops at the last entry; the checksum of the compression stands behind it.
        while content.fileobj is not None and content.fileobj.read(1 << 20):
            pass


def _extract(archive: Path, target: Path, kind: str, entries: Generator[_Entry, None, None], max_bytes: int) -> Path:
    total = 0
    with _unpacking(archive, target, kind) as building, contextlib.closing(entries):
        for entry in entries:
            path = PurePosixPath(entry.name.replace("\\", "/"))
            if entry.is_folder is None or path.is_absolute() or ".." in path.parts or ":" in entry.name:
                what, why = f"{archive} holds the entry {entry.name!r}", "it is a link, or would leave the folder"
                raise DataError(what, why=why, fix="do not use this archive; fetch it from its publisher")
            total += entry.size
            if total > max_bytes:
                what, why = f"{archive} would grow to more than {max_bytes} bytes", "that is the limit"
                raise DataError(what, why=why, fix="check where it comes from")
            place = building / path
            (place if entry.is_folder else place.parent).mkdir(parents=True, exist_ok=True)
            if not entry.is_folder:
                with entry.open() as source, place.open("wb") as file:
                    shutil.copyfileobj(source, file)
    return target


def put_unpacked(archive: Path, target: Path, unpack: Callable[[Path], Path]) -> None:
    """Let the folder that ``unpack`` makes of ``archive``, in a temporary folder, become ``target``.

    Where another process was faster, its folder is used.

    Raises:
        DataError: there is no such folder in it, or it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent, ignore_cleanup_errors=True) as temporary:
        unpacked = unpack(Path(temporary))
        if not unpacked.is_dir():
            raise DataError(
                f"{archive} does not hold {target.name}",
                why=f"there is no {unpacked.parent.name}/{unpacked.name} in it",
                fix="remove it and fetch it again",
            )
        with contextlib.suppress(OSError):
            unpacked.rename(target)
    if not target.is_dir():
        raise DataError(f"cannot write {target}", fix="move away what is there, or choose another --data-dir")


@contextlib.contextmanager
def _unpacking(archive: Path, target: Path, kind: str) -> Iterator[Path]:
    """A folder to unpack into, which becomes ``target`` in the end."""
    if target.exists():
        raise DataError(f"{target} exists already", why="unpacking never overwrites", fix="move it away, or use it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            yield building
            building.chmod(0o755)
            building.rename(target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except _BROKEN as error:
        raise DataError(
            f"{archive} is not a usable {kind} archive", why=str(error), fix="remove it and fetch it again"
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot unpack {archive} to {target}",
            why=str(error),
            fix="free some space, or choose a folder that you may write to",
        ) from error
