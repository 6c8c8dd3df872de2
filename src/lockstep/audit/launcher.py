"""Start an unchanged script on ranks that are observed, and watch them until they end."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.audit.trace import Records
from lockstep.errors import TaskError, UsageError, many
from lockstep.rundir.files import rows_of

#: Maximum time without a record of ranks that wait for each other.
GRACE_S = 15.0
_POLL_S = 0.2
_LAUNCHERS = ("torchrun", "accelerate")
#: Options of the launchers that precede the name of a module.
_MODULE_OPTIONS = ("-m", "--module")
_BOOTSTRAP = Path(__file__).with_name("bootstrap")


@dataclass(frozen=True)
class Script:
    """A script or module with its arguments; ``words`` follow ``python``."""

    words: tuple[str, ...]
    name: str


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended: exit codes (negative: killed), whether time ran out, and each rank's output."""

    codes: tuple[int, ...]
    is_stuck: bool
    is_late: bool
    outputs: tuple[str, ...]


def read_command(script: str, arguments: Sequence[str], *, is_module: bool) -> Script:
    """Read a script, a module, or a command of torchrun or accelerate, which is replaced with its options.

    Raises:
        UsageError: no script is named, or there is no such file.
    """
    words = [script, *arguments]
    if not is_module and Path(script).name in _LAUNCHERS:
        starts = [i for i, word in enumerate(words) if word.endswith(".py") or word in _MODULE_OPTIONS]
        start = starts[0] if starts else 0
        is_module = words[start] in _MODULE_OPTIONS and len(words) > start + 1
        words = words[start + 1 :] if is_module else words[start:]
    if is_module:
        return Script(("-m", *words), words[0])
    if not Path(words[0]).is_file():
        fix = "write `lockstep audit path/to/script.py`, or -m package.module"
        raise UsageError(f"script not found: {words[0]}", fix=fix)
    return Script(tuple(words), Path(words[0]).name)


def run_ranks(script: Script, ranks: int, folder: Path, *, steps: int, timeout_s: float) -> Outcome:
    """Run ``script`` on ``ranks`` new processes, with records and output in ``folder``, until they end.

    Passes end after ``steps`` optimizer steps, the processes after ``timeout_s``.
    """
    environment = _environment(ranks, folder, steps)
    outputs = [folder / f"output-{rank}.txt" for rank in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    is_stuck = is_late = False
    try:
        for rank, path in enumerate(outputs):
            with path.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, *script.words],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
        deadline = time.time() + timeout_s
        while not (is_stuck or is_late) and any(process.poll() is None for process in processes):
            time.sleep(_POLL_S)
            alive = [rank for rank, process in enumerate(processes) if process.poll() is None]
            written_at = max((path.stat().st_mtime for path in folder.glob("*.jsonl")), default=math.inf)
            is_stuck = time.time() - written_at > GRACE_S and _waits(read_records(folder), alive, ranks)
            is_late = time.time() > deadline
    finally:
        for process in processes:  # and its descendants: its session is its process group
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    codes = tuple(process.wait() for process in processes)
    return Outcome(codes, is_stuck, is_late, tuple(path.read_text("utf-8", "replace") for path in outputs))


def _waits(records: Records, alive: Collection[int], ranks: int) -> bool:
    """Return whether ranks that are ``alive`` wait for one that has ended, or for each other in different calls."""
    of_process = Records(record for record in records if record["kind"] != "draw" and record["rank"] in alive)
    last = [of_rank[-1] for of_rank in of_process.by("rank").values()]
    calls = {(record["kind"], record.get("name"), record["site"]) for record in last}
    return {kind for kind, _, _ in calls} <= {"call", "backward"} and (len(alive) < ranks or len(calls) > 1)


def read_records(folder: Path) -> Records:
    """Read the records of all ranks; random numbers, which workers of loaders record, come last of a rank."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines()]
    # A process that was killed may have written a part of its last line.
    return Records(sorted(rows_of(lines), key=lambda record: (record["rank"], record["kind"] == "draw")))


def _environment(ranks: int, folder: Path, steps: int) -> dict[str, str]:
    """Return the variables that torchrun sets, those of the observer, and those of this process."""
    from lockstep.hardware.detect import get_available_gpus

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = [str(_BOOTSTRAP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **({} if get_available_gpus() else {"ACCELERATE_USE_CPU": "1"}),
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "audit",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(path),
        "LOCKSTEP_AUDIT": str(folder),
        "LOCKSTEP_AUDIT_STEPS": str(steps),
    }


def script_failure(script: Script, outcome: Outcome, rank: int) -> TaskError:
    """Return the error for a script that fails without Lockstep too, with the end of the output of ``rank``."""
    reason = f"fails: exit code {outcome.codes[rank]} of rank {rank}"
    fix = "run it without `lockstep audit` first; nothing was judged"
    if outcome.is_late:
        reason = "has not ended in time"
        fix = "pass it arguments for a shorter run, or a larger --timeout"
    elif outcome.is_stuck:
        reason = "stands still: a rank waits for one that has ended, or is in another call"
    lines = outcome.outputs[rank].rstrip().splitlines()[-30:]
    message = f"{script.name} on {many(len(outcome.codes), 'rank')} {reason}"
    return TaskError(message, why="\n".join(["its last lines:", *lines]), fix=fix)
