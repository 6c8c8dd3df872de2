"""One failure, one block: which rank failed first, why, and what mends it.

What is known of a start comes from :mod:`lockstep.launch.failure.records`; what usual causes look like, from
:mod:`lockstep.launch.failure.causes`.
"""

from __future__ import annotations

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
    RanksDifferError,
    RunError,
    RunFolderError,
    StorageError,
    UsageError,
)
from lockstep.events import Restarted
from lockstep.launch.failure.causes import MEMORY_CAUSES, OOM_KILLED, SMALLER, Cause, find_cause, is_lost_peer
from lockstep.launch.failure.records import (
    LauncherLog,
    RankEnd,
    RankError,
    Restart,
    involves_user_code,
    last_lines,
    log_traceback,
    read_errors,
    read_launcher,
    told_of,
)
from lockstep.launch.health.hang import HangReport
from lockstep.launch.health.memory import RankMemory, advice, evaluation_advice, from_rows, machine_now, table
from lockstep.launch.local.rank_output import log_file
from lockstep.plan.batch import BatchPlan
from lockstep.telemetry.progress_board import Activity
from lockstep.telemetry.rundir import RunDir

_WRONG_USAGE = 2
_NO_FAILURE = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed. ``exit_code`` is negative for a signal; ``error`` is a Lockstep error's own words.

    ``time``: seconds since the epoch, the earliest at which it can have failed.
    """

    rank: int
    time: float
    exit_code: int
    type: str = ""
    message: str = ""
    traceback: str = ""
    error: Mapping[str, str] | None = None
    host: str = ""
    pid: int | None = None
    last_lines: tuple[str, ...] = ()
    ended_by_launcher: bool = False
    evaluating: bool = False

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed it, or ``None``."""
        return _signal_name(-self.exit_code) if self.exit_code < 0 else None

    @property
    def is_usage_error(self) -> bool:
        return self.error is not None and self.exit_code == _WRONG_USAGE

    @property
    def is_collateral(self) -> bool:
        """Whether this is what the failure of another rank looks like from here."""
        if self.type:
            return is_lost_peer(self.type, self.message)
        return self.ended_by_launcher or (self.signal == "SIGABRT" and is_lost_peer("", "\n".join(self.last_lines)))

    @property
    def explains_itself(self) -> bool:
        """Whether its error's own words say all, and where in Lockstep it was raised says nothing."""
        known = (StorageError.code, NonFiniteError.code, RanksDifferError.code)
        return self.error is not None and self.error["code"] in known

    @property
    def blames_another(self) -> bool:
        """Whether this rank missed another one, whose own failure says more if it left one."""
        return self.error is not None and self.error["code"] == CollectiveError.code

    def headline(self) -> str:
        if self.signal and not self.type:
            return f"was killed by signal {-self.exit_code} ({self.signal})"
        if not self.type:
            return f"ended with exit code {self.exit_code} without an error of its own"
        if self.explains_itself and self.error:
            return f"failed: {self.error['message']}"
        first = self.message.strip().splitlines()[:1]
        return f"failed: {': '.join([self.type, *first])}"


@dataclass(frozen=True)
class FailureReport:
    """Why a start of all ranks failed.

    ``first`` is the rank that failed by itself, ``None`` when only the launcher did; ``others`` failed
    after it or because of it.
    """

    ranks: int
    first: RankFailure | None
    others: tuple[RankFailure, ...]
    cause: Cause | None
    launcher_error: str = ""
    hang: HangReport | None = None
    memory: str = ""

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
        """Why, if the error says it or the cause is known."""
        if self.first and self.first.error:
            return self.first.error["why"]
        return self.cause.why if self.cause else ""

    @property
    def fix(self) -> str:
        """What mends it, if that is known."""
        if self.first and self.first.error:
            return self.first.error["fix"]
        return self.cause.fix if self.cause else ""

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
        if self.memory:
            blocks.append(self.memory)
        if self.others:
            blocks.append(_collateral(self.others))
        return "\n".join(blocks)

    def as_error(self) -> LockstepError:
        """The report as an exception, whose text is the whole block.

        A usage error that a rank raised comes back as what it was, exit code included.
        """
        if self.first and self.first.is_usage_error and self.first.error:
            kind = _usage_error_class(self.first.error["code"])
            return kind(self.what, why=self.why, fix=self.fix)
        return RankFailed("\n".join(filter(None, [self.what, self.details()])), why=self.why, fix=self.fix)

    def format(self) -> str:
        """The one block that people read: plain text, no newline at its end."""
        return str(self.as_error())


def _usage_error_class(code: str) -> type[LockstepError]:
    kinds: list[type[LockstepError]] = [UsageError, DataError, RunFolderError, CheckpointError]
    for kind in kinds:
        if kind.code == code:
            return kind
        kinds += kind.__subclasses__()
    return UsageError


def collect(run_dir: RunDir) -> FailureReport | None:
    """What the newest start in ``run_dir`` left about a failure; ``None`` when there was none."""
    launcher = read_launcher(run_dir)
    ends = {end.rank: end for end in launcher.exits}
    errors = read_errors(run_dir.logs)
    failures = [
        _rank_failure(run_dir.logs, rank, errors.get(rank), ends.get(rank), launcher.doing.get(rank))
        for rank in {*errors, *ends}
    ]
    failures = [failure for failure in failures if failure.type or failure.exit_code not in _NO_FAILURE]
    if launcher.hang is not None and all(failure.is_collateral for failure in failures):
        hang = launcher.hang
        return FailureReport(launcher.ranks or len(ends), None, (), hang.cause, hang.headline, hang)
    if not launcher.error and all(failure.ended_by_launcher for failure in failures):
        return None
    failures.sort(key=lambda failure: (failure.is_collateral, failure.blames_another, failure.time, failure.rank))
    first = failures[0] if failures and not (launcher.error and failures[0].is_collateral) else None
    cause, held = _cause(first, launcher), ""
    if first is not None and cause is not None and cause.name in MEMORY_CAUSES:
        held = _memory_table(run_dir, launcher, errors)
        cause = replace(cause, fix=cause.fix.replace(SMALLER, _advice(run_dir, first.evaluating)))
    return FailureReport(
        ranks=launcher.ranks or len(failures),
        first=first,
        others=tuple(failure for failure in failures if failure is not first),
        cause=cause,
        launcher_error=launcher.error,
        memory=held,
    )


def of_this_process(run_dir: RunDir, error: Exception) -> FailureReport | None:
    """The report of a run whose only rank this process is; ``None`` where ``error`` explains itself."""
    if isinstance(error, LockstepError):
        return None
    log_traceback(run_dir.logs, 0, error)
    told = told_of(0, error)
    cause, held = find_cause(f"{told.type}: {told.message}"), ""
    first = _rank_failure(run_dir.logs, 0, told, None)
    if cause is not None and cause.name in MEMORY_CAUSES:
        held = _memory_table(run_dir, LauncherLog(machine=machine_now()), {0: told})
        cause = replace(cause, fix=cause.fix.replace(SMALLER, _advice(run_dir, first.evaluating)))
    return FailureReport(ranks=1, first=replace(first, last_lines=()), others=(), cause=cause, memory=held)


def of_a_task(error: Exception) -> LockstepError | None:
    """The report of an error that code of the user's raised before there was a run; ``None`` if none was involved."""
    if not involves_user_code(error):
        return None
    told = told_of(0, error)
    cause = find_cause(f"{told.type}: {told.message}")
    what = f"{told.type}: {told.message}\n{textwrap.indent(told.traceback.rstrip(), '  ')}"
    return RunError(what, why=cause.why if cause else "", fix=cause.fix if cause else "")


def restarted(done: Sequence[Restart], attempt: int, step: int) -> Restarted:
    """The newest of the restarts ``done``, for people; ``attempt`` goes on from the checkpoint of ``step``."""
    last = done[-1]
    return Restarted(len(done), last.of, attempt, step, max(0, last.step - step), last.reason)


def _memory_table(run_dir: RunDir, launcher: LauncherLog, errors: Mapping[int, RankError]) -> str:
    """What is known of each rank's memory: by itself, by the launcher, by the run's rows, in this order."""
    try:
        on_gpu = run_dir.plan()["placement"]["accelerator"] == "gpu"
        known = from_rows(run_dir.ranks(), on_gpu)
    except (LockstepError, LookupError, TypeError):
        known = {}
    for rank, held in launcher.memory.items():
        known[rank] = held.over(known.get(rank, RankMemory()))
    for rank, error in errors.items():
        if error.memory is not None:
            known[rank] = error.memory.over(known.get(rank, RankMemory()))
    return table(known, launcher.machine)


def _advice(run_dir: RunDir, evaluating: bool) -> str:
    try:
        plan, run = run_dir.plan(), run_dir.read().id
        batch = BatchPlan.model_validate(plan["batch"])
        if evaluating:
            return evaluation_advice(int(plan["eval_batch_size"]), run)
        return advice(batch, run)
    except (LockstepError, ValidationError, LookupError, TypeError, ValueError):
        return SMALLER


def _collateral(others: Sequence[RankFailure]) -> str:
    names = ", ".join(str(failure.rank) for failure in sorted(others, key=lambda failure: failure.rank))
    if len(others) == 1:
        return f"1 other rank ended because of it or after it (rank {names})."
    return f"{len(others)} other ranks ended because of it or after it (ranks {names})."


def _cause(first: RankFailure | None, launcher: LauncherLog) -> Cause | None:
    if first is None:
        return find_cause(launcher.error)
    if first.signal == "SIGKILL" and launcher.machine.kills:
        return OOM_KILLED
    if first.type:
        return find_cause(f"{first.type}: {first.message}", first.signal)
    return find_cause("\n".join(first.last_lines), first.signal)


def _rank_failure(
    logs: Path, rank: int, error: RankError | None, end: RankEnd | None, doing: Activity | None = None
) -> RankFailure:
    lines = last_lines(log_file(logs, rank))
    if error is not None:
        known = error.model_dump(exclude={"rank", "memory"})
        return RankFailure(rank=rank, last_lines=lines, **known)
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
