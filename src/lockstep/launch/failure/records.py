"""What a start of all ranks records in the run's ``logs/``; :mod:`lockstep.launch.failure.report` reads it.

A rank that fails writes its own error (``rank-<r>.error.json``); the launcher writes how each process ended
(``launcher.json``), since one that is killed writes nothing; what a rank printed last is in its log. Where the run
folder cannot be written (full, read-only, removed), both go to a spare place, which the next launch empties.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import socket
import sysconfig
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from pydantic import Field

from lockstep.errors import LockstepError, StorageError, many
from lockstep.launch.health.hang import HangReport
from lockstep.launch.health.memory import MachineMemory, RankMemory, own_memory
from lockstep.launch.local.rank_output import MARK, log_file
from lockstep.telemetry.files import FileContent
from lockstep.telemetry.progress_board import Activity, pulse
from lockstep.telemetry.rundir import NCCL_DUMP, RunDir, write_json

LAUNCHER_FILE = "launcher.json"
#: How many of a rank's last lines a report shows.
LAST_LINES = 10

_MAX_BYTES = 4 << 20
_TAIL_BYTES = 64 << 10


class RankError(FileContent):
    """``rank-<r>.error.json``. ``time``: seconds since the epoch; ``error``: a Lockstep error's text."""

    rank: int
    host: str = ""
    pid: int | None = None
    time: float = 0.0
    type: str = ""
    message: str = ""
    traceback: str = ""
    error: dict[str, str] | None = None
    exit_code: int = 1
    memory: RankMemory | None = None
    evaluating: bool = False


class RankEnd(FileContent):
    """How the launcher saw a rank end. ``code`` is negative for a signal; times are seconds since the epoch.

    It ended between ``alive_at`` and ``seen_at``. ``ended_by_launcher``: it was ended because of a failure
    elsewhere, or killed after a stop.
    """

    rank: int
    pid: int | None = None
    code: int
    alive_at: float = 0.0
    seen_at: float = 0.0
    ended_by_launcher: bool = False


class Restart(FileContent):
    """Why all ranks were restarted. ``step``: the last one that a rank had finished; ``of``: the limit of restarts."""

    step: int = 0
    reason: str = ""
    of: int = 0


class LauncherLog(FileContent):
    """The part of ``launcher.json`` that a report needs. ``doing``: the last activity of each rank."""

    ranks: int | None = None
    exits: tuple[RankEnd, ...] = ()
    error: str = ""
    restarts: tuple[Restart, ...] = ()
    hang: HangReport | None = None
    doing: dict[int, Activity] = Field(default_factory=dict)
    memory: dict[int, RankMemory] = Field(default_factory=dict)
    machine: MachineMemory = MachineMemory()


def error_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.error.json"


def record(logs: Path, rank: int, error: BaseException) -> None:
    """Write ``rank-<r>.error.json``, elsewhere if need be. Raises :class:`~lockstep.errors.StorageError`."""
    write(error_file(logs, rank), describe(rank, error).model_dump())


def describe(rank: int, error: BaseException) -> RankError:
    """This process's failure as a record."""
    kind = type(error)
    exits = isinstance(error, SystemExit) and isinstance(error.code, int)
    return RankError(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        time=time.time(),
        type=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        message=f"the process was ended by sys.exit({exit_code_of(error)})" if exits else str(error),
        traceback=folded_traceback(error),
        error=error.as_dict() if isinstance(error, LockstepError) else None,
        exit_code=exit_code_of(error),
        memory=own_memory(),
        evaluating=pulse.activity.is_evaluation,
    )


def log_traceback(logs: Path, rank: int, error: BaseException) -> None:
    """Append the whole traceback to the rank's log, if that can be written."""
    with (
        contextlib.suppress(OSError),
        log_file(logs, rank).open("a", encoding="utf-8", errors="backslashreplace") as log,
    ):
        log.write(f"{MARK}rank {rank} failed\n{''.join(traceback.format_exception(error))}")


def folded_traceback(error: BaseException) -> str:
    """The traceback of ``error`` with frames of libraries folded; the last frame always stays."""
    described: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    parts: list[str] = []
    while described is not None:
        frames = list(described.stack)
        lines = ["Traceback (most recent call last):\n"] if frames else []
        for library, group in itertools.groupby(frames[:-1], lambda frame: _library_of(frame.filename)):
            own = list(group)
            lines += (
                traceback.format_list(own) if library is None else [f"  … {many(len(own), 'frame')} of {library}\n"]
            )
        ends = list(described.format_exception_only())
        if not parts and isinstance(error, LockstepError):
            # A report ends with why and fix.
            ends = [f"{type(error).__module__}.{type(error).__qualname__}: {error.what}\n"]
        parts.append("".join([*lines, *traceback.format_list(frames[-1:]), *ends]))
        if described.__cause__ is None and (described.__suppress_context__ or described.__context__ is None):
            break
        parts.append("\nThe above exception led to the next one:\n\n")
        described = described.__cause__ or described.__context__
    return "".join(reversed(parts))


def involves_user_code(error: BaseException) -> bool:
    """Whether a frame of the traceback is in code that is neither Lockstep's nor a library's."""
    stack = traceback.extract_tb(error.__traceback__)
    return any(_library_of(frame.filename) is None and Path(frame.filename).name != "lockstep" for frame in stack)


def _library_of(file: str) -> str | None:
    """The package that a source file belongs to; ``None`` for code of the user's."""
    own = Path(__file__).parents[2]
    if Path(file).is_relative_to(own):
        return own.name
    for root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")):
        if file.startswith(root + os.sep):
            return Path(file).relative_to(root).parts[0].removesuffix(".py")
    return "Python" if file.startswith("<frozen") else None


def exit_code_of(error: BaseException) -> int:
    """The exit code of a rank that ``error`` ended."""
    if isinstance(error, LockstepError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def clear(logs: Path) -> None:
    """Remove the records of an earlier start. Raises :class:`OSError`."""
    clear_spare(logs)
    for path in [logs / LAUNCHER_FILE, *logs.glob("rank-*.error.json"), *logs.glob(f"{NCCL_DUMP}*")]:
        path.unlink(missing_ok=True)


def read_launcher(run_dir: RunDir) -> LauncherLog:
    """What the launcher wrote about the latest start; empty where nothing can be read."""
    found = (LauncherLog.read(path, _MAX_BYTES) for path in _find(run_dir.logs, LAUNCHER_FILE))
    return next(filter(None, found), LauncherLog())


def read_errors(logs: Path) -> dict[int, RankError]:
    """The failures that ranks recorded, by rank."""
    found = (RankError.read(path, _MAX_BYTES) for path in _find(logs, "rank-*.error.json"))
    return {error.rank: error for error in found if error is not None}


def last_lines(log: Path, count: int = LAST_LINES) -> tuple[str, ...]:
    """The last lines that a rank wrote since it began; Lockstep's own, its traceback included, left out.

    Of a crash in native code, the words before it and the innermost Python calls.
    """
    text = ""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    before, mark, after = text.rpartition(f"{MARK}rank ")
    if mark and f"{MARK}process " not in after:
        text = before
    _, mark, own = text.rpartition(f"{MARK}process ")
    lines = own.split("\n")[1:] if mark else text.split("\n")
    drawn = (line.rstrip().rsplit("\r", 1)[-1] for line in lines)  # a progress bar redraws its line
    found = [line for line in drawn if line]
    crash = next((place for place, line in enumerate(found) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return tuple(found[-count:])
    threads = [place for place, line in enumerate(found) if place > crash and line.startswith(("Thread", "Current"))]
    current = [place for place in threads if found[place].startswith("Current")] or threads[-1:]
    words = found[max(0, crash + 1 - count // 2) : crash + 1]
    return (*words, *(found[current[0] :][: count - len(words)] if current else ()))


def write(path: Path, content: Any) -> None:
    """Write ``content`` as JSON to ``path``, a file in ``logs/``, or else to the spare place.

    Raises:
        StorageError: of ``path``, when there is no room in either.
    """
    place = _place(path.parent)
    try:
        write_json(path, content)
    except StorageError:
        with contextlib.suppress(OSError, StorageError):
            place.mkdir(mode=0o700, exist_ok=True)
            if _is_own(place):
                write_json(place / path.name, content, durable=False)
                return
        raise
    with contextlib.suppress(OSError):
        (place / path.name).unlink(missing_ok=True)


def _find(logs: Path, pattern: str) -> list[Path]:
    """Files of ``logs`` by pattern; one that had to be written to the spare place takes its namesake's."""
    place = _place(logs)
    spare = {path.name: path for path in place.glob(pattern)} if _is_own(place) else {}
    return list(({path.name: path for path in logs.glob(pattern)} | spare).values())


def clear_spare(logs: Path) -> None:
    """Remove what was written to the spare place."""
    if _is_own(_place(logs)):
        shutil.rmtree(_place(logs), ignore_errors=True)


def _place(logs: Path) -> Path:
    """The spare place of a run's ``logs/``: a folder of the user's in the system's temporary folder."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(logs))).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}-{name}"


def _is_own(place: Path) -> bool:
    """Whether it exists and belongs to this user: the temporary folder is open to all users."""
    try:
        status = place.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and place.is_dir() and not place.is_symlink()
