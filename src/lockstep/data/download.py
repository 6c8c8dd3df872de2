"""Files from the web, whole and verified, however often the line or the process breaks; and what archives contain.

The bytes go to ``NAME.part`` beside the target, under a lock that all processes of a node respect; a later try resumes
where the last one ended (HTTP range requests, RFC 9110 section 14). Only a file whose checksum is right takes the
target's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import logging
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from lockstep.errors import DataError

CHUNK_BYTES = 1 << 18
#: Answers that may be different the next time (RFC 9110; 425 and 429 from RFC 8470 and RFC 6585).
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_UNPACKED_BYTES = 16 * 1024**3
#: Errors of the libraries for a damaged or encrypted archive; gzip's error is an OSError.
_BROKEN = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, RuntimeError, OSError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """Waiting times and the number of tries, counted from the last one that received new bytes."""

    attempts: int = 5
    backoff_s: float = 1.0
    timeout_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep


def download(url: str, target: Path, sha256: str, *, patience: Patience | None = None) -> Path:
    """Fetch ``url`` to ``target`` unless it is there already, and return ``target``.

    Processes that ask for the same target wait for the first one. When it succeeds they use its file; when
    it fails they fail with its error; when it dies they resume from its bytes.

    Args:
        sha256: expected hash of the file.

    Raises:
        DataError: the address does not answer, the checksum is wrong, or the folder cannot be written.
    """
    if not url.startswith(("http://", "https://")):
        raise DataError(f"cannot download {url}", why="only http and https are known", fix="give such an address")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target) as (file, waited):
            failure = file.read() if waited else ""
            if target.exists():
                if problem := _mismatch(target, sha256):
                    raise DataError(
                        f"{target} is not the file that was expected", why=problem, fix="remove it and try again"
                    )
            elif failure.endswith("}"):  # of the process that this one has waited for
                raise DataError(**json.loads(failure))
            else:
                file.truncate(0)
                try:
                    _fetch(url, target, sha256, patience or Patience())
                except DataError as error:
                    file.write(json.dumps({"what": error.what, "why": error.why, "fix": error.fix}))
                    raise
    except OSError as error:
        fix = "free some space, or choose a folder that you may write to"
        raise DataError(f"cannot write to {target.parent}", why=str(error), fix=fix) from error
    return target


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[tuple[IO[str], bool]]:
    """One process at a time: the lock's file, and whether another process had it before."""
    # The lock file stays: removing it would let two processes hold locks on two files of one name.
    with target.with_name(f".{target.name}.lock").open("a+", encoding="utf-8") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            _log.info("waiting for another process that downloads %s", target.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file, waited  # closing the file, or dying, gives the lock back


class _Interrupted(Exception):
    """A try ended early; another one may resume."""


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _fetch(url: str, target: Path, sha256: str, patience: Patience) -> None:
    part = target.with_name(target.name + ".part")
    for again in (_size(part) > 0, False):
        _transfer(url, part, patience)
        problem = _mismatch(part, sha256)
        if not problem:
            break
        part.unlink()  # bytes of an earlier try may have been of another version of the file
        if not again:
            fix = "try again; if it stays so, the publisher changed the file: fetch and check it by hand"
            raise DataError(f"{url} does not give the file that was expected", why=problem, fix=fix)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)


def _transfer(url: str, part: Path, patience: Patience) -> None:
    failures = 0
    best = _size(part)
    while True:
        try:
            return _try_once(url, part, patience.timeout_s)
        except _Interrupted as error:
            there = _size(part)
            failures = 0 if there > best else failures + 1
            best = max(best, there)
            if failures >= patience.attempts:
                raise DataError(
                    f"cannot download {url}",
                    why=f"{failures} tries in a row brought nothing new; the last one: {error}",
                    fix=f"try again later: the {best} bytes received are kept, and it resumes after them",
                ) from None
            wait = patience.backoff_s * 2 ** max(0, failures - 1)
            _log.info("download of %s stopped at byte %d (%s); resuming in %.0f s", url, there, error, wait)
            patience.sleep(wait)


def _try_once(url: str, part: Path, timeout_s: float) -> None:
    start = _size(part)
    headers = {"User-Agent": "lockstep", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={start}-"} if start else {}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                if error.headers.get("Content-Range") == f"bytes */{start}":
                    return  # all bytes were there already
                part.unlink()
                raise _Interrupted("the server's file is shorter than the received part") from None
            if error.code in TRANSIENT:
                raise _Interrupted(f"HTTP {error.code} {error.reason}") from None
            raise DataError(
                f"cannot download {url}",
                why=f"the server answers {error.code} {error.reason}",
                fix="fetch the file by hand and give its folder with --data-dir",
            ) from None
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(getattr(error, "reason", None) or error) from None
    with response:
        resumes = response.status == http.HTTPStatus.PARTIAL_CONTENT
        if resumes and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            part.unlink()
            raise _Interrupted("the server sent another range than it was asked for")
        length = response.headers.get("Content-Length")
        with part.open("ab" if resumes else "wb") as file:
            while block := _read(response):
                file.write(block)
    expected = (start if resumes else 0) + int(length or 0)
    if _size(part) < expected:
        raise _Interrupted(f"the connection closed at byte {_size(part)} of {expected}")


def _read(response: http.client.HTTPResponse) -> bytes:
    # Only the reading is guarded: a full disk is another error than a broken line.
    try:
        return response.read(CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(error) from None


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mismatch(path: Path, sha256: str) -> str:
    """Describe a wrong checksum; empty for the right one."""
    digest = hash_file(path)
    return "" if digest == sha256.lower() else f"its SHA-256 is {digest}, not {sha256}"


def extract(archive: Path, folder: Path, *, max_bytes: int = MAX_UNPACKED_BYTES) -> Path:
    """Unpack the files of a zip or tar archive into ``folder``, a temporary one (:func:`put_unpacked`); returns it.

    Raises:
        DataError: a broken or encrypted archive, one that would grow beyond ``max_bytes``, one with an
            entry that leaves the folder or is a link, or a folder that cannot be written.
    """
    total = 0
    try:
        with contextlib.closing(_files_in(archive)) as files:
            for name, size, opened in files:
                path = PurePosixPath(name.replace("\\", "/"))
                if opened is None or path.is_absolute() or ".." in path.parts or ":" in name:
                    raise DataError(
                        f"{archive} has the entry {name!r}",
                        why="it is a link, or would leave the folder",
                        fix="fetch the archive from its publisher",
                    )
                total += size
                if total > max_bytes:
                    raise DataError(
                        f"{archive} would grow to more than {max_bytes} bytes",
                        why="that is the limit",
                        fix="check the source of the archive",
                    )
                unpacked = folder / path
                unpacked.parent.mkdir(parents=True, exist_ok=True)
                with opened() as source, unpacked.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except _BROKEN as error:
        fix = "remove it and fetch it again; or free some disk space"
        raise DataError(f"cannot unpack {archive}", why=str(error), fix=fix) from error
    return folder


def _files_in(archive: Path) -> Generator[tuple[str, int, Callable[[], Any] | None], None, None]:
    """Name, size and content of each file in an archive; no content: a link or a device."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                if not info.is_dir():
                    is_link = stat.S_ISLNK(info.external_attr >> 16)
                    yield info.filename, info.file_size, None if is_link else partial(packed.open, info)
        return
    with tarfile.open(archive) as tar:
        for entry in tar:
            if not entry.isdir():
                yield entry.name, entry.size, partial(tar.extractfile, entry) if entry.isreg() else None
        # tarfile stops at the last entry; the checksum of the compression stands behind it.
        while tar.fileobj is not None and tar.fileobj.read(1 << 20):
            pass


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
        raise DataError(f"cannot write {target}", fix="move it away, or choose another --data-dir")
