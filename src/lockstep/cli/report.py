"""``lockstep report``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunsDir, print_json

app = App(
    name="report",
    usage="Usage: lockstep report RUN… [OPTIONS]",
    help_epilogue="Example:\n  lockstep report last\n  lockstep report last runs/bench-scaling-5e6f7a8b --out page",
)


@app.default
def report(
    *runs: Annotated[
        str, Parameter(help="Runs (folder, id, beginning of an id, `last`) and folders of `lockstep bench`.")
    ],
    out: Annotated[
        Path | None, Parameter(help="Folder for report.html and pictures. Default: the folder report of the first one.")
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Write one HTML page that needs no network, and its pictures as PNG files."""
    from lockstep.errors import UsageError
    from lockstep.report.write import write_report

    if not runs:
        raise UsageError("no run was named", fix="lockstep report last; `lockstep runs` lists them")
    written = write_report(runs, runs_dir, out)
    if as_json:
        print_json({"files": [str(path) for path in written]}, sys.stdout)
    else:
        sys.stdout.writelines(f"{path}\n" for path in written)
