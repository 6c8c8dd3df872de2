"""``lockstep verify``."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, deliver
from lockstep.cli.settings import FILES, NO_SETTINGS, Settings, to_mapping
from lockstep.cli.train import TaskName

EPILOGUE = """\
Examples:
  lockstep verify har --devices cpu,cpu                          # two CPU ranks
  lockstep verify my_task.py:MyTask --devices gpu:0,gpu:1 --steps 50
  lockstep verify har --devices cpu,cpu --reproducibility exact  # equal bit for bit?
  lockstep verify script.py --devices cpu,cpu                    # a script with a lockstep.Session

Exit codes: 0 equal, 1 different or not finite (the likely cause is named), 2 wrong usage.
The report goes to --save-dir (default: runs/verify-<id>): report.json, report.md and, with matplotlib, verify.png."""

app = App(name="verify", usage="Usage: lockstep verify [TASK] --devices DEVICE,... [OPTIONS]", help_epilogue=EPILOGUE)


@app.default
def verify(
    task: TaskName = None,
    /,
    *,
    steps: Annotated[int, Parameter(group=FILES, help="Optimizer steps of each run. Default: 24.")] = 24,
    eval_batches: Annotated[int, Parameter(group=FILES, help="Batches of each validation. Default: 8.")] = 8,
    settings: Annotated[Settings, Parameter(name="*")] = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Train the same steps on one device and on several, and compare the results."""
    name, mapping = to_mapping(settings, task)
    from lockstep.telemetry.files import check_place
    from lockstep.telemetry.tables import say
    from lockstep.verification import verify as run
    from lockstep.verification.report import print_report, write_report

    chosen = mapping.pop("save_dir", None)
    folder = (
        Path(chosen) if chosen else Path(mapping.get("runs_dir", DEFAULT_RUNS_DIR)) / f"verify-{uuid.uuid4().hex[:8]}"
    )
    check_place(folder)
    if name.endswith(".py"):
        from lockstep.verification.script import print_script_report, verify_script, write_script_report

        del mapping["task"]
        found = verify_script(
            Path(name), (), mapping, steps=steps, say=lambda line: say(f"running: {line}", sys.stderr)
        )
        return deliver(found, folder, write=write_script_report, show=print_script_report, as_json=as_json)
    report = run(
        name, mapping, steps=steps, eval_batches=eval_batches, say=lambda line: say(f"running: {line}", sys.stderr)
    )
    return deliver(report, folder, write=write_report, show=print_report, as_json=as_json)
