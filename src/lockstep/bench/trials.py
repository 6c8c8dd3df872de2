"""The task that is measured, and its trials: a function on fresh ranks, whose rows survive whatever ends them.

A rank that runs out of memory, is killed or fails ends its trial, not the benchmark: the launcher ends the other
ranks, and what was reported until then counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.task import Task
from lockstep.engine.training_data import open_data
from lockstep.errors import RankFailed, UnsupportedError
from lockstep.hardware.host import usable_memory
from lockstep.hardware.monitor import SystemSource
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World, read_world
from lockstep.launch.failure.report import read_failure
from lockstep.launch.local import worker
from lockstep.launch.local.on_ranks import run_on_ranks
from lockstep.launch.prepare import Prepared, native_settings, place, plan_for, settle
from lockstep.launch.run_claim import create_folder
from lockstep.planning import Plan
from lockstep.tasks.registry import pack_task
from lockstep.telemetry.files import JsonLines, read_jsonl
from lockstep.telemetry.loggers import QUIET

#: In the folder of a trial: what rank 0 has reported so far.
ROWS_FILE = "rows.jsonl"
#: Share of a machine's free memory that the ranks of a trial on its CPU may take together.
CPU_SHARE = 0.8


class Rank(worker.Rank):
    """One rank of a trial."""

    def report(self, row: Mapping[str, Any]) -> None:
        """Keep ``row``, whatever happens to this process afterwards; rank 0 alone does."""
        if self.world.is_main:
            JsonLines(self.folder.path / ROWS_FILE).append(row)

    def check(self) -> None:
        """Raises :class:`KeyboardInterrupt` once a stop was requested."""
        if self.stop.requested is not None:
            raise KeyboardInterrupt


class PeakMemory:
    """The most memory that this rank has held since :meth:`reset`, in bytes for each of its devices.

    On a GPU what torch's allocator gave out; on a CPU the process's resident memory, where Linux lets the peak be
    reset (proc(5), ``clear_refs``, value 5; ``VmHWM``).
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._on_gpu = devices[0].type == "cuda"

    def reset(self) -> None:
        if self._on_gpu:
            for device in self._devices:
                torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> list[int]:
        if self._on_gpu:
            return [torch.cuda.max_memory_allocated(device) for device in self._devices]
        return [_status("VmHWM")]


#: What an NVML reading of the utilisation may span, seconds (nvmlUtilization_t: a sixth of a second to one).
_NVML_WINDOW_S = 1.0


class Utilisation:
    """How busy this rank's devices are, as shares; use it as a context manager.

    On a GPU what its driver says of the last moments, at most a second (NVML); ``None`` where it does not say, and when
    less than that has passed since :meth:`begin`, so that it would be of the time before. On a CPU the processor
    time of this process since :meth:`begin`, as a share of what ``threads`` threads can use.
    """

    def __init__(self, devices: list[torch.device], threads: int) -> None:
        self._gpus = [f"gpu:{device.index}" for device in devices if device.type == "cuda"]
        self._threads = threads
        self._source = SystemSource(self._gpus)
        self._open = contextlib.ExitStack()
        self._began = (0.0, 0.0)

    def __enter__(self) -> Utilisation:
        if self._gpus:
            self._open.enter_context(self._source)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def begin(self) -> None:
        self._began = time.process_time(), time.perf_counter()

    def read(self) -> list[float | None]:
        """One share for each device."""
        used, began = self._began
        if self._gpus and time.perf_counter() - began < _NVML_WINDOW_S:
            return [None] * len(self._gpus)
        if self._gpus:
            found = {device["id"]: device["utilisation"] for device in self._source.sample()["devices"]}
            return [found.get(name) for name in self._gpus]
        return [(time.process_time() - used) / (time.perf_counter() - began) / self._threads]


def memory_share(placement: Placement) -> int | None:
    """Bytes that each rank on a CPU may allocate, so that its trial runs out of memory and not the machine.

    ``None`` on GPUs, whose memory is the limit.
    """
    if placement.accelerator == "gpu":
        return None
    return int(usable_memory()[1] * CPU_SHARE / placement.world_size)


def limit_memory(extra: int) -> None:
    """Let this process allocate at most ``extra`` bytes more than it has now; beyond it allocations fail.

    RLIMIT_DATA counts private writable memory (setrlimit(2), since Linux 4.7), not what is only mapped.
    """
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _status("VmData") + extra
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _status(name: str) -> int:
    """A size in bytes of this process, from ``/proc``."""
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


#: How long a rank may take to end after a stop.
STOP_GRACE_S = 5.0
#: How long a collective waits for a rank of a trial.
TIMEOUT_S = 120.0


Ended = Literal["done", "out of memory", "failed", "stopped"]


@dataclass(frozen=True)
class Case:
    """One thing to measure. ``label`` goes into its row."""

    label: Mapping[str, Any]
    config: RunConfig
    plan: Plan
    warm_up: int


@dataclass(frozen=True)
class Outcome:
    """What a trial reported, and how it ended. ``error``: why it failed, in a line."""

    rows: list[dict[str, Any]]
    ended: Ended = "done"
    error: str = ""


@dataclass
class Trials:
    """Starts trials below ``folder``, one after another; none after one that was stopped."""

    folder: Path
    count: int = 0
    stopped: bool = False

    def run_case(self, function: Callable[..., None], case: Case, *arguments: Any, task: Task) -> Outcome:
        """Call ``function(rank, case, *arguments)`` on the ranks of ``case``; see :meth:`run`."""
        plan, config = case.plan, case.config
        return self.run(
            *(function, case, *arguments), task=task, ranks=plan.world_size, config=config, threads=plan.threads
        )

    def run(
        self,
        function: Callable[..., None],
        *arguments: Any,
        ranks: int,
        config: RunConfig,
        task: Task | None = None,
        threads: int = 1,
    ) -> Outcome:
        """Call ``function(rank, *arguments)`` on ``ranks`` new processes.

        Args:
            function: one that can be imported.
            config: of the trial; where its files go is decided here.
            task: what the ranks shall find with :func:`lockstep.tasks.registry.load_task`.
            threads: intra-op threads of each rank.

        Raises:
            UsageError: a rank refuses its settings. KeyboardInterrupt: a trial before it was stopped.
        """
        if self.stopped:
            raise KeyboardInterrupt
        self.count += 1
        path = self.folder / f"trial-{self.count:03}"
        run = create_folder(config.model_copy(update={"save_dir": path}))
        if task is not None:
            pack_task(run, task, config)
        ended: Ended = "done"
        said = ""
        try:
            run_on_ranks(
                *(_on_rank, function, *arguments), folder=run, ranks=ranks, threads=threads, stop_grace_s=STOP_GRACE_S
            )
        except KeyboardInterrupt:
            ended, self.stopped = "stopped", True
        except RankFailed as error:
            report = read_failure(run)
            lacks_memory = report is not None and report.cause is not None and report.cause.key.is_memory
            ended, said = "out of memory" if lacks_memory else "failed", error.what.splitlines()[0]
        return Outcome(read_jsonl(path / ROWS_FILE), ended, said)


def _on_rank(rank: worker.Rank, function: Callable[..., None], *arguments: Any) -> None:
    function(Rank(rank.folder, rank.world, rank.stop), *arguments)


@contextlib.contextmanager
def new_trials() -> Iterator[Trials]:
    """Trials in a temporary folder, removed afterwards. Raises :class:`KeyboardInterrupt` where one was stopped."""
    with TemporaryDirectory(prefix="lockstep-bench-") as folder:
        trials = Trials(Path(folder))
        yield trials
        if trials.stopped:
            raise KeyboardInterrupt


#: What every trial does without: it trains nothing that anybody keeps.
_QUIET: dict[str, Any] = {
    "init_from": None,
    "training": {"max_time_s": None, "early_stopping_patience": 0, "tail": "drop"},
    "telemetry": QUIET,
    "debug": {"fast_dev_run": False, "overfit_batches": None},
    "launch": {"max_restarts": 0, "nodes": None},
}


@dataclass
class Subject:
    """A task and the settings given for it, as for :func:`lockstep.train`."""

    task: Task | type[Task] | str
    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        if read_world(os.environ).from_outside:
            raise UnsupportedError(
                "bench starts its own ranks",
                why="torchrun or srun has started ranks already",
                fix="run it without them",
            )

    @cached_property
    def base(self) -> Prepared:
        """The plan with the settings as given.

        Raises:
            LockstepError: settings that contradict each other, the data or the devices.
        """
        built, config = self._settle({})
        return plan_for(built, config, place(config, World()), open_data(built, config), None)

    @property
    def name(self) -> str:
        return self.base.config.task.name

    def prepared(self, changes: Mapping[str, Any]) -> Prepared:
        """The plan of a trial with ``changes``. Raises :class:`~lockstep.errors.UsageError`."""
        built, config = self._settle(merge(_QUIET, changes))
        patience = {"timeout_s": min(TIMEOUT_S, config.distributed.timeout_s)}
        config = config.model_copy(update={"distributed": config.distributed.model_copy(update=patience)})
        return plan_for(built, config, place(config, World()), self.base.datasets, None)

    def case(self, label: Mapping[str, Any], changes: Mapping[str, Any], *, steps: int, warm_up: int) -> Case:
        """A case of ``steps`` measured steps. Raises :class:`~lockstep.errors.UsageError`."""
        total = steps + warm_up
        length = {"training": {"epochs": total, "max_steps": total}}
        trial = self.prepared(merge(changes, length))
        return Case(label, trial.config, trial.plan, warm_up)

    def _settle(self, changes: Mapping[str, Any]) -> tuple[Task, RunConfig]:
        self.given = native_settings(self.task, self.given)
        return settle(self.task, merge(self.given, changes))
