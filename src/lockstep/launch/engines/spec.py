"""The interface of engines, and their registry. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from lockstep.errors import ConfigError, LockstepError, UnsupportedError, UsageError

#: Modules of this package; each has a ``SPEC``.
BUILT_IN = ("torchrun", "slurm", "ray", "k8s")
#: Entry points of installed packages; each is an :class:`EngineSpec`.
GROUP = "lockstep.engines"


class NodeRange(NamedTuple):
    """How many nodes train together, at least and at most."""

    minimum: int
    maximum: int

    @classmethod
    def parse(cls, text: str | None) -> NodeRange:
        """Parse the range ``launch.nodes``, ``2`` or ``1:4``; one node without it. Raises :class:`ConfigError`."""
        minimum, _, maximum = (text or "1").partition(":")
        if int(minimum) > int(maximum or minimum):
            raise ConfigError(
                f"invalid --nodes {text}: the minimum is larger than the maximum", fix="write 1:4, for example"
            )
        return cls(int(minimum), int(maximum or minimum))

    @property
    def is_elastic(self) -> bool:
        return self.minimum < self.maximum

    def __str__(self) -> str:
        return f"{self.minimum}:{self.maximum}" if self.is_elastic else f"{self.minimum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The training of one run, as an engine needs it.

    Attributes:
        command: arguments of the Python interpreter in every rank: ``-m lockstep train …``, without ``--save-dir``.
        run_folder: of the run on this machine; :meth:`arguments` has it.
        nodes: number of nodes.
        ranks_per_node: processes on each node, one for each device.
        gpus_per_node: GPUs that each node needs, in the engine's terms (``4``, ``a100:4``); ``None``: none, the ranks
            use CPUs.
        environment: variables that each rank gets besides those of the engine.
        mirror: URL to which the run folder is copied.
        max_restarts: how often an engine that starts ranks again after a failure may do so.
        grace_s: seconds from the request to stop until ranks may be killed; they write a checkpoint.
        options: values of the engine's flags, by name.
    """

    command: tuple[str, ...]
    run_folder: Path
    nodes: NodeRange
    ranks_per_node: int = 1
    gpus_per_node: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    mirror: str | None = None
    max_restarts: int = 0
    grace_s: float = 120.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, run_folder: Path | None = None) -> list[str]:
        """Return the interpreter's arguments that begin or resume the run in ``run_folder``, by default the job's."""
        return [*self.command, "--save-dir", str(run_folder or self.run_folder), "--resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHandle:
    """The name under which an engine knows a submitted job.

    Attributes:
        run_folder: of the job's run, on this machine.
    """

    engine: str
    id: str
    run_folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The state of a submitted job.

    Attributes:
        text: in the engine's terms: ``PENDING (Resources)``.
        is_over: the job will not run again.
        is_waiting: no rank has started yet, or the job is queued again.
        exit_code: of a job that is over, where the run folder on this machine cannot show it.
    """

    text: str
    is_over: bool = False
    is_waiting: bool = False
    exit_code: int | None = None


class Engine(Protocol):
    """The operations of every engine. They raise :class:`UsageError` where the engine refuses or does not answer."""

    def manifest(self, job: Job) -> str:
        """Return the text that ``--print`` shows: a script or a document, complete enough to be submitted by hand."""

    def check(self, job: Job) -> None:
        """Refuse a job that cannot be submitted; called before its run folder is made."""

    def submit(self, job: Job) -> JobHandle | int:
        """Start ``job``. Returns its handle, or the exit code of a job that ended before this returned."""


class JobEngine(Engine, Protocol):
    """An engine whose jobs continue without this process, and maybe wait in a queue.

    Other runs are processes, which `lockstep stop` and `lockstep show` find through the run folder.
    """

    def status(self, handle: JobHandle) -> JobStatus: ...

    def stop(self, handle: JobHandle) -> None:
        """Ask for a checkpoint and the end of the job, or take it out of the queue; does not wait for the end."""

    def logs(self, handle: JobHandle) -> Iterator[str]:
        """Return the job's output. Each piece is new since the piece before; it may be empty."""


class AttachedEngine:
    """Base of engines whose job ends with its command: :meth:`Engine.submit` returns the exit code."""

    def manifest(self, job: Job) -> str:
        raise UnsupportedError(
            "--print has nothing to print",
            why="no script or document is submitted: the command itself runs the job",
            fix="leave --print out; docs/clusters.md has the commands of each engine",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOption:
    """A flag of one engine: ``--sbatch-option`` is ``sbatch_option``. Its value is text, or a list of texts."""

    name: str
    help: str
    metavar: str | None = None
    is_list: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Properties of an engine that other modules ask for.

    Attributes:
        name: the value of ``--on``. ``summary``: for its help.
        make: makes the engine; imports its library, and raises :class:`UsageError` without it.
        options: flags of this engine alone.
        makes_run_folder: the run folder is made when the job is submitted, with the job's name in it; otherwise the
            ranks make it.
        is_attached: the job ends with this process, which trains its node's share. ``launch.nodes`` without ``--on``
            chooses the first such engine.
        current_job: the id of the job that has a process with these variables; ``None``: it is in no job.
    """

    name: str
    summary: str
    make: Callable[[], Engine]
    options: tuple[EngineOption, ...] = ()
    makes_run_folder: bool = True
    is_attached: bool = False
    current_job: Callable[[Mapping[str, str]], str | None] = lambda environ: None


@cache
def engines() -> Mapping[str, EngineSpec]:
    """Return all engines by name: those of Lockstep, and those of installed packages. Raises :class:`ConfigError`."""
    from importlib.metadata import entry_points

    package = __name__.rpartition(".")[0]
    specs: list[EngineSpec] = [importlib.import_module(f"{package}.{name}").SPEC for name in BUILT_IN]
    for point in entry_points(group=GROUP):
        try:
            spec = point.load()
        except LockstepError:
            raise
        except Exception as error:  # whatever the package's code raises
            raise ConfigError(
                f"the engine of {point.value} cannot be imported", why=f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(spec, EngineSpec):
            specs.append(spec)
    by_name: dict[str, EngineSpec] = {}
    for spec in specs:
        by_name.setdefault(spec.name, spec)
    return by_name


def find_engine(name: str) -> EngineSpec:
    """Return the engine of that name. Raises :class:`UsageError`."""
    if name not in engines():
        raise UsageError(
            f"there is no engine {name[:100]!r}",
            why=f"there are {', '.join(engines())}",
            fix="install the package that brings it",
        )
    return engines()[name]


def engine_of(handle: JobHandle) -> JobEngine:
    """Return the engine of a submitted job. Raises :class:`UsageError`."""
    return cast(JobEngine, find_engine(handle.engine).make())


def attached_engine() -> EngineSpec:
    """Return the engine of ``launch.nodes`` without ``--on``."""
    return next(spec for spec in engines().values() if spec.is_attached)
