"""Crash-safe files: atomic JSON, appended JSON lines, and bounded reading of untrusted files.

Writers raise :class:`StorageError`; readers raise :class:`RunFolderError`. JSON has no NaN and no
infinity (RFC 8259, section 6), so a non-finite number is written as ``null``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from lockstep.errors import RunFolderError, StorageError

MAX_JSON_BYTES = 64 << 20
MAX_JSONL_BYTES = 512 << 20
_MAX_LINE_BYTES = 64 << 20
_TAIL_BYTES = 64 << 10
#: Of what :func:`last_row` reads; a row of ``ranks.jsonl`` has about 200 bytes a rank.
_MAX_TAIL_BYTES = 4 << 20

#: Part of every temporary name, to recognise leftovers of a killed process.
TEMPORARY = ".tmp-"

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM}


# --- writing -------------------------------------------------------------------------------------


def write_json(path: Path, obj: Any, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace ``path`` by ``obj`` as JSON: readers see the old content or the new, never a part.

    ``durable=False`` leaves out the fsync, for files whose loss at a power cut does not matter.

    Raises:
        StorageError: the file cannot be written; the old content is still there.
    """
    write_text(path, json.dumps(plain(obj), ensure_ascii=False, indent=2) + "\n", durable=durable, mode=mode)


def write_text(path: Path, text: str, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace ``path`` by ``text`` (UTF-8), atomically. Raises :class:`StorageError`."""
    write_bytes(path, text.encode("utf-8"), durable=durable, mode=mode)


def write_bytes(path: Path, content: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace ``path`` by ``content``, atomically. Raises :class:`StorageError`.

    Args:
        mode: the file's permissions, less those that the umask takes.
    """
    temporary = path.with_name(temporary_name(path.name))
    with storing(path):
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            fsync_folder(path.parent)


def temporary_name(name: str) -> str:
    """A hidden name beside ``name`` that no other writer uses."""
    return f".{name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"


def make_folders(folder: Path) -> None:
    """Make ``folder`` and what is above it, as far as it is missing. Raises :class:`StorageError`."""
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def check_place(folder: Path) -> None:
    """Whether ``folder`` could be made and written, to know it before hours of work; makes nothing.

    Raises:
        RunFolderError: it is a file, lies below one, or may not be written.
    """
    place = absolute(folder)
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not is_folder(place):
        why = f"{place} is not a folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        why = f"you have no permission to write {place}"
    else:
        return
    raise RunFolderError(f"{folder} cannot be written", why=why, fix="choose another --save-dir")


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable. Raises :class:`OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for folders; their renames cannot be made durable.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
            raise
    finally:
        os.close(descriptor)


class FileContent(BaseModel):
    """The content of a JSON file that another process, or an earlier version, wrote: unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path, max_bytes: int) -> Self | None:
        """The content of ``path``; ``None`` where that is missing or something else."""
        try:
            return cls.model_validate(read_json(path, max_bytes=max_bytes))
        except (RunFolderError, ValidationError):
            return None


def plain(value: Any) -> Any:
    """``value`` as JSON types. Non-finite numbers become ``None``, paths and times become text.

    NumPy and torch scalars are taken by their ``item()``. Text that is not valid Unicode (a file
    name of raw bytes in a command line) keeps its readable part.

    Raises:
        TypeError: a type that JSON has no form for (a programming error, not a user's).
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, os.PathLike):
        return plain(os.fspath(value))
    if isinstance(value, datetime):
        return value.isoformat()
    if callable(getattr(value, "item", None)):
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _key(key: Any) -> str:
    if not isinstance(key, str | int):
        raise TypeError(f"{type(key).__name__} cannot be a key in JSON")
    return str(plain(key))


class JsonLines:
    """Appends rows to a JSON lines file. One writer per file.

    A line that a killed writer left unfinished is cut off before the first row is appended, so
    that every line but the last is whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._repaired = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one line. Raises :class:`StorageError`, after which the file ends where it ended before."""
        line = json.dumps(plain(row), ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
        with storing(self.path), self.path.open("ab", buffering=0) as file:
            if not self._repaired:
                _cut_torn_line(self.path)
                self._repaired = True
            end = os.fstat(file.fileno()).st_size
            try:
                written = file.write(line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise


def _cut_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            if end - position >= _MAX_LINE_BYTES:
                raise OSError(errno.EINVAL, f"its last {end - position:,} bytes hold no line")
            start = max(0, position - 65_536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)


def storage_error(error: OSError, path: Path) -> StorageError:
    """What an operating system's refusal to write ``path`` means, and what to do about it."""
    why = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        what = f"no space left to write {path}"
        fix = "free some space (or raise the quota), then `lockstep resume` the run"
    elif error.errno == errno.EROFS:
        what, fix = f"{path} is on a read-only file system", "choose another --save-dir, or mount it writable"
    elif error.errno == errno.EEXIST:
        what, fix = f"{path} is there already, and no folder", "choose another --save-dir"
    elif error.errno in _NO_PERMISSION:
        what, fix = f"no permission to write {path}", "change the folder's permissions, or choose another --save-dir"
    elif error.errno in {errno.ENOENT, errno.ENOTDIR}:
        what, fix = f"the folder of {path} is not there", "do not move or delete a run folder while the run is on"
    else:
        what, fix = f"cannot write {path}", "check the disk or network share that holds the run folder"
    return StorageError(what, why=why, fix=fix)


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Inside, an :class:`OSError` is raised as the :class:`StorageError` of ``path``."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


# --- reading -------------------------------------------------------------------------------------


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The content of a JSON file; ``null`` stands where a number was not finite.

    Raises:
        RunFolderError: the file is missing, not a regular file, too large or not JSON.
    """
    return parse_json(read_bytes(path, max_bytes=max_bytes), path)


def parse_json(content: bytes, path: Path) -> Any:
    """``content`` of ``path`` as JSON. Raises :class:`RunFolderError`."""
    try:
        return json.loads(content, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"not valid JSON: {str(error)[:200]}") from None


def damaged(path: Path, why: str, fix: str = "restore the file, or use another run folder") -> RunFolderError:
    """The error of a file whose content is not what it should be."""
    return RunFolderError(f"{path} is damaged", why=why, fix=fix)


def read_jsonl(path: Path, *, max_bytes: int = MAX_JSONL_BYTES) -> list[dict[str, Any]]:
    """Rows of a JSON lines file; a missing file has none.

    What follows the last newline is a line being written and is left out. So is a line that a power
    cut damaged; but a file in which no complete line is valid raises.

    Raises:
        RunFolderError: not a regular file, too large, or not JSON lines.
    """
    if not os.path.lexists(path):
        return []
    *lines, _torn = read_bytes(path, max_bytes=max_bytes).split(b"\n")
    rows = [row for row in map(_row, lines) if row is not None]
    if not rows and any(line.strip() for line in lines):
        raise damaged(path, "none of its lines is a JSON object", "remove the file; the run itself is not affected")
    return rows


def last_row(path: Path, wanted: Callable[[dict[str, Any]], bool] = lambda row: True) -> dict[str, Any] | None:
    """The last complete row of a JSON lines file that is ``wanted``, read from its end; ``None`` when there is none.

    For files that are polled while they grow; reads only what the row needs, at most 4 MiB.
    """
    tail_bytes = _TAIL_BYTES
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            while True:
                file.seek(max(0, size - tail_bytes))
                *lines, _torn = file.read(tail_bytes).split(b"\n")
                row = next((row for row in map(_row, reversed(lines)) if row is not None and wanted(row)), None)
                if row is not None or tail_bytes >= min(size, _MAX_TAIL_BYTES):
                    return row
                tail_bytes *= 4
    except OSError:
        return None


def sparse_rows(path: Path, most: int) -> list[dict[str, Any]]:
    """Rows of a JSON lines file that may be larger than memory, evenly spaced: from ``most`` to twice as many.

    A file that has fewer gives all. Only the lines that are kept are looked at; bad ones are left out.

    Raises:
        RunFolderError: not a regular file, or it cannot be read.
    """
    kept: list[bytes] = []
    stride = 1
    try:
        with open_regular(path, buffer_bytes=-1, links=True) as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b"")):
                if number % stride == 0:
                    kept.append(line)
                if len(kept) == 2 * most:
                    kept, stride = kept[::2], 2 * stride
    except OSError as error:
        raise RunFolderError(f"cannot read {path}", why=str(error), fix="check the path and its permissions") from None
    return [row for row in map(_row, kept) if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def open_regular(path: Path, *, buffer_bytes: int = 0, links: bool = False) -> BinaryIO:
    """A regular file for reading, opened without blocking; unbuffered unless ``buffer_bytes`` is given.

    Args:
        links: whether ``path`` may be a symbolic link.

    Raises:
        OSError: it does not exist, or is a folder, a pipe, a device, or a link that is not allowed.
    """
    # Non-blocking, because opening a named pipe would otherwise wait for a writer for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        return os.fdopen(descriptor, "rb", buffering=buffer_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """The whole of a regular file of at most ``max_bytes``. Raises :class:`RunFolderError`."""
    try:
        with open_regular(path, buffer_bytes=-1, links=True) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise RunFolderError(
                    f"{path} is too large: {size:,} bytes",
                    why=f"no run writes more than {max_bytes:,} bytes there",
                    fix="restore the file, or use another run folder",
                )
            return file.read(size)  # more than the size would allocate all of it
    except FileNotFoundError:
        raise RunFolderError(f"there is no {path}", fix="check the path; `lockstep runs` lists the runs") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read {path}", why=str(error), fix="check the path and its permissions") from None


def names_in(folder: Path) -> list[str]:
    """Names in ``folder``; none when it is missing. Raises :class:`RunFolderError`."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - no object for each of thousands of names
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"cannot read the folder {folder}", why=str(error), fix="check the path and its permissions"
        ) from None


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; ``False`` also without permission (``Path.is_dir`` raises there)."""
    return os.path.isdir(path)  # noqa: PTH112


def absolute(path: Path) -> Path:
    """``path`` from the root, without ``..``, links left as the user named them."""
    return Path(os.path.abspath(path))


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders that killed writers left in ``folder``. Raises :class:`OSError`.

    Not by pid: in a container the next process has the same one. Call it when no other process writes.
    """
    for name in names_in(folder):
        if name.startswith(".") and TEMPORARY in name:
            leftover = folder / name
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
