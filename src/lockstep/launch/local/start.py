"""Several ranks on this machine: :func:`launch` starts them through a launcher process and waits.

The chain is caller → launcher (:mod:`lockstep.launch.local.launcher`) → ranks
(:mod:`lockstep.launch.local.worker`). Nothing of it runs in the caller, which may be a script without a
main guard, a notebook, a thread or a server's child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence

from lockstep.errors import RunFolderError, StorageError
from lockstep.hardware import parent_death
from lockstep.launch.failure import records
from lockstep.launch.local.environment import LAUNCH_ID, for_launcher
from lockstep.launch.local.rank_output import Relay
from lockstep.launch.local.signals import StopRequest, exit_code, held_back
from lockstep.telemetry.rundir import RunDir, read_json, write_json

#: How long the launcher may take to end when it has been told to kill everything.
_KILL_S = 10.0


def launch(
    run_dir: RunDir,
    ranks: int,
    *,
    environ: Mapping[str, str] | None = None,
    stop_grace_s: float = 30.0,
    max_restarts: int = 0,
    hang_timeout_s: float = 60.0,
    detached: bool = False,
    worker_module: str = "lockstep.launch.local.worker",
    nodes: str | None = None,
) -> int:
    """Run ``ranks`` ranks of the run on this machine and wait until all have ended.

    In the main thread, SIGINT and SIGTERM stop the run: the ranks write a checkpoint and end. A
    second SIGINT kills them. The handlers of the caller are back on return. In another thread the
    caller's handlers stay as they are.

    After a failure, :func:`lockstep.launch.failure.report.collect` tells what happened.

    Args:
        run_dir: a run that exists.
        ranks: how many, at least 1.
        environ: variables for the ranks, besides this process's own; LOCKSTEP_THREADS, the intra-op
            threads of each rank (default: OMP_NUM_THREADS, or 1), among them.
        stop_grace_s: how long ranks may take to end after a stop was requested, seconds.
        max_restarts: how often all ranks are started again after one has failed.
        hang_timeout_s: how long no rank may make progress before all are killed, seconds.
        detached: let the run go on when this process ends; otherwise it is stopped then, in good order.
        worker_module: what every rank runs, as ``python -m MODULE RUN_FOLDER``.
        nodes: the formatted :class:`lockstep.launch.nodes.command.Nodes` of a multi-node run.

    Returns:
        0: done; 1: failed; 2: wrong usage; 130 or 143: stopped by SIGINT or SIGTERM after a
        checkpoint (also 130 without one, after a second SIGINT).
    """
    try:
        records.clear(run_dir.logs)
    except OSError as error:
        raise RunFolderError(
            f"cannot write in {run_dir.logs}",
            why=str(error),
            fix="change its permissions, or choose another --save-dir",
        ) from error
    launch_id = uuid.uuid4().hex
    command = [
        *(sys.executable, "-P", "-m", "lockstep.launch.local.launcher", str(run_dir.path.resolve())),
        *("--ranks", str(ranks), "--worker-module", worker_module),
        *("--stop-grace-s", str(stop_grace_s), "--max-restarts", str(max_restarts)),
        *("--hang-timeout-s", str(hang_timeout_s)),
        *(() if detached else ("--parent-pid", str(os.getpid()))),
        *(("--nodes", nodes) if nodes else ()),
    ]
    launcher_environ = for_launcher({**os.environ, **(environ or {})}, launch_id, sys.path, several=nodes is not None)
    with StopRequest() as stop:
        code = _run(command, launcher_environ, stop)
    return code if code >= 0 else _ended_by_signal(run_dir, -code)


def _run(command: Sequence[str], environ: Mapping[str, str], stop: StopRequest) -> int:
    """The launcher's return code; nothing of it is left, whatever ends this function."""
    process, relay = None, Relay()
    try:
        with held_back():
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=relay.stdout,
                stderr=relay.stderr,
                start_new_session=True,
            )
        stop.notify(process.send_signal)
        return relay.wait(process)
    except KeyboardInterrupt:
        return _kill(process) if process is not None else exit_code(signal.SIGINT)
    finally:
        if process is not None and process.poll() is None:
            process.kill()  # its ranks die with it
            process.wait()
        if process is not None and process.returncode < 0:
            parent_death.kill_marked(LAUNCH_ID, environ[LAUNCH_ID])


def _kill(process: subprocess.Popen[bytes]) -> int:
    """The user will not wait any longer. Returns the exit code."""
    process.send_signal(signal.SIGQUIT)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(_KILL_S)
    return exit_code(signal.SIGINT)


def _ended_by_signal(run_dir: RunDir, number: int) -> int:
    """The launcher could not write down its own end."""
    if number in (signal.SIGINT, signal.SIGTERM):
        return exit_code(number)
    path = run_dir.logs / records.LAUNCHER_FILE
    try:
        content = read_json(path)
    except RunFolderError:
        content = {}
    name = signal.Signals(number).name
    with contextlib.suppress(StorageError):  # then the exit code has to say enough
        write_json(path, {**content, "error": f"the launcher was killed by signal {number} ({name})", "exit_code": 1})
    return 1
