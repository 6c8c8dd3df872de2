"""Which ranks write the checkpoints of an attempt: the first one, or each its part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lockstep.checkpoint.sharded import ShardedStore
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.writer import BackgroundWriter
from lockstep.config import RunConfig
from lockstep.engine.distributed.collectives import Collectives
from lockstep.errors import LockstepError
from lockstep.events import CheckpointSaved, Note, Sink
from lockstep.hardware.world import World
from lockstep.planning import Plan
from lockstep.telemetry.rundir import RunDir

#: How long ranks wait for the slowest one's part to be on disk. A rank that died is noticed at once, and a rank that
#: hangs is noticed by the launcher.
WRITE_TIMEOUT_S = 6 * 3600.0


@contextlib.contextmanager
def writing(
    run_dir: RunDir, world: World, config: RunConfig, plan: Plan, collectives: Collectives, keeper: bool, sink: Sink
) -> Iterator[BackgroundWriter | None]:
    """This rank's writer, if it has anything to write. Collective.

    A writer that communicates with other ranks is closed with the body, before the process group is destroyed.
    """

    def saved_to(store: CheckpointStore) -> BackgroundWriter:
        return BackgroundWriter(store, lambda step, path, best: sink.emit(CheckpointSaved(step, path, best)))

    if not _each_writes(plan, collectives, keeper, sink):
        yield saved_to(CheckpointStore(run_dir.checkpoints)) if keeper else None
        return
    shards = world.local_size if config.fsdp.sharding == "hybrid" else world.size
    ranks = Collectives(world, timeout_s=WRITE_TIMEOUT_S)
    writer = saved_to(ShardedStore(run_dir.checkpoints, ranks, shards))
    try:
        yield writer
    except BaseException:
        with contextlib.suppress(LockstepError):  # the first error is the one to report
            writer.close()
        raise
    writer.close()


def _each_writes(plan: Plan, collectives: Collectives, keeper: bool, sink: Sink) -> bool:
    """Whether each rank writes its part of a checkpoint, as is planned: if all of them see one run folder."""
    if not plan.sharded_checkpoints:
        return False
    keepers = int(*collectives.sum(float(keeper)))
    if keepers > 1:
        sink.emit(
            Note(
                "checkpoints_whole",
                f"Checkpoints are whole, not in shards: the nodes have {keepers} run folders, and each of them must "
                "have all that a resume needs.",
            )
        )
    return keepers == 1
