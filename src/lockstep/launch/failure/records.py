"""How the ranks of a start ended: ``rank-<r>.error.json`` in the run's ``logs/``, one kind of record.

A rank that fails writes it. For one that ended without (a killed process writes nothing), the process that started it
does. The launcher also writes facts about all ranks (``launcher.json``); a rank's last output is in its log. Where the
run folder cannot be written (full, read-only, removed), all goes to a spare place, which the next launch empties.
:mod:`lockstep.launch.failure.report` reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import signal
import socket
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import (
    CollectiveError,
    LockstepError,
    NonFiniteError,
    RankFailed,
    RankOutOfMemory,
    RanksDifferError,
    StorageError,
    UsageError,
    many,
)
from lockstep.launch.failure.causes import is_lost_peer
from lockstep.launch.process.rank_log import MARK, log_file
from lockstep.rundir.files import FileContent, write_json
from lockstep.rundir.folder import NCCL_DUMP, RunDir

LAUNCHER_FILE = "launcher.json"

_MAX_BYTES = 4 << 20
#: Errors whose text is enough, without a traceback.
_EXPLAIN_THEMSELVES = (StorageError.code, NonFiniteError.code, RanksDifferError.code)
#: Errors that report on all ranks.
_SPEAK_FOR_ALL = (RankFailed.code, RankOutOfMemory.code)


class RankEnd(FileContent):
    """How one rank ended: ``rank-<r>.error.json``. Written by the rank, or by the process that saw it end.

    ``time``: the earliest that is possible, in seconds since the epoch. ``error``: a Lockstep error as
    :meth:`lockstep.errors.LockstepError.as_dict`. ``exit_code`` is negative for a signal. ``last_lines``: of its log.
    ``is_hang``: the ranks have found that none of them makes progress. ``ended_by_launcher``: it was ended because of a
    failure elsewhere, or killed after a stop.
    """

    rank: int
    host: str = ""
    pid: int | None = None
    time: float = 0.0
    type: str = ""
    message: str = ""
    traceback: str = ""
    error: dict[str, str] | None = None
    exit_code: int = 1
    last_lines: tuple[str, ...] = ()
    is_hang: bool = False
    ended_by_launcher: bool = False

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed it, or ``None``."""
        names = {number.value: number.name for number in signal.Signals}
        return names.get(-self.exit_code, f"signal {-self.exit_code}") if self.exit_code < 0 else None

    @property
    def text(self) -> str:
        """Its error as ``type: message``; of a rank that has recorded none, the last lines of its log."""
        return f"{self.type}: {self.message}" if self.type else "\n".join(self.last_lines)

    @property
    def code(self) -> str:
        """The code of a Lockstep error; empty for others."""
        return self.error["code"] if self.error is not None else ""

    @property
    def is_usage_error(self) -> bool:
        return self.error is not None and self.exit_code == UsageError.exit_code

    @property
    def speaks_for_all(self) -> bool:
        """Whether its error is the whole report: wrong usage, or a hang that all ranks have found."""
        return self.is_usage_error or self.code in _SPEAK_FOR_ALL

    @property
    def is_collateral(self) -> bool:
        """Whether the failure of another rank has this effect."""
        if self.type:
            return is_lost_peer(self.type, self.message)
        return self.ended_by_launcher or (self.signal == "SIGABRT" and is_lost_peer("", "\n".join(self.last_lines)))

    @property
    def explains_itself(self) -> bool:
        return self.code in _EXPLAIN_THEMSELVES

    @property
    def blames_another(self) -> bool:
        """Whether this rank missed another one, whose failure explains more if it recorded one."""
        return self.code in (CollectiveError.code, RankFailed.code) and not self.is_hang

    @property
    def order(self) -> tuple[bool, bool, float, int]:
        """The key by which the ranks of a start are sorted: the first has the cause, the others its consequences."""
        return self.is_collateral, self.blames_another, self.time, self.rank

    def headline(self) -> str:
        if self.signal and not self.type:
            return f"was killed by signal {-self.exit_code} ({self.signal})"
        if not self.type:
            return f"ended with exit code {self.exit_code} without reporting an error"
        if self.explains_itself and self.error:
            return f"failed: {self.error['message']}"
        return f"failed: {': '.join([self.type, *self.message.strip().splitlines()[:1]])}"


class LauncherLog(FileContent):
    """The part of ``launcher.json`` that a report needs.

    ``may_restart``: a new start could end better. ``oom_kills``: processes that the kernel killed for lack of memory.
    """

    ranks: int | None = None
    error: str = ""
    may_restart: bool = False
    oom_kills: int = 0


# --- in a rank -----------------------------------------------------------------------------------


def error_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.error.json"


def record(logs: Path, rank: int, error: BaseException, *, hung_s: float | None = None) -> None:
    """Write ``rank-<r>.error.json``, elsewhere if need be. Raises :class:`~lockstep.errors.StorageError`.

    ``hung_s``: how long no rank has made progress, if ``error`` says so: later failures follow from it.
    """
    end = describe(rank, error)
    if hung_s is not None:
        end = end.model_copy(update={"is_hang": True, "time": end.time - hung_s})
    write(error_file(logs, rank), end.model_dump())


def describe(rank: int, error: BaseException) -> RankEnd:
    """Describe this process's failure as a record."""
    kind = type(error)
    exits = isinstance(error, SystemExit) and isinstance(error.code, int)
    return RankEnd(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        time=time.time(),
        type=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        message=f"the process was ended by sys.exit({exit_code_of(error)})" if exits else str(error),
        traceback=folded_traceback(error),
        error=error.as_dict() if isinstance(error, LockstepError) else None,
        exit_code=exit_code_of(error),
    )


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a rank that ``error`` ended."""
    if isinstance(error, LockstepError):
        return error.exit_code
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def log_traceback(logs: Path, rank: int, error: BaseException) -> None:
    """Append the whole traceback to the rank's log, if that can be written."""
    text = f"{MARK}rank {rank} failed\n{''.join(traceback.format_exception(error))}"
    with contextlib.suppress(OSError), log_file(logs, rank).open("ab") as log:
        log.write(text.encode("utf-8", "backslashreplace"))


def folded_traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` with frames of libraries folded; the last frame always stays."""
    described: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    parts: list[str] = []
    while described is not None:
        frames = list(described.stack)
        lines = ["Traceback (most recent call last):\n"] if frames else []
        for library, group in itertools.groupby(frames[:-1], lambda frame: _library_of(frame.filename)):
            group_frames = list(group)
            if library is None:
                lines += traceback.format_list(group_frames)
            else:
                lines.append(f"  … {many(len(group_frames), 'frame')} of {library}\n")
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
    """Return whether a frame of the traceback is in code that is neither Lockstep's nor a library's."""
    stack = traceback.extract_tb(error.__traceback__)
    return any(_library_of(frame.filename) is None and Path(frame.filename).name != "lockstep" for frame in stack)


def _library_of(file: str) -> str | None:
    """Return the package that a source file belongs to; ``None`` for code of the user's."""
    package = Path(__file__).parents[2]
    if Path(file).is_relative_to(package):
        return package.name
    for root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")):
        if file.startswith(root + os.sep):
            return Path(file).relative_to(root).parts[0].removesuffix(".py")
    return "Python" if file.startswith("<frozen") else None


# --- files ----------------------------------------------------------------------------------------


def clear(logs: Path) -> None:
    """Remove the records of an earlier start. Raises :class:`OSError`."""
    clear_spare(logs)
    for path in [logs / LAUNCHER_FILE, *logs.glob("rank-*.error.json"), *logs.glob(f"{NCCL_DUMP}*")]:
        path.unlink(missing_ok=True)


def read_launcher(run_dir: RunDir) -> LauncherLog:
    """Read the launcher's record of the latest start; empty if it cannot be read."""
    logs_read = (LauncherLog.read(path, _MAX_BYTES) for path in _find(run_dir.logs, LAUNCHER_FILE))
    return next(filter(None, logs_read), LauncherLog())


def read_ends(logs: Path) -> dict[int, RankEnd]:
    """Return the recorded failures by rank."""
    ends = (RankEnd.read(path, _MAX_BYTES) for path in _find(logs, "rank-*.error.json"))
    return {end.rank: end for end in ends if end is not None}


def record_ends(logs: Path, ends: Iterable[RankEnd]) -> None:
    """Record how ranks ended, as another process saw it, except for those that have recorded it themselves.

    Raises :class:`~lockstep.errors.StorageError`.
    """
    recorded = read_ends(logs)
    for end in ends:
        if end.rank not in recorded:
            write(error_file(logs, end.rank), end.model_dump())


def write(path: Path, content: Any) -> None:
    """Write ``content`` as JSON to ``path``, a file in ``logs/``, or else to the spare place.

    Raises:
        StorageError: of ``path``, when there is no room in either.
    """
    spare = _spare(path.parent)
    try:
        write_json(path, content)
    except StorageError:
        with contextlib.suppress(OSError, StorageError):
            spare.mkdir(mode=0o700, exist_ok=True)
            if _is_own(spare):
                write_json(spare / path.name, content, durable=False)
                return
        raise
    with contextlib.suppress(OSError):
        (spare / path.name).unlink(missing_ok=True)


def _find(logs: Path, pattern: str) -> list[Path]:
    """Find files of ``logs`` by pattern; one that had to be written to the spare place takes its namesake's."""
    folders = [logs, *filter(_is_own, [_spare(logs)])]
    return list({path.name: path for folder in folders for path in folder.glob(pattern)}.values())


def clear_spare(logs: Path) -> None:
    """Remove the files in the spare place."""
    if _is_own(_spare(logs)):
        shutil.rmtree(_spare(logs), ignore_errors=True)


def _spare(logs: Path) -> Path:
    """Return the spare place of a run's ``logs/``: a folder of the user's in the system's temporary folder."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(logs))).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}-{name}"


def _is_own(folder: Path) -> bool:
    """Return whether it exists and belongs to this user: the temporary folder is open to all users."""
    try:
        return folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()
    except OSError:
        return False
