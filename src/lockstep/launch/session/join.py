"""The ranks of a session meet, and find or make the run's folder.

A script that makes a ``lockstep.Session`` runs in this process alone, on ranks that
:mod:`lockstep.launch.session.script` started, or on those of ``torchrun`` and ``srun``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lockstep.config import RunConfig
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.hardware import Placement, World, parent_death, read_world
from lockstep.launch.local.signals import StopRequest
from lockstep.launch.nodes.membership import Team, join, meeting
from lockstep.launch.prepare import place
from lockstep.launch.run_claim import claimed, existing_run, warn
from lockstep.launch.session.outside import agree_outside
from lockstep.launch.session.record import new_folder
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.sinks import check_sinks

#: Set by launchers that Lockstep does not know; each process would think that it is alone.
_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class Started:
    """A rank that Lockstep's launcher has started for a session, in the run's folder.

    Attributes:
        given: settings of the command line, which override those of the script.
        resumes: whether the run has an attempt already.
    """

    run: RunDir
    world: World
    stop: StopRequest
    given: Mapping[str, Any]
    resumes: bool


#: Of this process; see :func:`started_as`.
_started: list[Started] = []


def started_as(started: Started) -> None:
    """The sessions of this process run on ``started``."""
    _started[:] = [started]


def settings_of_launch() -> Mapping[str, Any]:
    """Settings that the command line gives to a session of this process."""
    return _started[0].given if _started else {}


@dataclass(frozen=True)
class Joined:
    """A rank of a session before its plan is made.

    Attributes:
        found: whether the run has been trained before, so that this attempt resumes it.
        keeps: whether this rank writes the run folder that it sees.
    """

    run: RunDir
    world: World
    config: RunConfig
    placement: Placement
    team: Team
    stop: StopRequest
    found: bool
    keeps: bool

    @property
    def collectives(self) -> Any:
        return self.team.collectives

    @property
    def run_dir(self) -> RunDir:
        return self.run

    def note(self, key: str, text: str, level: str = "info") -> None:
        """A remark before the run's log begins."""
        if self.world.is_main:
            warn(text)


def join_session(config: RunConfig, *, resume: bool, ending: ExitStack) -> Joined:
    """Meet the other ranks of this process, if any, and find or make the run's folder. Collective.

    Args:
        ending: undoes all of it.

    Raises:
        UsageError: the devices do not fit the processes, or the folder cannot be used.
    """
    world = read_world(os.environ)
    _refuse_unknown_launcher(world)
    _refuse_for_tasks_only(config)
    if world.from_outside:
        parent_death.die_with_parent(os.getppid())
    check_sinks(config, config.save_dir)
    team, store = ending.enter_context(meeting(world, config))
    stop = _started[0].stop if _started else ending.enter_context(StopRequest())
    if world.from_outside:
        run, placement, found, keeps = agree_outside(team, store, world, config, resume=resume, ending=ending)
    else:
        placement, keeps = place(config, World()), world.is_main
        _refuse_other_number(placement, world)
        run, found = _folder(config, resume, ending)
        if placement.backend == "nccl" and store is not None:
            join(store, "nccl", world, config.distributed.timeout_s, placement.devices)
    return Joined(run, world, config, placement, team, stop, found, keeps)


def _folder(config: RunConfig, resume: bool, ending: ExitStack) -> tuple[RunDir, bool]:
    if _started:
        return _started[0].run, _started[0].resumes
    existing = existing_run(config, resume)
    if existing is None:
        return new_folder(config), False
    ending.enter_context(claimed(existing))
    return existing, True


def _refuse_unknown_launcher(world: World) -> None:
    name = next((n for n in _OTHER_LAUNCHERS if os.environ.get(n, "1") != "1"), None)
    if world.size == 1 and world.launcher == "none" and name is not None:
        raise ConfigError(
            f"{name} is {os.environ[name]}, but RANK and WORLD_SIZE are not set",
            why="each process would train alone, with all samples, and write a separate run",
            fix="start the script with `lockstep run script.py --devices ...`, torchrun or srun",
        )


def _refuse_for_tasks_only(config: RunConfig) -> None:
    for key, value, taken in (
        ("hardware.strategy", config.hardware.strategy, ("auto", "single", "ddp", "fsdp")),
        ("training.compile", config.training.compile, (False,)),
    ):
        if value not in taken:
            raise UnsupportedError(
                f"{key} = {value} is not for a session",
                why="it changes how the model is called, and the loop calls it",
                fix="compile in the script with model.compile(), or train a lockstep.Task"
                if value is True
                else f"leave it at {taken[0]}, or train a lockstep.Task",
            )


def _refuse_other_number(placement: Placement, world: World) -> None:
    if placement.world_size != world.size:
        devices = ",".join(placement.devices)
        raise ConfigError(
            f"the session names {placement.world_size} devices ({devices}), and this is {world.size} process(es)",
            why="a process of a session is one rank with one device; only a launcher can start more",
            fix=f"start it with `lockstep run script.py --devices {devices}`, or torchrun --nproc_per_node="
            f"{placement.world_size}; in a notebook with lockstep.Session.launch(function, devices={devices!r})",
        )
