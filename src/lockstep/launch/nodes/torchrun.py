"""``lockstep train --nodes 2 --rdzv HOST:PORT``: one of several machines that train together, by torch's agents.

The command runs on every node. It starts one process, the agent (:mod:`lockstep.launch.nodes.agent`), which meets the
others at HOST:PORT and starts this node's ranks. Each rank trains as under the user's own torchrun
(:mod:`lockstep.launch.nodes.external`). Until the ranks have agreed on a run there is no run folder, so that agent and
ranks have a temporary one each.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.config import RunConfig
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.errors import UsageError, many
from lockstep.hardware.world import World
from lockstep.launch.failure import records
from lockstep.launch.failure.report import error_of, read_failure
from lockstep.launch.local.on_ranks import RanksStopped, run_on_ranks
from lockstep.launch.local.worker import Rank
from lockstep.launch.nodes.agent import (
    AGENT_GRACE_S,
    BEGUN,
    ERROR,
    Agent,
    Nodes,
    first_line,
    read_content,
    run_agent,
    run_of,
)
from lockstep.launch.nodes.external import train_as_rank
from lockstep.launch.nodes.preparation import Begun, Start, TrainRequest
from lockstep.launch.prepare import place
from lockstep.rundir.folder import RunDir, new_run_id, read_json, write_json
from lockstep.tasks.registry import load_task, pack_task

#: How long a rank that another one has stopped stays, so that its agent sees whether a node waits to join.
MAKE_ROOM_S = 3.0
_REQUEST, _RESULT = "request.json", "result.json"


def train_on_nodes(task: Task, config: RunConfig, request: TrainRequest) -> RunResult:
    """Train on this node's devices, together with the other nodes on which this is called.

    Raises:
        UsageError: before anything starts, or when the nodes' settings differ. RunError: when the run fails.
        SystemExit: with code 130 or 143, when it was stopped before it could begin, or not waited for.
    """
    nodes = Nodes.of(config)
    ranks = len(place(config, World()).devices)
    nodes.refuse_unknown_host()
    if config.telemetry.progress != "silent":
        waits = f"waiting up to {nodes.join_timeout_s:g} s"
        print(f"meeting {nodes}, with {many(ranks, 'rank')} here; {waits}", file=sys.stderr)
    grace_s = config.launch.stop_grace_s + AGENT_GRACE_S
    limits = config.launch.model_copy(update={"max_restarts": 0, "stop_grace_s": grace_s})
    code = 0
    with TemporaryDirectory(prefix="lockstep-node-") as path:
        folder, agent_folder = (
            RunDir.create(Path(path, name), config, run_id=new_run_id(), command=sys.argv) for name in ("node", "agent")
        )
        write_json(folder.path / _REQUEST, asdict(request))
        pack_task(folder, task, config)
        main = f"{__name__}:{train_as_node_rank.__name__}"
        agent = Agent(nodes, ranks, main, config.launch, folder.path)
        try:
            run_on_ranks(run_agent, agent, folder=agent_folder, ranks=1, settings=limits, redirect=False)
        except RanksStopped as stopped:
            report = read_failure(agent_folder)
            if report is not None:  # the agent had to be killed
                raise report.as_error() from None
            code = stopped.exit_code
        error, result = read_content(folder, ERROR), read_content(folder, _RESULT)
        if error is not None:
            raise error_of(error)
        if result is None:
            raise SystemExit(code)
        # The ranks know only that they were to stop, not by which signal.
        return RunResult(**{**result, "run_dir": Path(result["run_dir"]), "exit_code": code or result["exit_code"]})


def train_as_node_rank(rank: Rank) -> int:
    """Train as a rank of the agent; its folder is the node's temporary one. The exit code is for the agent.

    That is 0 where another start would end the same: also after a stop and for wrong usage.
    """
    folder, config, world, runs = rank.folder, rank.folder.config(), rank.world, [run_of(rank.folder)]
    request = TrainRequest(**read_json(folder.path / _REQUEST))
    if runs[0] is not folder:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        request = replace(request, begun=Begun(str(runs[0].path), restarts, first_line(runs[0])))

    def note(start: Start) -> None:
        runs.append(start.run)
        if world.is_main:
            start.run.update(command=folder.read().command)  # what the user typed, not what started this process
            records.clear(start.run.logs)
            records.write(start.run.logs / records.LAUNCHER_FILE, {"ranks": world.size})
        if world.local_rank == 0:
            write_json(folder.path / BEGUN, str(start.run.path))

    try:
        result = train_as_rank(load_task(folder, config), config, world, request, rank, note)
    except (Exception, SystemExit) as error:
        records.record(runs[-1].logs, world.rank, error)
        if isinstance(error, UsageError):
            return 0
        raise
    if world.local_rank == 0:
        write_json(folder.path / _RESULT, {**asdict(result), "run_dir": str(result.run_dir)})
    stopped = result.exit_code > 128
    if stopped and rank.stop.requested is None:
        time.sleep(MAKE_ROOM_S)
    return 0 if stopped else result.exit_code
