"""``lockstep train``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import App, Group, Parameter

from lockstep.cli.output import ACCEPT_DATA
from lockstep.cli.settings import FILES, NO_SETTINGS, Settings, to_mapping
from lockstep.errors import UsageError
from lockstep.launch.local.signals import held_back

_SLURM = Group("On a cluster", sort_key=6)


def _flag(help: str, **more: Any) -> Parameter:
    return Parameter(help=help, group=_SLURM, negative="", **more)


@dataclass(frozen=True, kw_only=True)
class SubmitFlags:
    """What the flags say; ``None`` where a flag was not given."""

    on: Annotated[
        Literal["slurm"] | None,
        _flag("slurm: submit the training with sbatch and follow its log; --nodes says on how many nodes."),
    ] = None
    partition: Annotated[str | None, _flag("SLURM's partition. Default: the cluster's.")] = None
    time: Annotated[
        str | None,
        _flag("SLURM's time limit, e.g. 4:00:00; the run saves before it, is requeued and resumes.", metavar="TIME"),
    ] = None
    gpus_per_node: Annotated[
        str | None, _flag("GPUs on each node, a rank each: 4, or a100:4. Default: none.", metavar="[TYPE:]N")
    ] = None
    account: Annotated[str | None, _flag("SLURM's account. Default: yours.")] = None
    qos: Annotated[str | None, _flag("SLURM's quality of service. Default: the cluster's.")] = None
    sbatch_option: Annotated[
        list[str] | None,
        _flag("Any other option of sbatch, e.g. cpus-per-task=8. May be repeated.", metavar="NAME=VALUE"),
    ] = None
    print: Annotated[bool, _flag("Print the batch script and submit nothing.")] = False


NO_SUBMIT = SubmitFlags()


def refuse_without_slurm(flags: SubmitFlags) -> None:
    """Raise :class:`UsageError` for flags that mean something with ``--on slurm`` only."""
    given = [field.name for field in dataclasses.fields(flags) if field.name != "on" and getattr(flags, field.name)]
    if given and flags.on is None:
        raise UsageError(
            f"--{given[0].replace('_', '-')} is for a cluster", fix="add --on slurm, or leave it out to train here"
        )


def submit(name: str, mapping: Mapping[str, Any], flags: SubmitFlags) -> int:
    """Submit, and follow the job to its end; the exit code of the run."""
    from lockstep.launch.slurm import job_control

    script, config = job_control.prepare_script(name, mapping, _resources(flags))
    if flags.print:
        sys.stdout.write(script)
        return 0
    run, job = job_control.submit(script, config)
    sys.stdout.write(f"slurm job {job.id} → {run.path}\n")
    return job_control.follow(run, job, sys.stdout)


def _resources(flags: SubmitFlags) -> dict[str, Any]:
    """The flags as fields of :class:`lockstep.launch.slurm.job.Request`."""
    names = ("partition", "time", "gpus_per_node", "account", "qos")
    return {**{name: getattr(flags, name) for name in names}, "options": tuple(flags.sbatch_option or ())}


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
