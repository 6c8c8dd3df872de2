"""``python -m lockstep.doctor.worker RUN``: one rank of the examination, started by Lockstep's launcher."""

from __future__ import annotations

import sys

from lockstep.doctor.ranks import MEETING_FILE, PLACEMENT_FILE, TIMEOUT_S, joined, measure
from lockstep.engine.collectives import Collectives
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.launch.worker import main
from lockstep.telemetry.rundir import RunDir, read_json, write_json


def rank_main(run: RunDir, world: World) -> int:
    """Meet the others. The placement is in the run's folder; rank 0 leaves the meeting there."""
    placement = Placement.from_dict(read_json(run.path / PLACEMENT_FILE))
    with joined(world, placement):
        meeting = measure(Collectives(world, timeout_s=TIMEOUT_S), world, placement)
    if world.is_main:
        write_json(run.path / MEETING_FILE, meeting.model_dump())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], rank_main))
