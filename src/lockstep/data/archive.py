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
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from lockstep.errors import DataError

MAX_UNPACKED_BYTES = 16 * 1024**3

_BROKEN = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError),
    *(EOFError, RuntimeError, NotImplementedError),
)


def extract_zip(archive: Path, target: Path, *, max_bytes: int = MAX_UNPACKED_BYTES) -> Path:
    """Unpack ``archive`` into the new folder ``target``, whole or not at all, and return ``target``.

    Raises:
        DataError: a broken or encrypted archive, one that would grow beyond ``max_bytes``, one with an
            entry that leaves the folder or is a link, or a target that exists or cannot be written.
    """
    with _unpacking(archive, target, "zip") as building, zipfile.ZipFile(archive) as content:
        _check(archive, content, max_bytes)
        content.extractall(building)
    return target


def extract_tar(archive: Path, target: Path, *, max_bytes: int = MAX_UNPACKED_BYTES) -> Path:
    """Like :func:`extract_zip` for a tar archive, compressed by gzip, bzip2, xz or not at all.

    Of an entry, only name and content are taken.
    """
    total = 0
    with _unpacking(archive, target, "tar") as building, tarfile.open(archive) as content:
        for entry in content:
            if _leaves(entry.name) or not (entry.isreg() or entry.isdir()):
                raise _refused(archive, entry.name)
            total += entry.size
            if total > max_bytes:
                raise _too_large(archive, f"more than {max_bytes}", max_bytes)
            if entry.isreg():
                _write(content, entry, building / entry.name)
            else:
                (building / entry.name).mkdir(parents=True, exist_ok=True)
        # tarfile stops at the last entry; the checksum of the compression stands behind it.
        while content.fileobj is not None and content.fileobj.read(1 << 20):
            pass
    return target


def _write(content: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = content.extractfile(entry)
    assert source is not None, "a regular file has content"
    with source, path.open("wb") as file:
        shutil.copyfileobj(source, file)


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


def _check(archive: Path, content: zipfile.ZipFile, max_bytes: int) -> None:
    entries = content.infolist()
    for entry in entries:
        if _leaves(entry.filename) or stat.S_ISLNK(entry.external_attr >> 16):
            raise _refused(archive, entry.filename)
    total = sum(entry.file_size for entry in entries)
    if total > max_bytes:
        raise _too_large(archive, str(total), max_bytes)


def _leaves(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or ":" in name


def _refused(archive: Path, name: str) -> DataError:
    return DataError(
        f"{archive} holds the entry {name!r}",
        why="it is a link, or would be written outside the folder",
        fix="do not use this archive; fetch it from its publisher",
    )


def _too_large(archive: Path, size: str, limit: int) -> DataError:
    return DataError(
        f"{archive} would grow to {size} bytes", why=f"the limit is {limit}", fix="check where it comes from"
    )
