"""Copy a growing folder to any target that fsspec knows, in the background."""

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
from lockstep.rundir.files import TEMPORARY

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retry:
    """How often one file is tried in one pass, and the pause before the second try (doubled each time)."""

    attempts: int = 3
    backoff_s: float = 1.0


class Uploader:
    """Copies what is new or changed in a folder to ``target``, a path or a URL that fsspec knows, in a separate thread.

    Nothing is removed at the target. What cannot be copied is reported once per pass (default: a warning in the log),
    tried again in the next one, and never ends the run. Raises :class:`ConfigError` as :func:`check_target`.
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
        self.local_dir, self.target = Path(local_dir), str(target)
        self.failures: dict[str, str] = {}
        self._retry, self._report, self._close_timeout_s = retry or Retry(), report, close_timeout_s
        self._done: dict[str, tuple[int, int]] = {}
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
        for path in sorted(_files(self.local_dir)):
            name = path.relative_to(self.local_dir).as_posix()
            leads = path.is_symlink() and path.is_dir()
            try:
                status = path.lstat() if leads else path.stat()
                version = (status.st_mtime_ns, status.st_size)
                if self._done.get(name) != version:
                    self._copy(filesystem, path, f"{root.rstrip('/')}/{name}", leads=leads)
                    self._done[name] = version
            except Exception as error:  # whatever the target's library raises
                if path.exists():  # else it was removed meanwhile: an old checkpoint
                    failures[name] = _words(error)
        self.failures = failures

    def _copy(self, filesystem: Any, path: Path, remote: str, *, leads: bool) -> None:
        for attempt in range(1, self._retry.attempts + 1):
            try:
                filesystem.makedirs(remote.rpartition("/")[0], exist_ok=True)
                if leads:  # `last` and `best` of checkpoints/: to the reader a text file means the same
                    filesystem.pipe_file(remote, str(path.readlink()).encode())
                else:
                    filesystem.put_file(str(path), remote)
                return
            except Exception:
                if attempt == self._retry.attempts or not path.exists():
                    raise
                time.sleep(self._retry.backoff_s * 2 ** (attempt - 1))


def _files(folder: Path) -> Iterator[Path]:
    """The files below ``folder``, and links to folders, without temporary ones and links to files."""
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if TEMPORARY not in name]
        links = [name for name in folders if (Path(base) / name).is_symlink()]
        regular = [name for name in names if not (Path(base) / name).is_symlink()]
        yield from (Path(base) / name for name in [*regular, *links] if TEMPORARY not in name)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def check_target(target: str, local_dir: Path | None) -> None:
    """Raise :class:`ConfigError` unless a folder, ``local_dir`` if it is known, can be uploaded to ``target``."""
    import fsspec

    protocol, _, path = target.rpartition("://")
    protocol = protocol or "file"
    on_disk = protocol in ("file", "local")
    if on_disk and local_dir is not None and Path(path).resolve().is_relative_to(local_dir.resolve()):
        why, fix = "the target is that folder, or in it", "choose a target elsewhere"
        raise ConfigError(f"cannot upload {local_dir} to {target}", why=why, fix=fix)
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
        self._uploader, self._every_epochs = uploader, every_epochs

    def emit(self, event: Event) -> None:
        if isinstance(event, EpochEnded) and event.epoch % self._every_epochs == 0:
            self._uploader.request()

    def close(self) -> None:
        self._uploader.close()
