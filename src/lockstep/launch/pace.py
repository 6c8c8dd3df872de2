"""``data.num_workers: auto``: how fast the data load and how fast a step takes them, measured before the first step.

A process of its own does it (``python -m lockstep.launch.pace FOLDER``), on the run's own task, data and first device:
so neither the task's state nor random numbers, threads or a GPU's memory of the run are touched.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.data.loader import Request, Source, make_loader, windows
from lockstep.engine.attempt import assemble
from lockstep.engine.collectives import Collectives
from lockstep.engine.facts import inspect_task
from lockstep.engine.loop import training_steps
from lockstep.engine.runtime import rank_device, runtime
from lockstep.engine.source import open_datasets, training_source
from lockstep.engine.strategy import Flags
from lockstep.engine.task import Datasets, Task
from lockstep.engine.transfer import to_device
from lockstep.errors import LockstepError
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.host import usable_cores
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import World
from lockstep.launch import elastic, failure
from lockstep.launch.carry import load_task, pack_task
from lockstep.launch.folder import create_folder
from lockstep.launch.signals import StopRequest
from lockstep.launch.worker import main
from lockstep.plan import LoaderPlan, Plan, make_plan
from lockstep.plan.workers import HEADROOM, Recommendation, recommend, worker_counts
from lockstep.telemetry.rundir import RunDir, read_json, write_json

#: Seconds for the steps, for each number of workers, and for all of them together.
STEP_S, RATE_S, ALL_RATES_S = 0.5, 0.3, 1.5
WARM_UP = 2
#: A plan of so many epochs does not run out of batches meanwhile.
EPOCHS = 100_000
_ASKED, _FOUND = "asked.json", "found.json"


class Rate(NamedTuple):
    """How fast a loader is. ``first_s``: seconds until the first batch, whose workers have to start.

    ``transfer_s``: to bring a batch to the GPU, where there is one.
    """

    samples_per_s: float
    batch_s: float
    first_s: float
    transfer_s: float | None
    batches: int


def measured_workers(task: Task, config: RunConfig, placement: Placement, plan: Plan) -> Recommendation | str:
    """How many loader processes each rank of ``plan`` should have; a text says why nothing was measured."""
    if plan.reproducibility == "exact":
        return "exact mode measures nothing"
    if config.debug.trace != "off" or config.debug.fast_dev_run:
        return "a run for debugging measures nothing"
    if plan.sharded or plan.pipelined:
        return f"the step of strategy {placement.strategy} is not that of one device"
    local_ranks = -(-placement.world_size // placement.nodes)
    counts = worker_counts(max(1, usable_cores() // local_ranks))
    with tempfile.TemporaryDirectory(prefix="lockstep-pace-", ignore_cleanup_errors=True) as name:
        run = create_folder(_alone(config, placement, plan, Path(name) / "pace"))
        try:
            pack_task(run, task, config)
        except LockstepError as error:
            return f"not measured: {error.what}"
        write_json(run.path / _ASKED, {"counts": counts})
        stopped_by, found = _measured(run, plan)
    if stopped_by is not None:
        signal.raise_signal(stopped_by)  # to whoever would have had it without us
    return found


def _measured(run: RunDir, plan: Plan) -> tuple[int | None, Recommendation | str]:
    """The signal that stopped the measurement, if any, and what was found, or why nothing was."""
    with StopRequest() as stop, contextlib.redirect_stdout(sys.stderr):
        code = elastic.launch(
            run,
            1,
            environ={"LOCKSTEP_THREADS": str(plan.threads)},
            stop_grace_s=5.0,
            worker_module="lockstep.launch.pace",
        )
    # A process that was still starting is killed after the grace, and the code says that it failed.
    if stop.requested is not None or code >= 128:
        return stop.requested or code - 128, "stopped"
    if code:
        report = failure.collect(run)
        return None, f"not measured: {report.what.splitlines()[0] if report else f'exit code {code}'}"
    found = read_json(run.path / _FOUND)
    rates = {int(workers): rate for workers, rate in found["rates"].items()}
    return None, recommend(rates, found["demand"])


def _alone(config: RunConfig, placement: Placement, plan: Plan, folder: Path) -> RunConfig:
    """The settings of a rank that trains by itself on what each rank of ``plan`` will have."""
    changes = {
        "save_dir": str(folder),
        "init_from": None,
        "hardware": {"selected_devices": [placement.devices[0]], "strategy": "auto"},
        "training": {
            **{"batch_size": plan.batch.batch_size, "global_batch_size": None, "accumulate": 1},
            **{"epochs": EPOCHS, "max_steps": None, "threads": plan.threads, "compile": False},
        },
        "data": {"num_workers": 0},
        "launch": {"nodes": None},
    }
    return RunConfig.model_validate(merge(config.model_dump(mode="json"), changes))


def rank_main(run: RunDir, world: World) -> int:
    """In the process of its own: measure, and leave what was found in the folder."""
    config = run.config()
    task = load_task(run, config)
    datasets = open_datasets(task, config)
    placement = resolve_placement(config.hardware, config.distributed, World(), detect_devices())
    facts = inspect_task(task, datasets, config.task.name)
    plan = make_plan(config, placement, facts, cores=usable_cores())
    device = rank_device(placement.devices, World())
    with runtime(plan, device, World(), config.distributed.timeout_s, detect_anomaly=False):
        demand = _demand(run, task, config, plan, datasets, device)
        source = training_source(task, datasets.train, plan)
        rates = _rates(source, plan, read_json(run.path / _ASKED)["counts"], demand)
    write_json(run.path / _FOUND, {"demand": demand, "rates": rates})
    return 0


def _demand(run: RunDir, task: Task, config: RunConfig, plan: Plan, datasets: Datasets, device: torch.device) -> float:
    """Samples per second that the step takes when its batch, always the same one, is there."""
    fit = assemble(run, World(), task, config, plan, datasets, device, Collectives(World()), None)
    walk = windows(plan.batch, rank=0, epoch=0, position=0, epochs=plan.epochs, ghosts=False)
    first = next(walk)
    batch = training_source(task, datasets.train, plan).batch(first.requests[0])
    fit.strategy.module.train()
    steps = training_steps(
        *(itertools.repeat(first), itertools.repeat(batch), fit.strategy, fit.update, fit.state),
        epoch_over=lambda stop: False,
        requested=Flags,
        norm_every=config.telemetry.log_interval,
    )
    for _ in range(WARM_UP):
        next(steps)
    _synchronise(device)
    started, taken, number = time.perf_counter(), 0.0, 0
    while taken < STEP_S:
        next(steps)
        _synchronise(device)
        taken, number = time.perf_counter() - started, number + 1
    return number * first.size / taken


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rates(source: Source, plan: Plan, counts: Sequence[int], demand: float) -> dict[int, float]:
    """Samples per second by number of workers, up to the first that is enough."""
    rates: dict[int, float] = {}
    started = time.perf_counter()
    for workers in counts:
        rates[workers] = loading_rate(source, plan, workers, RATE_S).samples_per_s
        if rates[workers] >= HEADROOM * demand or time.perf_counter() - started > ALL_RATES_S:
            break
    return rates


def loading_rate(
    source: Source,
    plan: Plan,
    workers: int,
    seconds: float,
    *,
    device: torch.device | None = None,
    check: Callable[[], None] = lambda: None,
) -> Rate:
    """Load the batches of a single rank for about ``seconds``, after the first one.

    Args:
        device: where to bring some of the batches, to see how long that takes; only a GPU takes any time.
        check: called with every batch; may raise to end it.
    """
    how = LoaderPlan(
        num_workers=workers,
        prefetch_factor=plan.loader.prefetch_factor,
        persistent_workers=workers > 0,
        pin_memory=plan.loader.pin_memory,
    )
    loader = make_loader(source, _requests(plan), how, 0, largest=plan.batch.batch_size)
    first, samples, loaded, transfers = 0.0, 0, 0, list[float]()
    started = now = time.perf_counter()
    with contextlib.closing(loader):
        for batch, request in zip(iter(loader), _requests(plan), strict=False):
            check()
            now = time.perf_counter()
            if not first:
                first, started = now - started, now
                continue
            samples, loaded = samples + request.size, loaded + 1
            if loaded <= 10 and device is not None and device.type == "cuda":
                transfers.append(_transfer(batch, device))
            if now - started > seconds:
                break
        taken = time.perf_counter() - started - sum(transfers)
    return Rate(
        samples / taken if taken > 0 else 0.0,
        taken / max(1, loaded),
        first,
        statistics.median(transfers) if transfers else None,
        loaded,
    )


def _requests(plan: Plan) -> Iterable[Request]:
    walk = windows(plan.batch, rank=0, epoch=0, position=0, epochs=plan.epochs, ghosts=False)
    return itertools.chain.from_iterable(window.requests for window in walk)


def _transfer(batch: Any, device: torch.device) -> float:
    """Seconds to bring a batch to a GPU."""
    _synchronise(device)
    started = time.perf_counter()
    to_device(batch, device)
    _synchronise(device)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], rank_main))
