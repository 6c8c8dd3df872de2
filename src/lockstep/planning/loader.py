"""Decisions on data loading: worker processes of a rank, and sizes set by a user's loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.arithmetic import ceil_div
from lockstep.config import DataConfig, OptimizerConfig, RunConfig
from lockstep.config.sections import TrainingConfig
from lockstep.errors import many
from lockstep.planning.decision import Decision, decide
from lockstep.planning.plan import LoaderPlan, Plan, TaskFacts

#: Rates whose ratio is above this count as equal.
CLOSE = 0.95
#: Maximum number of loader processes of a rank that are started during the first steps.
MAX_WORKERS = 16
#: Time of another process to hand over a batch: seconds, and bytes per second. Measured on two cores of a server.
HANDOVER_S = 1.2e-3
HANDOVER_BYTES_S = 3e9


def automatic_workers(cores: int, local_ranks: int) -> int:
    """Return the loader processes of each rank by rule, leaving one core for the step.

    Never 1: one process reads no faster than the rank, which would also wait for the hand-over.
    """
    cores_per_rank = cores // local_ranks
    return 0 if cores_per_rank < 2 else max(2, min(4, cores_per_rank - 1))


def resolve_loader(
    data: DataConfig, facts: TaskFacts, *, cores: int, local_ranks: int, pin_memory: bool
) -> tuple[LoaderPlan, Decision]:
    """Decide the input pipeline of each rank.

    Args:
        cores: CPU cores that this node may use.
        pin_memory: default of ``data.pin_memory``.
    """
    configured = data.num_workers
    position = f"worker processes would share the position in {facts.read_file}, which the data set has open"
    shares = f"{cores} cores for {many(local_ranks, 'rank')}, one left for the step, 2 to 4 each"
    decision = decide(
        "workers",
        (facts.streams, 0, "one process of each node reads the stream"),
        (isinstance(configured, int), configured, "as configured"),
        (facts.whole_batches, 0, "the data set returns whole batches from memory"),
        (facts.read_file is not None, 0, position),
        (not facts.opens_files, None, "worker processes are started if the first steps show that they are faster"),
        # Processes that are started after the first sample would share open files.
        (facts.quick_samples, 0, "a sample is made in less time than another process needs to hand it over"),
        (True, automatic_workers(cores, local_ranks), f"reading opens files; {shares}"),
    )
    workers = int(decision.value or 0)
    max_workers = max(0, min(MAX_WORKERS, cores // local_ranks)) if decision.value is None else workers
    loader = LoaderPlan(
        num_workers=workers,
        most_workers=max_workers,
        prefetch_factor=data.prefetch_factor or 2,
        pin_memory=pin_memory if data.pin_memory is None else data.pin_memory,
    )
    shown = many(workers, "worker") + (f" at first, up to {max_workers}" if max_workers > workers else "")
    return loader, replace(decision, value=workers, shown=shown)


def worth_trying(load_s: float, step_s: float, batch_bytes: int, max_workers: int) -> int:
    """Return the number of loader processes that should shorten a step by at least a fifth; 0 if none does.

    Args:
        load_s: time to load a batch of ``batch_bytes`` in the training process.
        step_s: time from one batch to the next in the training process.
    """
    compute_s = step_s - load_s
    worker_s = load_s + HANDOVER_S + batch_bytes / HANDOVER_BYTES_S
    cores_s = (compute_s + worker_s) / max(1, max_workers)  # all the work of a step, divided among the cores
    expected = {workers: max(compute_s, worker_s / workers, cores_s) for workers in range(1, max_workers + 1)}
    fastest_s = min(expected.values(), default=step_s)
    if fastest_s > 0.8 * step_s:
        return 0
    return next(workers for workers, seconds in expected.items() if seconds <= fastest_s / CLOSE)


def of_session(plan: Plan, schedule: str) -> Plan:
    """Return ``plan`` with the decisions of a loop, without decisions and notes on settings that it does not use.

    ``schedule``: the reason for the learning rates.
    """
    unused = ("warmup", "monitor", "weight_decay", "channels_last", "data_device")
    decisions = {key: decision for key, decision in plan.decisions.items() if key not in unused}
    decisions["lr"] = replace(decisions["lr"], reason="the loop's optimizer (its first parameter group)")
    decisions["schedule"] = decide("schedule", (True, "loop", schedule))
    notes = tuple(note for note in plan.notes if not note.key.startswith(("lr_", "warmup", "optimizer", "schedule")))
    return plan.model_copy(update={"decisions": decisions, "notes": notes})


def sized(config: RunConfig, *, has_batch_size: bool, ranks: int, accumulate: int | None, lr: float) -> RunConfig:
    """Return ``config`` with the sizes of a loop over batches.

    Args:
        has_batch_size: a batch size is configured. Otherwise a rank's share of the global batch is divided into
            ``accumulate`` micro-batches.
        ranks: processes that share the global batch.
        accumulate: micro-batches of a step; ``None``: as configured.
        lr: learning rate of the loop's first optimizer; 0 if it has none.
    """
    training = config.training.model_dump()
    micro_batches = config.training.accumulate if accumulate is None else accumulate
    if config.training.global_batch_size is None:
        training["accumulate"] = micro_batches
    else:
        batch_size = ceil_div(config.training.global_batch_size, ranks * micro_batches)
        training["batch_size"] = min(config.training.batch_size, batch_size) if has_batch_size else batch_size
    sections: dict[str, Any] = {"training": TrainingConfig.model_validate(training)}
    if lr > 0:
        sections["optimizer"] = OptimizerConfig.model_validate({**config.optimizer.model_dump(), "lr": lr})
    return config.model_copy(update=sections)
