"""Build the training of a task on one rank: its parts, data, record and trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from lockstep.checkpoint.store import Snapshot
from lockstep.engine.build_parts import build_parts
from lockstep.engine.diagnostics.mfu import peak_share
from lockstep.engine.diagnostics.step_trace import Trace, trace_file
from lockstep.engine.fit import TaskTraining
from lockstep.engine.rank_context import RankContext
from lockstep.engine.run_log import RunLog
from lockstep.engine.state import RunResult
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import begin_stream, kept_on, training_source


class Fitting(Protocol):
    """Trains one rank until the plan is fulfilled, or a stop is agreed on."""

    @property
    def log(self) -> RunLog:
        """The record of the run."""

    def run(self) -> RunResult:
        """Train, and record how the run ended."""


def build_training(rank: RankContext, task: Task, datasets: Datasets, snapshot: Snapshot | None) -> TaskTraining:
    """Build the training of ``task`` on a rank, from ``snapshot`` or from the start. Collective."""
    parts = build_parts(rank, task, datasets, snapshot)
    debug = rank.config.debug
    rank = parts.rank
    strategy = parts.strategy
    done = parts.state.epoch * rank.plan.batch.samples + parts.state.position
    saved = None if snapshot is None else snapshot.trainer.get("stream")
    begin_stream(datasets, rank.run_dir.path, rank.attempt, rank.world, done, rank.plan.batch.global_batch, saved)
    source = training_source(task, datasets, rank.plan, rank.run_dir.path / f"skipped-rank{rank.world.rank}.jsonl")
    # Compiled code would be compiled again for the hooks that time one rank; the gradient of a divided model
    # is complete only when all ranks have done theirs.
    untimed = rank.config.training.compile or strategy.divided_by is not None
    share = None
    if rank.device.type == "cuda":
        share, text = peak_share(task, source, rank.plan)
        parts.remark(text)
    log = RunLog(rank, parts.state, timed=lambda: () if untimed else strategy.module.parameters(), peak_share=share)
    trace = None
    if debug.trace != "off":
        file = trace_file(rank.run_dir.path, rank.world.rank)
        trace = Trace(debug, file, rank.world.is_main, parts.update, strategy.module, parts.draws)
        source = trace.source(source)
    else:
        source = replace(source, pad=task.pad, full=rank.plan.filled_to) if rank.plan.filled_to else source
        source, remark = kept_on(source, rank.device, rank.plan)
        parts.remark(remark)
    return TaskTraining(task, datasets, parts, log, source, trace)
