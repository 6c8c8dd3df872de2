"""Training the trials of a sweep: the devices of each, and the remaining trials after a stop."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from lockstep.config.load import merge, nested, resolve
from lockstep.engine.task import Task
from lockstep.errors import DeviceError, RunFolderError, UsageError
from lockstep.hardware import read_world
from lockstep.hardware.detect import usable_cores
from lockstep.lab.sweep.process import StartProcess, TrialProcess, start_process
from lockstep.lab.sweep.searches import Grid, OptunaSearch, Search, Trial
from lockstep.lab.sweep.space import Range, Space, SweepOptions
from lockstep.launch.prepare import prepare
from lockstep.launch.process.signals import StopRequest, exit_code
from lockstep.rundir.files import absolute, flattened, make_folders, names_in, plain, read_json, write_json
from lockstep.rundir.folder import RunDir, or_else
from lockstep.rundir.groups import Grouping, facts_of, group_runs
from lockstep.telemetry.console import duration, number

#: Trials of a search without ``trials``.
TRIALS = 20
_SET_BY_SWEEP = {"name", "tags", "save_dir", "runs_dir", "training.seed", "hardware.selected_devices"}
_POLL_S = 0.2


@dataclass(frozen=True)
class Sweep:
    """A sweep that has ended. ``failed``: labels of trials that failed; ``stopped_by``: the signal that stopped it."""

    folder: Path
    runs: list[RunDir]
    failed: list[str]
    stopped_by: int | None = None

    @property
    def exit_code(self) -> int:
        """0; 1 if a trial failed; 130 or 143 if the sweep was stopped."""
        return exit_code(self.stopped_by) if self.stopped_by is not None else int(bool(self.failed))

    def groups(self, by: Sequence[str] = (), metric: str = "") -> Grouping:
        """Return its runs by their settings, best first: the metric's mean and standard deviation over seeds."""
        return group_runs(facts_of(self.runs), by, metric)


def run_sweep(
    task: Task | type[Task] | str,
    settings: Mapping[str, Any],
    space: Space,
    options: SweepOptions,
    report: Callable[[str], None],
) -> Sweep:
    """Train every trial of ``space``; ``report`` receives a line for each. See :func:`lockstep.sweep`.

    The first trial is planned here, so that errors of all trials are reported once, before one is started.
    """
    _check(space, options)
    settings = dict(settings)
    save_dir = settings.pop("save_dir", None)
    first = {key: values.low if isinstance(values, Range) else values[0] for key, values in space.items()}
    for key, values in space.items():
        for value in (values.low, values.high) if isinstance(values, Range) else values:
            resolve(settings, nested({key: value}))
    planned = merge(settings, nested(first))
    with contextlib.ExitStack() as connection:
        cluster = None
        if options.on is not None:
            from lockstep.lab.sweep.ray_cluster import RayCluster

            cluster = RayCluster(options, resolve(settings).hardware.selected_devices)
            connection.callback(cluster.leave)
            planned = merge(planned, cluster.settings_here)
        prepared = prepare(task, planned)
        config = prepared.config
        folder = absolute(Path(save_dir) if save_dir else config.runs_dir / f"sweep-{secrets.token_hex(4)}")
        _open_folder(folder, config.task.name, settings, options)
        search: Search
        if options.search == "optuna":
            trials = options.trials or TRIALS
            search = OptunaSearch(space, folder, seed=config.training.seed, trials=trials, mode=prepared.plan.mode)
        else:
            search = Grid(space, range(config.training.seed, config.training.seed + options.seeds))
        slots = divided(prepared.placement.devices, options.parallel) if cluster is None else cluster.slots
        start = start_process if cluster is None else cluster.start
        return _Sweeper(task, settings, folder, config.runs_dir, report, start).train(search, slots)


def _check(space: Space, options: SweepOptions) -> None:
    if read_world(os.environ).from_outside:
        raise UsageError("a sweep is not a rank", fix="start it without torchrun or srun: it starts each trial's ranks")
    for name, count in {"seeds": options.seeds, "parallel": options.parallel, "trials": options.trials}.items():
        if count is not None and count < 1:
            raise UsageError(f"{name} is {count}", fix="give 1 or more")
    if options.on is None and (options.ray_address or options.ray_resource):
        raise UsageError("--ray-address and --ray-resource are for --on ray", fix="add --on ray, or leave them out")
    fixed = sorted(_SET_BY_SWEEP & space.keys())
    if fixed:
        raise UsageError(f"{', '.join(fixed)} cannot be varied", why="the sweep sets it", fix="vary other settings")
    if not space and options.seeds == 1:
        raise UsageError("nothing is varied", fix="write for example --set optimizer.lr=1e-4,1e-3, or --seeds 5")
    empty = [key for key, values in space.items() if not isinstance(values, Range) and not values]
    if empty:
        raise UsageError(f"{', '.join(empty)} has no values", fix="list at least one")
    if options.search == "optuna" and options.seeds > 1:
        raise UsageError(
            "several seeds are for a grid",
            why="a search trains each point once",
            fix="search with one seed, then train the best settings with several",
        )
    if options.search == "grid" and options.trials is not None:
        raise UsageError("a number of trials is for a search", fix="leave it out, or search with optuna")


def divided(devices: Sequence[str], parallel: int | None) -> list[tuple[str, ...]]:
    """Return the devices of each of ``parallel`` trials; ``None``: a trial for each GPU, or one on the CPU.

    CPUs are shared by trials, a GPU only if it is named several times.

    Raises:
        DeviceError: the devices cannot be divided equally.
    """
    is_cpu = devices[0] == "cpu"
    trials = parallel or (1 if is_cpu else len(devices))
    if is_cpu:
        return [tuple(devices)] * trials
    if len(devices) % trials:
        raise DeviceError(
            f"{len(devices)} GPUs cannot be divided among {trials} trials",
            why="each trial has as many devices as the others, and no GPU of another trial",
            fix=f"use --parallel {len(devices)}, or name a GPU several times for trials that share it",
        )
    size = len(devices) // trials
    return [tuple(devices[first : first + size]) for first in range(0, len(devices), size)]


def _open_folder(folder: Path, task: str, settings: Mapping[str, Any], options: SweepOptions) -> None:
    """Make the sweep's folder, or check that the sweep in it was the same.

    Raises:
        RunFolderError: it has another sweep, or one that is not resumed.
    """
    file = folder / "sweep.json"
    run_settings = {key: value for key, value in settings.items() if key not in ("hardware", "runs_dir", "task")}
    task_settings = {key: str(value) for key, value in dict(settings.get("task") or {}).items() if key != "name"}
    content = plain({"task": task, "search": options.search, "settings": {**run_settings, "task": task_settings}})
    if not file.exists():
        if names_in(folder):
            raise RunFolderError(f"{folder} is not empty, and has no sweep", fix="choose another --save-dir")
        make_folders(folder)
        write_json(file, content)
        return
    if not options.resume:
        raise RunFolderError(
            f"{folder} has a sweep", fix="add --resume to train the remaining trials, or choose another folder"
        )
    before = flattened(read_json(file))
    now = flattened(content)
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if differing:
        raise RunFolderError(
            f"the sweep in {folder} has other settings",
            why=", ".join(differing),
            fix="use the same settings; values and seeds may be added",
        )


class _Sweeper:
    """Starts trials as processes, watches them, and ends them with the sweep."""

    def __init__(
        self,
        task: Task | type[Task] | str,
        settings: Mapping[str, Any],
        folder: Path,
        runs_dir: Path,
        report: Callable[[str], None],
        start: StartProcess,
    ) -> None:
        self._task = task
        self._settings = settings
        self._folder = folder
        self._runs_dir = absolute(runs_dir)
        self._report = report
        self._start = start
        self._runs: list[RunDir] = []
        self._failed: list[str] = []
        self._finished = 0

    def train(self, search: Search, slots: Sequence[tuple[str, ...]]) -> Sweep:
        """Train the trials of ``search``, one on each of ``slots`` at a time, until none is left or a stop."""
        free = list(slots)
        running: list[TrialProcess] = []
        with StopRequest() as stop:
            try:
                while True:
                    while free and stop.requested is None and (trial := search.next_trial()) is not None:
                        process = self._started(trial, free[0], len(slots), search)
                        if process is not None:
                            running.append(process)
                            del free[0]
                    if not running:
                        break
                    time.sleep(_POLL_S)
                    for process in running.copy():
                        if process.has_ended():
                            running.remove(process)
                            free.append(process.devices)
                            self._end(process, search, is_stopping=stop.requested is not None)
                        elif stop.requested is not None:
                            process.stop()
                        else:
                            process.prune(search)
            finally:
                for process in running:  # after an error or a second Ctrl-C
                    process.kill()
        runs = [run for run in self._runs if run.run_file.exists()]
        return Sweep(self._folder, runs, self._failed, stop.requested)

    def _started(self, trial: Trial, devices: tuple[str, ...], parallel: int, search: Search) -> TrialProcess | None:
        """Start a trial, unless its run is completed."""
        run = RunDir(self._runs_dir / trial.run_id(self._folder.name))
        self._runs.append(run)
        if run.run_file.exists() and run.status() == "completed":
            self._finish(trial, run, "completed", "before", search)
            return None
        name = self._settings.get("name")
        of_trial = {
            "name": f"{name} {trial.label}" if name else trial.label,
            "tags": [*self._settings.get("tags", ()), self._folder.name],
            "save_dir": str(run.path),
            "training": {"seed": trial.seed},
            "hardware": {"selected_devices": list(devices)},
        }
        settings = merge(merge(self._settings, nested(trial.values)), of_trial)
        shares_cores = parallel > 1 and devices[0] == "cpu"
        threads = max(1, usable_cores() // parallel) if shares_cores else None
        log = self._folder / f"{run.path.name}.log"
        return TrialProcess(trial, run, devices, log).start(
            self._start, cloudpickle.dumps((self._task, settings)), threads
        )

    def _end(self, process: TrialProcess, search: Search, *, is_stopping: bool) -> None:
        status = process.status()
        if status not in ("completed", "pruned"):
            status = "stopped" if is_stopping else "failed"
        took = f"in {duration(time.monotonic() - process.began)} on {','.join(process.devices)}"
        self._finish(process.trial, process.run, status, took, search)
        if status == "failed":
            self._failed.append(process.trial.label)
            self._report(f"  {process.error()}; its output: {process.log}")

    def _finish(self, trial: Trial, run: RunDir, status: str, took: str, search: Search) -> None:
        record = or_else(run.read, None) if run.run_file.exists() else None
        scores = {} if record is None else record.best_metric
        search.finish(trial, status, next(iter(scores.values()), math.nan))
        self._finished += 1
        score = "".join(f", {name} {number(value)}" for name, value in scores.items())
        self._report(f"{self._finished}/{trial.total} {trial.label}: {status} {took}{score}")
