"""``lockstep doctor``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunsDir, print_json

EPILOGUE = """\
Examples:
  lockstep doctor                                    # every GPU, or two ranks on the CPU where there is none
  lockstep doctor --devices gpu:0,gpu:0              # one GPU, with two ranks on it
  lockstep doctor --quick --json                     # look only; start no rank
  torchrun --nproc_per_node=2 -m lockstep doctor     # the ranks of torchrun or srun, on all their nodes

Exit codes: 0 nothing fails, 1 a check fails (its fix is printed), 2 wrong usage. Nothing is left behind."""

app = App(name="doctor", usage="Usage: lockstep doctor [OPTIONS]", help_epilogue=EPILOGUE)


@app.default
def doctor(
    *,
    devices: Annotated[
        str | None,
        Parameter(
            help="Devices as for `lockstep train`. Default: every GPU, or cpu,cpu where there is none.",
            metavar="DEVICE,...",
        ),
    ] = None,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    quick: Annotated[bool, Parameter(negative="", help="Start no ranks and no training.")] = False,
    as_json: AsJson = False,
) -> int:
    """Check whether this machine is ready for training on several devices; every finding with its fix."""
    from lockstep.doctor.examine import examine
    from lockstep.doctor.report import print_report
    from lockstep.hardware.world import read_world
    from lockstep.telemetry.tables import say

    report = examine(devices, runs_dir=runs_dir, quick=quick, say=lambda line: say(line, sys.stderr))
    if not read_world(os.environ).is_main:
        return 0  # rank 0 reports for all
    if as_json:
        print_json(report.as_dict(), sys.stdout)
    else:
        print_report(report, sys.stdout)
    return report.exit_code
