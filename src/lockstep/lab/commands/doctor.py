"""`lockstep doctor`."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Annotated

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunsDir, answer, flag, verb
from lockstep.telemetry.console import say

DOCTOR = """\
Examples:
  lockstep doctor                                    # every GPU, or two ranks on the CPU without a GPU
  lockstep doctor --devices gpu:0,gpu:0              # one GPU, with two ranks on it
  lockstep doctor --quick --json                     # look only; start no rank
  torchrun --nproc_per_node=2 -m lockstep doctor     # the ranks of torchrun or srun, on all their nodes

Exit codes: 0 nothing fails, 1 a check fails (its fix is printed), 2 wrong usage. Nothing is left behind."""


@verb("[OPTIONS]", DOCTOR)
def doctor(
    *,
    devices: Annotated[
        str | None,
        flag("Devices as for `lockstep train`. Default: every GPU, or cpu,cpu without a GPU.", "DEVICE,..."),
    ] = None,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    quick: Annotated[bool, flag("Start no ranks and no training.")] = False,
    as_json: AsJson = False,
) -> int:
    from lockstep.hardware.world import read_world
    from lockstep.lab.doctor.examine import examine
    from lockstep.lab.doctor.report import print_report

    report = examine(devices, runs_dir=runs_dir, quick=quick, say=lambda line: say(line, sys.stderr))
    if not read_world(os.environ).is_main:
        return 0  # rank 0 reports for all
    answer(report.as_dict(), partial(print_report, report), as_json)
    return report.exit_code
