"""All checks of one machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from lockstep.doctor.finding import Finding, guarded
from lockstep.doctor.gpus import (
    check_devices,
    check_health,
    check_links,
    check_memory,
    check_versions,
    gather_health,
    gather_links,
    gather_versions,
)
from lockstep.doctor.host import (
    check_cores,
    check_limits,
    check_shared_memory,
    gather_cores,
    gather_limits,
    gather_shared_memory,
)
from lockstep.doctor.network import (
    check_clock,
    check_host_name,
    check_interface,
    check_port,
    find_free_port,
    gather_network,
    read_clock,
)
from lockstep.doctor.storage import check_run_folder, probe_run_folder
from lockstep.hardware.device import Device
from lockstep.hardware.nvml import Nvml, open_nvml
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.planning.loader import automatic_workers


def examine_node(placement: Placement, world: World, detected: Sequence[Device], runs_dir: Path) -> list[Finding]:
    """The findings of this machine; starts no process, leaves no file."""
    nvml = open_nvml()
    with nvml or nullcontext():
        findings = [*_devices(placement, detected, nvml), *_machine(placement, world, runs_dir)]
    return [replace(finding, node=socket.gethostname()) for finding in findings]


def _devices(placement: Placement, detected: Sequence[Device], nvml: Nvml | None) -> Iterator[Finding]:
    names = list(dict.fromkeys(placement.devices))
    gpus = [device for device in detected if device.kind == "gpu" and device.id in names]
    yield from guarded("devices", lambda: check_devices(detected, placement.devices))
    yield from guarded("versions", lambda: check_versions(gather_versions(nvml), detected))
    yield from guarded("GPU memory", lambda: check_memory(gpus))
    if nvml is not None and gpus:
        yield from guarded("GPU health", lambda: check_health(gather_health(nvml, gpus)))
        yield from guarded("peer access", lambda: check_links(gather_links(nvml, gpus)))


def _machine(placement: Placement, world: World, runs_dir: Path) -> Iterator[Finding]:
    ranks = world.local_size if world.from_outside else placement.world_size
    gpus = placement.accelerator == "gpu"
    workers = automatic_workers(gather_cores().usable, ranks)
    network = partial(
        gather_network,
        os.environ,
        nodes=world.nodes,
        outside=world.from_outside,
        nccl=placement.backend == "nccl",
    )
    yield from guarded("cores", lambda: check_cores(gather_cores(), ranks, gpus=gpus))
    yield from guarded("shared memory", lambda: check_shared_memory(gather_shared_memory()))
    yield from guarded("limits", lambda: check_limits(gather_limits(), workers))
    yield from guarded("run folder", lambda: check_run_folder(probe_run_folder(runs_dir)))
    yield from guarded("host name", lambda: check_host_name(network()))
    yield from guarded("interface", lambda: check_interface(network()))
    yield from guarded("port", lambda: check_port(find_free_port()))
    yield from guarded("clock", lambda: check_clock(read_clock()))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that are the same on several nodes become one, for all of them."""
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        nodes.setdefault(replace(finding, node=""), []).append(finding.node)
    return [replace(finding, node=", ".join(dict.fromkeys(names))) for finding, names in nodes.items()]
