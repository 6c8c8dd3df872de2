"""The metrics of a checkpoint: on one device in this process, on several on a rank for each.

The ranks are started in a temporary folder: the run's own is only read.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.config import RunConfig, resolve
from lockstep.engine.distributed.collectives import Collectives, shared
from lockstep.engine.evaluate import evaluate, evaluation
from lockstep.engine.lightning.module_task import ModuleTask
from lockstep.engine.optim.precision import Precision
from lockstep.engine.process.determinism import rank_device, runtime
from lockstep.engine.resume import load_shared, load_weights, restoring
from lockstep.engine.state import TrainState
from lockstep.engine.strategies.partition import divide
from lockstep.engine.task import Context, Datasets, Task
from lockstep.engine.trained import Callbacks, build_model
from lockstep.engine.training_data import open_data
from lockstep.errors import DataError, UnsupportedError
from lockstep.hardware.host import usable_cores
from lockstep.hardware.world import World
from lockstep.launch.finished.reopen import as_restored, find_step, restore
from lockstep.launch.local.on_ranks import run_on_ranks
from lockstep.launch.prepare import place, plan_of
from lockstep.launch.run_claim import task_again, warn
from lockstep.launch.task_transport import load_task, pack_task
from lockstep.launch.temporary import temporary_folder
from lockstep.plan import Plan
from lockstep.telemetry.rundir import RunDir

#: How long a rank may take to end after a stop: it keeps nothing.
STOP_GRACE_S = 5.0


def evaluate_checkpoint(
    run: RunDir,
    *,
    split: str,
    devices: str | None,
    checkpoint: str | int,
    data: Path | None = None,
    task: Task | type[Task] | None = None,
) -> dict[str, Any]:
    """Metrics of one checkpoint on one split, the same on any number of devices.

    Each sample counts once. Every rank holds the whole model; of a run with ``strategy: fsdp`` its part of it.

    Args:
        devices: as ``--devices``; ``None``: the first one of the run.
        data: a file for the task's ``evaluation_data``, instead of ``split``; the run's own data are not opened.
        task: the run's task; ``None``: made from its settings.

    Raises:
        LockstepError: no such split, checkpoint or device; several devices for a ``LightningModule``; a rank failed.
    """
    built = task_again(run, run.config(), task)
    step = find_step(run, checkpoint)
    plan = plan_of(run)
    config = _config_on(run.config(), devices, "auto")
    placement = place(config, World())
    if plan.sharded and placement.world_size > 1:  # one device has nothing to divide
        config = _config_on(run.config(), devices, plan.strategy.name)
        placement = place(config, World())
    for note in placement.notes:
        warn(note.text)
    cores = usable_cores() // placement.world_size
    loader = plan.loader
    most = {"num_workers": min(loader.num_workers, cores), "most_workers": min(loader.most_workers, cores)}
    loader = loader.model_copy(update={**most, "persistent_workers": loader.persistent_workers and cores > 0})
    threads = replace(plan.decisions["threads"], value=min(plan.threads, max(1, cores)))
    changed = {"decisions": {**plan.decisions, "threads": threads}, "placement": placement.as_dict(), "loader": loader}
    plan = plan.model_copy(update=changed)
    compute = _here if placement.world_size == 1 else _on_ranks
    where = {"split": split} if data is None else {"data": str(data)}
    return {
        "run": run.read().id,
        **where,
        "step": step,
        **compute(run, built, config, plan, split, step, data),
    }


def _config_on(config: RunConfig, devices: str | None, strategy: str) -> RunConfig:
    """The run's configuration on other devices, which decide how their ranks talk."""
    chosen: Any = devices
    if chosen is None and config.hardware.selected_devices not in (None, ("all",)):
        chosen = config.hardware.selected_devices[:1]
    hardware = {"selected_devices": chosen, "strategy": strategy}
    return resolve(config.model_dump(mode="json"), {"hardware": hardware, "distributed": {"backend": "auto"}})


def _here(
    run: RunDir, task: Task, config: RunConfig, plan: Plan, split: str, step: int, data: Path | None
) -> dict[str, Any]:
    snapshot = CheckpointStore(run.checkpoints).load(step)
    measured = data or open_data(task, config)
    if isinstance(task, ModuleTask) and data is None:
        from lockstep.engine.lightning.evaluate import evaluate_module

        load_weights(task.module, snapshot.model, run.path)
        device = rank_device(tuple(plan.placement["devices"]), World())
        values, samples = evaluate_module(task, split, device, plan.placement["precision"], config.training.seed)
        return {"samples": samples, "metrics": values}
    return _measure(run, task, measured, config, plan, snapshot, split, World(), Collectives(World()))


def _measure(
    run: RunDir,
    task: Task,
    data: Datasets | Path | None,
    config: RunConfig,
    plan: Plan,
    snapshot: Snapshot,
    split: str,
    world: World,
    collectives: Collectives,
) -> dict[str, Any]:
    """What one rank does, with the others; the result is the same on all of them. Collective."""
    datasets = data if isinstance(data, Datasets) else Datasets(None, test=task.evaluation_data(Path(str(data))))
    if getattr(datasets, split, None) is None:
        raise DataError(f"this task has no {split} data", fix="choose --split val or --split test")
    device = rank_device(tuple(plan.placement["devices"]), world)
    precision = Precision(plan.placement["precision"], device, 1.0)
    with restoring(f"the checkpoint of step {snapshot.step}"):
        task.context = Context(TrainState.from_state_dict(snapshot.trainer["state"]))
    model, evaluated = build_model(task), task
    if plan.sharded:
        divided = divide(task, model, config, plan, datasets, device, world, collectives)
        evaluated = divided.strategy(task, precision, plan, world).evaluating(task)
    else:
        model = model.to(device)
    restore(task, model, snapshot, run.path)
    if datasets is data:
        datasets = as_restored(task, config, datasets)
    dataset = getattr(datasets, split)
    with evaluation(task, model, Callbacks(task)):
        values = evaluate(
            evaluated,
            model,
            dataset,
            collectives,
            batch_size=plan.eval_batch_size,
            device=device,
            precision=precision,
            loader=plan.loader,
            seed=plan.seed,
            step=snapshot.step,
            ghosts=plan.sharded,
        )
    return {"samples": len(dataset), "metrics": {f"{split}_{name}": value for name, value in values.items()}}


def _on_ranks(
    run: RunDir, task: Task, config: RunConfig, plan: Plan, split: str, step: int, data: Path | None
) -> dict[str, Any]:
    """Start a rank for each device and wait for the results.

    Raises:
        LockstepError: as the rank said that failed. KeyboardInterrupt: a stop was asked for.
    """
    if isinstance(task, ModuleTask):
        raise UnsupportedError(
            f"a LightningModule is evaluated on one device, not on {', '.join(plan.placement['devices'])}",
            why="what it logs are means over batches of its own, which several ranks would share out differently",
            fix=f"name one: --devices {plan.placement['devices'][0]}",
        )
    with temporary_folder("lockstep-evaluate-") as folder:
        ranks = RunDir.create(folder / "ranks", config, run_id=run.read().id, command=sys.argv)
        ranks.begin_attempt(plan.as_dict(), plan.placement)
        pack_task(ranks, task, config)
        found: dict[str, Any] = run_on_ranks(
            ranks,
            int(plan.placement["world_size"]),
            _on_rank,
            *(run.path, split, step, data),
            threads=plan.threads,
            stop_grace_s=STOP_GRACE_S,
            hang_timeout_s=config.launch.hang_timeout_s,
        )
        return found


def _on_rank(ranks: RunDir, world: World, path: Path, split: str, step: int, data: Path | None) -> dict[str, Any]:
    """One of the ranks of an evaluation."""
    run, config, plan = RunDir(path), ranks.config(), Plan.model_validate(ranks.plan())
    task = load_task(ranks, config)
    device = rank_device(tuple(plan.placement["devices"]), world)
    timeout_s = config.distributed.timeout_s
    with runtime(plan, device, world, timeout_s, detect_anomaly=False), shared(world, timeout_s):
        collectives = Collectives(world, timeout_s=timeout_s)
        snapshot = load_shared(CheckpointStore(run.checkpoints), step, collectives, in_pieces=plan.sharded)
        measured = data or open_data(task, config, collectives)
        return _measure(run, task, measured, config, plan, snapshot, split, world, collectives)
