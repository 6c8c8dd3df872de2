"""``lockstep version``."""

from __future__ import annotations

import sys
from importlib import metadata

from cyclopts import App

from lockstep.cli.output import AsJson, print_json

LIBRARIES = ("numpy", "torchmetrics", "safetensors", "pydantic", "lightning", "tensorboard")

app = App(name="version", usage="Usage: lockstep version [OPTIONS]")


@app.default
def version(*, as_json: AsJson = False) -> None:
    """Print versions, without importing what they are of."""
    from lockstep.telemetry.records import versions
    from lockstep.telemetry.tables import print_table

    found = versions()
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if as_json:
        print_json(found, sys.stdout)
        return
    print_table(("what", "version"), list(found.items()), sys.stdout)
