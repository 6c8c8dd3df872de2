"""Copies of mirrors on this machine, for commands that read runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, RunFolderError
from lockstep.rundir.files import make_folders, names_in, read_json, remove, write_json
from lockstep.rundir.folder import RunDir
from lockstep.rundir.remote import CHECKPOINT, MANIFEST, Remote, is_weights, reaching

#: Seconds between two copies of a mirror that is followed.
INTERVAL_S = 5.0
#: In a folder of copies: their names.
_COPIED = ".copied.json"


class Copy:
    """A copy of a mirror on this machine, without weights, for commands that read a run.

    Args:
        folder: default: one for this URL below the user's cache folder (XDG Base Directory Specification).

    Raises:
        RunFolderError: the mirror cannot be read, or has no run.
    """

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.remote = Remote(url)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "mirrors"
        digest = hashlib.sha256(self.remote.url.encode()).hexdigest()[:16]
        self.run = RunDir(folder or cache / digest / (self.remote.url.rpartition("/")[2] or "run"))
        self._marks: dict[str, Any] = {}

    def refresh(self) -> RunDir:
        """Copy new and changed files; the run."""
        self.update()
        self.run.read()
        return self.run

    def update(self) -> None:
        """Copy new and changed files, also of a run that is damaged."""
        with reaching(self.remote.url):
            names = self.remote.names()
            if "run.json" not in names:
                raise no_run(self.remote.url)
            for name, mark in names.items():
                if not is_weights(name) and self._marks.get(name) != mark:
                    with contextlib.suppress(FileNotFoundError):  # it has just been removed
                        self.remote.get(name, self.run.path / name)
                    self._marks[name] = mark
        for file in [file for file in self.run.path.rglob("*") if file.is_file()]:
            if file.relative_to(self.run.path).as_posix() not in names:
                file.unlink(missing_ok=True)
        complete = {name.split("/")[1] for name in names if name.endswith(f"/{MANIFEST}")}
        for name in {*names_in(self.run.checkpoints)} - complete:
            if CHECKPOINT.fullmatch(name):
                remove(self.run.checkpoints / name)


def no_run(url: str) -> RunFolderError:
    fix = "check the address: it is the value of storage.mirror"
    return RunFolderError(f"there is no run at {url}", why="it has no run.json", fix=fix)


class CopiedRuns:
    """Copies, in one folder, of the runs that are mirrored at a URL or directly below it."""

    def __init__(self, url: str) -> None:
        self._remote = Remote(url)
        self._folder = Copy(url).run.path.parent / "runs"
        self._copies: dict[str, Copy] = {}

    def refresh(self) -> Path:
        """Copy new and changed files, and remove copies of runs that are gone; the folder.

        Raises :class:`RunFolderError`.
        """
        with reaching(self._remote.url):
            names = self._remote.names()
        parents = [parent for parent, _, name in (name.rpartition("/") for name in names) if name == "run.json"]
        urls = {f"{self._remote.url}/{parent}".rstrip("/") for parent in parents if "/" not in parent}
        self._copies = {url: self._copies.get(url) or Copy(url, self._folder / url.rpartition("/")[2]) for url in urls}
        make_folders(self._folder)
        # The folder may have more, such as runs that were started from the page.
        record = self._folder / _COPIED
        copied = sorted(copy.run.path.name for copy in self._copies.values())
        previous = read_json(record) if record.exists() else []
        if copied != previous:
            write_json(record, copied)
        for gone in {*names_in(self._folder)} & ({*previous} - {*copied}):
            remove(self._folder / gone)
        for copy in self._copies.values():
            copy.update()
        return self._folder

    def follow(self) -> Path:
        """Call :meth:`refresh` again and again in a thread."""

        def run() -> None:
            while True:
                time.sleep(INTERVAL_S)
                with contextlib.suppress(LockstepError):  # an outage: the page shows the last copy
                    self.refresh()

        folder = self.refresh()
        threading.Thread(target=run, name="lockstep-mirror", daemon=True).start()
        return folder
