"""``training.on_oom``: after an attempt that ran out of memory, another one with half the micro-batch.

All ranks end with the failed attempt, and its memory with them. The global batch stays the same, and the run resumes
from its latest checkpoint or from the start, so losses are those of a run that began with the smaller micro-batch.
"""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import torch

from lockstep.config import RunConfig, resolve
from lockstep.engine.state import RunResult
from lockstep.errors import RankOutOfMemory
from lockstep.events import Note
from lockstep.hardware import read_world
from lockstep.launch.local.start import start
from lockstep.launch.prepare import Prepared, plan_settled
from lockstep.launch.run_claim import keep_config, resume_point, warn
from lockstep.planning import Plan
from lockstep.telemetry.rundir import RunDir

#: Four halvings find a micro-batch that was 16 times too large.
RETRIES = 4
#: What happens in the first steps of an attempt happens at its start.
FIRST_STEPS = 3


def start_with_retries(prepared: Prepared, run: RunDir, *, resumed_from: int) -> RunResult:
    """As :func:`.start`; a run that is out of memory is tried again up to ``RETRIES`` times, where that is asked for.

    Raises:
        LockstepError: the last attempt failed.
    """
    for _ in range(RETRIES):
        try:
            return start(prepared, run, resumed_from=resumed_from)
        except RankOutOfMemory as error:
            beat = run.progress()
            at_start = beat is None or beat.step - resumed_from < FIRST_STEPS
            smaller = halved(prepared.config, prepared.plan, at_start=at_start)
            if smaller is None:
                raise
            what = error.what.splitlines()[0]
        gc.collect()
        if torch.cuda.is_initialized():  # to ask whether there is a GPU would keep forks of this process from using it
            torch.cuda.empty_cache()
        point = resume_point(run, hold=True, report=warn)
        prepared = plan_settled(prepared.task, smaller, read_world(os.environ), point)
        batch = prepared.plan.batch
        text = (
            f"Out of memory ({what[:200]}): the micro-batch is now {batch.batch_size} samples, {batch.accumulate} a "
            f"step on each rank; the global batch stays {batch.global_batch}."
        )
        notes = (*prepared.plan.notes, Note("out_of_memory", text, "warning"))
        prepared = replace(prepared, plan=prepared.plan.model_copy(update={"notes": notes}))
        keep_config(run, smaller)
        resumed_from = point.step if point else 0
    return start(prepared, run, resumed_from=resumed_from)


def halved(config: RunConfig, plan: Plan, *, at_start: bool) -> RunConfig | None:
    """``config`` with half the micro-batch and the same global batch; ``None`` where that is not wanted or possible."""
    size, wanted = plan.batch.batch_size, config.training.on_oom
    if wanted == "fail" or (wanted == "start" and not at_start):
        return None
    if size < 2 or plan.reproducibility == "exact" or plan.task.loader is not None:
        return None
    training = {"batch_size": -(-size // 2), "global_batch_size": plan.batch.global_batch, "accumulate": 1}
    # The learning rate is scaled against the batch size that the run was started with.
    optimizer = {"base_batch_size": config.optimizer.base_batch_size or config.training.batch_size}
    return resolve(config.model_dump(mode="json"), {"training": training, "optimizer": optimizer})
