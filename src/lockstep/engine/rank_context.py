"""This process as one rank of an attempt: the ranks it joins, its writer of checkpoints, and what its bits depend on.

A :class:`RankContext` is made once and never changed. The state of the process is set by :mod:`.runtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.writer import BackgroundWriter, ShardedStore
from lockstep.config import RunConfig
from lockstep.engine.distributed.collectives import Collectives, collectives, shared
from lockstep.engine.runtime import rank_device, runtime
from lockstep.errors import CheckpointError, LockstepError
from lockstep.events import CheckpointSaved, Fanout, Note, Sink
from lockstep.hardware.world import World
from lockstep.planning import Plan
from lockstep.rundir.folder import RunDir
from lockstep.rundir.heartbeat import Heartbeat
from lockstep.telemetry.sinks import monitored

#: How long ranks wait for the slowest one's part to be on disk. A rank that died is noticed at once, and a rank that
#: hangs is named by the watch of the ranks.
WRITE_TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class RankContext:
    """Run, plan, device, process group and outputs of one rank.

    Rank 0 writes the run folder; the ``sink`` of other ranks drops events. ``heartbeat`` takes the steps
    done and the total, ``stop_signal`` gives the signal that asked this process to stop, if any.
    """

    run_dir: RunDir
    world: World
    config: RunConfig
    plan: Plan
    device: torch.device
    collectives: Collectives
    attempt: int = 1
    sink: Sink = field(default_factory=Fanout)
    writer: BackgroundWriter | None = None
    heartbeat: Callable[[int, int], None] = lambda step, total: None
    stop_signal: Callable[[], int | None] = lambda: None

    @property
    def reads_shards(self) -> bool:
        """Whether each rank writes its part of a checkpoint, and so can read it."""
        return self.writer is not None and self.writer.store.takes_parts

    @property
    def compared(self) -> Collectives:
        """Collectives for calls by a loop of the user's: the calls of ranks are compared."""
        return collectives()

    def note(self, key: str, text: str, level: Literal["info", "warning"] = "info") -> None:
        self.sink.emit(Note(key, text, level))


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt of a run as one of its ranks begins it; ``number`` counts from 1. See :class:`RankContext`.

    ``on_error``: called with an error before it is recorded; it ends the process where another report explains more.
    """

    run_dir: RunDir
    world: World
    config: RunConfig
    plan: Plan
    number: int
    sink: Sink
    stop_signal: Callable[[], int | None]
    on_error: Callable[[BaseException], None] = lambda error: None


@contextmanager
def open_writer(attempt: Attempt, collectives: Collectives) -> Iterator[BackgroundWriter | None]:
    """Open this rank's writer, if it has anything to write. Collective.

    Rank 0 writes checkpoints, or each rank its part, as is planned. A writer of parts communicates with other ranks: it
    is closed with the body, before the process group is destroyed.
    """

    def saved_to(store: CheckpointStore) -> BackgroundWriter:
        return BackgroundWriter(store, lambda step, path, best: attempt.sink.emit(CheckpointSaved(step, path, best)))

    folder = attempt.run_dir.checkpoints
    world = attempt.world
    if not attempt.plan.sharded_checkpoints:
        yield saved_to(CheckpointStore(folder)) if world.is_main else None
        return
    shards = world.local_size if attempt.config.fsdp.sharding == "hybrid" else world.size
    writer = saved_to(ShardedStore(folder, Collectives(world, timeout_s=WRITE_TIMEOUT_S), shards))
    try:
        yield writer
    except BaseException:
        with suppress(LockstepError):  # the first error is the one to report
            writer.close()
        raise
    writer.close()


@contextmanager
def join_ranks(attempt: Attempt, ending: ExitStack) -> Iterator[RankContext]:
    """Make this process a rank among the others; the first one of a node also samples its machine. Collective.

    ``ending`` is closed when the failure of an attempt, if any, has been recorded; it ends heartbeat and writer.
    """
    run_dir = attempt.run_dir
    world = attempt.world
    config = attempt.config
    plan = attempt.plan
    device = rank_device(tuple(plan.placement["devices"]), world)
    timeout_s = config.distributed.timeout_s
    watches = config.telemetry.system_metrics and world.local_rank == 0
    heartbeat = Heartbeat()
    ending.callback(heartbeat.stop)
    with (
        runtime(plan, device, detect_anomaly=config.debug.detect_anomaly, ranks=world.size),
        shared(world, timeout_s),
        monitored(run_dir.path, plan.placement["devices"], node=world.node_rank) if watches else nullcontext(),
    ):
        collectives = Collectives(world, timeout_s=timeout_s)
        with open_writer(attempt, collectives) as writer:
            if writer is not None:
                ending.callback(writer.close)
            if world.is_main:
                before = run_dir.progress()
                heartbeat.start(run_dir.heartbeat_file, before.step if before else 0, plan.total_steps)
            yield RankContext(
                run_dir,
                world,
                config,
                plan,
                device,
                collectives,
                attempt=attempt.number,
                sink=attempt.sink,
                writer=writer,
                heartbeat=heartbeat.beat,
                stop_signal=attempt.stop_signal,
            )


def pins(device: torch.device, plan: Plan) -> dict[str, Any]:
    """Return the properties of this machine that change bits; plans and checkpoints record them."""
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device_model": model,
        "threads": plan.threads,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fp32_precision": torch.backends.cuda.matmul.fp32_precision,
    }


def check_pins(saved: dict[str, Any], present: dict[str, Any]) -> None:
    """Refuse to resume an exact run where bits would differ."""
    differing = [f"{key} {saved.get(key)!r} → {value!r}" for key, value in present.items() if saved.get(key) != value]
    if differing:
        raise CheckpointError(
            "this run is exact, and results would differ in bits here",
            why="; ".join(differing),
            fix="resume with the earlier values, or give up exactness with --set training.reproducibility=fast",
        )
