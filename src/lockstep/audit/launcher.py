"""Start an unchanged script on ranks that are observed, and watch them until they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import TaskError, UsageError, many

#: How long ranks may run after another one has ended or waits elsewhere.
GRACE_S = 15.0
_POLL_S = 0.2
_BOOTSTRAP = Path(__file__).with_name("bootstrap")


@dataclass(frozen=True)
class Script:
    """A script or module with its arguments; ``words`` follow ``python``."""

    words: tuple[str, ...]
    name: str


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended: exit codes (negative: killed by us), whether time ran out, and each rank's output."""

    codes: tuple[int, ...]
    is_stuck: bool
    is_late: bool
    outputs: tuple[str, ...]


def read_command(script: str, arguments: Sequence[str], *, is_module: bool) -> Script:
    """Read a script, a module, or a command of torchrun or accelerate, whose launcher is replaced.

    Raises:
        UsageError: no script is named, or there is no such file.
    """
    words = [*(["-m"] if is_module else []), script, *arguments]
    launcher = Path(script).name
    if not is_module and launcher == "torchrun":
        words = _inner_command(launcher, words[1:])
    elif not is_module and (launcher, *words[1:2]) == ("accelerate", "launch"):
        words = _inner_command(launcher, words[2:])
    if words[0] == "-m" and len(words) > 1:
        return Script(tuple(words), words[1])
    if not Path(words[0]).is_file():
        fix = "write `lockstep audit path/to/script.py`, or -m package.module"
        raise UsageError(f"script not found: {words[0]}", fix=fix)
    return Script(tuple(words), Path(words[0]).name)


def _inner_command(launcher: str, words: list[str]) -> list[str]:
    """Return the command line of each rank: the launcher's options are read by its parser and left out."""
    if launcher == "torchrun":
        from torch.distributed.run import get_args_parser

        parser = get_args_parser()
    else:
        from accelerate.commands.launch import launch_command_parser  # type: ignore[import-untyped,unused-ignore]

        parser = launch_command_parser()
    try:
        options = parser.parse_args(words)
    except SystemExit:
        raise UsageError(f"the options of {launcher} are wrong", fix=f"`{launcher} --help` lists them") from None
    return [*(["-m"] if options.module else []), options.training_script, *options.training_script_args]


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
        deadline = time.monotonic() + timeout_s
        stuck_since: float | None = None
        while not (is_stuck or is_late) and any(process.poll() is None for process in processes):
            time.sleep(_POLL_S)
            now = time.monotonic()
            alive = [rank for rank, process in enumerate(processes) if process.poll() is None]
            stuck_since = (stuck_since or now) if _waits(folder, alive, ranks) else None
            is_stuck = stuck_since is not None and now - stuck_since > GRACE_S
            is_late = now > deadline
    finally:
        for process in processes:
            _end(process)
    codes = tuple(process.wait() for process in processes)
    return Outcome(codes, is_stuck, is_late, tuple(path.read_text("utf-8", "replace") for path in outputs))


def _waits(folder: Path, alive: Sequence[int], ranks: int) -> bool:
    """Whether the ranks that are ``alive`` wait for one that has ended, or for each other in different calls."""
    last = [next(iter(read_records(folder, "rank", rank, tail_bytes=65536)[-1:]), {}) for rank in alive]
    if not last or any(record.get("kind") not in ("call", "backward") for record in last):
        return False
    return len(alive) < ranks or len({(r["kind"], r.get("name"), r.get("site")) for r in last}) > 1


def read_records(folder: Path, process: str, rank: int, *, tail_bytes: int | None = None) -> list[dict[str, object]]:
    """Read the records of the process of a rank (``rank``) or of the workers of its loaders (``worker``).

    ``tail_bytes``: read the end of each file only.
    """
    records = []
    for path in sorted(folder.glob(f"{process}-{rank}-*.jsonl"), key=lambda path: path.stat().st_mtime):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - tail_bytes) if tail_bytes else 0)
            lines = file.read().splitlines()
        for line in lines:
            with suppress(json.JSONDecodeError):  # a torn line at either end
                records.append(json.loads(line))
    return records


def _environment(ranks: int, folder: Path, steps: int) -> dict[str, str]:
    """Return the variables that torchrun sets, those of the observer, and those of this process."""
    from lockstep.hardware.detect import get_available_gpus

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = [str(_BOOTSTRAP), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **({} if get_available_gpus() else {"ACCELERATE_USE_CPU": "1"}),
        **os.environ,
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        **{"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "audit", "TORCHELASTIC_USE_AGENT_STORE": "False"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(path)},
        **{"LOCKSTEP_AUDIT": str(folder), "LOCKSTEP_AUDIT_STEPS": str(steps)},
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a rank and its descendants; its session is its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def script_failure(script: Script, ranks: int, outcome: Outcome) -> TaskError:
    """Return the error for a script that fails without Lockstep too, with the end of its output."""
    failed = next((rank for rank, code in enumerate(outcome.codes) if code), 0)
    reason = f"fails: exit code {outcome.codes[failed]} of rank {failed}"
    fix = "run it without `lockstep audit` first; nothing was judged"
    if outcome.is_late:
        reason = "has not ended in time"
        fix = "pass it arguments for a shorter run, or a larger --timeout"
    elif outcome.is_stuck:
        reason = "stands still: a rank waits for one that has ended, or is in another call"
    lines = outcome.outputs[failed].rstrip().splitlines()[-30:]
    return TaskError(
        f"{script.name} on {many(ranks, 'rank')} {reason}", why="\n".join(["its last lines:", *lines]), fix=fix
    )
