"""``lockstep stop``."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import DEFAULT_RUNS_DIR, RunRef, RunsDir, find

app = App(
    name="stop",
    usage="Usage: lockstep stop RUN [OPTIONS]",
    help_epilogue="The run ends after the current step; `lockstep resume RUN` resumes it.",
)


@app.default
def stop(
    run: RunRef,
    /,
    *,
    timeout: Annotated[float, Parameter(help="How long to wait for its end, in seconds. Default: 60.")] = 60.0,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Stop a run and print what became of it."""
    found = find(run, runs_dir)
    from lockstep.launch import api as launcher
    from lockstep.launch.slurm import job_control
    from lockstep.launch.slurm.job import job_of
    from lockstep.telemetry.tables import say

    job = job_of(found)
    became = job_control.stop(found, job, timeout) if job is not None else launcher.stop(found, timeout)
    say(f"{found.read().id}: {became}", sys.stdout)
