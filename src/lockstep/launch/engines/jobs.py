"""Jobs of runs: made from settings, submitted to an engine, followed, and stopped.

The run folder is made when the job is submitted, so that the run can be listed, shown and stopped like any other.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from lockstep.checkpoint.manifest import is_frozen
from lockstep.config import RunConfig
from lockstep.errors import RunFolderError, UsageError
from lockstep.launch.engines.record import was_submitted_here, write_handle
from lockstep.launch.engines.spec import Job, JobHandle, JobStatus, NodeRange, engine_of, find_engine
from lockstep.launch.prepare import settle
from lockstep.launch.process.signals import exit_code
from lockstep.launch.run_claim import create_folder, existing_run
from lockstep.rundir.files import absolute
from lockstep.rundir.folder import LIVE, RunDir, new_run_id, refuse_occupied
from lockstep.telemetry.sinks import check_sinks

#: The least time to write a checkpoint, in seconds.
GRACE_S = 120.0
#: A stop gets this many times the duration of the run's newest save: the disk may be slower when all nodes are stopped.
_SAVES = 3
#: Seconds between two questions about a job's state: an engine's server has many users.
_STATUS_INTERVAL_S = 2.0
_READ_INTERVAL_S = 0.2

_STATES = {0: "completed", exit_code(signal.SIGTERM): "stopped"}
_SURROGATES = re.compile(r"\\ud[89ab]..\\ud[c-f]..")


def job_of_settings(
    task: str, settings: Mapping[str, Any], *, gpus_per_node: str | None, options: Mapping[str, Any]
) -> tuple[Job, RunConfig]:
    """Return the job of a new run, and the run's configuration.

    ``settings``: those that differ from the defaults. ``options``: values of the engine's flags.
    """
    _, config = settle(task, settings)
    nodes = NodeRange.parse(config.launch.nodes)
    run_folder = absolute(config.save_dir or config.runs_dir / new_run_id())
    # The engine starts the ranks, which learn from it how many nodes there are.
    of_ranks = {key: value for key, value in settings.get("launch", {}).items() if key not in ("nodes", "rdzv")}
    rank_settings = {**settings, "launch": of_ranks}
    job = Job(
        command=training_command(config.task.name, rank_settings),
        run_folder=run_folder,
        nodes=nodes,
        ranks_per_node=_ranks_per_node(config, gpus_per_node),
        gpus_per_node=gpus_per_node,
        mirror=config.storage.mirror,
        max_restarts=config.launch.max_restarts,
        grace_s=max(GRACE_S, config.launch.stop_grace_s, _SAVES * _newest_save_s(run_folder)),
        options=options,
    )
    config = config.with_values(launch={"nodes": None, "rdzv": None})
    return job, config.model_copy(update={"save_dir": run_folder})


def _newest_save_s(run_folder: Path) -> float:
    """Return seconds that the newest checkpoint of a run took to write, by the times of its files; 0 without one."""
    files = (RunDir(run_folder).checkpoints / "last").glob("*")
    times = [file.stat().st_mtime for file in files if not is_frozen(file.name)]  # frozen ones are older: links
    return max(times) - min(times) if times else 0.0


def _ranks_per_node(config: RunConfig, gpus_per_node: str | None) -> int:
    """Return the number of ranks of each node: one for each device that was named, or for each GPU of the node."""
    devices = config.hardware.selected_devices
    if devices is not None and "all" not in devices:
        return len(devices)
    number = (gpus_per_node or "1").rpartition(":")[2]
    if not number.isdigit() or int(number) < 1:
        raise UsageError(
            f"--gpus-per-node {gpus_per_node!r} is not a number of GPUs", fix="write 4, or a type before it: a100:4"
        )
    return int(number)


def training_command(task: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``-m lockstep train`` with ``settings`` written out, for the Python interpreter."""
    pairs = [f"{key}={_as_yaml(value)}" for key, value in _flat(settings) if key not in {"save_dir", "task.name"}]
    return ("-m", "lockstep", "train", task, *(word for pair in pairs for word in ("--set", pair)))


def _as_yaml(value: Any) -> str:
    """Write JSON, which is YAML except for pairs of surrogates (YAML 1.2, section 5.7)."""

    def escaped(pair: re.Match[str]) -> str:
        character: str = json.loads(f'"{pair[0]}"')
        return f"\\U{ord(character):08x}"

    return _SURROGATES.sub(escaped, json.dumps(value))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and all(str(inner).isidentifier() for inner in value):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def submit(engine_name: str, job: Job, config: RunConfig, stream: TextIO, *, resume: bool) -> int:
    """Make the run folder, submit the job, and follow it on ``stream``; the exit code of the run.

    No new folder is left where the engine refuses the job. ``resume``: the unfinished run in ``save_dir``, if any.
    """
    spec = find_engine(engine_name)
    engine = spec.make()
    engine.check(job)
    check_sinks(config, config.save_dir)
    existing = existing_run(config, resume)
    if not spec.makes_run_folder:
        if existing is None:
            refuse_occupied(job.run_folder)
        code = engine.submit(job)
        assert isinstance(code, int)
        return code
    run = existing or create_folder(config)
    previous_status = run.read().status
    run.update(status="pending")
    try:
        handle = engine.submit(job)
    except UsageError:
        if existing is None:
            shutil.rmtree(run.path)
        else:
            run.update(status=previous_status)
        raise
    if isinstance(handle, int):
        return handle
    write_handle(handle)
    stream.write(f"{_name(handle)} → {run.path}\n")
    return follow(handle, stream)


def _name(handle: JobHandle) -> str:
    return f"{handle.engine} job {handle.id}"


def follow(handle: JobHandle, stream: TextIO) -> int:
    """Copy the job's output to ``stream`` until the job is over; the exit code of the run.

    Ctrl-C ends the following, not the job.
    """
    engine = engine_of(handle)
    run = RunDir(handle.run_folder)
    output = engine.logs(handle)
    shown = ""
    asked_at = 0.0
    try:
        while True:
            stream.write(next(output, ""))
            stream.flush()
            if time.monotonic() - asked_at >= _STATUS_INTERVAL_S:
                try:
                    status = engine.status(handle)
                    text = status.text
                except UsageError:
                    status = None
                    text = f"{handle.engine} does not answer; asking again"
                asked_at = time.monotonic()
                if status is not None and status.is_over:
                    stream.write(next(output, ""))
                    break
                if text != shown:
                    stream.write(f"{_name(handle)}: {text}\n")
                    stream.flush()
                    shown = text
            time.sleep(_READ_INTERVAL_S)
    except KeyboardInterrupt:
        stream.write(f"\n{_name(handle)} continues; `lockstep stop {run.path}` ends it, with a checkpoint\n")
        return exit_code(signal.SIGINT)
    state = _state_after(run, status)
    if state == "completed":
        return 0
    sys.stderr.write(f"{_name(handle)} is over ({status.text}), and the run is {state}\n")
    return exit_code(signal.SIGTERM) if state == "stopped" else 1


def _state_after(run: RunDir, status: JobStatus) -> str:
    """Return the state of a run whose job is over: as in its folder, or by the exit code if no rank wrote it."""
    if status.exit_code is not None and run.read().status in LIVE:
        return run.update(status=_STATES.get(status.exit_code, "failed")).status
    return run.status()


def stop(handle: JobHandle, timeout_s: float) -> str:
    """End a submitted run: out of the queue, or with a checkpoint when it runs; its status afterwards.

    Raises :class:`RunFolderError`: the job was submitted elsewhere, is over, or still runs after ``timeout_s`` seconds.
    """
    if not was_submitted_here(handle):
        raise RunFolderError(
            f"{_name(handle)}, which {RunDir(handle.run_folder).job_file} names, was not submitted from here",
            why="a run folder from elsewhere could name any job",
            fix="end it on the machine that submitted it, or with the engine's command",
        )
    engine = engine_of(handle)
    run = RunDir(handle.run_folder)
    status = engine.status(handle)
    if status.is_over:
        raise RunFolderError(f"{_name(handle)} is over ({status.text})", fix=f"see `lockstep show {run.path}`")
    engine.stop(handle)
    if status.is_waiting:
        return run.update(status="stopped").status
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = engine.status(handle)
        if status.is_over:
            return _state_after(run, status)
        time.sleep(_READ_INTERVAL_S)
    raise RunFolderError(
        f"{_name(handle)} is still {status.text} after {timeout_s:g} s",
        why="it ends after the step it is in, with a checkpoint",
        fix="wait longer (--timeout), or cancel it with the engine's command: no checkpoint is lost",
    )
