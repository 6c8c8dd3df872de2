"""Ranks that make no progress: which one is behind, and where in its code.

Ranks wait for each other in collective calls, so one that stops stops all of them. A hang is therefore that *no*
rank makes progress for some time (:func:`is_hang`), and the question is which rank the others wait for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from lockstep.launch.failure.causes import Cause, CauseKey
from lockstep.launch.health import stacks
from lockstep.telemetry.files import FileContent
from lockstep.telemetry.progress_board import Activity, Sign

#: How often the ranks are checked.
INTERVAL_S = 0.5
#: After a longer pause between two checks this process had been stopped itself, and maybe the ranks too.
OWN_PAUSE_S = 5.0
_STATES = {psutil.STATUS_STOPPED: "stopped", psutil.STATUS_TRACING_STOP: "stopped", psutil.STATUS_DISK_SLEEP: "blocked"}


class Standstill(FileContent):
    """Where one rank was when no rank made progress. ``stack``: ``file:line in function``, innermost first.

    ``state``: ``running``, ``stopped`` (by a signal or a debugger), ``blocked`` (in the kernel) or ``unresponsive``.
    ``in_framework``: its innermost call is torch's or Lockstep's, as that of a rank which waits for others.
    ``in_user_code``: the user's code made that call.
    ``node``: its host, if there are several. ``workers``: where its loader's workers are, if it waits for them.
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
    workers: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        rank: int,
        sign: Sign,
        *,
        silent_s: float,
        state: str = "running",
        stack: stacks.Stack = (),
        workers: tuple[str, ...] = (),
    ) -> Standstill:
        """``stack``: of its main thread, innermost call first."""
        return cls(
            rank=rank,
            step=sign.step,
            doing=sign.activity.phrase(sign.step),
            ahead=sign.activity in (Activity.STEP, Activity.WAITING_FOR_DATA),
            waits_for_data=waits_for_data(sign, stack),
            waits_for_save=sign.activity is Activity.AWAITING_SAVE,
            silent_s=silent_s,
            state=state,
            place=stacks.place(stack),
            in_framework=bool(stack) and stack[0].is_framework,
            in_user_code=any(not frame.is_library for frame in stack),
            stack=tuple(map(str, stacks.own_part(stack))),
            workers=workers,
        )

    @property
    def where(self) -> str:
        """The line that it is blocked on: that of its loader's first worker, if it waits for one."""
        return self.workers[0] if self.workers else self.place

    @property
    def name(self) -> str:
        return f"{self.rank} on {self.node}" if self.node else f"{self.rank}"


class HangReport(FileContent):
    """A hang of all ranks of a run. ``behind``: those that the others wait for; empty if that is not known."""

    timeout_s: float
    ranks: tuple[Standstill, ...]

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
            if apart and (len(apart) < len(self.ranks) or apart[0].state == "stopped" or len(self.ranks) == 1):
                return tuple(apart)
        return ()

    @property
    def headline(self) -> str:
        """Which rank is behind, in which activity and where, on one line."""
        behind = self.behind
        silent = f"{min(rank.silent_s for rank in self.ranks):.0f} s"
        if not behind:
            return f"the ranks have made no progress for {silent}: each waits for the others"
        first = behind[0]
        names = f"rank {first.name}" if len(behind) == 1 else f"ranks {', '.join(rank.name for rank in behind)}"
        verb = "has" if len(behind) == 1 else "have"
        if first.state == "stopped":
            return f"{names} {verb} sent no heartbeat for {silent}, in {first.doing}"
        return f"{names} {verb} made no progress for {silent}, in {first.doing}{first.where and f': {first.where}'}"

    @property
    def cause(self) -> Cause:
        """Why, as far as the ranks' stacks show it, and how to fix it."""
        title, fix, check = self._explained()
        slow = f"; if it is only slow, raise launch.hang_timeout_s (now {self.timeout_s:g})"
        return Cause(CauseKey.HANG, title, fix if "launch.hang_timeout_s" in fix else fix + slow, check)

    def _explained(self) -> tuple[str, str, str]:
        """Title, fix, and how to check."""
        first = self.behind[0] if self.behind else None
        if first and first.state == "stopped":
            return (
                "its process is stopped (by SIGSTOP, a debugger or a batch system), and the others wait for it",
                "find out what stopped it, then `lockstep resume` the run; "
                "to debug a rank, set launch.hang_timeout_s to a large number",
                "",
            )
        if first and first.waits_for_data:
            worker = "fix what its worker does there, or try --num-workers 0"
            fix = worker if first.workers else "try --num-workers 0 to see where the data set stops"
            return "its loader returns no batch; the other ranks wait for it", fix, ""
        if first and not first.stack:
            title = "its process does not answer: native code keeps the interpreter, or the kernel blocks it"
            return title, "fix or avoid that call", "`py-spy dump --native --pid` shows where it is"
        if first and not first.in_framework:
            return "it is blocked there; the other ranks are waiting for it", "fix that line", ""
        return (
            "the ranks are in different collective calls, or one of them makes a call that the others do not make",
            "make every collective call on every rank, not under a condition that differs between ranks "
            "(`if rank == 0`)",
            "",
        )

    def table(self) -> str:
        """A line for each rank, and the stacks: those of the ranks that are behind first."""
        lines = []
        for rank in self.ranks:
            state = "" if rank.state == "running" else f" ({rank.state})"
            where = rank.place or ("no stack: the process does not answer" if not rank.stack else rank.stack[0])
            lines.append(f"  rank {rank.name}{state}: silent for {rank.silent_s:.0f} s in {rank.doing}; {where}")
            lines += [f"    {worker}" for worker in rank.workers]
        behind = self.behind
        for rank in (*behind, *(other for other in self.ranks if other not in behind)):
            if rank.stack:
                lines.append(
                    f"stack of rank {rank.name}, innermost call first (all threads: logs/rank-{rank.rank}.log):"
                )
                lines += [f"  {frame}" for frame in rank.stack]
        return "\n".join(lines)


def waits_for_data(sign: Sign, stack: stacks.Stack) -> bool:
    """Whether a rank waits for its loader, in training or in an evaluation."""
    return sign.activity is Activity.WAITING_FOR_DATA or any(frame.is_loader for frame in stack)


def is_hang(ranks: Iterable[tuple[float, bool]], timeout_s: float) -> bool:
    """The one condition for a hang: all ranks, given as (seconds without progress, may take any time), are stuck."""
    return all(silent_s >= timeout_s and not untimed for silent_s, untimed in ranks)


class Silence:
    """How long one process has made no progress.

    Args:
        now: seconds on the clock of the checks.
    """

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._seen: object = None
        self._since = now

    def update(self, sign: Sign, now: float) -> float:
        """Take the process's newest sign; seconds without progress."""
        before = self._seen
        self.ignore(sign)
        if self._seen != before:
            self._since = now
        return now - self._since

    def ignore(self, sign: Sign) -> None:
        """What differs in ``sign`` is not progress."""
        saving = sign.activity is Activity.SAVING
        self._seen = sign.beats, saving_progress(self._pid, sign.writer) if saving else None

    def pause(self, seconds: float) -> None:
        """Do not count ``seconds`` in which the checking process had been stopped."""
        self._since += seconds

    def silent_s(self, now: float) -> float:
        return now - self._since


class HangWatch:
    """Checks the ranks of one start until all of them have been without progress for too long.

    Args:
        pids: of the processes, by rank, in the order of local ranks.
        signs: the newest sign of each local rank.
        logs: where the ranks' logs are.
        timeout_s: how long all ranks may be without progress; untimed activities (:attr:`Activity.is_untimed`) count
            as progress.
        clock: seconds from any fixed point; must not run while the machine sleeps.
    """

    def __init__(
        self,
        pids: Mapping[int, int],
        signs: Callable[[], Sequence[Sign]],
        *,
        logs: Path,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pids = dict(pids)
        self._signs = signs
        self._logs = logs
        self._timeout_s = timeout_s
        self._clock = clock
        now = clock()
        self._checked_at = now
        self._silences = {rank: Silence(pid, now) for rank, pid in self._pids.items()}
        self._hangs = False
        #: The hang, once it is known.
        self.verdict: HangReport | None = None

    def look(self, alive: Collection[int]) -> HangReport | None:
        """A report, with stacks, when no rank of ``alive`` has made progress for ``timeout_s``."""
        hangs = self.hangs(alive)
        self.verdict = HangReport(timeout_s=self._timeout_s, ranks=self.locate(alive)) if hangs else None
        return self.verdict

    def hangs(self, alive: Collection[int]) -> bool:
        """Whether no rank of ``alive`` has made progress for ``timeout_s``; checks that at most every INTERVAL_S."""
        now = self._clock()
        pause = now - self._checked_at
        if pause >= INTERVAL_S:
            self._checked_at = now
            if pause > OWN_PAUSE_S:
                for silence in self._silences.values():
                    silence.pause(pause)
            self._hangs = self._check(self._read(alive), now)
        return self._hangs

    def _check(self, signs: Mapping[int, Sign], now: float) -> bool:
        silent_s = {rank: self._silences[rank].update(sign, now) for rank, sign in signs.items()}
        if not is_hang(((silent, False) for silent in silent_s.values()), self._timeout_s):
            return False  # without asking the system for the state of each process
        stopped = [rank for rank in signs if process_state(self._pids[rank]) == "stopped"]
        untimed = {rank: sign.activity.is_untimed and rank not in stopped for rank, sign in signs.items()}
        return is_hang(((silent_s[rank], untimed[rank]) for rank in signs), self._timeout_s)

    def locate(self, alive: Collection[int]) -> tuple[Standstill, ...]:
        """Where each rank of ``alive`` is; requests their stacks, and waits a little for the answers."""
        signs, now = self._read(alive), self._clock()
        states = {rank: process_state(self._pids[rank]) for rank in signs}
        answering = {rank: self._pids[rank] for rank in signs if states[rank] != "stopped"}
        found = stacks.ask(answering, self._logs, f"has made no progress for {self._timeout_s:g} s; its threads are at")
        workers = {
            rank: stacks.ask_workers(self._pids[rank], rank, self._logs)
            for rank, stack in found.items()
            if waits_for_data(signs[rank], stack)
        }
        for rank, sign in signs.items():
            self._silences[rank].ignore(sign)  # what they have written as an answer
        return tuple(
            Standstill.of(
                rank,
                sign,
                silent_s=self._silences[rank].silent_s(now),
                state=states[rank],
                stack=found.get(rank, ()),
                workers=workers.get(rank, ()),
            )
            for rank, sign in signs.items()
        )

    def _read(self, alive: Collection[int]) -> dict[int, Sign]:
        return {rank: sign for rank, sign in zip(self._pids, self._signs(), strict=True) if rank in alive}


def process_state(pid: int) -> str:
    """``running``, ``stopped`` or ``blocked``, as the system sees the process."""
    try:
        return _STATES.get(psutil.Process(pid).status(), "running")
    except psutil.Error:
        return "running"


def saving_progress(pid: int, writer: int) -> tuple[int, float]:
    """What changes from check to check during a save, whose steps are not counted. Linux.

    Bytes that the process's main thread and its thread ``writer`` (0: none) have read and written, caches included;
    and the time, while one of the two waits for the disk: all bytes may be in the cache by then. Other threads
    (heartbeat, monitor, watchdog) read and write also when the save is stuck.
    """
    threads = [Path(f"/proc/{pid}/task/{thread}") for thread in {pid, writer or pid}]
    waits = any(_waits_for_disk(thread) for thread in threads)
    return sum(_bytes_moved(thread) for thread in threads), time.monotonic() if waits else 0.0


def _bytes_moved(thread: Path) -> int:
    """What a thread has read and written; see proc_pid_io(5)."""
    with contextlib.suppress(OSError, KeyError):  # it has ended, or this kernel does not count
        counters = dict(line.split(": ") for line in (thread / "io").read_text().splitlines())
        return int(counters["rchar"]) + int(counters["wchar"])
    return 0


def _waits_for_disk(thread: Path) -> bool:
    """Whether a thread is in an uninterruptible call (``D``); see proc_pid_stat(5)."""
    with contextlib.suppress(OSError):  # it has ended
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "D"
    return False
