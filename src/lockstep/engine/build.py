"""What one rank trains with, in the order in which its parts are made."""

from __future__ import annotations

from dataclasses import replace

from lockstep.checkpoint.store import Snapshot
from lockstep.engine.checkpoints import Checkpoints
from lockstep.engine.diagnostics.mfu import peak_share
from lockstep.engine.diagnostics.step_trace import Trace, trace_file
from lockstep.engine.fit import Fit
from lockstep.engine.parts import build_parts
from lockstep.engine.rank_context import RankContext
from lockstep.engine.run_log import RunLog
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import begin_stream, kept_on, training_source
from lockstep.engine.validation import Validation


def build_fit(rank: RankContext, task: Task, datasets: Datasets, snapshot: Snapshot | None) -> Fit:
    """What this rank trains with, from ``snapshot`` or from the start. Collective."""
    parts = build_parts(rank, task, datasets, snapshot)
    rank, strategy, debug = parts.rank, parts.strategy, rank.config.debug
    done = parts.state.epoch * rank.plan.batch.samples + parts.state.position
    saved = None if snapshot is None else snapshot.trainer.get("stream")
    begin_stream(datasets, rank.run_dir.path, rank.attempt, rank.world, done, rank.plan.batch.global_batch, saved)
    source = training_source(task, datasets, rank.plan, rank.run_dir.path / f"skipped-rank{rank.world.rank}.jsonl")
    # Compiled code would be compiled again for the hooks that time a rank's own work; the gradient of a divided model
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
    validation = Validation(rank, task, datasets, parts)
    checkpoints = Checkpoints(rank, task, parts, log, datasets.train)
    return Fit(task, datasets, parts, log, validation, checkpoints, trace, source, scalars={})
