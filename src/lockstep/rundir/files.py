"""Crash-safe files: atomic JSON and folders, appended JSON lines, and bounded reading of untrusted files.

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
from pydantic_core import from_json

from lockstep.errors import RunFolderError, StorageError

MAX_JSON_BYTES = 64 << 20
MAX_JSONL_BYTES = 512 << 20
_MAX_LINE_BYTES = 64 << 20
#: Bytes read at a file's end: a row of ``ranks.jsonl`` has about 200 bytes a rank.
_TAIL_BYTES = 64 << 10
_MAX_TAIL_BYTES = 4 << 20
#: A file of this size is sampled; bytes read of it for the sample, and maximum bytes of a line.
LONG_BYTES = 8 << 20
_SPARSE_BYTES = 2 << 20
_MAX_SPARSE_LINE = 1 << 20

#: Part of every temporary name, to recognise leftovers of a killed process.
TEMPORARY = ".tmp-"
#: What renaming onto an empty folder gives when it is a mount point or a link, or its parent is read-only.
_NOT_REPLACEABLE = {errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


# --- writing -------------------------------------------------------------------------------------


def write_json(path: Path, obj: Any, *, durable: bool = True) -> None:
    """Replace ``path`` by ``obj`` as JSON, atomically; see :func:`write_bytes`."""
    write_text(path, json.dumps(plain(obj), ensure_ascii=False, indent=2) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace ``path`` by ``text`` (UTF-8), atomically; see :func:`write_bytes`."""
    write_bytes(path, text.encode("utf-8"), durable=durable, mode=mode)


def write_bytes(path: Path, content: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace ``path`` by ``content`` at once; ``durable=False``: its loss at a power cut does not matter."""
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
    """Return a hidden name beside ``name`` that no other writer uses."""
    return f".{name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of killed writers in ``folder``, when no other process writes. Raises :class:`OSError`."""
    for name in names_in(folder):
        if name.startswith(".") and TEMPORARY in name:
            remove(folder / name)


def remove(path: Path) -> None:
    """Remove a folder with its content, as far as possible, or anything else. Raises :class:`OSError`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def make_folders(folder: Path) -> None:
    """Make ``folder`` and its missing parents. Raises :class:`StorageError`."""
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def make_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make ``path``, a missing or an empty folder, with what ``fill`` writes into a folder given to it.

    It is built beside ``path`` and renamed; an empty folder that cannot be replaced, a mounted volume or the target of
    a link, is filled in place.
    """
    existed = is_folder(path)
    building = path.with_name(temporary_name(path.name))
    with storing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            building.mkdir()
            fill(building)
            building.rename(path)
            fsync_folder(path.parent)
        except OSError as error:
            if not existed or error.errno not in _NOT_REPLACEABLE:
                raise
            try:
                fill(path)
            except BaseException:
                for entry in path.iterdir():
                    remove(entry)
                raise
        except ValueError as error:  # a null character in the path
            raise StorageError(
                f"{str(path)!r} is not a valid path", why=str(error), fix="choose another --save-dir"
            ) from None
        finally:
            shutil.rmtree(building, ignore_errors=True)


def check_place(folder: Path) -> None:
    """Raise :class:`RunFolderError` unless ``folder`` could be made and written, before hours of work."""
    ancestor = absolute(folder)
    while not os.path.lexists(ancestor) and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    problem = "" if is_folder(ancestor) else f"{ancestor} is not a folder"
    if not problem and not os.access(ancestor, os.W_OK | os.X_OK):
        problem = f"you have no permission to write {ancestor}"
    if problem:
        raise RunFolderError(f"{folder} cannot be written", why=problem, fix="choose another --save-dir")


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


def plain(value: Any) -> Any:
    """Convert ``value`` to JSON types: ``None`` for non-finite numbers, ``?`` for text that is not valid Unicode."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int) for key in value):
            raise TypeError("keys in JSON are text")
        return {str(plain(key)): plain(item) for key, item in value.items()}
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


class JsonLines:
    """Appends rows to a JSON lines file, after cutting off a torn last line. One writer per file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._repaired = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one line. Raises :class:`StorageError`, and then leaves the file unchanged."""
        line = json.dumps(plain(row), ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        with storing(self.path), os.fdopen(open_own(self.path, flags), "r+b", buffering=0) as file:
            if not self._repaired:
                _cut_torn_line(file)
                self._repaired = True
            end = os.fstat(file.fileno()).st_size
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise


def _cut_torn_line(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    start = max(0, end - _MAX_LINE_BYTES)
    file.seek(start)
    lines_end = start + file.read(end - start).rfind(b"\n") + 1
    if 0 < start == lines_end:
        raise OSError(errno.EINVAL, f"its last {_MAX_LINE_BYTES:,} bytes hold no line")
    if lines_end < end:
        file.truncate(lines_end)


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file of the run folder as a descriptor; a link, pipe or device raises :class:`OSError`.

    The folder of ``path`` is opened first, and the name looked up in it.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def check_own_files(folder: Path) -> None:
    """Raise :class:`RunFolderError` unless ``folder`` has nothing but folders, regular files and links inside itself.

    Writing through another link, or to a pipe, would write outside.
    """
    root = folder.resolve()
    for path, folders, names in os.walk(root):
        for entry in (Path(path, name) for name in (*folders, *names)):
            with contextlib.suppress(FileNotFoundError):
                status = entry.lstat()
                if stat.S_ISLNK(status.st_mode):
                    if not _resolved(entry).is_relative_to(root):
                        raise RunFolderError(
                            f"{entry} is a link that leaves the run folder",
                            why=f"{entry.readlink()}: a training would write there",
                            fix="replace the link by its target; only the whole run folder may be behind a link",
                        )
                elif not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                    raise RunFolderError(
                        f"{entry} is a pipe, a socket or a device",
                        why="a run folder contains regular files and folders only",
                        fix="remove it",
                    )


def is_in_run_folder(folder: Path) -> bool:
    """Return whether ``folder`` is a run folder, or inside one."""
    return any((outer / "run.json").exists() for outer in (folder, *folder.parents))


def _resolved(link: Path) -> Path:
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return Path("/")


def storage_error(error: OSError, path: Path) -> StorageError:
    """Translate an operating system's refusal to write ``path`` to an error with a fix."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            problem = f"no space left to write {path}"
            fix = "free some space (or raise the quota), then `lockstep resume` the run"
        case errno.EROFS:
            problem = f"{path} is on a read-only file system"
            fix = "choose another --save-dir, or mount it writable"
        case errno.EEXIST:
            problem = f"{path} exists and is not a folder"
            fix = "choose another --save-dir"
        case errno.ELOOP | errno.EINVAL | errno.ENXIO:
            problem = f"{path} is not a regular file"
            fix = "replace it by a file, or remove it"
        case errno.EACCES | errno.EPERM:
            problem = f"no permission to write {path}"
            fix = "change the folder's permissions, or choose another --save-dir"
        case errno.ENOENT | errno.ENOTDIR:
            problem = f"the folder of {path} is missing"
            fix = "do not move or delete a run folder during its run"
        case _:
            problem = f"cannot write {path}"
            fix = "check the disk or network share that holds the run folder"
    return StorageError(problem, why=error.strerror or str(error), fix=fix)


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


# --- reading -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise RunFolderError(f"there is no {path}", fix="check the path; `lockstep runs` lists the runs") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read {path}", why=str(error), fix="check the path and its permissions") from None


class FileContent(BaseModel):
    """The content of a JSON file that another process, or an earlier version, wrote: unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path, max_bytes: int) -> Self | None:
        """Read ``path``; ``None`` if it is missing or has another content."""
        try:
            return cls.model_validate(read_json(path, max_bytes=max_bytes))
        except (RunFolderError, ValidationError):
            return None


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file; ``null`` stands where a number was not finite."""
    return parse_json(read_bytes(path, max_bytes=max_bytes), path)


def parse_json(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"not valid JSON: {str(error)[:200]}") from None


def damaged(path: Path, reason: str, fix: str = "restore the file, or use another run folder") -> RunFolderError:
    return RunFolderError(f"{path} is damaged", why=reason, fix=fix)


def read_jsonl(path: Path, *, max_bytes: int = MAX_JSONL_BYTES) -> list[dict[str, Any]]:
    """Read rows of a JSON lines file, without a torn last line and damaged ones; raises if no line is valid."""
    if not os.path.lexists(path):
        return []
    *lines, _torn = read_bytes(path, max_bytes=max_bytes).split(b"\n")
    rows = [row for row in map(row_of, lines) if row is not None]
    if not rows and any(line.strip() for line in lines):
        raise damaged(path, "none of its lines is a JSON object", "remove the file; the run itself is not affected")
    return rows


def last_row(path: Path) -> dict[str, Any] | None:
    """Return the last row of a growing JSON lines file; ``None`` if its last 4 MiB have none."""
    try:
        with open_regular(path, links=True) as file:
            size = file.seek(0, os.SEEK_END)
            for tail_bytes in (_TAIL_BYTES, _MAX_TAIL_BYTES):
                file.seek(max(0, size - tail_bytes))
                *lines, _torn = file.read(tail_bytes).split(b"\n")
                row = next((row for row in map(row_of, reversed(lines)) if row is not None), None)
                if row is not None or tail_bytes >= size:
                    return row
    except OSError:
        pass
    return None


class AppendedRows:
    """Reads a growing JSON lines file from its start, each row once; a file that was replaced is read again."""

    #: Read at once: small enough not to block other threads for long.
    CHUNK_BYTES = 1 << 20

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Whether the file has content that was not read yet.
        self.behind = False
        #: Whether the last read began at the start of the file.
        self.is_first = True
        self._identity = (0, 0)
        self.restart()

    def restart(self) -> None:
        """Begin again at the start of the file."""
        self._offset = 0
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Read the rows of at most one chunk, without damaged ones. Raises :class:`OSError`."""
        self.behind = False
        with open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                self._identity = identity
                self.restart()
            self.is_first = self._offset == 0
            if status.st_size == self._offset:
                return []
            self._offset = _next_data(file.fileno(), self._offset)
            file.seek(self._offset)
            content = file.read(self.CHUNK_BYTES)
            self._offset += len(content)
            self.behind = self._offset < status.st_size
        *lines, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > 4 * self.CHUNK_BYTES:
            self._rest = b""  # Lockstep writes no such line
        return rows_of(lines)


def sparse_rows(path: Path, max_rows: int, *, links: bool = True) -> list[dict[str, Any]]:
    """Read rows of a JSON lines file that may be larger than memory: all, or ``max_rows`` at equal distances.

    Of rows with hundreds of values, fewer are read.
    """
    with _reading(path), open_regular(path, buffer_bytes=8192, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        if size < LONG_BYTES:
            *lines, _torn = file.read(size).split(b"\n")
            return rows_of(lines)
        lines = []
        room = _SPARSE_BYTES
        max_rows = max(2, min(max_rows, room // max(1, len(file.readline(_MAX_SPARSE_LINE)))))
        for position in range(0, size, math.ceil(size / max_rows)):
            file.seek(_next_data(file.fileno(), position))
            file.readline(_MAX_SPARSE_LINE)  # rest of a line
            line = file.readline(_MAX_SPARSE_LINE)
            if line.startswith(b"{") and (room := room - len(line)) > 0:
                lines.append(line)
    return rows_of(lines)


def _next_data(file: int, offset: int) -> int:
    """Return the next offset that is not in a hole of a sparse file, or its end."""
    try:
        return max(offset, os.lseek(file, offset, os.SEEK_DATA))
    except OSError as error:
        return os.fstat(file).st_size if error.errno == errno.ENXIO else offset


def rows_of(lines: list[bytes]) -> list[dict[str, Any]]:
    """Return the rows among ``lines``; a line that a power cut damaged is left out."""
    try:
        parsed = from_json(b"[" + b",".join(line for line in lines if line) + b"]", allow_inf_nan=True)
    except ValueError:
        parsed = map(row_of, lines)
    return [row for row in parsed if isinstance(row, dict)]


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row in one line; ``None`` where a power cut damaged it."""
    try:
        row = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def open_regular(path: Path, *, buffer_bytes: int = 0, links: bool = False) -> BinaryIO:
    """Open a regular file for reading; a folder, pipe or device, or a link unless allowed, raises :class:`OSError`."""
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
    """Read the whole of a regular file of at most ``max_bytes``. Raises :class:`RunFolderError`."""
    with _reading(path), open_regular(path, buffer_bytes=-1, links=True) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise RunFolderError(
                f"{path} is too large: {size:,} bytes",
                why=f"no run writes more than {max_bytes:,} bytes there",
                fix="restore the file, or use another run folder",
            )
        return file.read(size)  # more than the size would allocate all of it


def names_in(folder: Path) -> list[str]:
    """List names in ``folder``; none when it is missing. Raises :class:`RunFolderError`."""
    with _reading(folder):
        try:
            return os.listdir(folder)  # noqa: PTH208 - no object for each of thousands of names
        except FileNotFoundError:
            return []


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder; ``False`` also without permission (``Path.is_dir`` raises there)."""
    return os.path.isdir(path)  # noqa: PTH112


def absolute(path: Path) -> Path:
    """Return ``path`` from the root, without ``..``, links left as the user named them."""
    return Path(os.path.abspath(path))


def flattened(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings by dotted key: ``{"training": {"epochs": 3}}`` → ``{"training.epochs": 3}``."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
