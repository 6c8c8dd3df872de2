"""The report of a failed attempt: which rank failed first, why, and how to fix it.

The records of a start come from :mod:`lockstep.launch.failure.records`, the usual causes from
:mod:`lockstep.launch.failure.causes`.
"""

from __future__ import annotations

import contextlib
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import (
    LockstepError,
    RankFailed,
    RankOutOfMemory,
    RunError,
    UsageError,
    many,
)
from lockstep.launch.failure import records
from lockstep.launch.failure.causes import OOM_KILLED, SMALLER, Cause, find_cause
from lockstep.launch.failure.records import RankEnd
from lockstep.launch.process.rank_log import last_lines, log_file
from lockstep.rundir.folder import NCCL_DUMP, RunDir, or_else


@dataclass(frozen=True)
class FailureReport:
    """Why a start of all ranks failed.

    ``first`` is the rank that failed first, ``None`` when only the launcher did; ``others`` failed after it or because
    of it. ``nccl_records``: the command that reads the files of NCCL's flight recorder, if there are any.
    """

    ranks: int
    first: RankEnd | None
    others: tuple[RankEnd, ...]
    cause: Cause | None
    launcher_error: str = ""
    nccl_records: str = ""

    @property
    def what(self) -> str:
        """Which rank failed first and with what, on one line (more, if the error's message has more)."""
        if self.first is None:
            return self.launcher_error.strip().splitlines()[-1]
        if self.first.speaks_for_all and self.first.error:
            return self.first.error["message"]
        who = f"rank {self.first.rank} of {self.ranks}" if self.ranks > 1 or self.first.rank else "the run"
        return f"{who} {self.first.headline()}"

    @property
    def why(self) -> str:
        """Why, if the error has a reason or the cause is known."""
        if self.first and self.first.error:
            return self.first.error["why"]
        return self.cause.title if self.cause else ""

    @property
    def fix(self) -> str:
        """How to fix it, if that is known."""
        if self.first and self.first.error:
            return self.first.error["fix"]
        return self.cause.advice if self.cause else ""

    def details(self) -> str:
        """Return the traceback and last lines of the first rank to fail, and how many others there are."""
        first = self.first
        blocks = []
        if first is None:
            if self.launcher_error.strip() != self.what:
                blocks.append(textwrap.indent(self.launcher_error.rstrip(), "  "))
        elif not first.speaks_for_all:
            if first.traceback and not first.explains_itself:
                blocks.append(textwrap.indent(first.traceback.rstrip(), "  "))
            if first.last_lines:
                blocks.append(f"last lines of logs/rank-{first.rank}.log:")
                blocks.append(textwrap.indent("\n".join(first.last_lines), "  "))
        if self.nccl_records:
            blocks.append(f"NCCL's flight recorder shows the collectives of each rank: {self.nccl_records}")
        if self.others and not (first and first.speaks_for_all):
            names = ", ".join(str(rank) for rank in sorted(failure.rank for failure in self.others))
            ranks = "rank" if len(self.others) == 1 else "ranks"
            count = many(len(self.others), "other rank")
            blocks.append(f"{count} ended because of it or after it ({ranks} {names}).")
        return "\n".join(blocks)

    def as_error(self) -> LockstepError:
        """Return the report as an exception, whose text is the whole report.

        A usage error of a rank is raised again, with its exit code.
        """
        if self.first and self.first.is_usage_error and self.first.error:
            return error_of(self.first.error)
        is_memory = self.cause is not None and self.cause.key in ("gpu-memory", "memory")
        failed = RankOutOfMemory if is_memory else RankFailed
        return failed("\n".join(filter(None, [self.what, self.details()])), why=self.why, fix=self.fix)

    def format(self) -> str:
        """Return the report as plain text, without a newline at its end."""
        return str(self.as_error())


def error_of(content: Mapping[str, str]) -> LockstepError:
    """Restore the error that :meth:`lockstep.errors.LockstepError.as_dict` has described."""
    kinds: list[type[LockstepError]] = [LockstepError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kind = next((kind for kind in kinds if kind.code == content["code"]), UsageError)
    return kind(content["message"], why=content["why"], fix=content["fix"])


def read_failure(run_dir: RunDir) -> FailureReport | None:
    """Return the report of the latest start in ``run_dir``; ``None`` when it did not fail."""
    launcher = records.read_launcher(run_dir)
    ends = [
        end.model_copy(update={"last_lines": last_lines(log_file(run_dir.logs, end.rank))})
        for end in records.read_ends(run_dir.logs).values()
    ]
    if not launcher.error and all(end.ended_by_launcher for end in ends):
        return None
    ends.sort(key=lambda end: end.order)
    first = ends[0] if ends and not (launcher.error and ends[0].is_collateral) else None
    if first is None:
        cause = find_cause(launcher.error)
    elif first.signal == "SIGKILL" and launcher.oom_kills:
        cause = OOM_KILLED
    else:
        cause = find_cause(first.text, first.signal)
    return FailureReport(
        ranks=launcher.ranks or len(ends),
        first=first,
        others=tuple(end for end in ends if end is not first),
        cause=_of_module(cause, run_dir),
        launcher_error=launcher.error,
        nccl_records=_nccl_records(run_dir),
    )


def failure_line(run_dir: RunDir) -> str:
    """Return the first line of :func:`read_failure`; empty when the latest start did not fail."""
    report = read_failure(run_dir)
    return report.what.splitlines()[0] if report else ""


def _nccl_records(run_dir: RunDir) -> str:
    has_records = any(run_dir.logs.glob(f"{NCCL_DUMP}*"))
    return f"torchfrtrace --prefix {NCCL_DUMP} {shlex.quote(str(run_dir.logs))}" if has_records else ""


def own_failure(run_dir: RunDir, error: Exception) -> FailureReport | None:
    """Return the report of a run whose only rank is this process, written into its record.

    ``None`` where ``error`` explains itself.
    """
    if isinstance(error, LockstepError):
        return None
    records.log_traceback(run_dir.logs, 0, error)
    failure = records.describe(0, error)
    report = FailureReport(ranks=1, first=failure, others=(), cause=_of_module(find_cause(failure.text), run_dir))
    _keep(run_dir, report.format())
    return report


def _of_module(cause: Cause | None, run_dir: RunDir) -> Cause | None:
    """Return ``cause`` with the fix for a task whose ``DataLoader`` sets the batch size, if the run has such a task."""
    task = or_else(run_dir.plan, {}).get("task", {})
    if cause is None or not task.get("sets_batch_size"):
        return cause
    return cause._replace(
        fix=cause.fix.replace(SMALLER, "set a smaller batch_size in the module's DataLoader, then `lockstep resume`")
    )


#: The error of a run that Ctrl-C ended, without a checkpoint.
INTERRUPTED = "interrupted without a checkpoint"


def keep_failure(run_dir: RunDir, otherwise: str) -> FailureReport | None:
    """Write :func:`read_failure`, or ``otherwise`` where nothing was recorded, into the run's record.

    ``None``, and nothing is written, of a run that is completed or was stopped.
    """
    if or_else(lambda: run_dir.read().status, "lost") in {"stopped", "completed"}:
        return None
    report = read_failure(run_dir)
    records.clear_spare(run_dir.logs)
    _keep(run_dir, report.format() if report else otherwise)
    return report


def _keep(run_dir: RunDir, error: str) -> None:
    with contextlib.suppress(LockstepError):  # the folder may be what failed
        run_dir.update(status="failed", error=error)


def task_failure(error: Exception) -> LockstepError | None:
    """Report an error before there was a run, in the user's code or at a limit of the system; else ``None``."""
    failure = records.describe(0, error)
    message = failure.text
    cause = find_cause(message)
    if records.involves_user_code(error):
        message += f"\n{textwrap.indent(failure.traceback.rstrip(), '  ')}"
    elif cause is None or cause.key not in ("memory", "threads"):
        return None
    return RunError(message, why=cause.title if cause else "", fix=cause.advice if cause else "")
