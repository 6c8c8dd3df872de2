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
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import DataError

#: Seconds without a byte after which a try ends.
TIMEOUT_S = 30.0
#: Answers that may be different the next time (RFC 9110; 425 and 429 from RFC 8470 and RFC 6585).
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})

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
    request = urllib.request.Request(url, headers={"User-Agent": "lockstep", "Accept-Encoding": "identity"})
    for attempt in range(attempts):
        if attempt:
            time.sleep(backoff_s * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response, part.open("wb") as file:
                shutil.copyfileobj(response, file)
                expected = int(response.headers.get("Content-Length") or 0)
                received = file.tell()
                if received >= expected:
                    return
                reason = f"the connection closed at byte {received} of {expected}"
        except urllib.error.HTTPError as error:
            with error:
                reason = f"the server answers {error.code} {error.reason}"
            if error.code not in TRANSIENT:
                fix = "fetch the file by hand and give its folder with --data-dir"
                raise DataError(f"cannot download {url}", why=reason, fix=fix) from None
        # Only of the connection: a full disk is another error.
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error))
        _log.info("download of %s stopped (%s)", url, reason)
    raise DataError(f"cannot download {url}", why=f"{attempts} tries; the last one: {reason}", fix="try again later")


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mismatch(path: Path, sha256: str) -> str:
    """Describe a wrong checksum; empty for the right one."""
    digest = hash_file(path)
    return "" if digest == sha256.lower() else f"its SHA-256 is {digest}, not {sha256}"


def extract(archive: Path, folder: Path) -> Path:
    """Unpack a zip archive whose checksum is known into ``folder``, a temporary one (:func:`put_unpacked`); return it.

    Raises:
        DataError: a broken archive, or a folder that cannot be written.
    """
    try:
        with zipfile.ZipFile(archive) as content:
            content.extractall(folder)
    except (zipfile.BadZipFile, zlib.error, OSError) as error:
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
