"""Which SLURM job a run was submitted as: ``slurm.json`` in its folder."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from lockstep.errors import RunFolderError
from lockstep.telemetry.files import read_json
from lockstep.telemetry.rundir import RunDir


class Job(BaseModel):
    """The content of ``slurm.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: int


def job_of(run: RunDir) -> Job | None:
    """The job that the run was submitted as, if it was."""
    try:
        return Job.model_validate(read_json(run.slurm_file, max_bytes=4096))
    except (RunFolderError, ValidationError):
        return None


def is_own_job(run: RunDir, environ: Mapping[str, str]) -> bool:
    """Whether this process is in the job that the run was submitted as: then nobody else is at the run.

    A job that was queued again has a number of its own still; its processes of the time before are gone.
    """
    job = job_of(run)
    return job is not None and environ.get("SLURM_JOB_ID") == str(job.id)
