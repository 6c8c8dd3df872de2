"""Starting what was prepared: in this process for one device, else on ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

from lockstep.engine.attempt import run_attempt
from lockstep.engine.state import RunResult
from lockstep.hardware import World
from lockstep.launch.failure import records
from lockstep.launch.failure.report import INTERRUPTED, keep_failure, own_failure
from lockstep.launch.failure.watchdog import stops_within
from lockstep.launch.local.on_ranks import launch
from lockstep.launch.local.worker import Rank
from lockstep.launch.prepare import RunInputs
from lockstep.launch.process.signals import StopRequest
from lockstep.launch.run_claim import plan_of, resume_point, warn
from lockstep.rundir.folder import RunDir
from lockstep.tasks.registry import load_task, pack_task
from lockstep.telemetry.sinks import standard_sinks


def start(prepared: RunInputs, run: RunDir, *, resumed_from: int) -> RunResult:
    """Train what was prepared, as a new attempt of ``run``; returns when it has ended, raises when it failed.

    ``resumed_from``: the step of the checkpoint that the attempt resumes; 0 without one.
    """
    attempt = run.begin_attempt(prepared.plan.as_dict(), prepared.placement.as_dict(), resumed_from)
    try:
        return (
            _train_on_ranks(prepared, run) if prepared.placement.world_size > 1 else _train_here(prepared, run, attempt)
        )
    except KeyboardInterrupt:
        keep_failure(run, INTERRUPTED)
        raise


def _train_here(prepared: RunInputs, run: RunDir, attempt: int) -> RunResult:
    sink = standard_sinks(run, prepared.config, sys.stdout)
    what = prepared.task, prepared.config, prepared.plan
    with StopRequest() as stop, stops_within(stop, prepared.config.launch.stop_grace_s):
        how: dict[str, Any] = {"attempt": attempt, "sink": sink, "stop_signal": lambda: stop.requested}
        try:
            return run_attempt(run, World(), *what, **how, datasets=prepared.datasets)
        except Exception as error:
            failure = own_failure(run, error)
            if failure is None:
                raise
            raise failure.as_error() from error


def _train_on_ranks(prepared: RunInputs, run: RunDir) -> RunResult:
    pack_task(run, prepared.task, prepared.config)
    code = launch(
        run,
        prepared.placement.world_size,
        settings=prepared.config.launch,
        threads=prepared.plan.threads,
        rank_main=f"{__name__}:{train_as_rank.__name__}",
    )
    failure = keep_failure(run, f"the launcher ended with exit code {code}") if code else None
    if failure is not None:
        raise failure.as_error()
    record, beat = run.read(), run.progress()
    if code == 1 and record.status == "completed":
        warn(f"the run is completed, but its launcher ended with exit code 1: see {run.logs / records.LAUNCHER_FILE}")
    return RunResult(
        status=record.status,
        exit_code=code,
        run_dir=run.path,
        step=beat.step if beat else 0,
        metrics=dict(record.final_metrics),
        best_epoch=record.best_epoch,
        best_metric=dict(record.best_metric),
    )


def train_as_rank(rank: Rank) -> int:
    """Train as one of the ranks: configuration, plan and task are read from the run folder."""
    run, world = rank.folder, rank.world
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
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
            sink.emit(records.restarted(done, attempt, step))
    attempt, task = run.read().attempt, load_task(run, config)
    how: dict[str, Any] = {"attempt": attempt, "sink": sink, "stop_signal": lambda: rank.stop.requested}
    return run_attempt(run, world, task, config, plan, **how).exit_code
