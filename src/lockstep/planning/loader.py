"""How data is loaded: the processes of a rank, by rule or from measured rates; what a user's loader or loop decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.config import DataConfig, RunConfig
from lockstep.config.sections import OptimizerConfig, TrainingConfig
from lockstep.errors import ConfigError, UnsupportedError, many
from lockstep.planning.decision import Decision, by_key
from lockstep.planning.plan import MEASURED, LoaderFacts, LoaderPlan, Plan, TaskFacts

#: Data should come this much faster than the step takes it, so that a slow batch does not stop it.
HEADROOM = 1.2
#: Rates closer than this are the same.
CLOSE = 0.95
#: Loader processes of a rank that the first steps may start.
MOST_WORKERS = 16
#: What it costs another process to hand over a batch: 1.2 ms and 1 s for each 2 GB, on two cores of a server.
HANDOVER_S, HANDOVER_BYTES_S = 1.2e-3, 2e9


class Recommendation(NamedTuple):
    """``bound``: what limits training with this setting, ``compute`` or ``data``."""

    num_workers: int
    bound: str
    reason: str


def recommend(rates: Mapping[int, float], demand: float) -> Recommendation:
    """How many loader processes to use, and why: the fewest that keep up with the step, else the fastest.

    Args:
        rates: samples per second by number of workers; at least one.
        demand: samples per second that the step would take if it never waited.
    """
    enough = [workers for workers, rate in sorted(rates.items()) if rate >= HEADROOM * demand]
    if enough:
        few = enough[0]
        return Recommendation(
            few, "compute", f"{_load(few, rates[few])}, a step needs {demand:,.0f}: more would only take cores from it"
        )
    fastest = max(rates.values())
    best = min(workers for workers, rate in rates.items() if rate >= CLOSE * fastest)
    if rates[best] >= demand:
        bound, end = "compute", f"just enough for the {demand:,.0f} that a step needs"
    else:
        waits = 1 - rates[best] / demand
        bound, end = "data", f"a step needs {demand:,.0f}: training waits for data {waits:.0%} of the time"
    return Recommendation(best, bound, f"{_load(best, rates[best])}, no number is faster; {end}")


def _load(workers: int, rate: float) -> str:
    return f"{workers} worker{' loads' if workers == 1 else 's load'} {rate:,.0f} samples/s"


def worker_counts(cores: int) -> list[int]:
    """0, 1, 2, 4, … up to ``cores``, and ``cores`` itself."""
    return sorted({0, cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)})


def automatic_workers(cores: int, local_ranks: int) -> int:
    """Loader processes of each rank that are not chosen by measuring: a core is left for the step.

    One process alone is slower than none: the rank waits for the same reading, and for the hand-over.
    """
    own = cores // local_ranks
    return 0 if own < 2 else max(2, min(4, own - 1))


def resolve_loader(
    data: DataConfig, facts: TaskFacts, *, cores: int, local_ranks: int, pin_memory: bool
) -> tuple[LoaderPlan, Decision]:
    """The input pipeline of each rank, and the decision on its worker processes.

    Args:
        cores: CPU cores that this node may use.
        pin_memory: whether page-locked host memory helps, where ``data`` does not say.
    """
    workers, most, reason = _workers(data, facts, cores, local_ranks)
    loader = LoaderPlan(
        num_workers=workers,
        most_workers=most,
        prefetch_factor=data.prefetch_factor or 2,
        persistent_workers=most > 0 if data.persistent_workers is None else data.persistent_workers,
        pin_memory=pin_memory if data.pin_memory is None else data.pin_memory,
    )
    shown = f"{workers} worker{'s' * (workers != 1)}" + (f" at first, up to {most}" if most > workers else "")
    return loader, Decision("workers", "loader", workers, reason, shown)


def _workers(data: DataConfig, facts: TaskFacts, cores: int, local_ranks: int) -> tuple[int, int, str]:
    """Loader processes of each rank: at first, and at most, if the first batches show that they help; and why."""
    if facts.streams:
        return 0, 0, "one process of each node reads the stream"
    if isinstance(data.num_workers, int):
        return data.num_workers, data.num_workers, "as configured"
    if facts.whole_batches:
        return 0, 0, "the data set returns whole batches from memory"
    if facts.read_file is not None:
        return 0, 0, f"worker processes would share the position in {facts.read_file}, which the data set has open"
    if not facts.opens_files:
        most = max(0, min(MOST_WORKERS, cores // local_ranks))
        return 0, most, "worker processes are started if the first steps show that they are faster"
    # A process that is started after the first sample would share what is open.
    if facts.quick_samples:
        return 0, 0, "a sample is made in less time than another process needs to hand it over"
    workers = automatic_workers(cores, local_ranks)
    reason = f"reading opens files; {cores} cores for {many(local_ranks, 'rank')}, one left for the step, 2 to 4 each"
    return workers, workers, reason


def worth_trying(load_s: float, step_s: float, batch_bytes: int, most: int) -> int:
    """How many loader processes should shorten a step by a fifth or more; 0 where no number does.

    Args:
        load_s: seconds to load a batch in the training process.
        step_s: seconds from one batch to the next there, ``load_s`` included.
        batch_bytes: what a process has to hand over.
        most: processes that may be started; the cores of the rank.
    """
    compute_s = step_s - load_s
    handed_s = load_s + HANDOVER_S + batch_bytes / HANDOVER_BYTES_S

    def expected(workers: int) -> float:
        return max(compute_s, handed_s / workers, (compute_s + handed_s) / max(most, 1))

    best = min(map(expected, range(1, most + 1)), default=step_s)
    if best > 0.8 * step_s:
        return 0
    return next(workers for workers in range(1, most + 1) if expected(workers) <= best / CLOSE)


def of_loader(decision: Decision, loader: LoaderFacts) -> Decision:
    """``decision``, or what the module and its ``loader`` decide instead."""
    if decision.key in {"lr", "schedule"}:
        return _its_own(decision, "the module's configure_optimizers() sets it")
    if decision.key == "workers":
        return _its_own(decision, "the module's own DataLoader sets its workers")
    if decision.key == "batch_size" and decision.value == loader.batch_size:
        return replace(decision, reason="set by the module's DataLoader")
    if decision.key == "order" and loader.batches is not None:
        return _its_own(decision, "the loader's own, which only one device can keep")
    if decision.key == "order" and not loader.shuffle:
        reason = "the DataLoader does not shuffle: index order"
        return replace(decision, value="index", shown="index", reason=reason)
    if decision.key == "order":
        return replace(decision, reason="the DataLoader shuffles: Lockstep shuffles again in each epoch")
    return decision


def _its_own(decision: Decision, reason: str) -> Decision:
    return replace(decision, value=None, shown="its own", reason=reason)


def training_of_loader(config: RunConfig, loader: LoaderFacts, *, held: int | None, devices: int) -> TrainingConfig:
    """The training section with the sizes of ``loader``.

    Args:
        held: the global batch that is fixed, if any.
        devices: of all ranks.

    Raises:
        ConfigError, UnsupportedError: settings that a ``LightningModule`` cannot have.
    """
    t = config.training
    refused = {
        "reproducibility: exact": t.reproducibility == "exact",
        "training.compile": t.compile,
        "debug.overfit_batches": config.debug.overfit_batches is not None,
        "debug.trace": config.debug.trace != "off",
        "debug.switch_off": bool(config.debug.switch_off),
        "telemetry.record_samples": config.telemetry.record_samples,
        "data.bucketing on": config.data.bucketing == "on",
    }
    for name, asked in refused.items():
        if asked:
            raise UnsupportedError(
                f"{name} is incompatible with a LightningModule",
                why="its steps belong to the module and Lightning's Trainer",
                fix="remove it, or write a lockstep.Task",
            )
    batch_size = loader.batch_size
    if loader.whole_steps:
        if t.accumulate > 1:
            raise ConfigError(
                "training.accumulate is set, but the module optimizes manually",
                why="with automatic_optimization = False it takes its steps itself",
                fix="leave it out",
            )
        batch_size = batch_size if held is None else -(-held // devices)
    if loader.batches is not None and loader.batches % t.accumulate:
        raise ConfigError(
            f"training.accumulate={t.accumulate} does not divide the {loader.batches} batches of an epoch",
            why="the training loader keeps its own order, so its batches are not divided again",
            fix="set it to a divisor",
        )
    tail = "drop" if loader.drop_last else t.tail
    return t.model_copy(update={"batch_size": batch_size, "tail": tail})


def of_session(plan: Plan, schedule: str) -> Plan:
    """``plan`` with the decisions that the loop takes itself, and without notes on settings that it does not use.

    Args:
        schedule: what sets the learning rates.
    """

    def own(decision: Decision) -> Decision:
        if decision.key == "lr":
            return replace(decision, reason="the loop's own optimizer (its first parameter group)")
        if decision.key == "schedule":
            return replace(decision, value="loop", shown="loop", reason=schedule)
        return decision

    unused = ("warmup", "monitor", "weight_decay", *MEASURED)
    decisions = by_key(own(d) for d in plan.decisions.values() if d.key not in unused)
    notes = tuple(note for note in plan.notes if not note.key.startswith(("lr_", "warmup", "optimizer", "schedule")))
    return plan.model_copy(update={"decisions": decisions, "notes": notes})


def sized(config: RunConfig, *, has_batch_size: bool, ranks: int, accumulate: int | None, lr: float) -> RunConfig:
    """``config`` with the sizes of a loop over batches.

    Args:
        has_batch_size: whether the user has set ``training.batch_size``; else a rank's share is one micro-batch for
            each of ``accumulate``.
        lr: of the loop's first optimizer.
    """
    training = config.training
    parts, update = training.accumulate if accumulate is None else accumulate, dict[str, Any]()
    if training.global_batch_size is None:
        update["accumulate"] = parts
    else:
        most = -(-training.global_batch_size // (ranks * parts))
        update["batch_size"] = min(training.batch_size, most) if has_batch_size else most
    settings: dict[str, Any] = {"training": TrainingConfig.model_validate({**training.model_dump(), **update})}
    if lr > 0:
        settings["optimizer"] = OptimizerConfig.model_validate({**config.optimizer.model_dump(), "lr": lr})
    return config.model_copy(update=settings)
