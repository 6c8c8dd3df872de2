"""This node's share of a run that an attached engine starts on several nodes: ``lockstep train --nodes`` on each.

Until the ranks have agreed on a run there is no run folder, so that the node's ranks have a temporary one. Each rank
trains as under the user's torchrun (:mod:`lockstep.launch.rank`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.config import RunConfig
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.errors import UsageError
from lockstep.hardware.world import World, restart_count
from lockstep.launch.engines.node_folder import begun_run, failure_reason, note_run
from lockstep.launch.engines.spec import Job, NodeRange, attached_engine
from lockstep.launch.failure import records
from lockstep.launch.local import worker
from lockstep.launch.meeting.membership import Team
from lockstep.launch.meeting.preparation import PreviousStart, Start, TrainRequest, prepare_together
from lockstep.launch.prepare import placement_of
from lockstep.launch.rank import train_as_rank
from lockstep.rundir.folder import RunDir
from lockstep.tasks.registry import pack_task

#: Seconds that a rank stays after another one has stopped it, so that its agent sees whether a node waits to join.
MAKE_ROOM_S = 3.0


def train_on_node(task: Task, config: RunConfig, request: TrainRequest) -> RunResult:
    """Train on this node's devices, together with the other nodes on which this is called.

    Raises:
        UsageError: before anything starts, or when the nodes' settings differ. RunError: when the run fails.
        SystemExit: with code 130 or 143, when it was stopped before it could begin, or not waited for.
    """
    launch = config.launch
    ranks = len(placement_of(config, World()).devices)
    options = {
        "rdzv": launch.rdzv,
        "join_timeout_s": launch.join_timeout_s,
        "describe": config.telemetry.progress != "silent",
    }
    engine = attached_engine().make()
    with TemporaryDirectory(prefix="lockstep-node-") as path:
        folder = RunDir(Path(path))
        call = worker.pack_call(train_as_node_rank, [config, request, pack_task(task, config), sys.argv])
        (folder.path / worker.CALL_FILE).write_bytes(call)
        job = Job(
            # -P: files in the working folder do not shadow a module.
            command=("-P", "-m", worker.__name__, str(folder.path)),
            run_folder=folder.path,
            nodes=NodeRange.parse(launch.nodes),
            ranks_per_node=ranks,
            max_restarts=launch.max_restarts,
            grace_s=launch.stop_grace_s,
            options=options,
        )
        engine.check(job)
        code = engine.submit(job)
        assert isinstance(code, int)
        results: list[RunResult] = [*worker.take_results(folder).values()]
        if not results:
            raise SystemExit(code)
        # The ranks know only that they were to stop, not by which signal.
        return replace(results[0], exit_code=code or results[0].exit_code)


def train_as_node_rank(
    rank: worker.Rank, config: RunConfig, request: TrainRequest, make_task: Callable[[], Task], command: list[str]
) -> RunResult | None:
    """Train as a rank of the engine; its folder is the node's temporary one. The first rank of a node has a result.

    ``command``: the user's, not that of this process.
    The process ends with exit code 0 where a restart cannot help (a stop, wrong usage), so that the engine makes none.
    """
    folder = rank.folder
    world = rank.world
    task = make_task()
    runs = [begun_run(rank.folder)]
    if runs[0] is not folder:
        previous = PreviousStart(str(runs[0].path), restart_count(os.environ), failure_reason(folder))
        request = replace(request, previous=previous)

    def prepare(team: Team, ending: ExitStack) -> Start:
        start = prepare_together(team, task, config, request, ending)
        runs.append(start.run)
        if world.is_main:
            start.run.update(command=command)
            records.clear(start.run.logs)
            records.write(start.run.logs / records.LAUNCHER_FILE, {"ranks": world.size})
        if world.local_rank == 0:
            note_run(folder, start.run)
        return start

    try:
        result = train_as_rank(world, config, prepare, rank)
    except (Exception, SystemExit) as error:
        records.record(runs[-1].logs, world.rank, error)
        if isinstance(error, UsageError):
            return None
        raise
    if result.exit_code > 128 and rank.stop.requested is None:
        time.sleep(MAKE_ROOM_S)
    return result if world.local_rank == 0 else None
