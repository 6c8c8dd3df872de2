"""Build model, strategy and update of one rank, as the plan asks, from a checkpoint or from the start."""

from __future__ import annotations

from torch import nn

from lockstep.checkpoint.store import Snapshot
from lockstep.engine.ablation import Watched
from lockstep.engine.distributed.buffers import check_start
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.engine.generators import seed_everything
from lockstep.engine.optim.precision import cast
from lockstep.engine.optim.step import Update, build_update, untrained_note
from lockstep.engine.parts import Parts
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import load_initial_weights, load_weights, restore, restored_state
from lockstep.engine.strategies.build import build_strategy, divide, on_device
from lockstep.engine.task import Context, Datasets, Task
from lockstep.engine.trained import Callbacks, build_model, refuse_meta
from lockstep.events import Note


def build_parts(rank: RankContext, task: Task, datasets: Datasets, snapshot: Snapshot | None) -> Parts:
    """Build them from ``snapshot``, or from the start. Collective."""
    config = rank.config
    plan = rank.plan
    state = restored_state(rank, snapshot)
    remarks = list[str | None]()
    task._lockstep_context = Context(state)
    seed_everything(plan.seed)  # opening the data may have drawn numbers
    model = build_model(task)
    refuse_meta(model)
    if snapshot is None:
        load_initial_weights(model, config.init_from, rank.collectives)
    if plan.sync_batchnorm:
        model = convert(model)
    model = cast(model, plan.placement["precision"])
    divided = None
    if plan.strategy.divides:
        divided = divide(rank, task, model, datasets)
    else:
        model = on_device(model, rank)
    update = build_update(rank, task, model, divided, validates=datasets.val is not None)
    remarks += [] if divided is None else divided.remarks
    if snapshot is not None:
        remarks += restore(rank, snapshot, state, model, lambda: _load(rank, snapshot, task, model, update))
    traces = config.debug.trace != "off"
    off = config.debug.switch_off
    warning = None
    if divided is None and not traces:  # a trace compares them itself
        warning = check_start(model, rank.collectives, exact=plan.reproducibility == "exact")
    watched = Watched(task, model, off) if traces or off else None
    strategy = build_strategy(rank, watched or task, model, update.precision, divided)
    if watched is not None:
        strategy.watching = watched.watching
    callbacks = Callbacks(task)
    update.after_backward = callbacks.caller("on_after_backward", task._lockstep_context, strategy.module)
    remarks.append(untrained_note(update, model, config.training.max_grad_norm))
    draws = set() if watched is None else watched.draws
    notes = [Note("remark", text) for text in remarks if text]
    notes += [] if warning is None else [Note("warning", warning, "warning")]
    return Parts(rank, strategy, update, state, callbacks, draws, notes)


def _load(rank: RankContext, snapshot: Snapshot, task: Task, model: nn.Module, update: Update) -> None:
    load_weights(model, snapshot.model, rank.run_dir.path)
    update.load_state_dict(snapshot.trainer["update"])
    task.load_state_dict(snapshot.trainer["task"])
