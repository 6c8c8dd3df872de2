"""A function on fresh ranks of this machine, for what is not a run: an evaluation, a trial, the doctor's examination.

``python -m lockstep.launch.local.on_ranks FOLDER`` is one of the ranks.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

from lockstep.errors import RankFailed
from lockstep.hardware.world import World
from lockstep.launch.failure import report as failure
from lockstep.launch.local import start
from lockstep.launch.local.signals import StopRequest
from lockstep.launch.local.worker import main
from lockstep.telemetry.rundir import RunDir

_CALL_FILE, _RESULT_FILE = "call.pkl", "result.pkl"


def run_on_ranks(
    folder: RunDir,
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    threads: int | None = None,
    **options: Any,
) -> Any:
    """Call ``function(folder, world, *arguments)`` on ``ranks`` new processes; what rank 0's call returned.

    What ranks print goes to standard error: standard output may be wanted as JSON.

    Args:
        threads: intra-op threads of each rank; 0: as :func:`lockstep.launch.local.start.launch` decides.
        options: of that function.

    Raises:
        LockstepError: a rank failed; which one and why. KeyboardInterrupt: a stop was requested.
    """
    options |= {"environ": {"LOCKSTEP_THREADS": str(threads)}} if threads else {}
    with StopRequest() as stop, contextlib.redirect_stdout(sys.stderr):
        code = 0 if stop.requested else call_on_ranks(folder, ranks, _keep_result, function, arguments, **options)
    # Ranks that were still starting are killed after the grace, and the code says that they failed.
    if stop.requested is not None or code >= 128:
        raise KeyboardInterrupt
    if code:
        raise failure_of(folder, f"the ranks ended with exit code {code}")
    return pickle.loads((folder.path / _RESULT_FILE).read_bytes())


def call_on_ranks(folder: RunDir, ranks: int, function: Callable[..., int], *arguments: Any, **options: Any) -> int:
    """Like :func:`run_on_ranks`, for a ``function`` that returns its rank's exit code; returns that of all."""
    import cloudpickle  # by reference where a function can be imported, by value where it lives in a script

    call = folder.path / _CALL_FILE
    call.write_bytes(cloudpickle.dumps((function, arguments)))
    try:
        return start.launch(folder, ranks, worker_module=__name__, **options)
    finally:
        call.unlink(missing_ok=True)


def failure_of(folder: RunDir, otherwise: str) -> Exception:
    """The error that says which rank failed and why; ``otherwise`` where no rank has said it."""
    report = failure.collect(folder)
    return report.as_error() if report else RankFailed(otherwise)


def _keep_result(folder: RunDir, world: World, function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    result = function(folder, world, *arguments)
    if world.is_main:
        (folder.path / _RESULT_FILE).write_bytes(pickle.dumps(result))
    return 0


def rank_main(folder: RunDir, world: World) -> int:
    """One of the ranks."""
    from lockstep.engine.process.process_group import serve_store  # torch

    serve_store()
    function, arguments = pickle.loads((folder.path / _CALL_FILE).read_bytes())
    code: int = function(folder, world, *arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], rank_main))
