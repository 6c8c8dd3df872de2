"""The report of a failed attempt: which rank failed first, why, and how to fix it.

What is known of a start comes from :mod:`lockstep.launch.failure.records`; what usual causes look like, from
:mod:`lockstep.launch.failure.causes`.
"""

from __future__ import annotations

import contextlib
import signal
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from lockstep.errors import (
    CheckpointError,
    CollectiveError,
    DataError,
    LockstepError,
    NonFiniteError,
    RankFailed,
    RankOutOfMemory,
    RanksDifferError,
    RunError,
    RunFolderError,
    StorageError,
    UsageError,
)
from lockstep.events import Restarted
from lockstep.launch.failure import records
from lockstep.launch.failure.causes import OOM_KILLED, Cause, CauseKey, find_cause, is_lost_peer
from lockstep.launch.failure.collectives import missing_ranks
from lockstep.launch.health.hang import HangReport
from lockstep.launch.health.memory import RankMemory, advice, evaluation_advice, from_rows, machine_now, table
from lockstep.launch.local.rank_output import log_file
from lockstep.launch.local.signals import STOPPED
from lockstep.planning.batch import BatchPlan
from lockstep.telemetry.progress_board import Activity
from lockstep.telemetry.rundir import RunDir, or_else

_NO_FAILURE = (0, *STOPPED)


class RankFailure(records.RankError):
    """How one rank failed. ``exit_code`` is negative for a signal.

    ``time``: the earliest at which it can have failed.
    """

    last_lines: tuple[str, ...] = ()
    ended_by_launcher: bool = False

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed it, or ``None``."""
        return _signal_name(-self.exit_code) if self.exit_code < 0 else None

    @property
    def is_usage_error(self) -> bool:
        return self.error is not None and self.exit_code == UsageError.exit_code

    @property
    def is_collateral(self) -> bool:
        """Whether this is what the failure of another rank looks like from here."""
        if self.type:
            return is_lost_peer(self.type, self.message)
        return self.ended_by_launcher or (self.signal == "SIGABRT" and is_lost_peer("", "\n".join(self.last_lines)))

    @property
    def explains_itself(self) -> bool:
        """Whether its error's text is enough, without the place in Lockstep where it was raised."""
        known = (StorageError.code, NonFiniteError.code, RanksDifferError.code)
        return self.error is not None and self.error["code"] in known

    @property
    def blames_another(self) -> bool:
        """Whether this rank missed another one, whose failure explains more if it recorded one."""
        return self.error is not None and self.error["code"] == CollectiveError.code

    def headline(self) -> str:
        if self.signal and not self.type:
            return f"was killed by signal {-self.exit_code} ({self.signal})"
        if not self.type:
            return f"ended with exit code {self.exit_code} without reporting an error"
        if self.explains_itself and self.error:
            return f"failed: {self.error['message']}"
        first = self.message.strip().splitlines()[:1]
        return f"failed: {': '.join([self.type, *first])}"


@dataclass(frozen=True)
class FailureReport:
    """Why a start of all ranks failed.

    ``first`` is the rank that failed first, ``None`` when only the launcher did; ``others`` failed
    after it or because of it.
    """

    ranks: int
    first: RankFailure | None
    others: tuple[RankFailure, ...]
    cause: Cause | None
    launcher_error: str = ""
    hang: HangReport | None = None
    memory: str = ""
    collectives: str = ""

    @property
    def what(self) -> str:
        """Which rank failed first and with what, on one line (more, if the error's message has more)."""
        if self.first is None:
            return self.launcher_error.strip().splitlines()[-1]
        if self.first.is_usage_error and self.first.error:
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
        """The traceback and last lines of the first rank to fail, and how many others there are."""
        first, blocks = self.first, []
        if first is None:
            if self.launcher_error.strip() != self.what:
                blocks.append(textwrap.indent(self.launcher_error.rstrip(), "  "))
        elif first.is_usage_error:
            return ""
        else:
            if first.traceback and not first.explains_itself:
                blocks.append(textwrap.indent(first.traceback.rstrip(), "  "))
            if first.last_lines:
                blocks.append(f"last lines of logs/rank-{first.rank}.log:")
                blocks.append(textwrap.indent("\n".join(first.last_lines), "  "))
        if self.hang is not None:
            blocks.append(self.hang.table())
        blocks += filter(None, (self.memory, self.collectives))
        if self.others:
            blocks.append(_collateral(self.others))
        return "\n".join(blocks)

    def as_error(self) -> LockstepError:
        """The report as an exception, whose text is the whole report.

        A usage error of a rank is raised as what it was, with its exit code.
        """
        if self.first and self.first.is_usage_error and self.first.error:
            kind = _usage_error_class(self.first.error["code"])
            return kind(self.what, why=self.why, fix=self.fix)
        is_memory = self.cause is not None and self.cause.key in (CauseKey.GPU_MEMORY, CauseKey.MEMORY)
        failed = RankOutOfMemory if is_memory else RankFailed
        return failed("\n".join(filter(None, [self.what, self.details()])), why=self.why, fix=self.fix)

    def format(self) -> str:
        """The report as plain text, without a newline at its end."""
        return str(self.as_error())


def _usage_error_class(code: str) -> type[LockstepError]:
    kinds: list[type[LockstepError]] = [UsageError, DataError, RunFolderError, CheckpointError]
    for kind in kinds:
        if kind.code == code:
            return kind
        kinds += kind.__subclasses__()
    return UsageError


def read_failure(run_dir: RunDir) -> FailureReport | None:
    """The report of the latest start in ``run_dir``; ``None`` when it did not fail."""
    launcher = records.read_launcher(run_dir)
    ends = {end.rank: end for end in launcher.exits}
    errors = records.read_errors(run_dir.logs)
    failures = [
        _rank_failure(run_dir.logs, rank, errors.get(rank), ends.get(rank), launcher.doing.get(rank))
        for rank in {*errors, *ends}
    ]
    failures = [failure for failure in failures if failure.type or failure.exit_code not in _NO_FAILURE]
    if launcher.hang is not None and all(failure.is_collateral for failure in failures):
        hang = launcher.hang
        calls = missing_ranks(run_dir.logs)
        return FailureReport(launcher.ranks or len(ends), None, (), hang.cause, hang.headline, hang, collectives=calls)
    if not launcher.error and all(failure.ended_by_launcher for failure in failures):
        return None
    failures.sort(key=lambda failure: (failure.is_collateral, failure.blames_another, failure.time, failure.rank))
    first = failures[0] if failures and not (launcher.error and failures[0].is_collateral) else None
    cause, memory = _cause(first, launcher), ""
    if first is not None and cause is not None and cause.key.is_memory:
        memory = _memory_table(run_dir, launcher, errors)
        cause = replace(cause, smaller=_smaller(run_dir, first.evaluating))
    return FailureReport(
        ranks=launcher.ranks or len(failures),
        first=first,
        others=tuple(failure for failure in failures if failure is not first),
        cause=cause,
        launcher_error=launcher.error,
        memory=memory,
        collectives=missing_ranks(run_dir.logs),
    )


def own_failure(run_dir: RunDir, error: Exception) -> FailureReport | None:
    """The report of a run whose only rank is this process, written into its record.

    ``None`` where ``error`` explains itself.
    """
    if isinstance(error, LockstepError):
        return None
    records.log_traceback(run_dir.logs, 0, error)
    own = records.describe(0, error)
    cause, memory = find_cause(f"{own.type}: {own.message}"), ""
    if cause is not None and cause.key.is_memory:
        memory = _memory_table(run_dir, records.LauncherLog(machine=machine_now()), {0: own})
        cause = replace(cause, smaller=_smaller(run_dir, own.evaluating))
    report = FailureReport(1, RankFailure(**dict(own)), (), cause, memory=memory)
    _keep(run_dir, report.format())
    return report


def keep_failure(run_dir: RunDir, otherwise: str) -> FailureReport | None:
    """:func:`read_failure`, written into the run's record; ``otherwise`` is, where nothing was recorded.

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
    """The report of an error in the user's code before there was a run; ``None`` if none of it was involved."""
    if not records.involves_user_code(error):
        return None
    own = records.describe(0, error)
    cause = find_cause(f"{own.type}: {own.message}")
    what = f"{own.type}: {own.message}\n{textwrap.indent(own.traceback.rstrip(), '  ')}"
    return RunError(what, why=cause.title if cause else "", fix=cause.advice if cause else "")


def restarted(done: Sequence[records.Restart], attempt: int, step: int) -> Restarted:
    """The event of the latest of the restarts ``done``; ``attempt`` resumes from the checkpoint of ``step``."""
    last = done[-1]
    return Restarted(len(done), last.of, attempt, step, max(0, last.step - step), last.reason)


def _memory_table(run_dir: RunDir, launcher: records.LauncherLog, errors: Mapping[int, records.RankError]) -> str:
    """What is known of each rank's memory: from the rank, the launcher or the run's rows, in this order."""
    try:
        on_gpu = run_dir.plan()["placement"]["accelerator"] == "gpu"
        known = from_rows(run_dir.ranks(), on_gpu)
    except (LockstepError, LookupError, TypeError):
        known = {}
    own = {rank: error.memory for rank, error in errors.items() if error.memory is not None}
    for rank, memory in (*launcher.memory.items(), *own.items()):
        known[rank] = memory.over(known.get(rank, RankMemory()))
    return table(known, launcher.machine)


def _smaller(run_dir: RunDir, evaluating: bool) -> str:
    """The command with which the run's steps or evaluations need less memory; empty where its plan is not known."""
    try:
        plan, run = run_dir.plan(), run_dir.read().id
        batch = BatchPlan.model_validate(plan["batch"])
        if plan["task"].get("loader") is not None:
            return f"a smaller batch_size in the module's DataLoader; the global batch stays: lockstep resume {run}"
        if evaluating:
            return evaluation_advice(int(plan["eval_batch_size"]), run)
        return advice(batch, run)
    except (LockstepError, ValidationError, LookupError, TypeError, ValueError):
        return ""


def _collateral(others: Sequence[RankFailure]) -> str:
    names = ", ".join(str(failure.rank) for failure in sorted(others, key=lambda failure: failure.rank))
    ranks = "rank" if len(others) == 1 else "ranks"
    return f"{len(others)} other {ranks} ended because of it or after it ({ranks} {names})."


def _cause(first: RankFailure | None, launcher: records.LauncherLog) -> Cause | None:
    if first is None:
        return find_cause(launcher.error)
    if first.signal == "SIGKILL" and launcher.machine.kills:
        return OOM_KILLED
    if first.type:
        return find_cause(f"{first.type}: {first.message}", first.signal)
    return find_cause("\n".join(first.last_lines), first.signal)


def _rank_failure(
    logs: Path, rank: int, error: records.RankError | None, end: records.RankEnd | None, doing: Activity | None
) -> RankFailure:
    lines = records.last_lines(log_file(logs, rank))
    if error is not None:
        return RankFailure(**{**dict(error), "rank": rank}, last_lines=lines)
    assert end is not None, "there is one or the other"
    return RankFailure(
        rank=rank,
        # A killed rank may be seen only after the ranks that missed it have written down theirs.
        time=end.alive_at,
        exit_code=end.code,
        pid=end.pid,
        last_lines=lines,
        ended_by_launcher=end.ended_by_launcher,
        evaluating=doing is not None and doing.is_evaluation,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
