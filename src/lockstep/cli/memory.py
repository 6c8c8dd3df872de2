"""``lockstep memory``."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import AsJson, print_json
from lockstep.cli.settings import NO_SETTINGS, Settings, to_mapping
from lockstep.cli.train import TaskName
from lockstep.errors import UsageError

app = App(
    name="memory",
    usage="Usage: lockstep memory [TASK] [OPTIONS]",
    help_epilogue="Examples:\n  lockstep memory har --devices cpu --batch-size 512\n"
    "  lockstep memory my_task.py:MyTask --gpus 8 --memory 80GB",
)


@app.default
def memory(
    task: TaskName = None,
    /,
    *,
    gpus: Annotated[
        int | None, Parameter(help="Number of hypothetical GPUs, instead of --devices. Default: none.")
    ] = None,
    memory: Annotated[
        str | None,
        Parameter(help="What each device has, such as 80GB. Default: what the chosen devices have.", metavar="SIZE"),
    ] = None,
    settings: Annotated[Settings, Parameter(name="*")] = NO_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """Print what each device will hold, by strategy, and the largest batch that fits; starts nothing."""
    name, mapping = to_mapping(settings, task)
    strategy = (mapping.get("hardware") or {}).pop("strategy", None)
    from lockstep.bench.workload import Subject
    from lockstep.forecast.estimate import estimate_memory, print_memory
    from lockstep.forecast.memory import MOST, check_strategy, parse_memory

    limit = None if memory is None else parse_memory(memory)
    if gpus is not None and not 1 <= gpus <= MOST:
        raise UsageError(f"invalid value for --gpus: {gpus} (must be 1 to {MOST:,})", fix="write for example --gpus 8")
    wanted = check_strategy(strategy)
    found = estimate_memory(Subject(name, mapping), gpus=gpus, limit=limit, strategy=wanted)
    if as_json:
        print_json(found, sys.stdout)
    else:
        print_memory(found, sys.stdout)
