"""How data is loaded: the processes of a rank, by rule or from measured rates; what a user's loader or loop decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.config import DataConfig, OptimizerConfig, RunConfig
from lockstep.config.sections import TrainingConfig
from lockstep.errors import ConfigError, many
from lockstep.planning.decision import Decision, decide
from lockstep.planning.notes import refuse
from lockstep.planning.plan import LoaderFacts, LoaderPlan, Plan, TaskFacts

#: Data should come this much faster than the step takes it, so that a slow batch does not stop it.
HEADROOM = 1.2
#: Rates closer than this are the same.
CLOSE = 0.95
#: Loader processes of a rank that the first steps may start.
MOST_WORKERS = 16
#: What it costs another process to hand over a batch: 1.2 ms and 1 s for each 3 GB, on two cores of a server.
HANDOVER_S, HANDOVER_BYTES_S = 1.2e-3, 3e9


class Recommendation(NamedTuple):
    """``bound``: what limits training with this setting, ``compute`` or ``data``."""

    num_workers: int
    bound: str
    reason: str


def recommend(rates: Mapping[int, float], demand: float) -> Recommendation:
    """How many loader processes to use, and why: the fewest that keep up with the step, else the fastest.

    ``rates``: samples per second by number of workers. ``demand``: those that the step would take if it never waited.
    """
    fastest = max(rates.values())
    enough = [workers for workers, rate in sorted(rates.items()) if rate >= HEADROOM * demand]
    best = enough[0] if enough else min(workers for workers, rate in rates.items() if rate >= CLOSE * fastest)
    loads = f"{best} worker{' loads' if best == 1 else 's load'} {rates[best]:,.0f} samples/s"
    if enough:
        reason = f"{loads}, a step needs {demand:,.0f}: more would only take cores from it"
        return Recommendation(best, "compute", reason)
    if rates[best] >= demand:
        reason = f"{loads}, no number is faster; just enough for the {demand:,.0f} that a step needs"
        return Recommendation(best, "compute", reason)
    waits = f"training waits for data {1 - rates[best] / demand:.0%} of the time"
    return Recommendation(best, "data", f"{loads}, no number is faster; a step needs {demand:,.0f}: {waits}")


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

    ``cores``: that this node may use. ``pin_memory``: whether it helps, where ``data`` does not say.
    """
    given, automatic = data.num_workers, automatic_workers(cores, local_ranks)
    position = f"worker processes would share the position in {facts.read_file}, which the data set has open"
    shares = f"{cores} cores for {many(local_ranks, 'rank')}, one left for the step, 2 to 4 each"
    chosen = decide(
        "workers",
        (facts.streams, 0, "one process of each node reads the stream"),
        (isinstance(given, int), given, "as configured"),
        (facts.whole_batches, 0, "the data set returns whole batches from memory"),
        (facts.read_file is not None, 0, position),
        (not facts.opens_files, None, "worker processes are started if the first steps show that they are faster"),
        # A process that is started after the first sample would share what is open.
        (facts.quick_samples, 0, "a sample is made in less time than another process needs to hand it over"),
        (True, automatic, f"reading opens files; {shares}"),
    )
    workers = int(chosen.value or 0)
    most = max(0, min(MOST_WORKERS, cores // local_ranks)) if chosen.value is None else workers
    loader = LoaderPlan(
        num_workers=workers,
        most_workers=most,
        prefetch_factor=data.prefetch_factor or 2,
        pin_memory=pin_memory if data.pin_memory is None else data.pin_memory,
    )
    shown = many(workers, "worker") + (f" at first, up to {most}" if most > workers else "")
    return loader, replace(chosen, value=workers, shown=shown)


def worth_trying(load_s: float, step_s: float, batch_bytes: int, most: int) -> int:
    """How many loader processes should shorten a step by a fifth or more, at most ``most``; 0 where no number does.

    ``load_s``: to load a batch of ``batch_bytes`` in the training process; ``step_s``: from one batch to the next
    there.
    """
    compute_s = step_s - load_s
    handed_s = load_s + HANDOVER_S + batch_bytes / HANDOVER_BYTES_S
    expected = {n: max(compute_s, handed_s / n, (compute_s + handed_s) / most) for n in range(1, most + 1)}
    best = min(expected.values(), default=step_s)
    if best > 0.8 * step_s:
        return 0
    return next(workers for workers, seconds in expected.items() if seconds <= best / CLOSE)


def of_loader(decision: Decision, loader: LoaderFacts) -> Decision:
    """``decision``, or what the module and its ``loader`` decide instead."""
    own = {
        "lr": "the module's configure_optimizers() sets it",
        "schedule": "the module's configure_optimizers() sets it",
        "workers": "the module's own DataLoader sets its workers",
        **({"order": "the loader's own, which only one device can keep"} if loader.batches is not None else {}),
    }
    if decision.key in own:
        return replace(decision, value=None, shown="its own", reason=own[decision.key])
    if decision.key == "batch_size" and decision.value == loader.batch_size:
        return replace(decision, reason="set by the module's DataLoader")
    if decision.key == "order" and loader.shuffle:
        return replace(decision, reason="the DataLoader shuffles: Lockstep shuffles again in each epoch")
    if decision.key == "order":
        return decide("order", (True, "index", "the DataLoader does not shuffle: index order"))
    return decision


def training_of_loader(config: RunConfig, loader: LoaderFacts, *, held: int | None, devices: int) -> TrainingConfig:
    """The training section with the sizes of ``loader``; ``held``: the global batch, if it is fixed.

    Raises for settings that a ``LightningModule`` cannot have.
    """
    t, why = config.training, "its steps belong to the module and Lightning's Trainer"
    refused = {
        "reproducibility: exact": t.reproducibility == "exact",
        "training.compile": t.compile,
        "debug.overfit_batches": config.debug.overfit_batches is not None,
        "debug.trace": config.debug.trace != "off",
        "debug.switch_off": bool(config.debug.switch_off),
        "telemetry.record_samples": config.telemetry.record_samples,
        "data.bucketing on": config.data.bucketing == "on",
    }
    asked = {name: (is_set, why) for name, is_set in refused.items()}
    refuse("a LightningModule", asked, "remove it, or write a lockstep.Task")
    if loader.whole_steps and t.accumulate > 1:
        raise ConfigError(
            "training.accumulate is set, but the module optimizes manually",
            why="with automatic_optimization = False it takes its steps itself",
            fix="leave it out",
        )
    if loader.batches is not None and loader.batches % t.accumulate:
        raise ConfigError(
            f"training.accumulate={t.accumulate} does not divide the {loader.batches} batches of an epoch",
            why="the training loader keeps its own order, so its batches are not divided again",
            fix="set it to a divisor",
        )
    batch_size = -(-held // devices) if loader.whole_steps and held is not None else loader.batch_size
    return t.model_copy(update={"batch_size": batch_size, "tail": "drop" if loader.drop_last else t.tail})


def of_session(plan: Plan, schedule: str) -> Plan:
    """``plan`` with the decisions that the loop takes itself, without notes on settings that it does not use.

    ``schedule``: what sets the learning rates.
    """
    unused = ("warmup", "monitor", "weight_decay", "channels_last", "data_device")
    decisions = {key: decision for key, decision in plan.decisions.items() if key not in unused}
    decisions["lr"] = replace(decisions["lr"], reason="the loop's own optimizer (its first parameter group)")
    decisions["schedule"] = decide("schedule", (True, "loop", schedule))
    notes = tuple(note for note in plan.notes if not note.key.startswith(("lr_", "warmup", "optimizer", "schedule")))
    return plan.model_copy(update={"decisions": decisions, "notes": notes})


def sized(config: RunConfig, *, has_batch_size: bool, ranks: int, accumulate: int | None, lr: float) -> RunConfig:
    """``config`` with the sizes of a loop over batches, and the learning rate of its first optimizer.

    Without ``has_batch_size`` a rank's share of the global batch is one micro-batch for each of ``accumulate``.
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
