"""``lockstep train``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import ACCEPT_DATA
from lockstep.cli.settings import FILES, NO_SETTINGS, Settings, to_mapping
from lockstep.cli.submit import NO_SUBMIT, SubmitFlags, refuse_without_slurm, submit
from lockstep.launch.local.signals import held_back

EPILOGUE = """\
Examples:
  lockstep train har                                   # gpu:0 if there is one, else the CPU
  lockstep train har --devices all --epochs 10         # every GPU
  lockstep train har --devices cpu,cpu                 # a dry run: two CPU ranks
  lockstep train har --config configs/har/two_gpu.yaml --lr 2e-3
  lockstep train my_task.py:MyTask --save-dir runs/mine --resume
  torchrun --nproc_per_node=2 -m lockstep train har    # each process is a rank
  lockstep train har --nodes 2 --rdzv node1:29400      # the same command on two machines

Ctrl-C once ends the run with a checkpoint; `lockstep resume last` resumes it."""

TaskName = Annotated[
    str | None,
    Parameter(
        name="task",
        help="What to train: har, path/to/file.py:Class or package.module:Class. Default: task.name of --config.",
    ),
]

app = App(name="train", usage="Usage: lockstep train [TASK] [OPTIONS]", help_epilogue=EPILOGUE)


@app.default
def train(
    task: TaskName = None,
    /,
    *,
    settings: Annotated[Settings, Parameter(name="*")] = NO_SETTINGS,
    resume: Annotated[
        bool,
        Parameter(negative="", group=FILES, help="Resume the unfinished run in --save-dir, if there is one."),
    ] = False,
    accept_data: Annotated[bool, Parameter(negative="", group=FILES, help=ACCEPT_DATA)] = False,
    cluster: Annotated[SubmitFlags, Parameter(name="*")] = NO_SUBMIT,
) -> int:
    """Train a task; the exit code of the run."""
    refuse_without_slurm(cluster)
    name, mapping = to_mapping(settings, task)
    if cluster.on is not None:
        return submit(name, mapping, cluster)
    with held_back():  # a signal in the middle of importing torch would abort the interpreter
        from lockstep.launch.api import train as start

    return start(name, mapping, resume=resume, accept_data=accept_data).exit_code
