"""Trials on a Ray cluster: each is an actor that reserves its resources and has the trial's process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.lab.sweep.process import start_process
from lockstep.lab.sweep.space import SweepOptions
from lockstep.launch.engines.ray import connect
from lockstep.launch.engines.spec import Job, NodeRange


class RayCluster:
    """Free resources of a Ray cluster, of which each trial reserves a GPU, or a CPU, for each of its ``devices``.

    ``None``: one GPU, or one CPU where the cluster has no GPU.

    Attributes:
        slots: devices of each trial that the cluster can train at the same time.

    Raises:
        UsageError: there is no Ray, no cluster, or one that is too small for a trial.
    """

    def __init__(self, options: SweepOptions, devices: Sequence[str] | None) -> None:
        named = () if devices is None or "all" in devices else tuple(devices)
        gpus = len({device for device in named if device != "cpu"})
        job = Job(
            command=(),
            run_folder=Path(),
            nodes=NodeRange(1, 1),
            ranks_per_node=gpus or len(named) or 1,
            gpus_per_node=str(gpus) if gpus else None,
            options={"ray_address": options.ray_address, "ray_resource": options.ray_resource},
        )
        self._ray, per_rank = connect(job)
        cluster = self._ray.cluster_resources()
        if not named and cluster.get("GPU"):
            per_rank.setdefault("GPU", 1.0)
        needs = {name: number * job.ranks_per_node for name, number in per_rank.items() if number}
        trials = options.parallel or min(int(cluster[name] / number) for name, number in needs.items())
        self.slots = [named or ("gpu:0" if needs.get("GPU") else "cpu",)] * trials
        self._host = self._ray.remote(
            num_cpus=needs.pop("CPU", 0), num_gpus=needs.pop("GPU", 0), resources=needs, max_concurrency=2
        )(TrialHost)

    @property
    def settings_here(self) -> Mapping[str, Any]:
        """Settings with which a trial can be planned on this machine, which may have no GPU."""
        devices = self.slots[0]
        precision = {} if devices[0] == "cpu" else {"precision": "32"}
        return {"hardware": {"selected_devices": ["cpu"] * len(devices), **precision}}

    def start(self, job: bytes, threads: int | None, log: Path) -> RemoteProcess:
        """Start a trial when its resources are free; Ray chooses the node."""
        return RemoteProcess(self._ray, self._host.remote(job, log, Path.cwd()))

    def leave(self) -> None:
        """Disconnect; trials that are left end."""
        self._ray.shutdown()


class TrialHost:
    """An actor: the process of one trial, on the node whose resources it reserves."""

    def __init__(self, job: bytes, log: Path, folder: Path) -> None:
        if folder.is_dir():
            os.chdir(folder)
        self._process = start_process(job, None, log)

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        return self._process.wait()

    def terminate(self) -> None:
        """Ask the process for its end with a checkpoint."""
        self._process.terminate()


class RemoteProcess:
    """The process of a :class:`TrialHost`, with the methods of a process here."""

    def __init__(self, ray: Any, host: Any) -> None:
        self._ray = ray
        self._host = host
        self._exit = host.wait.remote()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, 1 if it was lost with its node; ``None`` while it runs or waits for resources."""
        ended, _ = self._ray.wait([self._exit], timeout=0)
        if ended and self.returncode is None:
            self.returncode = 1
            with contextlib.suppress(self._ray.exceptions.RayError):
                self.returncode = self._ray.get(self._exit)
        return self.returncode

    def terminate(self) -> None:
        """Ask for its end with a checkpoint; one that still waits for resources ends at once."""
        ready, _ = self._ray.wait([self._host.terminate.remote()], timeout=1.0)
        if not ready:
            self.kill()

    def kill(self) -> None:
        """End it without a checkpoint."""
        self._ray.kill(self._host)

    def communicate(self) -> None:
        """Give its resources back."""
        self._ray.kill(self._host)
