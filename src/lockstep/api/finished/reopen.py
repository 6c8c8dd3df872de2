"""Opening a finished run again: its checkpoints, its task and its model."""

from __future__ import annotations

from torch import nn

from lockstep.checkpoint.mirror import fetch_checkpoint
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.engine.resume import plan_of as plan_of
from lockstep.engine.resume import restore_weights
from lockstep.engine.task import Task
from lockstep.engine.trained import bare, build_model
from lockstep.errors import CheckpointError
from lockstep.launch.run_claim import task_again
from lockstep.rundir.folder import RunDir
from lockstep.rundir.remote import Remote


def load_model(
    run: RunDir, checkpoint: str | int = "best", *, task: Task | type[Task] | None = None
) -> tuple[Task, nn.Module]:
    """Load a run's task and its model in evaluation mode; see :meth:`lockstep.Run.load_model`. Opens no data."""
    built = task_again(run, run.config(), task)
    snapshot = find_checkpoint(run, checkpoint)
    model = build_model(built)
    restore_weights(built, model, snapshot, run.path)
    return built, bare(model.eval())


def find_checkpoint(run: RunDir, checkpoint: str | int) -> Snapshot:
    """Load the checkpoint that ``best``, ``last`` or a step number means. Raises :class:`CheckpointError`."""
    return CheckpointStore(run.checkpoints).load(find_step(run, checkpoint))


def fetch_weights(url: str, copy: RunDir, checkpoint: str | int) -> None:
    """Complete a checkpoint in the copy of a mirror. Raises :class:`CheckpointError`: it is missing or damaged."""
    fetch_checkpoint(Remote(url), copy.checkpoints, find_step(copy, checkpoint))


def find_step(run: RunDir, checkpoint: str | int) -> int:
    """Find the step that ``best``, ``last`` or a number means. Raises :class:`CheckpointError`: there is none."""
    store = CheckpointStore(run.checkpoints)
    text = str(checkpoint)
    step = int(text) if text.isdigit() else store.step_of(text)
    steps = store.steps()
    if step is None and text == "best":
        step = store.step_of("last")
    if step is None or step not in steps:
        have = ", ".join(map(str, steps))
        state = run.read()
        raise CheckpointError(
            f"run {state.id} has no checkpoint" + f" {checkpoint!r}" * bool(steps),
            why=f"its steps are: {have}" if have else f"its status is {state.status}, and it saved none",
            fix="name one, or best, or last" if have else f"`lockstep show {state.id}` shows how far it came",
        )
    return step
