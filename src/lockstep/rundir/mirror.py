"""The mirror of a run folder: its copy at a URL of fsspec, from which any machine resumes the run.

The local folder stays the truth; one background thread copies it. A checkpoint is complete at the mirror when its
manifest is there: it goes up last, after the rows that belong to the checkpoint, and is removed first. ``last`` and
``best`` are text files that name checkpoints there. Each attempt writes ``attempts/<n>/mirror.json`` before anything
else; only one writer can, and an older attempt that sees a newer one stops writing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, LockstepError, RunFolderError, many, printable
from lockstep.events import CheckpointSaved, Event, RunStarted
from lockstep.rundir.files import TEMPORARY, names_in, remove, temporary_name
from lockstep.rundir.folder import RunDir, utc_now
from lockstep.rundir.heartbeat import Activity, pulse
from lockstep.rundir.remote import (
    CHECKPOINT,
    CHECKPOINTS,
    MANIFEST,
    POINTERS,
    Remote,
    in_words,
    is_local_only,
    is_of_checkpoint,
    is_weights,
    reaching,
)

#: Seconds between two looks at the run folder.
INTERVAL_S = 5.0
#: Longest pause after a failure, in seconds; the first is ``INTERVAL_S``, and each next one is twice as long.
LONGEST_PAUSE_S = 30.0
#: A growing file goes up as a whole, so at most in one of this many parts of the time.
SHARE_OF_TIME = 20
#: Seconds between lines of progress while the end of a run waits for its mirror.
PROGRESS_S = 5.0

_CLAIM = "mirror.json"
#: How long a mirror that another starting attempt has claimed may lack its run.json.
_STARTING_S = 5.0


def _attempt_of(names: dict[str, Any]) -> int:
    """Return the newest attempt that has written a mirror, by the names of its files; 0: none has."""
    numbers = [name.split("/")[1] for name in names if name.startswith("attempts/")]
    return max((int(number) for number in numbers if number.isascii() and number.isdigit()), default=0)


def refuse_inside(url: str, folder: Path | None) -> Remote:
    """Raise :class:`ConfigError` for a URL that is ``folder``, or in it; else the files at the URL."""
    remote = Remote(url)
    if remote.is_local and folder is not None and Path(remote.path("")).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"cannot mirror {folder} to {url}", why="it is in that folder", fix="choose another URL")
    return remote


def check_mirror(url: str, folder: Path | None) -> None:
    """Raise an error with exit code 2 unless the run in ``folder``, if there is one, can be mirrored to ``url``.

    Asks the storage: reads ``run.json``, and writes and removes a file. A mirror whose run failed before its first
    checkpoint is emptied, as a local folder is set aside.

    Args:
        folder: of the run; ``None``, missing or empty for a new one.
    """
    remote = refuse_inside(url, folder)
    run = None if folder is None or not (folder / "run.json").exists() else RunDir(folder)
    with reaching(url):
        record = remote.record()
        names = {} if record is None else remote.names()
        if record is not None and run is None and record.status == "failed" and not any(map(is_weights, names)):
            for name in sorted(names, key=lambda name: name == "run.json"):
                remote.remove(name)
            record = None
            names = {}
    if record is not None and (run is None or run.read().id != record.id):
        raise RunFolderError(
            f"{url} is the mirror of run {record.id}",
            why="a mirror has one run" if run is not None else "this is a new run",
            fix=f"choose another URL, or `lockstep resume {url}`",
        )
    if run is not None and _attempt_of(names) > run.last_attempt():
        raise RunFolderError(
            f"run {run.read().id} has been resumed elsewhere from its mirror {url}",
            why=f"attempt {_attempt_of(names)} is newer than those of {run.path}",
            fix=f"move {run.path} away, and resume from the mirror: lockstep resume {url}",
        )
    probe = f"probe{TEMPORARY}{secrets.token_hex(4)}"
    with reaching(url, "written"):
        remote.write(probe, b"")
        remote.remove(probe)


class _Superseded(Exception):
    """A newer attempt writes this mirror."""


class Mirror:
    """Copies a folder to a URL in one background thread; see the module.

    A failure is reported once and tried again until :meth:`close` gives up, with pauses of up to 30 s. Works for any
    folder; only that of a run which :meth:`start` has been called for has claims, and removes checkpoints at the URL.

    Args:
        interval_s: seconds between two looks; ``None``: only when asked to.
        report: receives one line for users.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        interval_s: float | None = INTERVAL_S,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = folder
        self.url = url
        #: Why the newest pass failed; empty: all was copied.
        self.failure = ""
        self._interval_s = interval_s
        self._report = report or _print
        self._remote: Remote | None = None
        self._attempt = 0
        self._is_claimed = False
        self._sent: dict[str, tuple[int, ...]] = {}
        self._due: dict[str, float] = {}
        self._published: dict[str, bytes] = {}
        self._retained: set[str | None] = set()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, attempt: int) -> None:
        """Claim the mirror for an attempt of the run, and begin to copy.

        Raises :class:`RunFolderError` if another attempt has the claim. An outage is waited for in the background.
        """
        self._attempt = attempt
        self._is_claimed = False
        try:
            self._claim(self._opened())
        except LockstepError:
            raise
        except Exception as error:
            self._failed(error)
        self.request()

    def request(self) -> None:
        """Ask for a pass over the folder; returns at once."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="lockstep-mirror", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self, wait_s: float) -> bool:
        """Make a last pass and wait for it; whether all is at the mirror. A later request starts it again."""
        with pulse.during(Activity.MIRRORING):
            self._closing.set()
            self.request()
            deadline = time.monotonic() + wait_s
            thread = self._thread
            assert thread is not None, "a request starts the thread"
            thread.join(min(PROGRESS_S / 2, wait_s))
            while thread.is_alive() and time.monotonic() < deadline:
                problem = f" ({self.failure})" if self.failure else ""
                self._report(f"mirror: {self._describe_unsent()} to copy to {self.url}{problem}")
                thread.join(max(0.0, min(PROGRESS_S, deadline - time.monotonic())))
        if thread.is_alive():
            self._abandoned.set()
            self._wake.set()
            self._report(
                f"warning: {self._describe_unsent()} have not reached {self.url} in {wait_s:g} s: they are in "
                f"{self.folder}, and resuming the run from there copies them"
            )
        self._closing.clear()
        return not thread.is_alive() and not self.failure

    def _run(self) -> None:
        pause: float | None = self._interval_s
        while not self._abandoned.is_set():
            self._wake.wait(pause)
            self._wake.clear()
            is_last = self._closing.is_set()
            try:
                self._pass(everything=is_last or self._interval_s is None)
            except _Superseded as error:
                self.failure = str(error)
                self._report(f"warning: {error}")
                return
            except Exception as error:  # whatever the storage's library raises
                pause = min(LONGEST_PAUSE_S, 2 * pause if self.failure and pause else INTERVAL_S)
                pause = min(pause, INTERVAL_S) if is_last else pause
                self._failed(error)
            else:
                if self.failure:
                    self._report(f"mirror: {self.url} is reached again")
                pause = self._interval_s
                self.failure = ""
                if is_last:
                    return
        self._abandoned.clear()

    def _failed(self, error: Exception) -> None:
        if not self.failure:
            self._report(f"warning: cannot copy to {self.url}, and will try again: {in_words(error)}")
        self.failure = in_words(error)
        self._remote = None

    def _opened(self) -> Remote:
        self._remote = self._remote or Remote(self.url)
        return self._remote

    def _claim(self, remote: Remote) -> None:
        name = f"attempts/{self._attempt}/{_CLAIM}"
        run = RunDir(self.folder).read().id
        claim = {"run": run, "host": socket.gethostname(), "pid": os.getpid(), "at": utc_now().isoformat()}
        content = json.dumps({**claim, "key": secrets.token_hex(8)}).encode()
        try:
            remote.write(name, content, mode="create")
        except FileExistsError:
            # A starting attempt that was killed leaves a claim without a run.
            if remote.read_if_there("run.json") is None:
                time.sleep(_STARTING_S)
            if remote.read_if_there("run.json") is not None:
                other = json.loads(remote.read(name))
                raise RunFolderError(
                    f"another attempt writes the mirror {self.url}",
                    why=f"process {other.get('pid')} on {other.get('host')} has begun attempt {self._attempt} there",
                    fix="end one of them, or choose another mirror",
                ) from None
            remote.write(name, content)
        self._is_claimed = True

    # One pass.

    def _pass(self, *, everything: bool) -> None:
        remote = self._opened()
        if self._attempt and not self._is_claimed:
            try:
                self._claim(remote)
            except RunFolderError as error:
                raise _Superseded(f"{error.what}: {error.why}") from None
        self._refuse_superseded(remote)
        self._send_records(remote, everything=everything)
        while (name := self._next_checkpoint(remote)) is not None and not self._abandoned.is_set():
            self._send_checkpoint(remote, name)
        self._send_pointers(remote)
        if self._attempt:
            self._retire(remote)

    def _next_checkpoint(self, remote: Remote) -> str | None:
        """Choose a complete checkpoint that is not at the mirror: the best first, then the newest."""
        folder = self.folder / CHECKPOINTS
        local = sorted((name for name in names_in(folder) if CHECKPOINT.fullmatch(name)), reverse=True)
        best = self._target("best")
        for name in sorted(local, key=lambda name: name != best):
            try:
                manifest = (folder / name / MANIFEST).read_bytes()
            except OSError:  # retired meanwhile
                continue
            file = f"{CHECKPOINTS}/{name}/{MANIFEST}"
            if name not in self._published and remote.read_if_there(file) == manifest:
                self._published[name] = manifest
            if self._published.get(name) != manifest:
                return name
        return None

    def _send_checkpoint(self, remote: Remote, name: str) -> None:
        """Send a checkpoint, its manifest last; nothing if it is retired before its files could be held."""
        folder = self.folder / CHECKPOINTS / name
        remote_folder = f"{CHECKPOINTS}/{name}"
        with _linked(folder) as source:
            try:
                manifest = (source / MANIFEST).read_bytes()
                self._published.pop(name, None)
                remote.remove(f"{remote_folder}/{MANIFEST}")
                for file in sorted(source.iterdir()):
                    if file.name != MANIFEST:
                        self._send(remote, file, f"{remote_folder}/{file.name}")
                        self._send_records(remote)
            except FileNotFoundError:
                if source.exists():
                    raise
                return
        self._send_records(remote, everything=True)
        self._refuse_superseded(remote)
        remote.write(f"{remote_folder}/{MANIFEST}", manifest)
        self._published[name] = manifest
        self._send_pointers(remote)

    def _target(self, pointer: str) -> str | None:
        """Return the checkpoint that ``last`` or ``best`` names in the folder."""
        link = self.folder / CHECKPOINTS / pointer
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return str(link.readlink()) if link.is_symlink() else link.read_text("ascii").strip()
        return None

    def _send_pointers(self, remote: Remote) -> None:
        for pointer in POINTERS:
            name = f"{CHECKPOINTS}/{pointer}"
            target = self._target(pointer)
            mark = (int(target.removeprefix("step-")),) if target in self._published else None
            if mark is not None and self._sent.get(name) != mark:
                remote.write(name, f"{target}\n".encode())
                self._sent[name] = mark

    def _retire(self, remote: Remote) -> None:
        """Remove the checkpoints at the mirror that the folder no longer has, manifests first."""
        keep = {*names_in(self.folder / CHECKPOINTS), *map(self._target, POINTERS)}
        if not self._published or keep == self._retained:
            return
        mirrored = {name.split("/")[1] for name in remote.names(CHECKPOINTS)}
        for checkpoint in filter(CHECKPOINT.fullmatch, mirrored - keep):
            remote.remove_checkpoint(checkpoint)
            self._published.pop(checkpoint, None)
            gone = f"{CHECKPOINTS}/{checkpoint}/"
            self._sent = {name: mark for name, mark in self._sent.items() if not name.startswith(gone)}
        self._retained = keep

    def _refuse_superseded(self, remote: Remote) -> None:
        if self._attempt and remote.read_if_there(f"attempts/{self._attempt + 1}/{_CLAIM}") is not None:
            raise _Superseded(
                f"attempt {self._attempt + 1} has been begun elsewhere from the mirror {self.url}; "
                "this one writes there no longer"
            )

    def _send_records(self, remote: Remote, *, everything: bool = False) -> None:
        """Send the new and changed files besides checkpoints; of large ones not each change, unless ``everything``."""
        for file in self._records():
            name = file.relative_to(self.folder).as_posix()
            start = time.monotonic()
            if not everything and start < self._due.get(name, 0.0):
                continue
            try:
                self._send(remote, file, name)
            except FileNotFoundError:
                if file.exists():
                    raise
            self._due[name] = start + SHARE_OF_TIME * (time.monotonic() - start)

    def _records(self) -> list[Path]:
        """Return the files besides checkpoints, ``run.json`` last."""
        files = [file for file in self._files() if not is_of_checkpoint(file.relative_to(self.folder).as_posix())]
        return sorted(files, key=lambda file: (file == self.folder / "run.json", file))

    def _files(self) -> Iterator[Path]:
        """Yield the files of the folder that can be read. Links are not followed."""
        for base, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if TEMPORARY not in name]
            for file in (Path(base) / name for name in names if not is_local_only(name)):
                if not file.is_symlink() and os.access(file, os.R_OK):
                    yield file

    def _send(self, remote: Remote, file: Path, name: str) -> None:
        """Send a file unless its present content has been sent."""
        mark = _mark(file)
        if self._sent.get(name) == mark:
            return
        # Frozen weights, of which checkpoints have hard links, are copied there.
        sent_name = next((other for other, sent in self._sent.items() if sent == mark and is_weights(name)), None)
        try:
            if sent_name is None:
                raise FileNotFoundError
            remote.copy(sent_name, name)
        except FileNotFoundError:
            remote.put(file, name)
        self._sent[name] = mark

    def _describe_unsent(self) -> str:
        """Describe the files that are not at the mirror: their number and size."""
        sizes = []
        for file in self._files():
            name = file.relative_to(self.folder).as_posix()
            with contextlib.suppress(OSError):
                mark = _mark(file)
                if self._sent.get(name) != mark and (is_weights(name) or not is_of_checkpoint(name)):
                    sizes.append(mark[1])
        return f"{many(len(sizes), 'file')} ({sum(sizes) / 1e6:,.1f} MB)"


def _mark(file: Path) -> tuple[int, ...]:
    """Return a value that changes with a file: time, size and number, since JSON files are replaced."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_dev, status.st_ino


@contextlib.contextmanager
def _linked(folder: Path) -> Iterator[Path]:
    """Link a checkpoint's files, which then outlive it, or yield the folder itself without hard links."""
    links = folder.with_name(temporary_name(folder.name))
    try:
        shutil.copytree(folder, links, symlinks=True, copy_function=os.link)
        source = links
    except OSError:
        source = folder
    try:
        yield source
    finally:
        remove(links)


def _print(line: str) -> None:
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()


class MirrorSink:
    """Mirrors the run folder from the start of an attempt to its end, which waits for it at most ``wait_s`` seconds."""

    def __init__(self, run: RunDir, url: str, *, wait_s: float) -> None:
        self._mirror = Mirror(run.path, url)
        self._wait_s = wait_s
        self._is_started = False

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._mirror.start(event.attempt)
            self._is_started = True
        elif isinstance(event, CheckpointSaved) and self._is_started:
            self._mirror.request()

    def close(self) -> None:
        if self._is_started:
            self._is_started = False
            self._mirror.close(self._wait_s)
