"""One rank of a training run, started by the launcher."""

from __future__ import annotations

import os
import sys

from lockstep.config import RunConfig
from lockstep.engine.attempt import run_attempt
from lockstep.events import Sink
from lockstep.launch.failure import records
from lockstep.launch.failure.report import restarted
from lockstep.launch.local.worker import Rank
from lockstep.launch.nodes.command import train_as_node_rank
from lockstep.launch.run_claim import resume_point, warn
from lockstep.planning import Plan
from lockstep.tasks.registry import load_task
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.sinks import standard_sinks


def train(rank: Rank) -> int:
    """Train as this rank: configuration, plan and task are read from the run folder."""
    run, world = rank.folder, rank.world
    if world.launcher == "--nodes":
        return train_as_node_rank(rank)
    restarted = bool(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    config = run.config(run.read().attempt if restarted else None)
    plan = Plan.model_validate(run.plan())
    sink = standard_sinks(run, config, sys.stdout)
    if restarted and world.is_main:
        _begin_again(run, config, plan, sink)
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


def _begin_again(run: RunDir, config: RunConfig, plan: Plan, sink: Sink) -> None:
    """The ranks were restarted after a failure: the same settings and plan, from the latest valid checkpoint."""
    edited = run.config_file.read_bytes()
    run.keep_config(config)
    if run.config_file.read_bytes() != edited:
        warn(f"{run.config_file} was edited while the run trained; it is as it was: a restart keeps the settings")
    point = resume_point(run, hold=True, report=warn)
    step = point.step if point else 0
    attempt = run.begin_attempt(run.plan(), plan.placement, step)
    done = records.restarts(run)
    if done:
        sink.emit(restarted(done, attempt, step))
