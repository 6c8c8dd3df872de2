"""The frame of every rank that Lockstep's launcher starts, whatever its function (:mod:`.start`, :mod:`.on_ranks`).

::

    python -m lockstep.launch.local.worker MODULE:FUNCTION RUN

It ends with the launcher, writes to its log, answers stop requests, and records its failure in a file.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from lockstep._compat import run_exit_functions
from lockstep.errors import LockstepError, StorageError
from lockstep.hardware import parent_death
from lockstep.hardware.world import World, read_world
from lockstep.launch.failure import records
from lockstep.launch.process import environment, signals
from lockstep.launch.process.rank_log import leave, log_file, rank_output, stacks_on_request
from lockstep.rundir.folder import RunDir
from lockstep.rundir.heartbeat import pulse


@dataclass(frozen=True)
class Rank:
    """This process as one of the ranks that the launcher started in ``folder``, a run's or a temporary one."""

    folder: RunDir
    world: World
    stop: signals.StopRequest


def main(function: str, folder: str) -> int:
    """Run ``function``, as ``module:function``, as one rank of the run in ``folder``; its result is the exit code.

    The process ends at once. After a failure, exit handlers may wait for ranks that wait for this one; after a
    success, native threads of torch that still run must not turn it into a crash.
    """
    launcher = os.environ.get(environment.LAUNCHER_PID)
    if launcher is not None:  # this process ends with it
        parent_death.die_with_parent(int(launcher))
    stop = signals.StopRequest().install()
    signals.accept()
    environment.restore_sys_path(os.environ)
    environment.set_threads(os.environ)
    pulse.connect(os.environ)
    try:
        rank = Rank(RunDir.open(Path(folder)), read_world(os.environ), stop)
    except LockstepError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    code = _run(rank, function)
    stop.restore()
    if code in (0, *signals.STOPPED):
        run_exit_functions()
    leave(code)


def _run(rank: Rank, function: str) -> int:
    """Call ``function`` with this rank's output in its place.

    A failure becomes an exit code, and is recorded and not printed, since the process that started the ranks prints one
    report on all of them.
    """
    logs = rank.folder.logs
    number = rank.world.rank
    try:
        records.error_file(logs, number).unlink(missing_ok=True)
        if environment.LAUNCHER_PID in os.environ:
            parent_death.watch_pipe(parent_death.take_lifeline())
        with rank_output(logs, number), log_file(logs, number).open("a", encoding="utf-8") as log:
            for stream in (sys.stdout, sys.stderr):
                if hasattr(stream, "reconfigure"):
                    stream.reconfigure(line_buffering=True)
            faulthandler.enable(file=log)  # for crashes in native code
            try:
                with stacks_on_request(log):
                    return int(resolve_name(function)(rank))
            finally:
                faulthandler.disable()
    except KeyboardInterrupt:
        return signals.exit_code(signals.STOP_SIGNALS[0])
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return 0
        try:
            records.record(logs, number, error)
        except StorageError as storage:
            print(f"rank {number} cannot record its failure: {storage}", file=sys.stderr)
            traceback.print_exception(error, file=sys.stderr)
        records.log_traceback(logs, number, error)
        return records.exit_code_of(error)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
