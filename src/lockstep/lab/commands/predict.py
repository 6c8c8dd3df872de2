"""`lockstep memory` and `lockstep forecast`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from lockstep.cli.output import AsJson, answer, flag, progress, report_folder, verb
from lockstep.cli.settings import NO_SETTINGS, Flags, TaskName, numbers, to_mapping
from lockstep.errors import UsageError
from lockstep.lab.commands.bench import finish


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
        str | None, flag("Memory of each device, such as 80GB. Default: that of the chosen devices.", "SIZE")
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
    chosen_strategy = check_strategy(strategy)
    estimate = estimate_memory(Subject(name, mapping), gpus=gpus, limit=limit, strategy=chosen_strategy)
    answer(estimate, partial(print_memory, estimate), as_json)


@verb(
    "[TASK] --gpus N,... [OPTIONS]",
    "Examples:\n  lockstep forecast har --devices gpu:0 --gpus 8,64,512\n"
    '  lockstep forecast my_task.py:MyTask --gpu "NVIDIA H100 80GB HBM3" --gpus 8,64 --interconnect nvlink,ib400',
)
def forecast(
    task: TaskName = None,
    /,
    *,
    gpus: Annotated[str, flag("Numbers of devices, comma-separated. Default: 8,64,512.", "N,...")] = ("8,64,512"),
    interconnect: Annotated[
        str | None,
        flag(
            "nvlink or pcie inside nodes, 25gbe or ib400 between them. Default: nvlink,ib400; between CPUs 25gbe.",
            "NAME,...",
        ),
    ] = None,
    gpus_per_node: Annotated[int, flag("Devices of one machine. Default: 8.")] = 8,
    gpu: Annotated[
        str | None,
        flag("A hypothetical GPU, by its driver's name: its step is modelled. Default: measured on --devices.", "NAME"),
    ] = None,
    memory: Annotated[
        str | None, flag("Memory of each GPU, such as 80GB, to choose the strategy. Default: not checked.", "SIZE")
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
    from lockstep.lab.forecast.project import Wish
    from lockstep.lab.forecast.project import forecast as project

    limit = None if memory is None else parse_memory(memory)
    chosen_strategy = check_strategy(strategy, speed=True)
    wish = Wish(
        gpus=tuple(counts),
        interconnect=interconnect,
        per_node=gpus_per_node,
        gpu=gpu,
        memory=limit,
        strategy=chosen_strategy,
        steps=steps,
        repeats=repeats,
    )
    return finish(project(Subject(name, mapping), wish, say=progress), folder, as_json)
