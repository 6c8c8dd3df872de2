"""``lockstep resume``."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter

from lockstep.cli.output import ACCEPT_DATA, DEFAULT_RUNS_DIR, RunRef, RunsDir, Sets, find
from lockstep.launch.local.signals import held_back

EPILOGUE = """\
The run resumes from its latest valid checkpoint, also in the middle of an epoch, with exactly the remaining
samples. On other devices the global batch does not change.

Examples:
  lockstep resume last
  lockstep resume run-1a2b3c4d --devices gpu:0
  lockstep resume last --epochs 40"""

app = App(name="resume", usage="Usage: lockstep resume RUN [OPTIONS]", help_epilogue=EPILOGUE)


@app.default
def resume(
    run: RunRef,
    /,
    *,
    devices: Annotated[
        str | None,
        Parameter(help="Devices by name, comma-separated. Default: those of the run so far.", metavar="DEVICE,..."),
    ] = None,
    epochs: Annotated[
        int | None, Parameter(help="Epochs in all, to train a completed run for longer. Default: the run's.")
    ] = None,
    rescale_batch: Annotated[
        bool,
        Parameter(negative="", help="Keep the batch per device instead of the global batch: another run from here on."),
    ] = False,
    accept_data: Annotated[bool, Parameter(negative="", help=ACCEPT_DATA)] = False,
    set: Sets = None,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> int:
    """Resume a run; the exit code of the run."""
    from lockstep.config import load

    overrides = load(sets=[*(set or ()), *([] if epochs is None else [f"training.epochs={epochs}"])])
    found = find(run, runs_dir)
    if found.cli_config_file.exists():
        from lockstep.lightning import finished

        return finished.resume(found, devices=devices, set=set, rescale_batch=rescale_batch, accept_data=accept_data)
    with held_back():  # a signal in the middle of importing torch would abort the interpreter
        from lockstep.launch import api as launcher
        from lockstep.launch.session.script import resume_session

    code = resume_session(found, overrides, devices)
    if code is not None:
        return code
    how: dict[str, Any] = {"devices": devices, "rescale_batch": rescale_batch, "accept_data": accept_data}
    return launcher.resume(found, overrides=overrides, **how).exit_code
