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


def download(
    url: str, target: Path, sha256: str | None, *, size: int | None = None, patience: Patience | None = None
) -> Path:
    """Fetch ``url`` to ``target`` unless it is there already, and return ``target``.

    Processes that ask for the same target wait for the first one. When it succeeds they use its file; when
    it fails they fail with its error; when it dies they resume from its bytes.

    Args:
        sha256: what the file must hash to. ``None``: not known; the hash of what came is then written to
            ``NAME.sha256`` beside the target, logged, and holds for later calls.
        size: bytes that the file must have, if known.

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
                _check_present(target, sha256, size)
            elif failure.endswith("}"):  # of the process that this one has waited for
                raise DataError(**json.loads(failure))
            else:
                file.truncate(0)
                try:
                    _fetch(url, target, sha256, size, patience or Patience())
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


class _Part:
    """The bytes received so far, and the server's name for the version that they belong to."""

    def __init__(self, path: Path) -> None:
        self.path, self._note = path, path.with_name(path.name + ".version")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def version(self) -> str:
        return self._note.read_text(encoding="utf-8") if self._note.exists() else ""

    def begin(self, version: str) -> None:
        """Drop the bytes; the next ones are of ``version``."""
        self.remove()  # before its name is noted, or it could come to stand for old bytes
        self._note.write_text(version, encoding="utf-8")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)


def _fetch(url: str, target: Path, sha256: str | None, size: int | None, patience: Patience) -> None:
    part = _Part(target.with_name(target.name + ".part"))
    if part.size and sha256 is None and not part.version:
        part.remove()  # it is unknown whether the rest belongs to it
    for again in (part.size > 0, False):
        _transfer(url, part, patience)
        found = hash_file(part.path)
        problem = _mismatch(part.path, found, sha256, size)
        if not (problem and again):
            break
        part.remove()  # bytes of an earlier try may have been of another version of the file
    if problem:
        part.remove()
        raise DataError(
            f"{url} does not give the file that was expected",
            why=problem,
            fix="try again; if it stays so, the publisher changed the file: fetch and check it by hand",
        )
    if sha256 is None:
        _record(target, found)
    with part.path.open("rb") as file:
        os.fsync(file.fileno())
    part.path.replace(target)
    part.remove()


def _transfer(url: str, part: _Part, patience: Patience) -> None:
    """Try until the whole file is received."""
    failures, best = 0, part.size
    while True:
        try:
            return _try_once(url, part, patience.timeout_s)
        except _Interrupted as error:
            failures = 0 if part.size > best else failures + 1
            best = max(best, part.size)
            if failures >= patience.attempts:
                raise DataError(
                    f"cannot download {url}",
                    why=f"{failures} tries in a row brought nothing new; the last one: {error}",
                    fix=f"try again later: the {best} bytes received are kept, and it resumes after them",
                ) from None
            wait = patience.backoff_s * 2 ** max(0, failures - 1)
            _log.info("download of %s stopped at byte %d (%s); resuming in %.0f s", url, part.size, error, wait)
            patience.sleep(wait)


def _try_once(url: str, part: _Part, timeout_s: float) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "lockstep", "Accept-Encoding": "identity"})
    start = part.size
    if start:
        request.add_header("Range", f"bytes={start}-")
        if part.version:
            request.add_header("If-Range", part.version)
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
            part.remove()
            raise _Interrupted("the server sent another range than it was asked for")
        if not resumes:
            tag = response.headers.get("ETag", "")  # a strong validator, for If-Range (RFC 9110 section 13.1.5)
            part.begin(tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified", ""))
        length = response.headers.get("Content-Length")
        expected = (start if resumes else 0) + int(length) if length else None
        with part.path.open("ab" if resumes else "wb") as file:
            for block in _blocks(response):
                file.write(block)
    if expected is not None and part.size < expected:
        raise _Interrupted(f"the connection closed at byte {part.size} of {expected}")


def _refused(url: str, error: urllib.error.HTTPError, part: _Part) -> None:
    """An answer without the file: nothing left to send, a reason to try again, or a final no."""
    if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and part.size:
        if error.headers.get("Content-Range") == f"bytes */{part.size}":
            return  # all bytes were there already
        part.remove()
        raise _Interrupted("the server's file is shorter than what had come")
    if error.code in TRANSIENT:
        raise _Interrupted(f"HTTP {error.code} {error.reason}")
    raise DataError(
        f"cannot download {url}",
        why=f"the server answers {error.code} {error.reason}",
        fix="fetch the file by hand and give its folder with --data-dir",
    )


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    # Only the reading is guarded: a full disk is another error than a broken line.
    while True:
        try:
            block = response.read(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _Interrupted(error) from None
        if not block:
            return
        yield block


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_present(target: Path, sha256: str | None, size: int | None) -> None:
    problem = _mismatch(target, hash_file(target), sha256 or _recorded(target), size)
    if problem:
        raise DataError(f"{target} is not the file that was expected", why=problem, fix="remove it and try again")


def _mismatch(path: Path, found: str, sha256: str | None, size: int | None) -> str:
    """What is wrong with the file, in words; nothing when all is well."""
    there = path.stat().st_size
    if size is not None and there != size:
        return f"it has {there} bytes, not {size}"
    if sha256 is not None and found != sha256.lower():
        return f"its SHA-256 is {found}, not {sha256}"
    return ""


def _record(target: Path, found: str) -> None:
    file = _checksum_file(target)
    file.write_text(f"{found}  {target.name}\n", encoding="utf-8")
    _log.warning("no checksum is known for %s; what came has SHA-256 %s (kept in %s)", target, found, file)


def _recorded(target: Path) -> str | None:
    file = _checksum_file(target)
    return file.read_text(encoding="utf-8").split()[0] if file.exists() else None


def _checksum_file(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")
