"""Files from the web, whole and verified, and what zip archives contain.

The bytes go to ``NAME.part`` beside the target, under a lock that all processes of a node respect. Only a file whose
checksum is right takes the target's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import logging
import os
import shutil
import stat
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from lockstep.errors import DataError

#: Seconds without a byte after which a try ends.
TIMEOUT_S = 30.0
#: Answers that may be different the next time (RFC 9110; 425 and 429 from RFC 8470 and RFC 6585).
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_UNPACKED_BYTES = 16 * 1024**3
#: Errors of the library for a damaged or encrypted archive.
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError)

_log = logging.getLogger(__name__)


def download(url: str, target: Path, sha256: str, *, attempts: int = 5, backoff_s: float = 1.0) -> Path:
    """Fetch ``url`` to ``target`` unless it is there already, and return ``target``.

    Processes that ask for the same target wait for the first one, and use its file; if it fails or dies, the next one
    tries.

    Args:
        sha256: expected hash of the file.
        attempts: tries, where the connection breaks or the server is busy.
        backoff_s: seconds before the second try, doubled for each later one.

    Raises:
        DataError: the address does not answer, the checksum is wrong, or the folder cannot be written.
    """
    if not url.startswith(("http://", "https://")):
        raise DataError(f"cannot download {url}", why="only http and https are known", fix="give such an address")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The lock file stays: removing it would let two processes hold locks on two files of one name.
        with target.with_name(f".{target.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file, or dying, gives the lock back
            if target.exists():
                if problem := _mismatch(target, sha256):
                    raise DataError(
                        f"{target} is not the file that was expected", why=problem, fix="remove it and try again"
                    )
                return target
            part = target.with_name(target.name + ".part")
            _fetch(url, part, attempts, backoff_s)
            if problem := _mismatch(part, sha256):
                part.unlink()
                raise DataError(
                    f"{url} does not give the file that was expected",
                    why=problem,
                    fix="try again; if it stays so, the publisher changed the file: fetch and check it by hand",
                )
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(target)
    except OSError as error:
        fix = "free some space, or choose a folder that you may write to"
        raise DataError(f"cannot write to {target.parent}", why=str(error), fix=fix) from error
    return target


def _fetch(url: str, part: Path, attempts: int, backoff_s: float) -> None:
    """Write all bytes of ``url`` to ``part``. Raises :class:`DataError` after the last try."""
    for attempt in range(1, attempts + 1):
        try:
            return _try_once(url, part)
        except _Interrupted as error:
            if attempt == attempts:
                raise DataError(
                    f"cannot download {url}", why=f"{attempts} tries; the last one: {error}", fix="try again later"
                ) from None
            wait_s = backoff_s * 2 ** (attempt - 1)
            _log.info("download of %s stopped (%s); trying again in %.0f s", url, error, wait_s)
            time.sleep(wait_s)


class _Interrupted(Exception):
    """A try ended early; another one may succeed."""


def _try_once(url: str, part: Path) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "lockstep", "Accept-Encoding": "identity"})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            if error.code in TRANSIENT:
                raise _Interrupted(f"HTTP {error.code} {error.reason}") from None
            raise DataError(
                f"cannot download {url}",
                why=f"the server answers {error.code} {error.reason}",
                fix="fetch the file by hand and give its folder with --data-dir",
            ) from None
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(getattr(error, "reason", None) or error) from None
    with response, part.open("wb") as file:
        received = 0
        while block := _read(response):
            received += file.write(block)
        expected = int(response.headers.get("Content-Length") or 0)
        if received < expected:
            raise _Interrupted(f"the connection closed at byte {received} of {expected}")


def _read(response: http.client.HTTPResponse) -> bytes:
    # Only the reading is guarded: a full disk is another error than a broken line.
    try:
        return response.read(1 << 18)
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
    """Unpack the files of a zip archive into ``folder``, a temporary one (:func:`put_unpacked`); return it.

    Raises:
        DataError: a broken or encrypted archive, one that would grow beyond ``max_bytes``, one with an
            entry that leaves the folder or is a link, or a folder that cannot be written.
    """
    try:
        with zipfile.ZipFile(archive) as content:
            entries = [entry for entry in content.infolist() if not entry.is_dir()]
            if sum(entry.file_size for entry in entries) > max_bytes:
                raise DataError(
                    f"{archive} would grow to more than {max_bytes} bytes",
                    why="that is the limit",
                    fix="check the source of the archive",
                )
            for entry in entries:
                path = PurePosixPath(entry.filename.replace("\\", "/"))
                is_link = stat.S_ISLNK(entry.external_attr >> 16)
                if is_link or path.is_absolute() or ".." in path.parts or ":" in entry.filename:
                    raise DataError(
                        f"{archive} has the entry {entry.filename!r}",
                        why="it is a link, or would leave the folder",
                        fix="fetch the archive from its publisher",
                    )
                unpacked = folder / path
                unpacked.parent.mkdir(parents=True, exist_ok=True)
                with content.open(entry) as source, unpacked.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except _BROKEN as error:
        fix = "remove it and fetch it again; or free some disk space"
        raise DataError(f"cannot unpack {archive}", why=str(error), fix=fix) from error
    return folder


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
