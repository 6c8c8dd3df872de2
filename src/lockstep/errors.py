"""Every error that Lockstep raises on purpose.

::

    LockstepError            what, why, fix; exit code 1
    ├── UsageError           wrong usage or configuration: exit code 2, before anything starts
    │   ├── ConfigError      a key, a value or a combination of settings
    │   ├── DeviceError      a device that this machine does not have
    │   │   └── PrecisionError   a precision that a selected device does not support
    │   ├── TaskError        a task that cannot be found, imported or used
    │   └── UnsupportedError a combination that Lockstep refuses by name
    ├── DataError            data that is missing, empty, damaged or out of range: exit code 2
    ├── RunFolderError       a run folder that is missing, in use, foreign, newer or read-only: exit code 2
    ├── CheckpointError      a checkpoint that is missing, corrupt or of another model: exit code 2
    │   ├── NewerFormatError one that is valid, but written by a later version of Lockstep
    │   └── UnreadableError  one that could not be read, so that it is unknown whether it is valid
    └── RunError             something that failed during a run: exit code 1
        ├── RankFailed       one rank failed; the others ended because of it
        │   └── RankOutOfMemory  it ran out of memory
        ├── CollectiveError  a rank did not make a collective call, or made another one
        ├── StorageError     the run folder could not be written
        ├── RanksDifferError ranks that should train the same weights do not
        ├── ResultsDifferError `lockstep.verify`: several devices do not compute the same as one
        ├── SampleError      a sample could not be read, or samples not made into a batch
        └── NonFiniteError   too many steps without a finite gradient
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

#: Codes that would move a terminal's cursor, change its state or the direction of text; not tab and line feed.
_CONTROL = dict.fromkeys(
    {*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {9, 10}, "\ufffd"
)


def printable(text: str) -> str:
    """Escape ``text`` for a terminal: names, errors and hosts of a run folder may have been written by anybody."""
    return text.translate(_CONTROL)


class LockstepError(Exception):
    """An error for users: what happened, why, and how to fix it."""

    code = "ERROR"
    exit_code = 1
    #: The problem of each wrong setting, by its key, in an error about single settings.
    settings: Mapping[str, str] = MappingProxyType({})

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = (self.what, self.why and f"why: {self.why}", self.fix and f"fix: {self.fix}")
        return "\n".join(filter(None, lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling of exceptions between ranks.
        notes = getattr(self, "__notes__", None)
        return partial(type(self), self.what, why=self.why, fix=self.fix), (), notes and {"__notes__": notes}

    def as_dict(self) -> dict[str, str]:
        """Return the one JSON shape of an error: ``code``, ``message``, ``why``, ``fix``."""
        return {"code": self.code, "message": self.what, "why": self.why, "fix": self.fix}


class UsageError(LockstepError):
    code = "WRONG_USAGE"
    exit_code = 2


class ConfigError(UsageError):
    code = "INVALID_CONFIG"


class DeviceError(UsageError, ValueError):
    code = "GPU_NOT_AVAILABLE"


class PrecisionError(DeviceError):
    code = "PRECISION_NOT_AVAILABLE"


class TaskError(UsageError):
    code = "TASK_NOT_USABLE"


class DataError(LockstepError):
    code = "DATA_NOT_USABLE"
    exit_code = 2


class RunFolderError(LockstepError):
    code = "RUN_NOT_USABLE"
    exit_code = 2


class CheckpointError(LockstepError):
    code = "CHECKPOINT_NOT_USABLE"
    exit_code = 2


class NewerFormatError(CheckpointError):
    code = "CHECKPOINT_TOO_NEW"


class UnreadableError(CheckpointError):
    code = "CHECKPOINT_UNREADABLE"


class UnsupportedError(UsageError):
    code = "NOT_SUPPORTED"


class RunError(LockstepError):
    code = "RUN_FAILED"


class RankFailed(RunError):
    code = "RANK_FAILED"


class RankOutOfMemory(RankFailed):
    code = "OUT_OF_MEMORY"


class CollectiveError(RunError):
    code = "COLLECTIVE_FAILED"


class StorageError(RunError):
    code = "STORAGE_FAILED"


class RanksDifferError(RunError):
    code = "RANKS_DIFFER"


class ResultsDifferError(RunError):
    code = "RESULTS_DIFFER"


class SampleError(RunError):
    code = "SAMPLE_FAILED"


class NonFiniteError(RunError):
    code = "NON_FINITE"


def many(count: int, noun: str) -> str:
    """Format a count: ``1 rank``, ``2 ranks``, ``2 processes``, ``2 epochs``."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith(("s", "x", "tch", "nch")) else "s")


def gigabytes(size: float) -> float:
    """Convert bytes to 1e9 bytes with one decimal: the unit of every memory figure that people see."""
    return round(size / 1e9, 1)
