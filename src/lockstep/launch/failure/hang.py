"""Ranks that make no progress: which one is behind, and where in its code.

Ranks wait for each other in collective calls, so one that stops stops all of them. A hang is therefore that *no* rank
makes progress for some time, and the question is which rank the others wait for.
"""

from __future__ import annotations

from typing import Any

import psutil

from lockstep.launch.failure.causes import Cause
from lockstep.launch.process.rank_log import Stack, own_part, place_of
from lockstep.rundir.files import FileContent
from lockstep.rundir.heartbeat import Activity, Sign

#: The first step may take this many times ``launch.hang_timeout_s``: caches are filled, libraries loaded.
FIRST_STEP_FACTOR = 5
_STATES = {psutil.STATUS_STOPPED: "stopped", psutil.STATUS_TRACING_STOP: "stopped", psutil.STATUS_DISK_SLEEP: "blocked"}


HANG_TIMEOUT = "launch.hang_timeout_s"
COLLECTIVE_TIMEOUT = "distributed.timeout_s"


class Standstill(FileContent):
    """Where one rank was when no rank made progress. ``stack``: ``file:line in function``, innermost first.

    ``state``: ``running``, ``stopped`` (by a signal or a debugger), ``blocked`` (in the kernel) or ``unresponsive``.
    ``in_framework``: its innermost call is torch's or Lockstep's; ``in_user_code``: the user's code made that call.
    ``node``: its host, if there are several.
    """

    rank: int
    step: int = 0
    doing: str = ""
    ahead: bool = False
    waits_for_data: bool = False
    waits_for_save: bool = False
    silent_s: float = 0.0
    state: str = "running"
    place: str = ""
    in_framework: bool = False
    in_user_code: bool = False
    stack: tuple[str, ...] = ()
    node: str = ""

    @property
    def name(self) -> str:
        return f"{self.rank} on {self.node}" if self.node else f"{self.rank}"


def standstill(rank: int, sign: Sign, stack: Stack, **fields: Any) -> Standstill:
    """Make it from a rank's newest sign and the stack of its main thread; ``fields``: the other fields."""
    return Standstill(
        rank=rank,
        step=sign.step,
        doing=sign.activity.phrase(sign.step),
        ahead=sign.activity in (Activity.STEP, Activity.WAITING_FOR_DATA),
        waits_for_data=waits_for_data(sign, stack),
        waits_for_save=sign.activity is Activity.AWAITING_SAVE,
        **position(stack),
        **fields,
    )


def position(stack: Stack) -> dict[str, Any]:
    """Return fields of a :class:`Standstill` that show where in its code a rank is."""
    training = own_part(stack)
    return {
        "place": place_of(training or stack),
        "in_framework": bool(stack) and stack[0].is_framework,
        "in_user_code": any(not frame.is_library for frame in training),
        "stack": tuple(map(str, training)),
    }


class HangReport(FileContent):
    """A hang of all ranks of a run. ``behind``: those that the others wait for; empty if that is not known.

    ``by``: the rank that has made the report. ``setting``: whose time-out ``timeout_s`` is. After that of a collective
    call, ``ranks`` are those that were not in it when another rank gave up.
    """

    by: int = 0
    timeout_s: float
    ranks: tuple[Standstill, ...]
    setting: str = HANG_TIMEOUT

    @property
    def hung_s(self) -> float | None:
        """How long no rank has made progress; ``None`` after a collective call: others may have."""
        return min(rank.silent_s for rank in self.ranks) if self.setting == HANG_TIMEOUT else None

    @property
    def behind(self) -> tuple[Standstill, ...]:
        for apart in (
            [rank for rank in self.ranks if rank.state == "stopped"],
            [rank for rank in self.ranks if rank.stack and (rank.waits_for_data or not rank.in_framework)],
            [rank for rank in self.ranks if not rank.stack],
            [rank for rank in self.ranks if not rank.waits_for_save],
            [rank for rank in self.ranks if (rank.step, rank.ahead) == min((r.step, r.ahead) for r in self.ranks)],
            [rank for rank in self.ranks if rank.in_user_code],
        ):
            are_all = len(apart) == len(self.ranks) > 1 and self.setting == HANG_TIMEOUT
            if apart and (not are_all or apart[0].state == "stopped"):
                return tuple(apart)
        return ()

    @property
    def _all_wait_for_data(self) -> bool:
        return all(rank.waits_for_data for rank in self.ranks)

    @property
    def headline(self) -> str:
        """Which rank is behind, in which activity and where, on one line."""
        behind = self.behind
        silent = f"{min(rank.silent_s for rank in self.ranks):.0f} s"
        if not behind:
            awaited = "its loader" if self._all_wait_for_data else "the others"
            return f"the ranks have made no progress for {silent}: each waits for {awaited}"
        first = behind[0]
        who = f"rank {first.name} has" if len(behind) == 1 else f"ranks {', '.join(r.name for r in behind)} have"
        if first.state == "stopped":
            return f"{who} sent no heartbeat for {silent}, in {first.doing}"
        if self.setting != HANG_TIMEOUT:
            silent = f"the {self.timeout_s:g} s of {self.setting}"
        return f"{who} made no progress for {silent}, in {first.doing}{first.place and f': {first.place}'}"

    @property
    def cause(self) -> Cause:
        """Why, as far as the ranks' stacks show it, and how to fix it."""
        first = self.behind[0] if self.behind else None
        slow = f"; if it is only slow, raise {self.setting} (now {self.timeout_s:g})"
        check = ""
        if first and first.state == "stopped":
            title = "its process is stopped (by SIGSTOP, a debugger or a batch system), and the others wait for it"
            fix = (
                "find out what stopped it, then `lockstep resume` the run; to debug a rank, set launch.hang_timeout_s "
            )
            fix = fix + "to a large number"
            slow = ""
        elif self._all_wait_for_data or (first and first.waits_for_data):
            title = "the loader returns no batch" + "; the other ranks wait for it" * (first is not None)
            fix = "look at the data set there, or try --num-workers 0"
        elif first and not first.stack:
            title = "its process does not answer: native code keeps the interpreter, or the kernel blocks it"
            fix = "fix or avoid that call"
            check = "`py-spy dump --native --pid` shows its calls"
        elif first and not first.in_framework:
            title = "it is blocked there; the other ranks are waiting for it"
            fix = "fix that line"
        else:
            title = (
                "the ranks are in different collective calls, or one of them makes a call that the others do not make"
            )
            fix = "make every collective call on every rank, not under a condition that differs between ranks "
            fix += "(`if rank == 0`)"
        return Cause("hang", title, fix + slow, check)

    def table(self) -> str:
        """Format a line for each rank, and the stacks: those of the ranks that are behind first."""
        lines = []
        for rank in self.ranks:
            state = "" if rank.state == "running" else f" ({rank.state})"
            location = rank.place or ("no stack: the process does not answer" if not rank.stack else rank.stack[0])
            lines.append(f"  rank {rank.name}{state}: silent for {rank.silent_s:.0f} s in {rank.doing}; {location}")
        behind = self.behind
        for rank in (*behind, *(other for other in self.ranks if other not in behind)):
            if rank.stack:
                log = f"logs/rank-{rank.rank}.log"
                lines.append(f"stack of rank {rank.name}, innermost call first (all threads: {log}):")
                lines += [f"  {frame}" for frame in rank.stack]
        return "\n".join(lines)


def waits_for_data(sign: Sign, stack: Stack) -> bool:
    """Return whether a rank waits for its loader, in training or in an evaluation."""
    return sign.activity is Activity.WAITING_FOR_DATA or any(frame.is_loader for frame in stack)


def silence_limit_s(activity: Activity, stack: Stack, timeout_s: float) -> float | None:
    """Return seconds that a rank may go without progress in ``activity``; ``None``: its length is unknown."""
    # Metrics may take any time to compute, but not to reduce.
    if activity is Activity.COMPUTING_METRICS and stack and stack[0].is_collective:
        return timeout_s
    if activity.is_untimed:
        return None
    return timeout_s * (FIRST_STEP_FACTOR if activity is Activity.FIRST_STEP else 1)


def process_state(pid: int) -> str:
    """Return ``running``, ``stopped`` or ``blocked``, as the system sees the process."""
    try:
        return _STATES.get(psutil.Process(pid).status(), "running")
    except psutil.Error:
        return "running"
