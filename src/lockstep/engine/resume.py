"""Resuming from a checkpoint: what must agree, and restoring state and weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep._compat.torch import plain_name
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.config import RunConfig
from lockstep.data.order import ORDER_VERSION
from lockstep.engine.dataset_checks import same_data
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.optim.step import Update
from lockstep.engine.process.runtime import check_pins, pins
from lockstep.engine.rank_context import RankContext
from lockstep.engine.state import TrainState
from lockstep.engine.task import Task
from lockstep.errors import CheckpointError, LockstepError
from lockstep.planning import OrderPlan, Plan
from lockstep.telemetry.rundir import RunDir

T = TypeVar("T")


class Reads(Protocol):
    """A rank that reads checkpoints."""

    @property
    def run_dir(self) -> RunDir: ...

    @property
    def collectives(self) -> Collectives: ...

    def note(self, key: str, text: str, level: Literal["info", "warning"] = "info") -> None: ...


def load_latest(rank: Reads, *, in_pieces: bool = False) -> Snapshot | None:
    """The latest valid checkpoint, for all ranks; damaged ones after it are set aside. Collective.

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
    """The checkpoint of ``step``, read and verified by rank 0 and sent to all ranks. Collective.

    ``in_pieces``: the model is divided and every rank sees ``store``'s folder, so that of a checkpoint in shards
    each reads for itself what it needs.

    Raises:
        CheckpointError: on every rank, when it cannot be read.
    """

    def read() -> Snapshot | None:
        return None if in_pieces and store.verify(step).shards else store.load(step)

    found = _from_main(read, collectives)
    return store.open(step) if found is None else found


def _from_main(read: Callable[[], T], collectives: Collectives) -> T:
    """What ``read()`` returns on rank 0, or the :class:`CheckpointError` that it raises, on every rank. Collective."""
    found: T | CheckpointError | None = None
    if collectives.is_main:
        try:
            found = read()
        except CheckpointError as error:
            found = error
    found = collectives.broadcast(found)
    if isinstance(found, CheckpointError):
        raise found
    return cast(T, found)


def manifest_of(
    config: RunConfig, plan: Plan, state: TrainState, attempt: int, pins: Mapping[str, Any]
) -> dict[str, Any]:
    """What decides whether a checkpoint fits: compared at resume, readable without torch."""
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
    """Forget the best so far where a resumed run is judged by another metric than before; a note about it."""
    before, now = manifest.get("monitor"), [plan.monitor, plan.mode]
    if before in (None, now) or state.best_value is None or state.step >= plan.total_steps:
        return None
    state.best_value = state.best_epoch = state.best_step = None
    state.best_metric, state.evaluations_without_gain = {}, 0
    return (
        f"The run was judged by {before[0]} ({before[1]}) and is now judged by {now[0]} ({now[1]}): "
        "the best evaluation and the patience of early stopping start again."
    )


def check_fits(manifest: dict[str, Any], plan: Plan, *, makes_data: bool = False, remedy: str = "") -> None:
    """Refuse a checkpoint of other data or another order of it.

    Args:
        makes_data: the run makes its data in each epoch.
        remedy: what else may help where the data differ.

    Raises:
        CheckpointError: naming what differs.
    """
    saved, here = str(manifest.get("fingerprint")), plan.task.fingerprint
    same_length = saved.partition(":")[0] == here.partition(":")[0]
    accepted = makes_data or (same_length and saved == plan.accepted_data)
    if not accepted and not same_data(saved, here):
        why = f"its fingerprint (length and a hash of some samples) was {saved}, here it is {here}"
        fix = "point data.data_dir at the same data, or start a new run with --init-from"
        if same_length:
            fix += "; to resume with these data, add --accept-data"
        fix += remedy
        raise CheckpointError("the training data is not what this run was trained on", why=why, fix=fix)
    version, seed = manifest.get("order_version"), manifest.get("seed")
    order = OrderPlan.model_validate(manifest.get("order", {}))
    checks = [
        (
            version == ORDER_VERSION,
            f"the run's order is version {version}, this Lockstep's is {ORDER_VERSION}",
            "resume with the version of Lockstep that run.json names, or start a new run with --init-from",
        ),
        (
            order == plan.order,
            f"the run's order is {order}; that of the plan is {plan.order}",
            "leave the weights and the settings of data (sampling, bucketing, epoch_samples) as they were",
        ),
        (seed == plan.seed, f"the run's seed is {seed}, not {plan.seed}", "leave training.seed as it was"),
    ]
    for fits, what, fix in checks:
        if not fits:
            why = "in another order samples would repeat and others would be left out"
            raise CheckpointError(what, why=why, fix=fix)


def restored_state(rank: RankContext, snapshot: Snapshot | None) -> TrainState:
    """The run's counters from ``snapshot``, or those of a new run.

    Raises:
        CheckpointError: ``snapshot`` is of other data or another order, or damaged.
    """
    if snapshot is None:
        return TrainState(position=rank.config.debug.start_position)
    check_fits(snapshot.manifest, rank.plan)
    with restoring(rank.run_dir.path):
        return TrainState.from_state_dict(snapshot.trainer["state"])


def restore(
    rank: RankContext, snapshot: Snapshot, state: TrainState, task: Task, model: nn.Module, update: Update
) -> list[str]:
    """Restore task, model and update; returns notes on what differs from the checkpoint.

    Raises:
        CheckpointError: the checkpoint does not fit, or bits of an exact run would differ here.
    """
    if rank.plan.reproducibility == "exact":
        check_pins(snapshot.manifest["pins"], pins(rank.device, rank.plan))
    load_weights(model, snapshot.model, rank.run_dir.path)
    with restoring(rank.run_dir.path):
        update.load_state_dict(snapshot.trainer["update"])
        check_moments(update.optimizer)
        task.load_state_dict(snapshot.trainer["task"])
    notes = judge_afresh(state, snapshot.manifest, rank.plan), freeze_again(model, state.frozen)
    return [note for note in notes if note is not None]


@contextlib.contextmanager
def restoring(source: Path | str) -> Iterator[None]:
    """What a state that does not fit raises, deep in some ``load_state_dict``, becomes a :class:`CheckpointError`."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:  # every optimizer and task has its own
        raise CheckpointError(
            f"the training state in {source} does not fit",
            why=f"{type(error).__name__}: {str(error)[:300]}",
            fix="resume with the task and the optimizer that it was saved with, or start a new run with --init-from",
        ) from error


def check_moments(optimizer: Optimizer) -> None:
    """Raise :class:`ValueError` where a restored state cannot be one of torch's Adam, AdamW or SGD.

    Their ``load_state_dict`` takes anything; the first step would fail in native code.
    """
    expected = {Adam: {"step", "exp_avg", "exp_avg_sq"}, AdamW: {"step", "exp_avg", "exp_avg_sq"}, SGD: set[str]()}
    if type(optimizer) not in expected:
        return
    for parameter, state in optimizer.state.items():
        missing = expected[type(optimizer)] - state.keys()
        if missing:
            raise ValueError(f"the optimizer's state lacks {', '.join(sorted(missing))}")
        for name, value in state.items():
            fits = value is None if not isinstance(value, Tensor) else value.shape in (parameter.shape, torch.Size())
            if not fits or (name == "step" and value.dim()):
                raise ValueError(f"the optimizer's {name} does not fit a parameter of shape {tuple(parameter.shape)}")


def frozen_names(model: nn.Module) -> list[str]:
    """Names of the parameters that are not trained; of tied ones all names."""
    return [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]


def freeze_again(model: nn.Module, frozen: Collection[str] | None) -> str | None:
    """Freeze and unfreeze parameters as at the checkpoint, since a hook may have changed them.

    Returns a note where that differs from what ``model()`` gives. ``frozen``: their names; ``None``: not known.
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

    Raises:
        CheckpointError: names or shapes differ; the model is as it was.
    """
    own = model.state_dict()
    names = {plain_name(name): name for name in own}
    weights = {names.get(plain_name(name), name): value for name, value in weights.items()}
    missing, surplus = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{key} {_shape(weights[key])} → {_shape(own[key])}"
        for key in own.keys() & weights.keys()
        if key.rpartition(".")[2] != "_extra_state" and _shape(own[key]) != _shape(weights[key])
    ]
    listed = ("missing", ", ", missing), ("unknown", ", ", surplus), ("shapes", "; ", sorted(shapes))
    problems = [f"{kind} {comma.join(names[:5])}" for kind, comma, names in listed if names]
    if problems:
        raise CheckpointError(
            f"the weights in {source} do not fit the model",
            why="; ".join(problems),
            fix="use the task settings with which they were trained",
        )
    if any(hasattr(value, "device_mesh") for value in own.values()):  # divided among ranks
        from lockstep.engine.distributed.dtensor_state import divided_like

        weights = {name: divided_like(value, own[name]) for name, value in weights.items()}
    model.load_state_dict(weights)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def load_initial_weights(model: nn.Module, source: Path | None, collectives: Collectives) -> None:
    """Put what rank 0's ``source`` holds (see :func:`weights_from`), if it names one, into ``model``. Collective.

    Only rank 0 has to see the file.

    Raises:
        CheckpointError: on every rank.
    """
    found = _from_main(lambda: None if source is None else (source, weights_from(source)), collectives)
    if found is not None:
        named, weights = found
        load_weights(model, weights, named)


def weights_from(source: Path) -> dict[str, Any]:
    """Weights for ``--init-from``: a run folder (its best, else last checkpoint), a checkpoint, or a safetensors file.

    Raises:
        CheckpointError: there are none, or they are corrupt.
    """
    if source.is_file() and source.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(source))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {source}", why=str(error), fix="check the file") from None
    if (folder := source / "checkpoints").is_dir():
        store = CheckpointStore(folder)
        steps = store.step_of("best"), store.step_of("last")
        step = next((step for step in steps if step is not None), None)
    else:
        store, number = CheckpointStore(source.parent), source.name.removeprefix("step-")
        step = int(number) if number != source.name and number.isdigit() else None
    if step is None:
        raise CheckpointError(
            f"{source} holds no weights",
            why="it is neither a run folder with checkpoints, nor a checkpoint, nor a .safetensors file",
            fix="give one of these to --init-from",
        )
    return dict(store.load(step).model)
