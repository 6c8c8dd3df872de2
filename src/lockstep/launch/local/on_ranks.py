"""A function on new ranks of this machine, for what is not a run: an evaluation, a trial, the doctor's checks."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.config import LaunchConfig
from lockstep.engine.session.current import Stopped
from lockstep.errors import RankFailed
from lockstep.launch.failure.report import read_failure
from lockstep.launch.local.fork_server import launch
from lockstep.launch.local.signals import StopRequest, exit_code
from lockstep.launch.local.worker import Rank
from lockstep.telemetry.rundir import RunDir

_CALL_FILE = "call.pkl"


class RanksStopped(KeyboardInterrupt):
    """A stop was requested while ranks ran; ``exit_code``: 130 or 143."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


def run_on_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    folder: RunDir,
    ranks: int,
    settings: LaunchConfig | None = None,
    threads: int | None = None,
    redirect: bool = True,
) -> list[Any]:
    """Call ``function(rank, *arguments)`` on ``ranks`` new processes; the results in rank order.

    Args:
        function: takes a :class:`lockstep.launch.local.worker.Rank` first; its result can be pickled.
        folder: where the ranks keep their logs.
        settings, threads: as for :func:`lockstep.launch.local.fork_server.launch`.
        redirect: print what ranks print to standard error: standard output may be wanted as JSON.

    Raises:
        LockstepError: a rank failed; which one and why. RanksStopped: a stop was requested.
    """
    import cloudpickle  # by reference where a function can be imported, by value where it lives in a script

    file = folder.path / _CALL_FILE
    file.write_bytes(cloudpickle.dumps((function, arguments)))
    try:
        with StopRequest() as stop, contextlib.redirect_stdout(sys.stderr if redirect else sys.stdout):
            code = 0
            if not stop.requested:
                code = launch(
                    folder, ranks, rank_main=f"{__name__}:{call.__name__}", settings=settings, threads=threads
                )
    finally:
        file.unlink(missing_ok=True)
    # Ranks that were still starting are killed after the grace, with the exit code of a failure.
    if stop.requested is not None or code >= 128:
        raise RanksStopped(exit_code(stop.requested) if stop.requested is not None else code)
    if code:
        report = read_failure(folder)
        raise report.as_error() if report else RankFailed(f"the ranks ended with exit code {code}")
    results = []
    for rank in range(ranks):
        file = _result_file(folder, rank)
        results.append(pickle.loads(file.read_bytes()))
        file.unlink()
    return results


def _result_file(folder: RunDir, rank: int) -> Path:
    return folder.path / f"result-{rank}.pkl"


def call(rank: Rank) -> int:
    """Run the function of :func:`run_on_ranks` as one of its ranks."""
    from lockstep.engine.process.runtime import serve_store  # torch

    serve_store()
    function, arguments = pickle.loads((rank.folder.path / _CALL_FILE).read_bytes())
    try:
        result, code = function(rank, *arguments), 0
    except Stopped as end:
        result, code = None, int(end.code or 0)
    _result_file(rank.folder, rank.world.rank).write_bytes(pickle.dumps(result))
    return code
