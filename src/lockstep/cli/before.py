"""Commands before a run: ``plan`` and ``verify``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.cli.output import AsJson, deliver, flag, print_json, progress, report_folder, verb
from lockstep.cli.settings import (
    FILES,
    NO_SETTINGS,
    Flags,
    ScriptArguments,
    TaskName,
    fork_ranks_from_here,
    refuse_arguments,
    to_mapping,
)
from lockstep.config.load import devices_in
from lockstep.telemetry.console import duration, print_plan, say

if TYPE_CHECKING:
    from lockstep.planning import Plan

#: How often `lockstep verify` starts ranks, at most without more runs for a diagnosis.
_VERIFY_LAUNCHES = 6


@verb("[TASK] [OPTIONS]", "Example:\n  lockstep plan har --devices gpu:0,gpu:1 --batch-size 64")
def plan(task: TaskName = None, /, *, settings: Flags = NO_SETTINGS, as_json: AsJson = False) -> None:
    name, mapping = to_mapping(settings, task)
    from lockstep.launch.prepare import prepare

    inputs = prepare(name, mapping)
    made = inputs.plan
    if as_json:
        print_json(made.as_dict())
        return
    print_plan(made.as_dict(), sys.stdout)
    say(made.effective_batch_label, sys.stdout)
    say(_expected_time(made, inputs.config.runs_dir), sys.stdout)
    for note in made.notes:
        say(f"{'note' if note.level == 'info' else note.level}: {note}", sys.stdout)


def _expected_time(plan: Plan, runs_dir: Path) -> str:
    """Describe how long the run takes, at the speed of the newest run of this task on the same devices."""
    from lockstep.planning.schedule import DEV_STEPS
    from lockstep.rundir.files import last_row
    from lockstep.rundir.summary import read_runs, summarize

    placement = (plan.placement["devices"], plan.placement["precision"])
    for run, record in read_runs(runs_dir):
        if record.task != plan.task.name:
            continue
        summary = summarize(run, record)
        speed = summary["samples_per_s"]
        if speed and (summary["step"] or 0) >= DEV_STEPS and (summary["devices"], summary["precision"]) == placement:
            epoch_s = plan.batch.samples / speed
            run_s = plan.total_steps * plan.batch.global_batch / speed
            share = (last_row(run.steps_file) or {}).get("data_wait_share")
            waiting = f", which waited for input {share:.0%} of the time" if isinstance(share, float) else ""
            return (
                f"an epoch takes about {duration(epoch_s)} and the run {duration(run_s)}, without evaluations, at the "
                f"{speed:,.0f} samples/s of {run.path.name}{waiting}"
            )
    return (
        "no time is known for this task on these devices: `train` with the same options and --fast-dev-run measures "
        f"{DEV_STEPS} steps, then `plan` shows the time of the run"
    )


VERIFY = """\
Examples:
  lockstep verify har --devices cpu,cpu                          # two CPU ranks
  lockstep verify my_task.py:MyTask --devices gpu:0,gpu:1 --steps 50
  lockstep verify har --devices cpu,cpu --reproducibility exact  # equal bit for bit?
  lockstep verify script.py --devices cpu,cpu -- --lr 0.1        # a script with a lockstep.Session

Exit codes: 0 equal, 1 different or not finite (the likely cause is named), 2 wrong usage.
The report goes to --save-dir (default: runs/verify-<id>): report.json."""


@verb("[TASK] --devices DEVICE,... [OPTIONS] [-- ARGUMENTS]", VERIFY)
def verify(
    task: TaskName = None,
    /,
    *arguments: ScriptArguments,
    steps: Annotated[int, flag("Optimizer steps of each run. Default: 24.", group=FILES)] = 24,
    eval_batches: Annotated[int, flag("Batches of each validation. Default: 8.", group=FILES)] = 8,
    settings: Flags = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    refuse_arguments(task, arguments)
    name, mapping = to_mapping(settings, task)
    folder = report_folder(mapping, "verify")
    from lockstep.verification import verify as run
    from lockstep.verification.report import print_report, write_report

    fork_ranks_from_here(devices_in(mapping), script=name.endswith(".py"), launches=_VERIFY_LAUNCHES)
    say = partial(progress, doing="running")
    if name.endswith(".py"):
        from lockstep.verification.script import print_script_report, verify_script

        del mapping["task"]
        script_report = verify_script(Path(name), arguments, mapping, steps=steps, say=say)
        return deliver(script_report, folder, write=write_report, show=print_script_report, as_json=as_json)
    report = run(name, mapping, steps=steps, eval_batches=eval_batches, say=say)
    return deliver(report, folder, write=write_report, show=print_report, as_json=as_json)
