"""``lockstep train … --on slurm``: the flags, and submitting instead of training here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from lockstep.errors import UsageError

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
