"""The SLURM job of a run: its batch script, as pure text from values, and its record, ``slurm.json`` in the run folder.

The script can be kept, edited and submitted again; on the run folder of an unfinished run it resumes from the latest
checkpoint. What the lines mean: ``man sbatch``, ``man srun``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.rundir.files import FileContent
from lockstep.rundir.folder import RunDir

#: How long before its time limit SLURM signals the script, seconds: the time to write a checkpoint.
NOTICE_S = 120

_WORD = re.compile(r"[\w.,:+@/%=\[\]-]+")
_PAIR = re.compile(r"\\ud[89ab]..\\ud[c-f]..")
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

# A rank that fails ends the others within two minutes; after a stop they get that time too.
srun --kill-on-bad-exit=0 --wait=120 {command} &
wait $!; code=$?
while [ $code -gt 128 ] && kill -0 $! 2>/dev/null; do wait $!; code=$?; done

if [ -n "$again" ] && [ $code -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


@dataclass(frozen=True)
class JobRequest:
    """What a job asks SLURM for. ``options``: more of sbatch's, as ``name=value`` or ``name``."""

    nodes: int = 1
    ranks_per_node: int = 1
    partition: str | None = None
    time: str | None = None
    gpus_per_node: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()


def batch_script(request: JobRequest, run: Path, command: Sequence[str], folder: Path) -> str:
    """The script that trains in ``run``: every rank executes ``command`` in ``folder``."""
    options = "\n".join(f"#SBATCH --{option}" for option in _options(request, run, folder))
    return TEMPLATE.format(run=_one_line(run), options=options, notice_s=NOTICE_S, command=shlex.join(command))


def _options(request: JobRequest, run: Path, folder: Path) -> Iterator[str]:
    yield f"job-name={shlex.quote(_one_line(Path(run.name)))}"
    yield f"nodes={request.nodes}"
    yield f"ntasks-per-node={request.ranks_per_node}"
    for name in ("partition", "time", "gpus_per_node", "account", "qos"):
        value, flag = getattr(request, name), name.replace("_", "-")
        if value is not None:
            yield f"{flag}={_checked(f'--{flag}', value)}"
    yield f"chdir={shlex.quote(_one_line(folder))}"
    # sbatch reads its lines of a script as a shell would, and takes % in a log's name for a pattern.
    yield f"output={shlex.quote(_one_line(run / 'logs' / 'slurm.log').replace('%', '%%'))}"
    yield from ("open-mode=append", "requeue", f"signal=B:USR1@{NOTICE_S}")
    for option in request.options:
        name, equals, value = option.partition("=")
        if not _OPTION.fullmatch(name):
            fix = "write it without dashes in front, for example --sbatch-option constraint=a100"
            raise UsageError(f"--sbatch-option {option!r} is not of the form name=value", fix=fix)
        yield f"{name}={_checked(f'--sbatch-option {name}', value)}" if equals else name


def _checked(what: str, value: str) -> str:
    if not _WORD.fullmatch(value):
        raise UsageError(f"{what} {value!r} is not a value for sbatch", fix="`man sbatch` lists what is")
    return value


def _one_line(path: Path) -> str:
    if "\n" in str(path):
        raise UsageError(f"{str(path)!r} has a line break in it", fix="choose a --save-dir without one")
    return str(path)


def training_command(python: str, task: str, settings: Mapping[str, Any], run: Path) -> list[str]:
    """``lockstep train`` with ``settings`` written out, which starts the run in ``run`` or resumes it."""
    pairs = [f"{key}={_as_yaml(value)}" for key, value in _flat(settings) if key not in {"save_dir", "task.name"}]
    sets = [part for pair in pairs for part in ("--set", pair)]
    return [python, "-m", "lockstep", "train", task, *sets, "--save-dir", str(run), "--resume"]


def _as_yaml(value: Any) -> str:
    """JSON, which YAML contains but for one thing: it knows no pairs of surrogates (YAML 1.2, section 5.7)."""

    def escaped(pair: re.Match[str]) -> str:
        character: str = json.loads(f'"{pair[0]}"')
        return f"\\U{ord(character):08x}"

    return _PAIR.sub(escaped, json.dumps(value))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and all(str(inner).isidentifier() for inner in value):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class Job(FileContent):
    """The content of ``slurm.json``."""

    id: int


def job_of(run: RunDir) -> Job | None:
    """The job that the run was submitted as, if it was."""
    return Job.read(run.slurm_file, max_bytes=4096)


def is_own_job(run: RunDir, environ: Mapping[str, str]) -> bool:
    """Whether this process is in the job that the run was submitted as: then no other process trains it.

    A job that was queued again keeps its number; its previous processes have ended.
    """
    job = job_of(run)
    return job is not None and environ.get("SLURM_JOB_ID") == str(job.id)
