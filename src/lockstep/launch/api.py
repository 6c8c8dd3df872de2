"""Starting, resuming, evaluating and stopping runs: what the command line and the library call."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from lockstep.config import RunConfig
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.errors import RunFolderError
from lockstep.hardware import read_world
from lockstep.launch.finished.evaluation import evaluate
from lockstep.launch.nodes.command import train_on_nodes
from lockstep.launch.nodes.external import train_as_rank
from lockstep.launch.nodes.preparation import Request
from lockstep.launch.oom_retry import start_with_retries
from lockstep.launch.prepare import make_plan, overrides_of, plan_settled, settle
from lockstep.launch.run_claim import (
    changed_config,
    claimed,
    create_folder,
    existing_run,
    keep_config,
    refuse_running,
    resume_point,
    task_again,
    task_of_run,
    warn,
)
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.sinks import check_sinks

__all__ = [
    "RunResult",
    "evaluate",
    "make_plan",
    "resume",
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
    """Train ``task`` with ``config``, nested settings that differ from the defaults; see :func:`lockstep.train`.

    Without ``task`` it is ``config.task``.
    """
    world = read_world(os.environ)
    built, whole = settle(task, config)
    request = Request(resume, overrides_of(config), isinstance(task, Task), accept_data)
    if world.from_outside:
        return train_as_rank(built, whole, world, request)
    if whole.launch.nodes not in (None, "1"):
        return train_on_nodes(built, whole, request)
    existing = existing_run(whole, resume)
    if existing is not None:
        whole = changed_config(existing, request.given)
        built = task_of_run(built, whole, as_given=request.as_given)
        with claimed(existing):
            return _go_on(existing, built, whole, hold=True, accept_data=accept_data)
    check_sinks(whole, whole.save_dir)
    prepared = plan_settled(built, whole, world, None)
    run_dir = create_folder(prepared.config)
    return start_with_retries(prepared, run_dir, resumed_from=0)


def resume(
    run: RunDir,
    *,
    task: Task | type[Task] | None = None,
    devices: str | None = None,
    rescale_batch: bool = False,
    accept_data: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> RunResult:
    """Resume a run on ``devices``, with ``overrides`` of its settings, nested; see :meth:`lockstep.Run.resume`."""
    refuse_running(run)
    config = changed_config(run, overrides or {}, devices)
    built = task_again(run, config, task)
    with claimed(run):
        return _go_on(run, built, config, hold=not rescale_batch, accept_data=accept_data)


def _go_on(run: RunDir, task: Task, config: RunConfig, *, hold: bool, accept_data: bool) -> RunResult:
    check_sinks(config, run.path)
    point = resume_point(run, hold=hold, accept_data=accept_data, report=warn)
    prepared = plan_settled(task, config, read_world(os.environ), point)
    keep_config(run, config)
    return start_with_retries(prepared, run, resumed_from=point.step if point else 0)


def stop(run: RunDir, timeout: float = 60.0) -> str:
    """Stop a run after saving a checkpoint; its status afterwards. One that is starting is stopped once it has begun.

    The process is the one of the latest heartbeat, identified by number and time of creation.

    Raises:
        RunFolderError: the run is not running on this host, or still starts or runs after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        record = run.read()
        status = run.judge(record)
        if status not in {"running", "pending"}:
            raise RunFolderError(f"run {record.id} is {status}, not running", fix="`lockstep runs` lists the runs")
        beat = run.progress()
        if beat is not None and not beat.handing_over:
            break
        if time.monotonic() >= deadline:
            raise RunFolderError(
                f"run {record.id} is still starting after {timeout:g} s",
                why="no process of it handles a stop yet",
                fix="wait longer (--timeout)",
            )
        time.sleep(0.1)
    if beat.host != socket.gethostname():
        raise RunFolderError(
            f"run {record.id} runs on {record.host}",
            why="a signal reaches only this host",
            fix="run `lockstep stop` there",
        )
    try:
        os.kill(beat.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError as error:
        why, fix = f"process {beat.pid}: {error.strerror}", "ask the user who started it, or become that user"
        raise RunFolderError(f"you may not stop run {record.id}", why=why, fix=fix) from None
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
