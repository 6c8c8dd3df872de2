"""Copy a growing folder to any target that fsspec knows, in the background.

:class:`Uploader` does the work; :class:`UploadSink` starts it at the events of a run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.events import EpochEnded, Event
from lockstep.telemetry.files import TEMPORARY

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retry:
    """How often one file is tried in one pass, and the pause before the second try (doubled each time)."""

    attempts: int = 3
    backoff_s: float = 1.0
    sleep: Callable[[float], None] = time.sleep


class Uploader:
    """Copies what is new or changed in a folder to ``target``, in a separate thread.

    Nothing is removed at the target. A file that cannot be copied is reported and tried again in the next pass;
    it never ends the run.

    Args:
        local_dir: may not exist yet.
        target: a URL that fsspec knows (``s3://bucket/run``, ``gs://…``, ``file:///mnt/share/run``) or a path.
        report: called once per pass with what could not be copied; default: a warning in the log.
        close_timeout_s: how long :meth:`close` waits for the last pass.

    Raises:
        ConfigError: fsspec does not know the target or lacks the package for it; or it is in the folder itself.
    """

    def __init__(
        self,
        local_dir: Path | str,
        target: str,
        *,
        retry: Retry | None = None,
        report: Callable[[str], None] = _log.warning,
        close_timeout_s: float = 600.0,
    ) -> None:
        self.local_dir = Path(local_dir)
        self.target = str(target)
        self.failures: dict[str, str] = {}
        self._retry = retry or Retry()
        self._report = report
        self._close_timeout_s = close_timeout_s
        self._done: dict[str, object] = {}
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        check_target(self.target, self.local_dir)

    def request(self) -> None:
        """Ask for a pass over the folder; returns at once. Requests during a pass become one more pass."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="lockstep-upload", daemon=True)
            self._thread.start()
        self._wanted.set()

    def close(self) -> bool:
        """Make a last pass and wait for it; whether all is at the target. A later request starts it again."""
        self._closing.set()
        self.request()
        assert self._thread is not None, "a request starts the thread"
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            self._report(f"the upload to {self.target} is given up after {self._close_timeout_s:g} s")
            return False
        return not self.failures

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            last = self._closing.is_set()
            try:
                self._pass()
            except Exception as error:  # a target that cannot even be opened, in any library's words
                self.failures = {"": _words(error)}
            if self.failures:
                name, why = next(iter(self.failures.items()))
                self._report(f"{len(self.failures)} files are not at {self.target}; {name or 'all'}: {why}")
            if last:
                self._closing.clear()
                return

    def _pass(self) -> None:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(self.target)
        failures = {}
        for item in sorted(_items(self.local_dir)):
            if self._done.get(item.name) != item.version:
                why = self._copy(filesystem, f"{root.rstrip('/')}/{item.name}", item)
                if why is None:
                    self._done[item.name] = item.version
                else:
                    failures[item.name] = why
        self.failures = failures

    def _copy(self, filesystem: Any, remote: str, item: _Item) -> str | None:
        """Why the file could not be copied, or ``None``."""
        why = None
        for attempt in range(self._retry.attempts):
            if attempt:
                self._retry.sleep(self._retry.backoff_s * 2 ** (attempt - 1))
            try:
                filesystem.makedirs(remote.rpartition("/")[0], exist_ok=True)
                if item.pointer is not None:
                    filesystem.pipe_file(remote, item.pointer.encode())
                else:
                    filesystem.put_file(str(self.local_dir / item.name), remote)
                return None
            except Exception as error:  # whatever the target's library raises
                if isinstance(error, FileNotFoundError) and not (self.local_dir / item.name).exists():
                    return None  # removed meanwhile: an old checkpoint
                why = _words(error)
        return why


@dataclass(frozen=True, order=True)
class _Item:
    """A file below the folder; ``version`` changes with its content, ``pointer`` is where a link to a folder leads."""

    name: str
    version: tuple[int, int]
    pointer: str | None = None


def _items(folder: Path) -> Iterator[_Item]:
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if TEMPORARY not in name]
        for name in [*names, *(name for name in folders if (Path(base) / name).is_symlink())]:
            path = Path(base) / name
            # `last` and `best` of checkpoints/ link to folders; to the reader a text file means the same.
            pointer = str(path.readlink()) if path.is_symlink() and path.is_dir() else None
            try:
                status = path.lstat() if pointer else path.stat()
            except FileNotFoundError:
                continue
            if TEMPORARY not in name:
                where = path.relative_to(folder).as_posix()
                yield _Item(where, (status.st_mtime_ns, status.st_size), pointer)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def check_target(target: str, local_dir: Path | None) -> None:
    """Whether a folder can be uploaded to ``target``. ``local_dir``: where the folder is, if that is known.

    Raises:
        ConfigError: as :class:`Uploader`.
    """
    import fsspec

    protocol, _, path = target.rpartition("://")
    protocol = protocol or "file"
    on_disk = protocol in ("file", "local")
    if on_disk and local_dir is not None and Path(path).resolve().is_relative_to(local_dir.resolve()):
        raise ConfigError(
            f"cannot upload {local_dir} to {target}",
            why="the target is that folder, or in it",
            fix="choose a target elsewhere",
        )
    try:
        fsspec.get_filesystem_class(protocol.partition("::")[0])
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"cannot upload to {target}",
            why=str(error)[:300],
            fix="give a path or a URL that fsspec knows, and install the package that it needs",
        ) from None


class UploadSink:
    """Uploads the run folder after every ``every_epochs`` epochs, and at the end."""

    def __init__(self, uploader: Uploader, *, every_epochs: int = 1) -> None:
        self._uploader = uploader
        self._every_epochs = every_epochs

    def emit(self, event: Event) -> None:
        if isinstance(event, EpochEnded) and event.epoch % self._every_epochs == 0:
            self._uploader.request()

    def close(self) -> None:
        """The last pass: the other sinks have written all they had."""
        self._uploader.close()
