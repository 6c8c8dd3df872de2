"""The order of the checks: this machine, ranks that communicate, a training step.

The ranks check together, whether Lockstep or another launcher has started them, on one node or several.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.config import resolve
from lockstep.errors import RunError, many
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import World, read_world
from lockstep.lab.doctor.gpus import check_gpus
from lockstep.lab.doctor.machine import check_machine
from lockstep.lab.doctor.ranks import RANKS, STEP, by_hand, check_as_rank, check_together
from lockstep.lab.doctor.report import DoctorReport, Finding
from lockstep.launch.local.on_ranks import run_on_ranks
from lockstep.launch.process.signals import StopRequest
from lockstep.rundir.folder import RunDir

_CANNOT_MEET = (
    "see that every rank is there and runs the same command, and that nodes reach each other: look for a firewall, and "
    "choose the interface (GLOO_SOCKET_IFNAME)"
)
Say = Callable[[str], None]


def examine(
    devices: str | None = None, *, runs_dir: Path = Path("runs"), quick: bool = False, say: Say = lambda line: None
) -> DoctorReport:
    """Check everything that training on several devices needs; ``quick``: start no ranks and no training.

    Under ``torchrun`` or ``srun``, on any number of nodes, every rank calls this; the report of rank 0 is complete,
    those of other ranks are empty. Otherwise Lockstep starts the ranks, one on each of ``devices``. Default: every
    GPU, or two ranks on the CPU without a GPU.
    """
    world = read_world(os.environ)
    detected = detect_devices()
    if devices is None and not world.from_outside:
        has_gpu = any(device.kind == "gpu" and device.supported for device in detected)
        devices = "all" if has_gpu else "cpu,cpu"
    config = resolve({"hardware": {"selected_devices": devices}})
    placement = resolve_placement(config.hardware, config.distributed, world, detected)
    if world.is_main:
        say(f"checking {many(world.nodes, 'node')}, {many(placement.world_size, 'rank')}")
    findings: Sequence[Finding] = ()
    meeting = None
    with (
        StopRequest() as stop,
        tempfile.TemporaryDirectory(
            prefix="lockstep-doctor-", dir=_shared_folder(runs_dir, world), ignore_cleanup_errors=True
        ) as name,
    ):
        folder = Path(name)
        if world.local_rank == 0:  # before any rank has opened its GPU
            findings = _this_node(placement, world, runs_dir)
        try:
            if world.from_outside or placement.world_size == 1 or quick:
                findings, meeting = check_together(None, world, placement, findings, folder, quick=quick)
            else:
                say(f"starting {placement.world_size} ranks: they sum numbers, and train a step")
                logs = RunDir(folder / "ranks")
                ranks = placement.world_size
                findings, meeting = run_on_ranks(check_as_rank, placement, findings, folder=logs, ranks=ranks)[0]
        except Exception as error:
            if not world.is_main:
                raise RunError(f"rank {world.rank} stopped checking: {error}", fix="see rank 0's report") from error
            findings = [
                *findings,
                RANKS.failed(error, _CANNOT_MEET if world.from_outside else by_hand(placement)),
                STEP("skip", "the ranks must communicate first"),
            ]
        if stop.requested is not None:
            raise KeyboardInterrupt
    used_devices = tuple(rank.device for rank in meeting.ranks) if meeting else placement.devices
    return DoctorReport(used_devices, tuple(findings) if world.is_main else (), meeting)


def _shared_folder(runs_dir: Path, world: World) -> Path | None:
    """Return the folder for temporary files: of several nodes one that they share; ``None``: the system's."""
    if world.nodes == 1:
        return None
    folder = next(path for path in (runs_dir, *runs_dir.absolute().parents) if path.is_dir())
    return folder if os.access(folder, os.W_OK) else None


def _this_node(placement: Placement, world: World, runs_dir: Path) -> list[Finding]:
    """Return the findings of this machine; starts no rank and leaves no file."""
    findings = [*check_gpus(placement.devices, detect_devices()), *check_machine(placement, world, runs_dir)]
    return [replace(finding, node=socket.gethostname()) for finding in findings]
