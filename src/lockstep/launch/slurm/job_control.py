"""Training by SLURM: submit a job, follow it, ask for its state, stop it.

The run's folder is made when the job is submitted, so that the run is found, shown and stopped like any other;
``slurm.json`` in it names the job. Everything is asked of SLURM's own commands.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from lockstep.config import RunConfig, resolve
from lockstep.errors import RunFolderError, UsageError
from lockstep.launch.prepare import settle
from lockstep.launch.process.signals import exit_code
from lockstep.launch.run_claim import create_folder
from lockstep.launch.slurm.job import Job, JobRequest, batch_script, training_command
from lockstep.rundir.files import absolute, write_json, write_text
from lockstep.rundir.folder import RunDir, new_run_id
from lockstep.telemetry.sinks import check_sinks

SCRIPT = "job.sbatch"
#: How often SLURM is asked for a job's state, seconds; its daemon serves all users.
_ASK_S = 2.0
_READ_S = 0.2
#: States of a job that will not run again (``man squeue``, job state codes).
_OVER = re.compile(r"COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|REVOKED")
#: How often a job is found preempted before it is taken not to be queued again.
_PREEMPTED_LOOKS = 15


def prepare_script(task: str, settings: Mapping[str, Any], resources: Mapping[str, Any]) -> tuple[str, RunConfig]:
    """The batch script for a new run, and the run's configuration.

    ``settings``: those that differ from the defaults. ``resources``: other fields of :class:`JobRequest`.
    """
    _, config = settle(task, settings)
    nodes = config.launch.nodes or "1"
    if not nodes.isdigit():
        raise UsageError(
            f"invalid --nodes {nodes} for SLURM",
            why="SLURM gives a job exactly the nodes that it requests",
            fix="write one number, such as --nodes 2",
        )
    request = JobRequest(nodes=int(nodes), ranks_per_node=_ranks(config, resources.get("gpus_per_node")), **resources)
    path = absolute(config.save_dir or config.runs_dir / new_run_id())
    # The ranks are SLURM's, and learn from it how many nodes there are.
    settings = {**settings, "launch": {k: v for k, v in settings.get("launch", {}).items() if k != "nodes"}}
    config = resolve(config.model_dump(mode="json"), {"save_dir": str(path), "launch": {"nodes": None}})
    command = training_command(sys.executable, config.task.name, settings, path)
    return batch_script(request, path, command, Path.cwd()), config


def _ranks(config: RunConfig, gpus_per_node: str | None) -> int:
    """How many ranks each node has: one for each device that was named, or for each GPU that is asked for."""
    named = config.hardware.selected_devices
    if named is not None and "all" not in named:
        return len(named)
    number = (gpus_per_node or "1").rpartition(":")[2]
    if not number.isdigit() or int(number) < 1:
        fix = "write 4, or a type before it: a100:4"
        raise UsageError(f"--gpus-per-node {gpus_per_node!r} is not a number of GPUs", fix=fix)
    return int(number)


def submit(script: str, config: RunConfig) -> tuple[RunDir, Job]:
    """Make the run's folder, with the script in it, and submit it. Where SLURM refuses the job, no folder is left."""
    check_sinks(config, config.save_dir)
    _ask("sbatch", "--test-only", stdin=script)
    run = create_folder(config)
    write_text(run.path / SCRIPT, script)
    try:
        answer = _ask("sbatch", "--parsable", str(run.path / SCRIPT))
    except UsageError:
        shutil.rmtree(run.path)
        raise
    job = Job(id=int(answer.split(";")[0]))
    write_json(run.slurm_file, job.model_dump())
    return run, job


def state(job: Job) -> str | None:
    """The job's state and, while it waits, the reason, in SLURM's terms; ``None`` when SLURM no longer knows it."""
    try:
        answer = _ask("squeue", "--noheader", "--jobs", str(job.id), "--states", "all", "--format", "%T %r")
    except UsageError as error:
        if "invalid job id" in str(error).lower():
            return None  # a job is forgotten some minutes after its end
        raise
    name, _, reason = answer.strip().partition(" ")
    return f"{name} ({reason})" if reason not in ("", "None") else name or None


def follow(run: RunDir, job: Job, stream: TextIO) -> int:
    """Copy the job's log to ``stream`` until the job is over; the exit code of the run.

    Ctrl-C ends the following, not the job.
    """
    log = _Log(run.logs / "slurm.log", stream)
    shown, asked, preempted = "", 0.0, 0
    try:
        while True:
            log.copy()
            if time.monotonic() - asked >= _ASK_S:
                try:
                    now = state(job)
                except UsageError:
                    now = "SLURM does not answer; asking again"
                asked = time.monotonic()
                # A preempted job is queued again at once, or it is over.
                preempted = preempted + 1 if now is not None and now.startswith("PREEMPTED") else 0
                if now is None or _OVER.match(now) or preempted > _PREEMPTED_LOOKS:
                    log.copy()
                    break
                if now != shown and not now.startswith("COMPLETING"):
                    stream.write(f"slurm job {job.id}: {now}\n")
                    stream.flush()
                    shown = now
            time.sleep(_READ_S)
    except KeyboardInterrupt:
        stream.write(f"\njob {job.id} continues; `lockstep stop {run.path}` ends it, with a checkpoint\n")
        return exit_code(signal.SIGINT)
    status = run.read().status
    if status == "completed":
        return 0
    sys.stderr.write(f"slurm job {job.id} is over ({now or 'unknown to SLURM'}), and the run is {status}\n")
    return exit_code(signal.SIGTERM) if status == "stopped" else 1


class _Log:
    """A growing file that is copied to ``stream``."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path, self._stream, self._position = path, stream, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character

    def copy(self) -> None:
        """Copy what is new."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
            self._position += len(new)
            self._stream.write(self._decoder.decode(new))
            self._stream.flush()


def stop(run: RunDir, job: Job, timeout: float) -> str:
    """End a submitted run: out of the queue, or with a checkpoint when it runs; the status that it then has.

    Raises :class:`RunFolderError` where SLURM knows the job by another script: the file may name any job.
    """
    now = state(job)
    if now is None or _OVER.match(now):
        fix = f"see `lockstep show {run.path}`"
        raise RunFolderError(f"slurm job {job.id} is over ({now or 'unknown to SLURM'})", fix=fix)
    script = Path(_ask("squeue", "--noheader", "--jobs", str(job.id), "--states", "all", "--format", "%o").strip())
    if script.name != SCRIPT or script.parent.resolve() != run.path.resolve():
        raise RunFolderError(
            f"slurm job {job.id}, which slurm.json of run {run.read().id} names, does not train it",
            why=f"its script is {script}; the run folder may be from another machine",
            fix=f"look at it: scontrol show job {job.id}; if it does train the run: scancel --signal=TERM {job.id}",
        )
    if now.startswith(("PENDING", "REQUEUED", "SUSPENDED")):
        _ask("scancel", str(job.id))
        return run.update(status="stopped").status
    _ask("scancel", "--signal=TERM", str(job.id))
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        now = state(job)
        if now is None or _OVER.match(now):
            return run.status()
        time.sleep(_READ_S)
    raise RunFolderError(
        f"slurm job {job.id} is still {now} after {timeout:g} s",
        why="it ends after the step it is in, with a checkpoint",
        fix=f"wait longer (--timeout), or `scancel {job.id}`: no checkpoint is lost",
    )


def _ask(program: str, *arguments: str, stdin: str = "") -> str:
    """What one of SLURM's commands prints. Raises :class:`UsageError`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SBATCH_", "SLURM_JOB"))}
    how: dict[str, Any] = {"capture_output": True, "text": True, "env": environ, "timeout": 60}
    try:
        result = subprocess.run([program, *arguments], input=stdin, **how)
    except FileNotFoundError:
        raise UsageError(
            f"the command {program} was not found",
            why="SLURM's commands are on its login nodes",
            fix="run this on a login node, or write the script with --print and submit it there",
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{program} did not answer within 60 s", fix="`scontrol ping` shows its state") from None
    if result.returncode:
        lines = [line.removeprefix(f"{program}: ").removeprefix("error: ") for line in result.stderr.split("\n")]
        raise UsageError(
            f"SLURM refused: {' '.join(lines).strip()[:500]}",
            fix="`sinfo` lists partitions and their limits; `sbatch --test-only` tries a script",
        )
    output: str = result.stdout
    return output
