"""``<runs folder>/.studio``: the studio's files. Run folders are only read."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from lockstep.errors import StorageError
from lockstep.lab.report.page import render
from lockstep.rundir.files import absolute, storage_error, storing, write_text
from lockstep.studio.schemas import ApiError, run_not_found

#: Permissions of a file that only this user may read.
_PRIVATE = 0o600
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,100}")
_CONFIG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}")


class Home:
    """Paths below one runs folder. Names that come from the page are checked here, and only here."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = absolute(runs_dir)
        self.path = self.runs_dir / ".studio"
        self.starts = self.path / "starts"
        self.configs = self.path / "configs"

    def make(self) -> None:
        with storing(self.path):
            for folder in (self.path, self.starts, self.configs):
                folder.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)

    def run(self, name: str) -> Path:
        """Return the folder of a run, which may not exist."""
        if not is_run_name(name):
            raise run_not_found(name)
        return self.runs_dir / name

    def start(self, name: str) -> Path:
        """Return the folder of the studio's notes on a run: how it was started, its labels."""
        return self.starts / self.run(name).name

    def config(self, name: str) -> Path:
        if not _CONFIG_NAME.fullmatch(name):
            raise ApiError(
                "CONFIG_NOT_FOUND",
                404,
                f"{name[:100]!r} is not a valid name of a configuration",
                fix="use letters, digits, spaces, dots, dashes and underscores; at most 64",
            )
        return self.configs / f"{name}.json"

    def token(self, *, new: bool = False) -> str:
        """Return the studio's secret: that of the last start, with which open pages still work, or a new one."""
        file = self.path / "token"
        if new:
            file.unlink(missing_ok=True)
        try:
            if not file.is_symlink() and file.stat().st_mode & 0o077 == 0 and file.stat().st_uid == os.getuid():
                text = file.read_text(encoding="ascii").strip()
                if _TOKEN.fullmatch(text):
                    return text
        except (FileNotFoundError, PermissionError, ValueError):
            pass
        except OSError as error:  # such as too many open files: a new token would end every session
            raise storage_error(error, file) from error
        text = secrets.token_urlsafe(32)
        write_text(file, text, mode=_PRIVATE)
        return text

    def write_door(self, url: str) -> Path:
        """Write a page for this user alone that leads to ``url``: other users can read the arguments of a command."""
        file = self.path / "open.html"
        write_text(file, render(__package__, "door.html", url=url), mode=_PRIVATE)
        return file


def state_of(path: Path | str) -> tuple[int, int, int] | None:
    """When a file or folder was last changed, in ns, its size and inode; ``None`` when there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - fast for a thousand runs
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def is_run_name(name: str) -> bool:
    """Return whether ``name`` can be a folder right under the runs folder: one component, not hidden."""
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:
        return False
    return 0 < length <= 255 and not name.startswith(".") and "/" not in name and "\0" not in name


def remove_folder(folder: Path, inside: Path) -> None:
    """Delete ``folder`` with its content if it is a real folder right inside ``inside``; else :class:`StorageError`."""
    if folder.parent != inside or folder.is_symlink():
        raise StorageError(
            f"{folder} is not deleted",
            why="it is a link, or not right inside the runs folder",
            fix="check its target, and delete it yourself",
        )
    with storing(folder), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
