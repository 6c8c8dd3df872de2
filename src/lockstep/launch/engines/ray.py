"""Engine ``ray``: Ray Train places the ranks, starts them again after a failure, and changes their number.

Each of Ray's workers starts its rank as a process, as torchrun does, and waits for its end. So a rank has a main
thread, signals and group of processes, and nothing in it depends on Ray. The command that submitted the job supervises
it: the job ends with this command.

Ray's controller asks :class:`Supervision` before it ends workers: the ranks then write a checkpoint first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.errors import RankFailed, RunError, UsageError, many
from lockstep.launch.engines.spec import AttachedEngine, EngineOption, EngineSpec, Job
from lockstep.launch.failure.causes import find_cause
from lockstep.launch.process.signals import exit_code

#: Settings of Ray, unless the user has set them. With its defaults of 60 and 2 s, a run waits 108 s after the loss of a
#: node, until it continues on the others (docs/decisions.md).
VARIABLES = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "12",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CONNECT_TIMEOUT_S = 10.0
#: Seconds between two looks for nodes that have joined the cluster; Ray's default is 60.
RESIZE_INTERVAL_S = 5.0
_OUTPUT_INTERVAL_S = 0.2


class Ray(AttachedEngine):
    """A Ray cluster, as a driver on one of its machines sees it."""

    def check(self, job: Job) -> None:
        """Refuse resources that are no numbers, and a machine without Ray."""
        _resources_per_rank(job)
        _library()

    def submit(self, job: Job) -> int:
        """Train, with the output of the ranks on standard output; the exit code of rank 0.

        Raises:
            UsageError: there is no cluster, or it is too small. RunError: the run has failed, and is not started again.
        """
        ray, resources = connect(job)
        free = ray.available_resources()
        ranks = job.nodes.minimum * job.ranks_per_node
        missing = [name for name, number in resources.items() if ranks * number > free.get(name, 0.0)]
        if missing:
            sys.stderr.write(f"note: waiting until other programs of the Ray cluster free {', '.join(missing)}\n")
        try:
            return _train(ray, job, resources)
        finally:
            ray.shutdown()


def connect(job: Job) -> tuple[Any, dict[str, float]]:
    """Join the cluster that ``job`` names; returns Ray, and the resources of each rank.

    Raises:
        UsageError: there is no Ray, no cluster, or it is too small.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    resources = _resources_per_rank(job)
    ray = _library()
    _connect(ray, job.options.get("ray_address"))
    try:
        _refuse_small_cluster(ray.nodes(), job, resources)
    except UsageError:
        ray.shutdown()
        raise
    return ray, resources


def _library() -> Any:
    try:
        import ray
        import ray.train
    except ImportError as error:
        raise UsageError(
            "--on ray needs Ray Train", why=str(error), fix="pip install 'lockstep-train[ray]', on every node"
        ) from None
    return ray


def _connect(ray: Any, address: str | None) -> None:
    """Join the cluster as a driver. Raises :class:`UsageError`."""
    variables = {name: os.environ[name] for name in VARIABLES}
    address = address or os.environ.get("RAY_ADDRESS")
    host, _, port = (address or "").rpartition(":")
    try:
        if host and port.isdigit() and "://" not in host:  # Ray itself waits for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
        ray.init(
            address=address or "auto",
            logging_level="ERROR",
            log_to_driver=False,
            runtime_env={"env_vars": variables},
        )
    except (OSError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"there is no Ray cluster at {address}" if address else "there is no Ray cluster here",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="start one with `ray start --head`, or name its address: --ray-address HOST:6379",
        ) from None


def _resources_per_rank(job: Job) -> dict[str, float]:
    """Return the resources that Ray reserves for each rank: a GPU or a CPU, and those of ``--ray-resource``."""
    resources = {"CPU": 1.0} | ({"GPU": 1.0} if job.gpus_per_node else {})
    for text in job.options.get("ray_resource") or ():
        name, _, number = text.partition("=")
        try:
            resources[name] = float(number)
        except ValueError:
            raise UsageError(
                f"--ray-resource {text!r} is not a resource", fix="write NAME=NUMBER, for example --ray-resource CPU=4"
            ) from None
    return resources


def _refuse_small_cluster(nodes: Sequence[Mapping[str, Any]], job: Job, per_rank: Mapping[str, float]) -> None:
    """Raise :class:`UsageError` where the nodes have no room for the fewest ranks, whatever else they do."""
    ranks = job.nodes.minimum * job.ranks_per_node
    needed = {name: number for name, number in per_rank.items() if number}
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    room = sum(min((int(node.get(name, 0.0) / needed[name]) for name in needed), default=ranks) for node in resources)
    if room < ranks:
        amounts = [", ".join(f"{node.get(name, 0.0):g} {name}" for name in needed) for node in resources]
        raise UsageError(
            f"the Ray cluster has too few resources for {many(ranks, 'rank')}",
            why=f"each needs {', '.join(f'{number:g} {name}' for name, number in needed.items())} of one node, and "
            f"the nodes have {'; '.join(amounts[:8])}",
            fix="name fewer nodes or devices, or add nodes with `ray start --address=HOST:PORT`",
        )


def _train(ray: Any, job: Job, resources: Mapping[str, float]) -> int:
    """Train on the cluster, with the output of the ranks on this terminal; the exit code."""
    from lockstep._compat.ray import DataParallelTrainer, LoggingConfig
    from lockstep.launch.engines.ray_workers import RankAddress, Supervision, Terminal, run_rank

    fewest, largest = (number * job.ranks_per_node for number in job.nodes)
    on_this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        node_id=ray.get_runtime_context().get_node_id(), soft=False
    )
    terminal = ray.remote(num_cpus=0, scheduling_strategy=on_this_node)(Terminal).remote()
    trainer = DataParallelTrainer(
        run_rank,
        train_loop_config={
            "arguments": job.arguments(),
            "environment": dict(job.environment),
            "folder": Path.cwd(),
            "terminal": terminal,
        },
        backend_config=RankAddress(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(fewest, largest) if job.nodes.is_elastic else largest,
            elastic_resize_monitor_interval_s=RESIZE_INTERVAL_S,
            use_gpu="GPU" in resources,
            resources_per_worker=dict(resources),
        ),
        run_config=ray.train.RunConfig(
            name=job.run_folder.name,
            storage_path=tempfile.gettempdir(),
            failure_config=ray.train.FailureConfig(max_failures=job.max_restarts),
            callbacks=[Supervision(grace_s=job.grace_s)],
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )
    with _output(ray, terminal), _stop_signals() as received:
        try:
            result = trainer.fit()
        except SystemExit:  # Ray's end of a run that was interrupted
            return exit_code(signal.SIGTERM if received else signal.SIGINT)
        except ray.train.WorkerGroupError as error:
            failure = _failure(error.worker_failures, job)
            if failure is None:
                return RunError.exit_code
            raise failure from None
        except ray.train.TrainingFailedError as error:
            raise RunError(f"Ray has ended the run: {str(error).splitlines()[0]}") from None
    return int(result.return_value)  # type: ignore[attr-defined]


def _failure(failures: Mapping[int, Exception], job: Job) -> RunError | None:
    """Return the error of the rank that failed first, as far as known: the others lost their connection to it.

    ``None``: that rank has printed its report.
    """
    from lockstep.launch.engines.ray_workers import RankEnded

    ended = {rank: error for rank, error in failures.items() if isinstance(error, RankEnded)}
    if not ended:
        return RunError(f"Ray has ended the run: {'; '.join(map(repr, failures.values()))}")
    rank, error = min(ended.items(), key=lambda item: item[1].is_lost_peer)
    if not error.traceback and error.signal_name is None:
        reported = error.exit_code == RunError.exit_code
        return None if reported else RankFailed(f"rank {rank} ended with exit code {error.exit_code}")
    cause = find_cause(error.last_line, error.signal_name)
    return RankFailed(
        f"rank {rank} failed: {error.last_line or error.signal_name}",
        why="\n".join(filter(None, [cause.title if cause else "", error.traceback.rstrip()])),
        fix=cause.advice if cause else f"see logs/rank-{rank}.log in {job.run_folder}",
    )


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, which Ray handles; yields the signals received."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _output(ray: Any, terminal: Any) -> Iterator[None]:
    """Copy the output of the ranks to standard output, and nothing of Ray's."""
    ended = threading.Event()
    stream = sys.stdout

    def copy() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(_OUTPUT_INTERVAL_S)
            try:
                stream.write(ray.get(terminal.take.remote()))
                stream.flush()
            except ray.exceptions.RayError:  # the actor was lost with its node
                return

    thread = threading.Thread(target=copy, name="lockstep-ray-output", daemon=True)
    thread.start()
    with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        try:
            yield
        finally:
            ended.set()
            thread.join()


SPEC = EngineSpec(
    name="ray",
    summary="train on a Ray cluster; Ray Train places the ranks",
    make=Ray,
    makes_run_folder=False,
    options=(
        EngineOption(
            name="ray_address",
            help="Address of the Ray cluster. Default: RAY_ADDRESS, or the cluster of this machine.",
            metavar="HOST:PORT",
        ),
        EngineOption(
            name="ray_resource",
            help="A resource that Ray reserves for each rank, e.g. CPU=4. May be repeated.",
            metavar="NAME=NUMBER",
            is_list=True,
        ),
    ),
)
