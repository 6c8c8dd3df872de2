"""This node's share of a run that an attached engine starts on several nodes: ``lockstep train --nodes`` on each.

Until the ranks have agreed on a run there is no run folder, so that the node's ranks have a temporary one. Each rank
trains as under the user's torchrun (:mod:`lockstep.launch.rank`).
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.config import RunConfig
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.errors import UsageError
from lockstep.hardware.world import World, restart_count
from lockstep.launch.engines.node_folder import RESULT, begun_run, content_of, failure_reason, note_run, raise_error
from lockstep.launch.engines.spec import Job, NodeRange, attached_engine
from lockstep.launch.failure import records
from lockstep.launch.local import worker
from lockstep.launch.meeting.membership import Team
from lockstep.launch.meeting.preparation import PreviousStart, Start, TrainRequest, prepare_together
from lockstep.launch.prepare import place
from lockstep.launch.rank import train_as_rank
from lockstep.rundir.folder import RunDir, new_run_id, read_json, write_json
from lockstep.tasks.registry import load_task, pack_task

#: Seconds that a rank stays after another one has stopped it, so that its agent sees whether a node waits to join.
MAKE_ROOM_S = 3.0
_REQUEST = "request.json"


def train_on_node(task: Task, config: RunConfig, request: TrainRequest) -> RunResult:
    """Train on this node's devices, together with the other nodes on which this is called.

    Raises:
        UsageError: before anything starts, or when the nodes' settings differ. RunError: when the run fails.
        SystemExit: with code 130 or 143, when it was stopped before it could begin, or not waited for.
    """
    launch = config.launch
    ranks = len(place(config, World()).devices)
    options = {
        "rdzv": launch.rdzv,
        "join_timeout_s": launch.join_timeout_s,
        "describe": config.telemetry.progress != "silent",
    }
    engine = attached_engine().make()
    with TemporaryDirectory(prefix="lockstep-node-") as path:
        folder = RunDir.create(Path(path, "node"), config, run_id=new_run_id(), command=sys.argv)
        write_json(folder.path / _REQUEST, asdict(request))
        pack_task(folder, task, config)
        main = f"{__name__}:{train_as_node_rank.__name__}"
        job = Job(
            # -P: files in the working folder do not shadow a module.
            command=("-P", "-m", worker.__name__, main, str(folder.path)),
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
        raise_error(folder)
        result = content_of(folder, RESULT)
        if result is None:
            raise SystemExit(code)
        # The ranks know only that they were to stop, not by which signal.
        return RunResult(**{**result, "run_dir": Path(result["run_dir"]), "exit_code": code or result["exit_code"]})


def train_as_node_rank(rank: worker.Rank) -> int:
    """Train as a rank of the engine; its folder is the node's temporary one. The exit code is for the engine.

    That is 0 where another start would end the same: also after a stop and for wrong usage.
    """
    folder = rank.folder
    config = rank.folder.config()
    world = rank.world
    runs = [begun_run(rank.folder)]
    request = TrainRequest(**read_json(folder.path / _REQUEST))
    if runs[0] is not folder:
        previous = PreviousStart(str(runs[0].path), restart_count(os.environ), failure_reason(folder))
        request = replace(request, previous=previous)

    def prepare(team: Team, ending: ExitStack) -> Start:
        start = prepare_together(team, load_task(folder, config), config, request, ending)
        runs.append(start.run)
        if world.is_main:
            start.run.update(command=folder.read().command)  # the user's command, not that of this process
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
            return 0
        raise
    if world.local_rank == 0:
        write_json(folder.path / RESULT, {**asdict(result), "run_dir": str(result.run_dir)})
    stopped = result.exit_code > 128
    if stopped and rank.stop.requested is None:
        time.sleep(MAKE_ROOM_S)
    return 0 if stopped else result.exit_code
