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
from typing import Any

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
    """Read a script, a module, or a command of torchrun, accelerate or Python, whose launcher is replaced.

    Raises:
        UsageError: no script is named, or there is no such file.
    """
    words = [script, *arguments]
    name = Path(script).name
    if is_module:
        return Script(("-m", *words), script)
    if name.startswith("python"):
        words = words[1:]
        if words[:2] in (["-m", "torch.distributed.run"], ["-m", "accelerate.commands.launch"]):
            name = "torchrun" if words[1].startswith("torch") else "accelerate-launch"
            words = words[1:]
    if name == "accelerate" and words[1:2] == ["launch"]:
        words = words[1:]
        name = "accelerate-launch"
    if name in ("torchrun", "accelerate-launch"):
        words = _inner_command(name, words[1:])
    if words[:1] == ["-m"] and len(words) > 1:
        return Script(tuple(words), words[1])
    if not words or not Path(words[0]).is_file():
        message = f"script not found: {words[0]}" if words else "no script given"
        raise UsageError(message, fix="write `lockstep audit path/to/script.py`, or -m package.module")
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
    """Run ``script`` on ``ranks`` new processes until they end.

    Args:
        script: words of the command line of each process.
        ranks: processes, with torchrun's variables.
        folder: where records and output are written.
        steps: optimizer steps of a pass after which it is ended.
        timeout_s: when the processes are killed.
    """
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    is_stuck = is_late = False
    try:
        for rank in range(ranks):
            with (folder / f"output-{rank}.txt").open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, *script.words],
                    env=_environment(rank, ranks, port, folder, steps),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        stuck_since: float | None = None
        while any(process.poll() is None for process in processes):
            time.sleep(_POLL_S)
            now = time.monotonic()
            alive = [rank for rank, process in enumerate(processes) if process.poll() is None]
            stuck_since = (stuck_since or now) if _waits(folder, alive, ranks) else None
            is_stuck = stuck_since is not None and now - stuck_since > GRACE_S
            is_late = now > deadline
            if is_stuck or is_late:
                break
    finally:
        for process in processes:
            _end(process)
    outputs = tuple((folder / f"output-{rank}.txt").read_text("utf-8", "replace") for rank in range(ranks))
    return Outcome(tuple(process.wait() for process in processes), is_stuck, is_late, outputs)


def _waits(folder: Path, alive: Sequence[int], ranks: int) -> bool:
    """Whether the ranks that are ``alive`` wait for one that has ended, or for each other in different calls."""
    last = [_last_record(folder, rank) for rank in alive]
    if not last or any(record.get("t") not in ("call", "backward") for record in last):
        return False
    return len(alive) < ranks or len({(record["t"], record.get("kind"), record.get("site")) for record in last}) > 1


def _last_record(folder: Path, rank: int) -> dict[str, Any]:
    for file in folder.glob(f"rank-{rank}-*.jsonl"):
        with file.open("rb") as records:
            records.seek(max(0, file.stat().st_size - 65536))
            lines = records.read().split(b"\n")
        with suppress(json.JSONDecodeError, IndexError):
            record: dict[str, Any] = json.loads(lines[-2])
            return record
    return {}


def _environment(rank: int, ranks: int, port: int, folder: Path, steps: int) -> dict[str, str]:
    from lockstep.hardware.detect import get_available_gpus

    environ = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if not get_available_gpus():
        environ["ACCELERATE_USE_CPU"] = "1"
    environ |= os.environ
    environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks))
    environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "audit"}
    environ |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = [str(_BOOTSTRAP), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ["PYTHONPATH"] = os.pathsep.join(path)
    return environ | {"LOCKSTEP_AUDIT": str(folder), "LOCKSTEP_AUDIT_STEPS": str(steps)}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


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
    lines = outcome.outputs[failed].rstrip().splitlines()[-30:]
    if outcome.is_late:
        message = f"{script.name} on {ranks} ranks has not ended in time"
        fix = "pass it arguments for a shorter run, or a larger --timeout"
    elif outcome.is_stuck:
        message = f"{script.name} on {ranks} ranks: a rank waits for one that has ended, or is in another call"
        fix = "run it with torchrun; it waits there, too"
    else:
        message = f"{script.name} on {many(ranks, 'rank')} fails: exit code {outcome.codes[failed]} of rank {failed}"
        fix = "run it without `lockstep audit` first; nothing was judged"
    return TaskError(message, why="\n".join(["its last lines:", *lines]), fix=fix)


def read_records(folder: Path, kind: str, rank: int) -> list[dict[str, object]]:
    """Read the records of the process of a rank (``rank``) or of the workers of its loaders (``worker``)."""
    records = []
    for file in sorted(folder.glob(f"{kind}-{rank}-*.jsonl"), key=lambda file: file.stat().st_mtime):
        lines = file.read_text("utf-8").splitlines()
        for line in lines:
            with suppress(json.JSONDecodeError):  # a torn last line
                records.append(json.loads(line))
    return records
