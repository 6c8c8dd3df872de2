"""One file from the web, whole and verified, however often the line or the process breaks.

The bytes go to ``NAME.part`` beside the target, under a lock that all processes of a node respect; a
later try resumes where the last one ended (HTTP range requests, RFC 9110 section 14). Only a file whose
checksum is right takes the target's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lockstep.errors import DataError

CHUNK_BYTES = 1 << 18
#: Answers that may be different the next time (RFC 9110; 425 and 429 from RFC 8470 and RFC 6585).
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long to wait and how often to try. Tries are counted from the last one that brought new bytes."""

    attempts: int = 5
    backoff_s: float = 1.0
    timeout_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep


def download(url: str, target: Path, sha256: str, *, patience: Patience | None = None) -> Path:
    """Fetch ``url`` to ``target`` unless it is there already, and return ``target``.

    Processes that ask for the same target wait for the first one. When it succeeds they use its file; when
    it fails they fail with its error; when it dies they resume from its bytes.

    Args:
        sha256: what the file must hash to.

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
                    what = f"{target} is not the file that was expected"
                    raise DataError(what, why=problem, fix="remove it and try again")
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
        raise DataError(
            f"cannot write to {target.parent}",
            why=str(error),
            fix="free some space, or choose a folder that you may write to",
        ) from error
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
        if not (problem and again):
            break
        part.unlink()  # bytes of an earlier try may have been of another version of the file
    if problem:
        part.unlink()
        raise DataError(
            f"{url} does not give the file that was expected",
            why=problem,
            fix="try again; if it stays so, the publisher changed the file: fetch and check it by hand",
        )
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)


def _transfer(url: str, part: Path, patience: Patience) -> None:
    """Try until the whole file is received."""
    failures, best = 0, _size(part)
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
    request = urllib.request.Request(url, headers={"User-Agent": "lockstep", "Accept-Encoding": "identity"})
    start = _size(part)
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            _refused(url, error, part)
        return
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(getattr(error, "reason", None) or error) from None
    with response:
        resumes = response.status == http.HTTPStatus.PARTIAL_CONTENT
        if resumes and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            part.unlink()
            raise _Interrupted("the server sent another range than it was asked for")
        length = response.headers.get("Content-Length")
        expected = (start if resumes else 0) + int(length) if length else None
        with part.open("ab" if resumes else "wb") as file:
            while block := _read(response):
                file.write(block)
    if expected is not None and _size(part) < expected:
        raise _Interrupted(f"the connection closed at byte {_size(part)} of {expected}")


def _refused(url: str, error: urllib.error.HTTPError, part: Path) -> None:
    """An answer without the file: nothing left to send, a reason to try again, or a final no."""
    if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and _size(part):
        if error.headers.get("Content-Range") == f"bytes */{_size(part)}":
            return  # all bytes were there already
        part.unlink()
        raise _Interrupted("the server's file is shorter than what had come")
    if error.code in TRANSIENT:
        raise _Interrupted(f"HTTP {error.code} {error.reason}")
    raise DataError(
        f"cannot download {url}",
        why=f"the server answers {error.code} {error.reason}",
        fix="fetch the file by hand and give its folder with --data-dir",
    )


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
    """What is wrong with the file, in words; nothing when all is well."""
    found = hash_file(path)
    return "" if found == sha256.lower() else f"its SHA-256 is {found}, not {sha256}"
