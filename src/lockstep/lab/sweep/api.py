"""Sweeps from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, Unpack

from lockstep.api.settings import Settings, mapping_of
from lockstep.config import RunConfig

if TYPE_CHECKING:
    from lockstep.engine.task import Task
    from lockstep.lab.sweep.sweep import Sweep


class SweepSettings(Settings, total=False):
    """The keywords of :func:`sweep`: common settings of all trials, and how they are trained."""

    seeds: int  # how many seeds each combination is trained with, from the run's seed upwards
    parallel: int | None  # trials at the same time
    search: Literal["grid", "optuna"]
    trials: int | None  # of a search
    resume: bool  # train the remaining trials of the sweep in save_dir
    on: Literal["ray"] | None  # trials on the resources of a Ray cluster
    ray_address: str | None
    ray_resource: list[str] | None


def sweep(
    task: Task | type[Task] | str,
    space: Mapping[str, Iterable[Any] | str] | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    **settings: Unpack[SweepSettings],
) -> Sweep:
    """Train ``task`` with each combination of settings and each seed; returns when all runs have ended.

    Example::

        sweep = lockstep.sweep(MyTask, {"optimizer.lr": [1e-4, 1e-3]}, seeds=5, epochs=3, devices="all")
        best = sweep.groups().groups[0]
        print(best.settings, best.mean, best.deviation)

    Each trial is a run in a separate process, with the sweep's name as a tag. Trials that fail are named in
    ``failed``, and the others are trained all the same.

    Args:
        task: as for :func:`lockstep.train`. A class or a name, where settings of the task are varied.
        space: values by the keys of settings, such as ``"task.width"``; for a search also ranges as text,
            ``"1e-5..1e-2"``, or ``"log:1e-5..1e-2"`` on a logarithmic scale.
        config: settings of all trials, as for :func:`lockstep.train`.
        settings: common settings by their short names; ``save_dir`` is the sweep's folder, and runs are in
            ``runs_dir``. ``seeds``: how many seeds each combination is trained with, from the run's ``seed`` upwards.
            ``parallel``: trials at the same time, each with as many of ``devices``; default: one on each GPU, or one on
            the CPU. Trials share a GPU only if it is named several times. ``search="optuna"`` chooses ``trials`` points
            (default: 20), and stops trials whose evaluations are worse than the median. ``resume=True`` trains the
            remaining trials of the sweep in ``save_dir``; if there is none, it starts one. ``on="ray"``: trials on the
            free resources of a Ray cluster, each with one GPU or CPU for each of ``devices``.

    Raises:
        UsageError: the task, a setting or the space is wrong; nothing was started.
        UnsupportedError: optuna is not installed.
    """
    from lockstep.lab.sweep.space import SweepOptions, checked
    from lockstep.lab.sweep.sweep import run_sweep

    names = {field.name for field in fields(SweepOptions)}
    options = SweepOptions(**{name: value for name, value in settings.items() if name in names})  # type: ignore[arg-type]
    common = {name: value for name, value in settings.items() if name not in names}
    return run_sweep(task, mapping_of(config, common), checked(space or {}), options, lambda line: None)
