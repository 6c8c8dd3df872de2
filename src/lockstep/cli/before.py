"""What is asked before a run: its plan, its memory, its speed on other devices, the same results on several."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from lockstep.cli.bench import finish
from lockstep.cli.output import AsJson, answer, deliver, flag, print_json, progress, report_folder, verb
from lockstep.cli.settings import (
    FILES,
    NO_SETTINGS,
    Flags,
    ScriptArguments,
    TaskName,
    fork_ranks_from_here,
    numbers,
    refuse_arguments,
    to_mapping,
)
from lockstep.errors import UsageError
from lockstep.telemetry.console import print_plan, say


@verb("[TASK] [OPTIONS]", "Example:\n  lockstep plan har --devices gpu:0,gpu:1 --batch-size 64")
def plan(task: TaskName = None, /, *, settings: Flags = NO_SETTINGS, as_json: AsJson = False) -> None:
    name, mapping = to_mapping(settings, task)
    from lockstep.launch.prepare import prepare

    made = prepare(name, mapping).plan
    if as_json:
        print_json(made.as_dict())
        return
    print_plan(made.as_dict(), sys.stdout)
    say(made.effective_batch_label, sys.stdout)
    for note in made.notes:
        say(f"{'note' if note.level == 'info' else note.level}: {note}", sys.stdout)


@verb(
    "[TASK] [OPTIONS]",
    "Examples:\n  lockstep memory har --devices cpu --batch-size 512\n"
    "  lockstep memory my_task.py:MyTask --gpus 8 --memory 80GB",
)
def memory(
    task: TaskName = None,
    /,
    *,
    gpus: Annotated[int | None, flag("Number of hypothetical GPUs, instead of --devices. Default: none.")] = None,
    memory: Annotated[
        str | None, flag("What each device has, such as 80GB. Default: what the chosen devices have.", "SIZE")
    ] = None,
    settings: Flags = NO_SETTINGS,
    as_json: AsJson = False,
) -> None:
    name, mapping = to_mapping(settings, task)
    strategy = (mapping.get("hardware") or {}).pop("strategy", None)
    from lockstep.lab.bench.trials import Subject
    from lockstep.lab.forecast.memory import MOST, check_strategy, estimate_memory, parse_memory, print_memory

    limit = None if memory is None else parse_memory(memory)
    if gpus is not None and not 1 <= gpus <= MOST:
        raise UsageError(f"invalid value for --gpus: {gpus} (must be 1 to {MOST:,})", fix="write for example --gpus 8")
    wanted = check_strategy(strategy)
    found = estimate_memory(Subject(name, mapping), gpus=gpus, limit=limit, strategy=wanted)
    answer(found, partial(print_memory, found), as_json)


@verb(
    "[TASK] --gpus N,... [OPTIONS]",
    "Examples:\n  lockstep forecast har --devices gpu:0 --gpus 8,64,512\n"
    '  lockstep forecast my_task.py:MyTask --gpu "NVIDIA H100 80GB HBM3" --gpus 8,64 --interconnect nvlink,ib400\n'
    "  lockstep forecast har --devices cpu,cpu --gpus 1,2 --interconnect measured",
)
def forecast(
    task: TaskName = None,
    /,
    *,
    gpus: Annotated[str, flag("Numbers of devices, comma-separated. Default: 8,64,512.", "N,...")] = ("8,64,512"),
    interconnect: Annotated[
        str,
        flag(
            "nvlink or pcie inside nodes, 25gbe or ib400 between them, or measured: between the chosen devices. "
            "Default: nvlink,ib400.",
            "NAME,...",
        ),
    ] = "nvlink,ib400",
    gpus_per_node: Annotated[int, flag("Devices of one machine. Default: 8.")] = 8,
    gpu: Annotated[
        str | None,
        flag("A hypothetical GPU, by its driver's name: its step is modelled. Default: measured on --devices.", "NAME"),
    ] = None,
    memory: Annotated[
        str | None, flag("What each GPU has, such as 80GB, to choose the strategy. Default: not asked.", "SIZE")
    ] = None,
    steps: Annotated[int, flag("Measured steps of one device. Default: 30.")] = 30,
    repeats: Annotated[int, flag("How often they are measured. Default: 3.")] = 3,
    settings: Flags = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    name, mapping = to_mapping(settings, task)
    folder = report_folder(mapping, "bench-forecast")
    strategy = (mapping.get("hardware") or {}).pop("strategy", None)
    counts = numbers("--gpus", gpus, "8,64,512")
    from lockstep.lab.bench.trials import Subject
    from lockstep.lab.forecast.memory import check_strategy, parse_memory
    from lockstep.lab.forecast.project import forecast as project
    from lockstep.lab.forecast.scaling import Wish

    limit = None if memory is None else parse_memory(memory)
    wanted = check_strategy(strategy, speed=True)
    wish = Wish(tuple(counts), interconnect, gpus_per_node, gpu, limit, wanted, steps, repeats)
    return finish(project(Subject(name, mapping), wish, say=progress), folder, as_json)


VERIFY = """\
Examples:
  lockstep verify har --devices cpu,cpu                          # two CPU ranks
  lockstep verify my_task.py:MyTask --devices gpu:0,gpu:1 --steps 50
  lockstep verify har --devices cpu,cpu --reproducibility exact  # equal bit for bit?
  lockstep verify script.py --devices cpu,cpu -- --lr 0.1        # a script with a lockstep.Session

Exit codes: 0 equal, 1 different or not finite (the likely cause is named), 2 wrong usage.
The report goes to --save-dir (default: runs/verify-<id>): report.json and, of a task, report.md and, with matplotlib,
verify.png."""


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

    fork_ranks_from_here(mapping, name, script=name.endswith(".py"))
    say = partial(progress, doing="running")
    if name.endswith(".py"):
        from lockstep.verification.script import print_script_report, verify_script, write_script_report

        del mapping["task"]
        found = verify_script(Path(name), arguments, mapping, steps=steps, say=say)
        return deliver(found, folder, write=write_script_report, show=print_script_report, as_json=as_json)
    report = run(name, mapping, steps=steps, eval_batches=eval_batches, say=say)
    return deliver(report, folder, write=write_report, show=print_report, as_json=as_json)
