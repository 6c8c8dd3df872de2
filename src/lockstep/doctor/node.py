"""All checks of one machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from lockstep.doctor import gpus, host, network
from lockstep.doctor.finding import Finding, guarded
from lockstep.hardware.device import Device
from lockstep.hardware.host import usable_cores, visible_cores
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
    chosen = [device for device in detected if device.kind == "gpu" and device.id in names]
    yield from guarded("devices", lambda: gpus.check_devices(detected, placement.devices))
    yield from guarded("versions", lambda: gpus.check_versions(gpus.gather_versions(nvml), detected))
    yield from guarded("GPU memory", lambda: gpus.check_memory(chosen))
    if nvml is not None and chosen:
        yield from guarded("GPU health", lambda: gpus.check_health(nvml, chosen))
        yield from guarded("peer access", lambda: gpus.check_links(nvml, chosen))


def _machine(placement: Placement, world: World, runs_dir: Path) -> Iterator[Finding]:
    ranks = world.local_size if world.from_outside else placement.world_size
    on_gpus = placement.accelerator == "gpu"
    visible, usable = visible_cores(), usable_cores()
    workers = automatic_workers(usable, ranks)
    gather = partial(network.gather_network, os.environ, world, nccl=placement.backend == "nccl")
    yield from guarded("cores", lambda: host.check_cores(visible, usable, ranks, gpus=on_gpus))
    yield from guarded("shared memory", lambda: host.check_shared_memory(host.gather_shared_memory()))
    yield from guarded("limits", lambda: host.check_limits(host.gather_limits(), workers))
    yield from guarded("run folder", lambda: host.check_run_folder(host.probe_run_folder(runs_dir)))
    yield from guarded("host name", lambda: network.check_host_name(gather()))
    yield from guarded("interface", lambda: network.check_interface(gather()))
    yield from guarded("port", lambda: network.check_port(network.find_free_port()))
    yield from guarded("clock", lambda: network.check_clock(network.read_clock()))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that are the same on several nodes become one, for all of them."""
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        nodes.setdefault(replace(finding, node=""), []).append(finding.node)
    return [replace(finding, node=", ".join(dict.fromkeys(names))) for finding, names in nodes.items()]
