"""The ranks of a session meet, and find or make the run's folder.

A script that makes a ``lockstep.Session`` runs in this process alone, on ranks that
:mod:`lockstep.launch.session.script` started, or on those of ``torchrun`` and ``srun``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.config import RunConfig, merge
from lockstep.errors import ConfigError, UnsupportedError, many
from lockstep.hardware import Placement, World, read_world
from lockstep.launch.meeting.membership import Team, meeting
from lockstep.launch.meeting.preparation import agree_on_run, place_together
from lockstep.launch.meeting.supervision import Supervision, supervise
from lockstep.launch.prepare import placement_of
from lockstep.launch.process.signals import Stopped
from lockstep.launch.run_claim import create_folder, warn
from lockstep.launch.session.started import Started, close_open_session, started
from lockstep.rundir.folder import RunDir
from lockstep.rundir.origin import Script
from lockstep.telemetry.sinks import check_sinks

#: Set by launchers that Lockstep does not know; each process would think that it is alone.
_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
#: Settings that a loop has no use for, each with its replacement.
_FOR_TASKS = {
    "hardware.strategy": "leave it at auto",
    "training.compile": "compile in the script with torch.compile(model)",
    "telemetry.profile": "use torch.profiler in the loop",
    "debug.fast_dev_run": "set training.max_steps=1",
    "debug.limit_eval_batches": "give session.evaluate() a torch.utils.data.Subset",
    "debug.overfit_batches": "give session.batches() a torch.utils.data.Subset",
    "debug.start_position": "give session.batches() a torch.utils.data.Subset",
    "debug.switch_off": "set dropout to 0 in the script",
}
_STRATEGIES = ("single", "ddp", "fsdp")


def end_script(code: int) -> NoReturn:
    """End the session and its process."""
    close_open_session(None)
    raise Stopped(code)


def with_settings_of_launch(script_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``script_settings``, overridden by those that its ranks were started with.

    Raises :class:`ConfigError`: one of the script is for the launcher, which has started without it.
    """
    if not started:
        return dict(script_settings)
    chosen = started[0].settings
    defaults = RunConfig().launch.model_dump()
    for key, value in script_settings.get("launch", {}).items():
        if key not in chosen.get("launch", {}) and value != defaults.get(key, value):
            raise ConfigError(
                f"launch.{key} = {value} has no effect in lockstep.Session(...)",
                why="it is for the launcher, which had started before the script made its session",
                fix=f"give it where the ranks are started: lockstep run script.py --set launch.{key}={value}, or "
                f"Session.launch(function, config={{'launch.{key}': {value!r}}})",
            )
    return merge(script_settings, chosen)


@dataclass(frozen=True)
class Joined:
    """A rank of a session before its plan is made.

    ``is_resume``: the run has been trained before. ``ending`` leaves the ranks and the folder.
    """

    run_dir: RunDir
    world: World
    placement: Placement
    team: Team
    supervision: Supervision
    is_resume: bool
    ending: ExitStack

    @property
    def collectives(self) -> Any:
        return self.team.collectives

    def note(self, key: str, text: str, level: str = "info") -> None:
        """Add a remark before the run's log begins."""
        if self.world.is_main:
            warn(text)


def join_session(config: RunConfig, *, resume: bool, ending: ExitStack) -> Joined:
    """Meet the other ranks of this process, if any, and find or make the run's folder. Collective.

    ``ending`` undoes all of it. Raises :class:`UsageError`: the devices do not fit the processes, or the folder cannot
    be used.
    """
    world = read_world(os.environ)
    _refuse_unknown_launcher(world)
    _refuse_for_tasks_only(config)
    team = ending.enter_context(meeting(world, config))
    team.together(lambda: check_sinks(config, config.save_dir), here=world.is_main)
    placement = place_together(team, config) if world.from_outside else _local_placement(config, world)
    if started:
        run, is_resume = _launched_run(started[0])
        if world.is_main and config.save_dir is not None and config.save_dir.resolve() != run.path.resolve():
            warn(
                f"save_dir={config.save_dir} has no effect under `lockstep run`: use --save-dir. The run is {run.path}."
            )
    else:
        agreed = agree_on_run(team, config, resume=resume, claim=ending)
        run = agreed.run
        is_resume = agreed.is_resume
        team.together(lambda: _new_folder(config, agreed.run_id), here=world.is_main and not is_resume)
    supervision = supervise(team, run, config, placement.as_dict(), started[0].rank if started else None, ending)
    return Joined(run, world, placement, team, supervision, is_resume, ending)


def _local_placement(config: RunConfig, world: World) -> Placement:
    """Place ranks on this machine. Raises :class:`ConfigError`: it has another number of ranks than ``world``."""
    placement = placement_of(config, World())
    if placement.world_size != world.size:
        devices = ",".join(placement.devices)
        raise ConfigError(
            f"the session names {placement.world_size} devices ({devices}), and this is {many(world.size, 'process')}",
            why="a process of a session is one rank with one device; only a launcher can start more",
            fix=f"start it with `lockstep run script.py --devices {devices}`, or torchrun --nproc_per_node="
            f"{placement.world_size}; in a notebook with lockstep.Session.launch(function, devices={devices!r})",
        )
    return placement


def _launched_run(launch: Started) -> tuple[RunDir, bool]:
    """Return the run that the launcher's caller has made, for its one session, and whether it is resumed."""
    if launch.has_session:
        raise UnsupportedError(
            "the script makes a second lockstep.Session",
            why="`lockstep run` and Session.launch start one run, whose folder has the checkpoints of one session",
            fix="prepare all models and optimizers with one session; or start the script once for each session, "
            "for example with the number of the fold as its argument",
        )
    launch.has_session = True
    launch.on_session()
    return launch.rank.folder, launch.resumes


def _refuse_unknown_launcher(world: World) -> None:
    name = next((n for n in _OTHER_LAUNCHERS if os.environ.get(n, "1") != "1"), None)
    if world.size == 1 and world.launcher == "none" and name is not None:
        raise ConfigError(
            f"{name} is {os.environ[name]}, but RANK and WORLD_SIZE are not set",
            why="each process would train alone, with all samples, and write a separate run",
            fix="start the script with `lockstep run script.py --devices ...`, torchrun or srun",
        )


def _refuse_for_tasks_only(config: RunConfig) -> None:
    for key, instead in _FOR_TASKS.items():
        section, name = key.split(".")
        value, default = (getattr(getattr(settings, section), name) for settings in (config, RunConfig()))
        if value not in (default, *(_STRATEGIES if name == "strategy" else ())):
            raise UnsupportedError(
                f"{key} = {value} is not for a session",
                why="it is for the loop of a lockstep.Task, and the script has another one",
                fix=f"{instead}, or train a lockstep.Task",
            )


def _new_folder(config: RunConfig, run_id: str) -> None:
    """Create the folder of a new run of this process's script."""
    run = create_folder(config, run_id)
    path = Path(sys.argv[0])
    if path.is_file():
        Script(str(path.resolve()), sys.argv[1:], str(Path.cwd()), {}).keep(run)
