"""``lockstep predict``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunRef, RunsDir, checkpoint_choice, find, print_json

app = App(
    name="predict",
    usage="Usage: lockstep predict RUN [DATA] [OPTIONS]",
    help_epilogue="Example:\n  lockstep predict last test --devices cpu,cpu --out predictions.csv",
)


@app.default
def predict(
    run: RunRef,
    data: Annotated[str, Parameter(help="train, val or test, or a file or folder of data. Default: test.")] = "test",
    /,
    *,
    out: Annotated[
        Path | None,
        Parameter(
            metavar="FILE",
            help="File to write, ending in .csv, .jsonl or .parquet. Default: predictions-DATA.csv in the run folder.",
        ),
    ] = None,
    checkpoint: Annotated[
        str, Parameter(metavar="best|last|STEP", help="Which weights to use. Default: best.")
    ] = "best",
    devices: Annotated[
        str | None,
        Parameter(
            help="Devices by name, comma-separated: any number gives the same file. Default: the first of the run.",
            metavar="DEVICE,...",
        ),
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Write a row for each sample, in the order of the data.

    The same command resumes an interrupted prediction.
    """
    chosen = checkpoint_choice(checkpoint)
    found = find(run, runs_dir)
    from lockstep.launch.finished.predict import predict as write_predictions
    from lockstep.telemetry.tables import print_table

    result = write_predictions(found, data, out, devices=devices, checkpoint=chosen)
    if as_json:
        print_json(result, sys.stdout)
        return
    print_table(("", ""), [(name, str(value)) for name, value in result.items()], sys.stdout)
