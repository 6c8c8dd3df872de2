"""Resuming from a checkpoint: what must agree, and restoring state and weights."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from pydantic import ValidationError
from torch import nn

from lockstep._compat.torch import plain_name
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.config import RunConfig
from lockstep.data.order import ORDER_VERSION
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.fingerprint import same_data
from lockstep.engine.rank_context import RankContext, check_pins, pins
from lockstep.engine.state import TrainState
from lockstep.engine.task import Task
from lockstep.errors import CheckpointError, LockstepError
from lockstep.planning import OrderPlan, Plan, ResumePoint
from lockstep.rundir.files import damaged
from lockstep.rundir.folder import RunDir

T = TypeVar("T")


class Reads(Protocol):
    """A rank that reads checkpoints."""

    @property
    def run_dir(self) -> RunDir: ...

    @property
    def collectives(self) -> Collectives: ...

    def note(self, key: str, text: str, level: Literal["info", "warning"] = "info") -> None: ...


def load_latest(rank: Reads, *, in_pieces: bool = False) -> Snapshot | None:
    """Load the latest valid checkpoint, for all ranks; damaged ones after it are set aside. Collective.

    ``in_pieces``: see :func:`load_shared`.
    """
    store = CheckpointStore(rank.run_dir.checkpoints)
    step: int | None = None
    if rank.collectives.is_main:
        store.clean_temporary()
        step = store.newest_verified(lambda message: rank.note("checkpoint_damaged", message, "warning"))
        for broken in store.set_aside_after(step):
            text = f"{store.aside_of(broken)} was set aside; remove it to free its space"
            rank.note("checkpoint_set_aside", text, "warning")
    step = rank.collectives.broadcast(step)
    return None if step is None else load_shared(store, step, rank.collectives, in_pieces=in_pieces)


def load_shared(store: CheckpointStore, step: int, collectives: Collectives, *, in_pieces: bool = False) -> Snapshot:
    """Load the checkpoint of ``step``, read and verified by rank 0 and sent to all ranks. Collective.

    ``in_pieces``: the model is divided and every rank sees ``store``'s folder, so that of a checkpoint in shards
    each reads only its part.
    """

    def read() -> Snapshot | None:
        return None if in_pieces and store.verify(step).shards else store.load(step)

    snapshot = _from_main(read, collectives)
    return store.open(step) if snapshot is None else snapshot


def _from_main(read: Callable[[], T], collectives: Collectives) -> T:
    """Call ``read()`` on rank 0; return its value or raise its :class:`CheckpointError` on every rank. Collective."""
    result: T | CheckpointError | None = None
    if collectives.is_main:
        try:
            result = read()
        except CheckpointError as error:
            result = error
    result = collectives.broadcast(result)
    if isinstance(result, CheckpointError):
        raise result
    return cast(T, result)


def manifest_of(
    config: RunConfig, plan: Plan, state: TrainState, attempt: int, pins: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe whatever decides whether a checkpoint fits: compared at resume, readable without torch."""
    return {
        "attempt": attempt,
        "epoch": state.epoch,
        "position": state.position,
        "samples_seen": state.samples_seen,
        "seed": plan.seed,
        "global_batch": plan.batch.global_batch,
        "lanes": config.training.lanes,
        "reproducibility": plan.reproducibility,
        "fingerprint": plan.task.fingerprint,
        "order_version": ORDER_VERSION,
        "order": plan.order.model_dump(),
        "pins": json.loads(json.dumps(dict(pins))),
        "best": dict(state.best_metric),
        "monitor": [plan.monitor, plan.mode],
    }


def judge_afresh(state: TrainState, manifest: dict[str, Any], plan: Plan) -> str | None:
    """Forget the best evaluation if a resumed run is judged by another metric than before, and return a note."""
    before = manifest.get("monitor")
    now = [plan.monitor, plan.mode]
    if before in (None, now) or state.best_value is None or state.step >= plan.total_steps:
        return None
    state.best_value = state.best_epoch = state.best_step = None
    state.best_metric = {}
    state.evaluations_without_gain = 0
    metric, mode = before if isinstance(before, list) and len(before) == 2 else (before, "unknown")
    return (
        f"The run was judged by {metric} ({mode}) and is now judged by {now[0]} ({now[1]}): "
        "the best evaluation and the patience of early stopping start again."
    )


def check_fits(manifest: dict[str, Any], plan: Plan, *, makes_data: bool = False, remedy: str = "") -> None:
    """Raise :class:`CheckpointError` for a checkpoint of other data or another order of it.

    ``makes_data``: the run makes its data in each epoch. ``remedy``: another fix for different data.
    """
    saved = str(manifest.get("fingerprint"))
    present = plan.task.fingerprint
    same_length = saved.partition(":")[0] == present.partition(":")[0]
    accepted = makes_data or (same_length and saved == plan.accepted_data)
    if not accepted and not same_data(saved, present):
        accepts = "; to resume with these data, add --accept-data" if same_length else ""
        raise CheckpointError(
            "the training data is not that of this run",
            why=f"its fingerprint (length and a hash of some samples) was {saved}, here it is {present}",
            fix=f"point data.data_dir at the same data, or start a new run with --init-from{accepts}{remedy}",
        )
    version = manifest.get("order_version")
    seed = manifest.get("seed")
    order = manifest.get("order", {})
    difference = fix = ""
    if version != ORDER_VERSION:
        difference = f"the run's order is version {version}, this Lockstep's is {ORDER_VERSION}"
        fix = "resume with the version of Lockstep that run.json names, or start a new run with --init-from"
    elif OrderPlan.model_validate(order) != plan.order:
        difference = f"the run's order is {OrderPlan.model_validate(order)}; that of the plan is {plan.order}"
        fix = "leave the weights and the settings of data (sampling, bucketing, epoch_samples) as they were"
    elif seed != plan.seed:
        difference = f"the run's seed is {seed}, not {plan.seed}"
        fix = "leave training.seed as it was"
    if difference:
        raise CheckpointError(
            difference, why="in another order samples would repeat and others would be left out", fix=fix
        )


def restored_state(rank: RankContext, snapshot: Snapshot | None) -> TrainState:
    """Return the counters of ``snapshot``, which must be of the same data in the same order, or of a new run."""
    if snapshot is None:
        return TrainState(position=rank.config.debug.start_position)
    check_fits(snapshot.manifest, rank.plan)
    with restoring(rank.run_dir.path):
        return TrainState.from_state_dict(snapshot.trainer["state"])


def restore(
    rank: RankContext, snapshot: Snapshot, state: TrainState, module: nn.Module, load: Callable[[], None]
) -> tuple[str | None, str | None]:
    """Restore what trains by ``load()``, and which parameters of ``module`` are frozen.

    Returns:
        Notes on how the run is judged, and on parameters that were frozen or unfrozen.
    """
    if rank.plan.reproducibility == "exact":
        check_pins(snapshot.manifest["pins"], pins(rank.device, rank.plan))
    with restoring(rank.run_dir.path):
        load()
    return judge_afresh(state, snapshot.manifest, rank.plan), freeze_again(module, state.frozen)


def restore_weights(task: Task, model: nn.Module, snapshot: Snapshot, source: Path) -> None:
    """Restore the weights, then the task's state. Both follow ``task.model()``."""
    load_weights(model, snapshot.model, source)
    with restoring(f"the checkpoint of step {snapshot.step}"):
        task.load_state_dict(snapshot.trainer["task"])


def load_best(rank: RankContext, task: Task, model: nn.Module, step: int) -> int:
    """Restore the weights and the task's state of the best checkpoint, if it is not that of ``step``. Collective.

    Returns:
        The step of the weights.
    """
    store = CheckpointStore(rank.run_dir.checkpoints)
    best = rank.collectives.broadcast(store.step_of("best") if rank.collectives.is_main else None)
    if best is None or best == step:
        return step
    snapshot = load_shared(store, best, rank.collectives, in_pieces=rank.reads_shards)
    restore_weights(task, model, snapshot, rank.run_dir.path)
    return int(best)


@contextlib.contextmanager
def restoring(source: Path | str) -> Iterator[None]:
    """Convert errors of ``load_state_dict`` for a state that does not fit to a :class:`CheckpointError`."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:  # optimizers and tasks raise different ones
        raise CheckpointError(
            f"the training state in {source} does not fit",
            why=f"{type(error).__name__}: {str(error)[:300]}",
            fix="resume with the task and the optimizer that it was saved with, or start a new run with --init-from",
        ) from error


def frozen_names(model: nn.Module) -> list[str]:
    """Return names of the parameters that are not trained; of tied ones all names."""
    return [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]


def freeze_again(model: nn.Module, frozen: Collection[str] | None) -> str | None:
    """Freeze and unfreeze parameters as at the checkpoint, since a hook may have changed them.

    Returns a note if that differs from ``model()``. ``frozen``: names of parameters; ``None``: unknown.
    """
    if frozen is None:
        return None
    frozen = {plain_name(name) for name in frozen}
    changed = [p for name, p in model.named_parameters() if p.requires_grad == (plain_name(name) in frozen)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    if not changed:
        return None
    return f"Parameters are frozen and trained as at the checkpoint, not as model() makes them: {len(changed)} differ."


def load_weights(model: nn.Module, weights: dict[str, Any], source: Path | str) -> None:
    """Put ``weights`` into ``model``; one of them may have been saved with ``torch.compile`` in its names.

    Raises :class:`CheckpointError` where names or shapes differ; then the model is as it was.
    """
    current = model.state_dict()
    names = {plain_name(name): name for name in current}
    weights = {names.get(plain_name(name), name): value for name, value in weights.items()}
    missing = sorted(current.keys() - weights.keys())
    surplus = sorted(weights.keys() - current.keys())
    shapes = [
        f"{key} (saved {_shape(weights[key])}, model {_shape(current[key])})"
        for key in sorted(current.keys() & weights.keys())
        if key.rpartition(".")[2] != "_extra_state" and _shape(current[key]) != _shape(weights[key])
    ]
    listed = ("missing", ", ", missing), ("unknown", ", ", surplus), ("shapes", "; ", shapes)
    problems = [f"{kind} {comma.join(names[:5])}" for kind, comma, names in listed if names]
    if problems:
        raise CheckpointError(
            f"the weights in {source} do not fit the model",
            why="; ".join(problems),
            fix="use the settings and the code of model() with which they were trained, or start a new run",
        )
    if any(hasattr(value, "device_mesh") for value in current.values()):  # divided among ranks
        from lockstep.engine.distributed.dtensor_state import divided_like

        weights = {name: divided_like(value, current[name]) for name, value in weights.items()}
    model.load_state_dict(weights)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def load_initial_weights(model: nn.Module, source: Path | None, collectives: Collectives) -> None:
    """Put what rank 0's ``source`` holds (see :func:`_weights_from`), if it names one, into ``model``. Collective.

    Only rank 0 has to see the file.
    """
    initial = _from_main(lambda: None if source is None else (source, _weights_from(source)), collectives)
    if initial is not None:
        named, weights = initial
        load_weights(model, weights, named)


def _weights_from(source: Path) -> dict[str, Any]:
    """Read ``--init-from``: a run folder (its best, else last checkpoint), a checkpoint or a safetensors file."""
    if source.is_file() and source.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(source))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {source}", why=str(error), fix="check the file") from None
    if (folder := source / "checkpoints").is_dir():
        store = CheckpointStore(folder)
        step = store.step_of("best")
        step = store.step_of("last") if step is None else step
    else:
        store = CheckpointStore(source.parent)
        number = source.name.removeprefix("step-")
        step = int(number) if number != source.name and number.isdigit() else None
    if step is None:
        raise CheckpointError(
            f"{source} holds no weights",
            why="it is neither a run folder with checkpoints, nor a checkpoint, nor a .safetensors file",
            fix="give one of these to --init-from",
        )
    return dict(store.load(step).model)


def resume_point(
    run_dir: RunDir, *, hold: bool, report: Callable[[str], None], accept_data: bool = False
) -> ResumePoint | None:
    """Return where a run resumes: its latest valid checkpoint, or the beginning; ``None`` when it has no plan yet.

    ``hold``: keep the run's global batch. ``accept_data``: resume on other training data of the same length, too.
    """
    store = CheckpointStore(run_dir.checkpoints)
    step = store.newest_verified(report)
    if step is None:
        if not os.path.lexists(run_dir.plan_file):
            return None
        plan = plan_of(run_dir)
        start = run_dir.config().debug.start_position
        return ResumePoint(
            step=0,
            epoch=0,
            position=start,
            samples_seen=0,
            global_batch=plan.batch.global_batch,
            order=plan.order,
            hold=hold,
        )
    manifest = store.manifest(step)
    with restoring(store.path_of(step)):
        return ResumePoint(
            step=step,
            epoch=manifest["epoch"],
            position=manifest["position"],
            samples_seen=manifest["samples_seen"],
            global_batch=manifest["global_batch"],
            order=OrderPlan.model_validate(manifest.get("order", {})),
            fingerprint=manifest.get("fingerprint"),
            hold=hold,
            accept_data=accept_data,
        )


def plan_of(run_dir: RunDir) -> Plan:
    """Return the newest plan of a run. Raises :class:`RunFolderError`."""
    try:
        return Plan.model_validate(run_dir.plan())
    except ValidationError as error:
        raise damaged(
            run_dir.plan_file, str(error)[:300], f"copy the newest plan.json of {run_dir.attempts} over it"
        ) from None
