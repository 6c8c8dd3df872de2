"""``lockstep evaluate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

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
    name="evaluate",
    usage="Usage: lockstep evaluate RUN [OPTIONS]",
    help_epilogue="Example:\n  lockstep evaluate last --split val --checkpoint last",
)


@app.default
def evaluate(
    run: RunRef,
    /,
    *,
    split: Annotated[Literal["test", "val"], Parameter(help="Which data to evaluate on. Default: test.")] = "test",
    data: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="Evaluate on other data than the run's, such as a manifest of recordings."),
    ] = None,
    checkpoint: Annotated[
        str, Parameter(metavar="best|last|STEP", help="Which weights to evaluate. Default: best.")
    ] = "best",
    devices: Annotated[
        str | None,
        Parameter(
            help="Devices by name, comma-separated: any number gives the same metrics. Default: the first of the run.",
            metavar="DEVICE,...",
        ),
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Print the metrics of a checkpoint."""
    chosen = checkpoint_choice(checkpoint)
    found = find(run, runs_dir)
    from lockstep.telemetry.console import value_text
    from lockstep.telemetry.tables import print_table

    how: dict[str, Any] = {"split": split, "devices": devices, "checkpoint": chosen, "data": data}
    if found.cli_config_file.exists():
        from lockstep.lightning import finished

        result = finished.evaluate(found, **how)
    else:
        from lockstep.launch import api

        result = api.evaluate(found, **how)
    if as_json:
        print_json(result, sys.stdout)
        return
    rows = {**result, **result.get("metrics", {})}
    rows.pop("metrics", None)
    print_table(("", ""), [(name, value_text(value)) for name, value in rows.items()], sys.stdout)
