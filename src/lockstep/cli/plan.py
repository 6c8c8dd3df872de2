"""``lockstep plan``."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import AsJson, print_json
from lockstep.cli.settings import NO_SETTINGS, Settings, to_mapping
from lockstep.cli.train import TaskName

app = App(
    name="plan",
    usage="Usage: lockstep plan [TASK] [OPTIONS]",
    help_epilogue="Example:\n  lockstep plan har --devices gpu:0,gpu:1 --batch-size 64",
)


@app.default
def plan(
    task: TaskName = None,
    /,
    *,
    settings: Annotated[Settings, Parameter(name="*")] = NO_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """Print the plan with its reasons."""
    name, mapping = to_mapping(settings, task)
    from lockstep.launch.api import make_plan
    from lockstep.telemetry.console import print_plan
    from lockstep.telemetry.tables import say

    made = make_plan(name, mapping)
    if as_json:
        print_json(made.as_dict(), sys.stdout)
        return
    print_plan(made.as_dict(), sys.stdout)
    say(made.effective_batch_label, sys.stdout)
    for note in made.notes:
        say(f"{'note' if note.level == 'info' else note.level}: {note}", sys.stdout)
