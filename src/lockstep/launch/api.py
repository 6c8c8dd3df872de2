"""Starting, resuming, evaluating and stopping runs: what the command line and the library call."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.attempt import run_attempt
from lockstep.engine.result import RunResult
from lockstep.engine.task import Task
from lockstep.engine.training_data import open_data
from lockstep.errors import LockstepError, RunFolderError
from lockstep.events import Sink
from lockstep.hardware.world import World, read_world
from lockstep.launch.lightning_cli import refuse_lightning_cli
from lockstep.launch.local.signals import StopRequest
from lockstep.launch.nodes.command import train_as_node_rank, train_on_nodes
from lockstep.launch.nodes.external import train_as_rank
from lockstep.launch.prepare import Prepared, make_plan, place, plan_for, resume_point, settle
from lockstep.launch.run_claim import (
    changed_config,
    claimed,
    create_folder,
    existing_run,
    keep_config,
    overrides_of,
    refuse_running,
    task_again,
    task_of_run,
    warn,
)
from lockstep.launch.task_transport import load_task, pack_task
from lockstep.plan import Plan, ResumePoint
from lockstep.telemetry.lookup import or_else
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.sinks import check_sinks, standard_sinks

__all__ = [
    "RunResult",
    "evaluate",
    "make_plan",
    "resume",
    "run_rank",
    "stop",
    "train",
]


def train(
    task: Task | type[Task] | str | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    accept_data: bool = False,
) -> RunResult:
    """Train ``task`` as ``config`` says, on the devices that it names; returns when the run has ended.

    One device trains in this process, several in processes of their own, so this may be called from a
    script without a main guard, a notebook or a server. Under ``torchrun`` or ``srun`` this process is one rank.

    Args:
        task: an object, a class, or a name as on the command line; ``None`` takes ``config.task``.
        config: a :class:`RunConfig`, or a nested mapping of the settings that differ from the defaults.
        resume: go on with the unfinished run in ``save_dir``; on a fresh folder just start.
        accept_data: resume even if the training data are not those of the checkpoint, but as many samples.

    Raises:
        UsageError: before anything starts. RunError: when the run fails.
    """
    world = read_world(os.environ)
    built, whole = settle(task, config)
    as_given = isinstance(task, Task)
    if world.from_outside:
        return train_as_rank(
            built, whole, world, resume=resume, given=config, as_given=as_given, accept_data=accept_data
        )
    if whole.launch.nodes not in (None, "1"):
        return train_on_nodes(built, whole, resume=resume, given=config, as_given=as_given, accept_data=accept_data)
    existing = existing_run(whole, resume)
    if existing is not None:
        whole = changed_config(existing, overrides_of(config))
        built = task_of_run(built, whole, as_given=as_given)
        with claimed(existing):
            return _go_on(existing, built, whole, hold=True, accept_data=accept_data)
    check_sinks(whole, whole.save_dir)
    prepared = _prepare(built, whole, None, world)
    run_dir = create_folder(prepared.config)
    return _start(prepared, run_dir, resumed_from=0)


def resume(
    run: RunDir,
    *,
    task: Task | type[Task] | None = None,
    devices: str | None = None,
    rescale_batch: bool = False,
    accept_data: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> RunResult:
    """Resume a run from its latest valid checkpoint, on the same or different devices.

    Args:
        task: the run's task; ``None``: made from its settings.

    Raises:
        RunFolderError: the run is still running, or its task lives in a script.
        UnsupportedError: it is a run of LightningCLI.
    """
    refuse_running(run)
    refuse_lightning_cli(run, "resume")
    changes: dict[str, Any] = dict(overrides or {})
    if devices is not None:
        changes = merge(changes, {"hardware": {"selected_devices": devices}})
    config = changed_config(run, changes)
    built = task_again(run, config, task)
    with claimed(run):
        return _go_on(run, built, config, hold=not rescale_batch, accept_data=accept_data)


def _go_on(run: RunDir, task: Task, config: RunConfig, *, hold: bool, accept_data: bool) -> RunResult:
    check_sinks(config, run.path)
    point = resume_point(run, hold=hold, accept_data=accept_data, report=warn)
    prepared = _prepare(task, config, point, read_world(os.environ))
    keep_config(run, config)
    return _start(prepared, run, resumed_from=point.step if point else 0)


def _prepare(task: Task, config: RunConfig, point: ResumePoint | None, world: World) -> Prepared:
    placement = place(config, world)
    return plan_for(task, config, placement, open_data(task, config), point)


def _start(prepared: Prepared, run: RunDir, *, resumed_from: int) -> RunResult:
    attempt = run.begin_attempt(prepared.plan.as_dict(), prepared.placement.as_dict(), resumed_from)
    if prepared.placement.world_size == 1:
        return _train_here(prepared, run, attempt)
    return _launch(prepared, run)


def _train_here(prepared: Prepared, run: RunDir, attempt: int) -> RunResult:
    """Train in this process, on one device (or, with ``dp``, on several)."""
    from lockstep.launch.failure import report as failure

    sinks = standard_sinks(run, prepared.config, sys.stdout)
    with StopRequest() as stop_request:
        try:
            return run_attempt(
                run,
                World(),
                prepared.task,
                prepared.config,
                prepared.plan,
                attempt=attempt,
                sink=sinks,
                stop_signal=lambda: stop_request.requested,
                datasets=prepared.datasets,
            )
        except Exception as error:
            report = failure.of_this_process(run, error)
            if report is None:
                raise
            with contextlib.suppress(LockstepError):  # the folder may be what failed
                run.update(status="failed", error=report.format())
            raise report.as_error() from error


def _launch(prepared: Prepared, run: RunDir) -> RunResult:
    from lockstep.launch.failure import report as failure
    from lockstep.launch.failure import spare
    from lockstep.launch.local import start

    pack_task(run, prepared.task, prepared.config)
    code = start.launch(
        run,
        prepared.placement.world_size,
        environ={"LOCKSTEP_THREADS": str(prepared.plan.threads)},
        stop_grace_s=prepared.config.launch.stop_grace_s,
        max_restarts=prepared.config.launch.max_restarts,
        hang_timeout_s=prepared.config.launch.hang_timeout_s,
    )
    if code and or_else(lambda: run.read().status, "lost") not in {"stopped", "completed"}:
        report = failure.collect(run)
        spare.clear(run.logs)
        told = report.format() if report is not None else f"the launcher ended with exit code {code}"
        with contextlib.suppress(LockstepError):  # the folder may be what failed
            run.update(status="failed", error=told)
        if report is not None:
            raise report.as_error()
    return result_of(run, code)


def result_of(run: RunDir, exit_code: int) -> RunResult:
    """What the run folder says of an attempt that other processes made."""
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


def run_rank(run: RunDir, world: World) -> int:
    """Body of a process that Lockstep's launcher started: one rank of the attempt that was prepared."""
    if world.launcher == "--nodes":
        return train_as_node_rank(run, world)
    config = run.config()
    task = load_task(run, config)
    plan = Plan.model_validate(run.plan())
    sink = standard_sinks(run, config, sys.stdout)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and world.is_main:
        _begin_again(run, plan, sink)
    with StopRequest() as stop_request:
        result = run_attempt(
            run,
            world,
            task,
            config,
            plan,
            attempt=run.read().attempt,
            sink=sink,
            stop_signal=lambda: stop_request.requested,
        )
    return result.exit_code


def _begin_again(run: RunDir, plan: Plan, sink: Sink) -> None:
    """The ranks were started again after a failure: the same plan, from the newest checkpoint."""
    from lockstep.launch.failure.records import restarts
    from lockstep.launch.failure.report import restarted

    point = resume_point(run, hold=True, report=warn)
    step = point.step if point else 0
    attempt = run.begin_attempt(run.plan(), plan.placement, step)
    done = restarts(run)
    if done:
        sink.emit(restarted(done, attempt, step))


def evaluate(
    run: RunDir,
    *,
    split: str = "test",
    devices: str | None = None,
    checkpoint: str | int = "best",
    data: Path | None = None,
    task: Task | type[Task] | None = None,
) -> dict[str, Any]:
    """Metrics of a checkpoint on the ``val`` or ``test`` data, the same on any number of devices.

    Args:
        devices: as ``--devices``; ``None``: the first one of the run.
        data: a file of other data, for a task with ``evaluation_data``.
        task: the run's task; ``None``: made from its settings.

    Raises:
        UsageError: no such split, checkpoint or device. RunError: a rank failed.
    """
    from lockstep.launch.finished.evaluation import evaluate_checkpoint

    refuse_lightning_cli(run, "evaluate", split=split)
    return evaluate_checkpoint(run, split=split, devices=devices, checkpoint=checkpoint, data=data, task=task)


def stop(run: RunDir, timeout: float = 60.0) -> str:
    """Ask a run to end with a checkpoint; the status that it then has.

    The process is the one of the newest heartbeat, known by number and time of creation.

    Raises:
        RunFolderError: the run is not running here, or is still there after ``timeout`` seconds.
    """
    import signal
    import socket

    record = run.read()
    status = run.judge(record)
    if status not in {"running", "pending"}:
        raise RunFolderError(f"run {record.id} is {status}, not running", fix="`lockstep runs` lists the runs")
    beat = run.progress()
    if beat is None or beat.host != socket.gethostname():
        raise RunFolderError(
            f"run {record.id} runs on {record.host}",
            why="a signal reaches only this host",
            fix="run `lockstep stop` there",
        )
    os.kill(beat.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        status = run.status()
        if status not in {"running", "pending"}:
            return status
        time.sleep(0.1)
    raise RunFolderError(
        f"run {record.id} is still {status} after {timeout:g} s",
        why="it ends after the step it is in, with a checkpoint",
        fix=f"wait longer (--timeout), or kill process {beat.pid}: no checkpoint is lost",
    )
