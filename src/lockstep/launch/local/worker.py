"""The main function of every rank that Lockstep's launcher or the agent of ``--nodes`` starts.

The rank ends with its parent, writes to its log, answers stop requests, and leaves its result or its failure in a file.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep._compat import run_exit_functions
from lockstep.errors import LockstepError, StorageError
from lockstep.hardware import parent_death
from lockstep.hardware.world import World, read_world
from lockstep.launch.failure import records
from lockstep.launch.process import environment, signals
from lockstep.launch.process.rank_log import leave, log_file, rank_output, stacks_on_request
from lockstep.rundir.folder import RunDir


@dataclass(frozen=True)
class Rank:
    """This process as one of the ranks that the launcher started in ``folder``, a run's or a temporary one."""

    folder: RunDir
    world: World
    stop: signals.StopRequest


#: The call of the ranks that an agent starts, in their folder.
CALL_FILE = "call.pkl"
#: The pickled results of ranks, in their folder.
RESULTS = "result-*.pkl"


def pack_call(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Pickle a call for ranks: the function by reference if it can be imported, by value if it is in a script."""
    import cloudpickle

    content: bytes = cloudpickle.dumps((function, tuple(arguments)))
    return content


def take_results(folder: RunDir) -> dict[int, Any]:
    """Read and remove results of the ranks in ``folder`` that are not ``None``, by rank."""
    results = {}
    for file in folder.path.glob(RESULTS):
        results[int(file.stem.partition("-")[2])] = pickle.loads(file.read_bytes())
        file.unlink()
    return results


def main(folder: Path, call: bytes) -> int:
    """Call a function as one rank: ``call`` is the pickle of the function and its arguments after the :class:`Rank`.

    The process ends at once. After a failure, exit handlers may wait for ranks that wait for this one; after a
    success, native threads of torch that still run must not turn it into a crash.
    """
    parent_death.die_with_parent(int(os.environ[environment.LAUNCHER_PID]))
    stop = signals.StopRequest().install()
    signals.accept()
    environment.restore_sys_path(os.environ)
    environment.set_threads(os.environ)
    try:
        rank = Rank(RunDir(folder), read_world(os.environ), stop)
    except LockstepError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    code = _run(rank, call)
    stop.restore()
    if code in (0, *signals.STOPPED):
        run_exit_functions()
    leave(code)


def _run(rank: Rank, call: bytes) -> int:
    """Make the call with this rank's output in its place.

    A failure becomes an exit code, and is recorded and not printed, since the process that started the ranks prints one
    report on all of them.
    """
    logs = rank.folder.logs
    number = rank.world.rank
    try:
        records.error_file(logs, number).unlink(missing_ok=True)
        parent_death.watch_pipe(parent_death.take_lifeline())
        with rank_output(logs, number), log_file(logs, number).open("a", encoding="utf-8") as log:
            for stream in (sys.stdout, sys.stderr):
                if hasattr(stream, "reconfigure"):
                    stream.reconfigure(line_buffering=True)
            faulthandler.enable(file=log)  # for crashes in native code
            try:
                with stacks_on_request(log):
                    _call(rank, call)
                    return 0
            finally:
                faulthandler.disable()
    except KeyboardInterrupt:
        return signals.exit_code(signals.STOP_SIGNALS[0])
    except signals.Stopped as end:
        return int(end.code or 0)
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


def _call(rank: Rank, call: bytes) -> None:
    function, arguments = pickle.loads(call)
    result: Any = function(rank, *arguments)
    if result is not None:
        (rank.folder.path / f"result-{rank.world.rank}.pkl").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    node_folder = Path(sys.argv[1])
    sys.exit(main(node_folder, (node_folder / CALL_FILE).read_bytes()))
