"""``python -m lockstep.bench.worker RUN``: one rank of a trial, started by Lockstep's launcher."""

from __future__ import annotations

import sys

import cloudpickle

from lockstep.bench.rank import CALL_FILE, Rank
from lockstep.hardware.world import World
from lockstep.launch.signals import StopRequest
from lockstep.launch.worker import main
from lockstep.telemetry.rundir import RunDir


def rank_main(run: RunDir, world: World) -> int:
    """Call the function that the trial's folder holds."""
    function, arguments = cloudpickle.loads((run.path / CALL_FILE).read_bytes())
    with StopRequest() as stop:
        function(Rank(run, world, lambda: stop.requested), *arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], rank_main))
