"""Starting what was prepared: in this process for one device, else on ranks, through a launcher process.

The chain is caller → launcher (:mod:`lockstep.launch.local.launcher`) → ranks (:func:`train_as_rank`). No rank runs in
the caller, which may be a script without a main guard, a notebook, a thread or a server's child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from lockstep.engine.attempt import run_attempt
from lockstep.engine.state import RunResult
from lockstep.errors import LockstepError, RunFolderError, StorageError
from lockstep.hardware import World
from lockstep.launch.failure import records
from lockstep.launch.failure.report import own_failure, read_failure, restarted
from lockstep.launch.local.fork_server import run_launcher
from lockstep.launch.local.signals import StopRequest, exit_code
from lockstep.launch.local.worker import Rank
from lockstep.launch.prepare import Prepared
from lockstep.launch.run_claim import plan_of, resume_point, warn
from lockstep.tasks.registry import load_task, pack_task
from lockstep.telemetry.lookup import or_else
from lockstep.telemetry.rundir import RunDir, read_json, write_json
from lockstep.telemetry.sinks import standard_sinks


def start(prepared: Prepared, run: RunDir, *, resumed_from: int) -> RunResult:
    """Train what was prepared, as a new attempt of ``run``; returns when it has ended.

    Args:
        resumed_from: the step of the checkpoint that the attempt resumes; 0 without one.

    Raises:
        LockstepError: the attempt failed; which rank and why.
    """
    attempt = run.begin_attempt(prepared.plan.as_dict(), prepared.placement.as_dict(), resumed_from)
    if prepared.placement.world_size == 1:
        return _train_here(prepared, run, attempt)
    return _train_on_ranks(prepared, run)


def _train_here(prepared: Prepared, run: RunDir, attempt: int) -> RunResult:
    """Train in this process, on one device (or, with ``dp``, on several)."""
    with StopRequest() as stop:
        try:
            return run_attempt(
                run,
                World(),
                prepared.task,
                prepared.config,
                prepared.plan,
                attempt=attempt,
                sink=standard_sinks(run, prepared.config, sys.stdout),
                stop_signal=lambda: stop.requested,
                datasets=prepared.datasets,
            )
        except Exception as error:
            failure = own_failure(run, error)
            if failure is None:
                raise
            _record(run, failure.format())
            raise failure.as_error() from error


def _train_on_ranks(prepared: Prepared, run: RunDir) -> RunResult:
    settings = prepared.config.launch
    pack_task(run, prepared.task, prepared.config)
    code = launch(
        run,
        prepared.placement.world_size,
        threads=prepared.plan.threads,
        stop_grace_s=settings.stop_grace_s,
        max_restarts=settings.max_restarts,
        hang_timeout_s=settings.hang_timeout_s,
    )
    if code and or_else(lambda: run.read().status, "lost") not in {"stopped", "completed"}:
        failure = read_failure(run)
        records.clear_spare(run.logs)
        _record(run, failure.format() if failure else f"the launcher ended with exit code {code}")
        if failure is not None:
            raise failure.as_error()
    return result_of(run, code)


def _record(run: RunDir, error: str) -> None:
    with contextlib.suppress(LockstepError):  # the folder may be what failed
        run.update(status="failed", error=error)


def result_of(run: RunDir, exit_code: int) -> RunResult:
    """The result of an attempt that other processes made, from the run folder."""
    record = run.read()
    beat = run.progress()
    return RunResult(
        status=record.status,
        exit_code=exit_code,
        run_dir=run.path,
        step=beat.step if beat else 0,
        metrics=dict(record.final_metrics),
        best_epoch=record.best_epoch,
        best_metric=dict(record.best_metric),
    )


def launch(
    run_dir: RunDir,
    ranks: int,
    *,
    threads: int | None = None,
    environ: Mapping[str, str] | None = None,
    stop_grace_s: float = 30.0,
    max_restarts: int = 0,
    hang_timeout_s: float = 60.0,
    rank_main: str = f"{__name__}:train_as_rank",
    nodes: Mapping[str, Any] | None = None,
) -> int:
    """Run ``ranks`` ranks of the run on this machine and wait until all have ended.

    In the main thread, SIGINT and SIGTERM stop the run: the ranks write a checkpoint and end. A
    second SIGINT kills them. The handlers of the caller are back on return. In another thread the
    caller's handlers stay as they are.

    The run is stopped, with a checkpoint, when this process ends. After a failure,
    :func:`lockstep.launch.failure.report.read_failure` reports it.

    Args:
        run_dir: a run that exists.
        ranks: how many, at least 1.
        threads: intra-op threads of each rank; ``None``: OMP_NUM_THREADS, or 1.
        environ: variables for the ranks, in addition to this process's.
        stop_grace_s: how long ranks may take to end after a stop was requested, seconds.
        max_restarts: how often all ranks are started again after one has failed.
        hang_timeout_s: how long no rank may make progress before all are killed, seconds.
        rank_main: what every rank runs, as ``module:function``; it takes a
            :class:`lockstep.launch.local.worker.Rank` and returns an exit code.
        nodes: fields of :class:`lockstep.launch.nodes.command.Nodes`, for a run on several nodes.

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
    settings = {
        "ranks": ranks,
        "rank_main": rank_main,
        "stop_grace_s": stop_grace_s,
        "max_restarts": max_restarts,
        "hang_timeout_s": hang_timeout_s,
        "nodes": nodes,
    }
    with StopRequest() as stop:
        code = run_launcher(str(run_dir.path.resolve()), settings, stop, threads=threads, environ=environ or {})
    return code if code >= 0 else _ended_by_signal(run_dir, -code)


def _ended_by_signal(run_dir: RunDir, number: int) -> int:
    """Record the launcher's end, which it could not record itself."""
    if number in (signal.SIGINT, signal.SIGTERM):
        return exit_code(number)
    path = run_dir.logs / records.LAUNCHER_FILE
    try:
        content = read_json(path)
    except RunFolderError:
        content = {}
    name = signal.Signals(number).name
    with contextlib.suppress(StorageError):  # the exit code remains
        write_json(path, {**content, "error": f"the launcher was killed by signal {number} ({name})", "exit_code": 1})
    return 1


# --- in a rank -----------------------------------------------------------------------------------


def train_as_rank(rank: Rank) -> int:
    """Train as one of the ranks: configuration, plan and task are read from the run folder."""
    run, world = rank.folder, rank.world
    again = bool(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    config = run.config(run.read().attempt if again else None)
    plan = plan_of(run)
    sink = standard_sinks(run, config, sys.stdout)
    if again and world.is_main:  # the ranks were restarted after a failure, from the latest valid checkpoint
        edited = run.config_file.read_bytes()
        run.keep_config(config)
        if run.config_file.read_bytes() != edited:
            warn(f"{run.config_file} was edited while the run trained; it is as it was: a restart keeps the settings")
        point = resume_point(run, hold=True, report=warn)
        step = point.step if point else 0
        attempt = run.begin_attempt(run.plan(), plan.placement, step)
        done = records.read_launcher(run).restarts
        if done:
            sink.emit(restarted(done, attempt, step))
    result = run_attempt(
        run,
        world,
        load_task(run, config),
        config,
        plan,
        attempt=run.read().attempt,
        sink=sink,
        stop_signal=lambda: rank.stop.requested,
    )
    return result.exit_code
