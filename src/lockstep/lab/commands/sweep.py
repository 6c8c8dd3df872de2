"""`lockstep sweep`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter

from lockstep.cli.output import AsJson, answer, progress, verb
from lockstep.cli.settings import NO_SETTINGS, Flags, TaskName, to_mapping
from lockstep.lab.sweep.space import SweepOptions, split_sets
from lockstep.launch.process.signals import held_back
from lockstep.telemetry.console import print_table, say, value_text

SWEEP = """\
Examples:
  lockstep sweep har --set optimizer.lr=1e-4,3e-4,1e-3 --seeds 5
  lockstep sweep my_task.py:MyTask --set training.batch_size=32,64 --devices all   # a trial on each GPU
  lockstep sweep har --set optimizer.lr=log:1e-5..1e-2 --search optuna --trials 30
  lockstep sweep har --seeds 5 --save-dir runs/seeds --resume                  # train the remaining trials

A --set with several values, KEY=A,B, is varied; a list in brackets is one value. Each trial is an ordinary run in
--runs-dir with the sweep's name as a tag: `lockstep compare` and `report` take it.
Exit codes: 0 done, 1 a trial failed, 130 or 143 stopped: the same command with --save-dir and --resume continues."""


@verb("[TASK] --set KEY=A,B,... [OPTIONS]", SWEEP)
def sweep(
    task: TaskName = None,
    /,
    *,
    options: Annotated[SweepOptions, Parameter(name="*")] = SweepOptions(),  # noqa: B008
    settings: Flags = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    space, fixed = split_sets(settings.set or ())
    name, mapping = to_mapping(dataclasses.replace(settings, set=fixed), task)
    with held_back():  # a signal in the middle of importing torch would abort the interpreter
        from lockstep.lab.sweep.sweep import run_sweep

    result = run_sweep(name, mapping, space, options, partial(progress, doing="sweep"))
    grouping = result.groups(list(space))
    document: dict[str, Any] = {"sweep": result.folder.name, "folder": str(result.folder), "failed": result.failed}
    columns, rows = grouping.table(value_text)
    answer({**document, **grouping.as_dict()}, partial(print_table, columns, rows), as_json)
    if not as_json:
        say(f"sweep: {result.folder.name}", sys.stdout)
    if result.exit_code:
        again = [word for word in sys.argv[1:] if word != "--resume"]
        again += [] if "save_dir" in mapping else ["--save-dir", str(result.folder)]
        say(f"to train the remaining trials: lockstep {shlex.join([*again, '--resume'])}", sys.stderr)
    return result.exit_code
