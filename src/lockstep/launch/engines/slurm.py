"""Engine ``slurm``: a batch script, submitted with SLURM's commands.

The script can be kept, edited and submitted again; on the run folder of an unfinished run it resumes from the latest
checkpoint. The meaning of its lines: ``man sbatch``, ``man srun``.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.launch.engines.spec import EngineOption, EngineSpec, Job, JobHandle, JobStatus
from lockstep.rundir.files import write_text

SCRIPT = "job.sbatch"
#: States of a job that will not run again (``man squeue``, job state codes).
_OVER = re.compile(r"COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|REVOKED")
_WAITING = ("PENDING", "REQUEUED", "SUSPENDED")
#: How often a job is found preempted before it is taken not to be queued again.
_PREEMPTED_LOOKS = 15
_WORD = re.compile(r"[\w.,:+@/%=\[\]-]+")
_OPTION = re.compile(r"[a-z][a-z-]*")

TEMPLATE = """\
#!/bin/bash
# Trains {run}. `sbatch` of this file resumes the run, if it is unfinished.
{options}

# SLURM sends USR1 {notice_s} s before the time limit: the ranks write a checkpoint and end, and the job queues again.
again=
stop() {{
    again=yes
    scancel --signal=TERM "$SLURM_JOB_ID"
}}
trap stop USR1

# srun does not take this from sbatch.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

# A rank that fails ends the others within {notice_s} s; after a stop they get that time too.
srun --kill-on-bad-exit=0 --wait={notice_s} {command} &
wait $!; code=$?
while [ $code -gt 128 ] && kill -0 $! 2>/dev/null; do wait $!; code=$?; done

if [ -n "$again" ] && [ $code -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


class Slurm:
    """SLURM's commands on this machine, a login node."""

    def __init__(self) -> None:
        self._preempted_looks = 0

    def manifest(self, job: Job) -> str:
        """Return the batch script; every rank executes the job's command in the current folder."""
        options = "\n".join(f"#SBATCH --{option}" for option in _sbatch_options(job, Path.cwd()))
        variables = ["env", *(f"{name}={value}" for name, value in job.environment.items())] if job.environment else []
        command = shlex.join([*variables, sys.executable, *job.arguments()])
        run = _without_line_break(job.run_folder)
        return TEMPLATE.format(run=run, options=options, notice_s=f"{job.grace_s:.0f}", command=command)

    def check(self, job: Job) -> None:
        """Ask SLURM whether it would take the script."""
        _answer("sbatch", "--test-only", stdin=self.manifest(job))

    def submit(self, job: Job) -> JobHandle:
        """Write the script into the run folder and submit it."""
        file = job.run_folder / SCRIPT
        write_text(file, self.manifest(job))
        answer = _answer("sbatch", "--parsable", str(file))
        return JobHandle(engine=SPEC.name, id=answer.strip().split(";")[0], run_folder=job.run_folder)

    def status(self, handle: JobHandle) -> JobStatus:
        """Return the job's state and, while it waits, the reason."""
        try:
            answer = _answer("squeue", "--noheader", "--jobs", handle.id, "--states", "all", "--format", "%T %r")
        except UsageError as error:
            if "invalid job id" not in str(error).lower():
                raise
            answer = ""  # a job is forgotten some minutes after its end
        name, _, reason = answer.strip().partition(" ")
        if not name:
            return JobStatus(text="unknown to SLURM", is_over=True)
        # A preempted job is queued again at once, or it is over.
        self._preempted_looks = self._preempted_looks + 1 if name == "PREEMPTED" else 0
        is_over = bool(_OVER.match(name)) or self._preempted_looks > _PREEMPTED_LOOKS
        text = f"{name} ({reason})" if reason not in ("", "None") else name
        return JobStatus(text=text, is_over=is_over, is_waiting=name.startswith(_WAITING))

    def stop(self, handle: JobHandle) -> None:
        """Take the job out of the queue; the ranks of one that runs write a checkpoint and end."""
        signal = () if self.status(handle).is_waiting else ("--signal=TERM",)
        _answer("scancel", *signal, handle.id)

    def logs(self, handle: JobHandle) -> Iterator[str]:
        """Yield the log, which SLURM writes into the run folder."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character
        log = handle.run_folder / "logs" / "slurm.log"
        while not log.exists():
            yield ""
        with log.open("rb") as file:
            while True:
                yield decoder.decode(file.read())


def _sbatch_options(job: Job, folder: Path) -> Iterator[str]:
    if job.nodes.is_elastic:
        raise UsageError(
            f"invalid --nodes {job.nodes} for SLURM",
            why="SLURM gives a job exactly the nodes that it requests",
            fix="write one number, such as --nodes 2",
        )
    yield f"job-name={shlex.quote(_without_line_break(Path(job.run_folder.name)))}"
    yield f"nodes={job.nodes}"
    yield f"ntasks-per-node={job.ranks_per_node}"
    values = {**job.options, "gpus_per_node": job.gpus_per_node}
    for name in ("partition", "time", "gpus_per_node", "account", "qos"):
        value = values.get(name)
        flag = name.replace("_", "-")
        if value is not None:
            yield f"{flag}={_checked(f'--{flag}', value)}"
    yield f"chdir={shlex.quote(_without_line_break(folder))}"
    # sbatch reads its lines of a script as a shell would, and takes % in a log's name for a pattern.
    log = _without_line_break(job.run_folder / "logs" / "slurm.log")
    yield f"output={shlex.quote(log.replace('%', '%%'))}"
    yield from ("open-mode=append", "requeue", f"signal=B:USR1@{job.grace_s:.0f}")
    for option in job.options.get("sbatch_option") or ():
        name, equals, value = option.partition("=")
        if not _OPTION.fullmatch(name):
            raise UsageError(
                f"--sbatch-option {option!r} is not of the form name=value",
                fix="write it without dashes in front, for example --sbatch-option constraint=a100",
            )
        yield f"{name}={_checked(f'--sbatch-option {name}', value)}" if equals else name


def _checked(flag: str, value: str) -> str:
    if not _WORD.fullmatch(value):
        raise UsageError(f"{flag} {value!r} is not a value for sbatch", fix="`man sbatch` lists them")
    return value


def _without_line_break(path: Path) -> str:
    if "\n" in str(path):
        raise UsageError(f"{str(path)!r} has a line break in it", fix="choose a --save-dir without one")
    return str(path)


def _answer(program: str, *arguments: str, stdin: str = "") -> str:
    """Return the output of one of SLURM's commands. Raises :class:`UsageError`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SBATCH_", "SLURM_JOB"))}
    try:
        result = subprocess.run(
            [program, *arguments], input=stdin, capture_output=True, text=True, env=environ, timeout=60
        )
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
    return result.stdout


SPEC = EngineSpec(
    name="slurm",
    summary="submit the training with sbatch and follow its log",
    make=Slurm,
    options=(
        EngineOption(name="partition", help="SLURM's partition. Default: the cluster's."),
        EngineOption(
            name="time",
            help="SLURM's time limit, e.g. 4:00:00; the run saves before it, is requeued and resumes.",
            metavar="TIME",
        ),
        EngineOption(name="account", help="SLURM's account. Default: yours."),
        EngineOption(name="qos", help="SLURM's quality of service. Default: the cluster's."),
        EngineOption(
            name="sbatch_option",
            help="Any other option of sbatch, e.g. cpus-per-task=8. May be repeated.",
            metavar="NAME=VALUE",
            is_list=True,
        ),
    ),
    current_job=lambda environ: environ.get("SLURM_JOB_ID"),
)
