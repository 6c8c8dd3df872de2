"""``lockstep export``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import (
    DEFAULT_RUNS_DIR,
    AsJson,
    RunRef,
    RunsDir,
    checkpoint_choice,
    find,
    print_json,
)

app = App(
    name="export",
    usage="Usage: lockstep export RUN [OPTIONS]",
    help_epilogue="Example:\n  lockstep export last --out model --no-program",
)


@app.default
def export(
    run: RunRef,
    /,
    *,
    out: Annotated[
        Path | None, Parameter(help="Folder to write to, new or empty. Default: the folder export of the run.")
    ] = None,
    checkpoint: Annotated[
        str, Parameter(metavar="best|last|STEP", help="Which weights to export. Default: best.")
    ] = "best",
    program: Annotated[
        bool | None,
        Parameter(
            negative="--no-program",
            help="Also write the model as a torch.export program, which runs without the task's code. Default: on, "
            "unless it is a LightningModule without example_input_array.",
        ),
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Write the files and say which."""
    chosen = checkpoint_choice(checkpoint)
    found = find(run, runs_dir)
    from lockstep.launch.finished.export import export as write_export
    from lockstep.telemetry.console import value_text
    from lockstep.telemetry.tables import print_table

    result = write_export(found, out or found.path / "export", checkpoint=chosen, program=program)
    if as_json:
        print_json(result, sys.stdout)
        return
    rows = [
        (name, ", ".join(value) if isinstance(value, list) else value_text(value)) for name, value in result.items()
    ]
    print_table(("", ""), rows, sys.stdout)
