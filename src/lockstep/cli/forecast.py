"""``lockstep forecast``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.bench import finish, places, progress
from lockstep.cli.output import AsJson
from lockstep.cli.settings import NO_SETTINGS, Settings, to_mapping
from lockstep.cli.train import TaskName
from lockstep.errors import UsageError

app = App(
    name="forecast",
    usage="Usage: lockstep forecast [TASK] --gpus N,... [OPTIONS]",
    help_epilogue="Examples:\n  lockstep forecast har --devices gpu:0 --gpus 8,64,512\n"
    '  lockstep forecast my_task.py:MyTask --gpu "NVIDIA H100 80GB HBM3" --gpus 8,64 --interconnect nvlink,ib400\n'
    "  lockstep forecast har --devices cpu,cpu --gpus 1,2 --interconnect measured",
)


@app.default
def forecast(
    task: TaskName = None,
    /,
    *,
    gpus: Annotated[str, Parameter(help="Numbers of devices, comma-separated. Default: 8,64,512.", metavar="N,...")] = (
        "8,64,512"
    ),
    interconnect: Annotated[
        str,
        Parameter(
            help="nvlink or pcie inside nodes, 25gbe or ib400 between them, or measured: between the chosen devices. "
            "Default: nvlink,ib400.",
            metavar="NAME,...",
        ),
    ] = "nvlink,ib400",
    gpus_per_node: Annotated[int, Parameter(help="Devices of one machine. Default: 8.")] = 8,
    gpu: Annotated[
        str | None,
        Parameter(
            help="A hypothetical GPU, by its driver's name: its step is modelled. Default: measured on --devices.",
            metavar="NAME",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        Parameter(help="What each GPU has, such as 80GB, to choose the strategy. Default: not asked.", metavar="SIZE"),
    ] = None,
    steps: Annotated[int, Parameter(help="Measured steps of one device. Default: 30.")] = 30,
    repeats: Annotated[int, Parameter(help="How often they are measured. Default: 3.")] = 3,
    settings: Annotated[Settings, Parameter(name="*")] = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Predict throughput and scaling efficiency on more GPUs than you have, with error bars."""
    name, mapping = to_mapping(settings, task)
    save_dir, runs_dir = places(mapping)
    strategy = (mapping.get("hardware") or {}).pop("strategy", None)
    counts = [count.strip() for count in gpus.split(",")]
    if not all(count.isascii() and count.isdigit() for count in counts):
        raise UsageError(f"--gpus {gpus!r} is not a list of numbers", fix="write for example --gpus 8,64,512")
    from lockstep.bench.workload import Subject
    from lockstep.forecast.memory import check_strategy, parse_memory
    from lockstep.forecast.project import forecast as project
    from lockstep.forecast.scaling import Wish

    wish = Wish(
        tuple(map(int, counts)),
        interconnect,
        gpus_per_node,
        gpu,
        None if memory is None else parse_memory(memory),
        check_strategy(strategy, speed=True),
        steps,
        repeats,
    )
    report = project(Subject(name, mapping), wish, say=progress)
    return finish(report, save_dir, runs_dir, as_json)
