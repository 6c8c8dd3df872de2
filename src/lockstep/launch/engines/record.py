"""The record of a submitted job, ``job.json`` in the run folder: which engine has it, under which name.

The user's list (:mod:`lockstep.config.named`) has the job too: a run folder from elsewhere could name any job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import Field

from lockstep.config.named import Reference, named
from lockstep.launch.engines.spec import JobHandle, find_engine
from lockstep.rundir.files import FileContent, write_json
from lockstep.rundir.folder import RunDir


class JobRecord(FileContent):
    """The content of ``job.json``."""

    engine: str
    #: Engines pass it to their commands: no option.
    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]*$", max_length=256)


def write_handle(handle: JobHandle) -> None:
    """Record the job in its run folder. Raises :class:`StorageError`."""
    record = JobRecord(engine=handle.engine, id=handle.id)
    write_json(RunDir(handle.run_folder).job_file, record.model_dump())
    named.add([_reference(handle)])


def _reference(handle: JobHandle) -> Reference:
    name = json.dumps([handle.engine, handle.id, str(handle.run_folder.resolve())])
    return Reference(setting="job.json", value=handle.id, entry=f"job={name}")


def was_submitted_here(handle: JobHandle) -> bool:
    """Return whether the user submitted the job for this run folder on this machine, or with its home folder."""
    return not named.missing([_reference(handle)])


def handle_of(run: RunDir) -> JobHandle | None:
    """Return the job that the run was submitted as; ``None``: it was not submitted."""
    record = JobRecord.read(run.job_file, max_bytes=4096)
    return None if record is None else JobHandle(engine=record.engine, id=record.id, run_folder=run.path)


def is_own_job(run: RunDir, environ: Mapping[str, str]) -> bool:
    """Return whether this process is in the job that the run was submitted as: then no other process trains it.

    A job that was queued again keeps its name; its previous processes have ended.
    """
    handle = handle_of(run)
    return handle is not None and find_engine(handle.engine).current_job(environ) == handle.id
