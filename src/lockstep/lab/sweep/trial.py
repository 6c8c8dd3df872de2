"""One trial, as a process: ``python -m lockstep.lab.sweep.trial``, with its task and settings on standard input."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from lockstep.hardware.parent_death import take_lifeline, watch_pipe


def main() -> int:
    """Train, or resume, the run that the sweep describes; ends with the sweep's process."""
    from lockstep.cli.output import print_error
    from lockstep.cli.settings import fork_ranks_from_here
    from lockstep.config.load import devices_in
    from lockstep.errors import LockstepError
    from lockstep.launch.process.signals import held_back

    program: dict[str, Any] = pickle.load(sys.stdin.buffer)
    sys.path[:] = program["path"]  # the task may be in a module beside the sweep's program
    sys.argv = program["argv"]
    job: bytes = pickle.load(sys.stdin.buffer)
    watch_pipe(take_lifeline())
    try:
        with held_back():
            import cloudpickle

            from lockstep.launch.api import train

        task, settings = cloudpickle.loads(job)
        fork_ranks_from_here(devices_in(settings))
        return train(task, settings, resume=True).exit_code
    except LockstepError as error:
        print_error(error, sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    sys.exit(main())
