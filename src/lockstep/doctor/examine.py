"""The order of the checks: this machine, ranks that communicate, a training step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lockstep.config import resolve
from lockstep.doctor.finding import Finding
from lockstep.doctor.node import examine_node
from lockstep.doctor.practice import (
    STEP,
    TOGETHER,
    alone,
    by_hand,
    failed,
    let_ranks_meet,
    step_finding,
    train_one_step,
)
from lockstep.doctor.ranks import Meeting
from lockstep.doctor.report import DoctorReport
from lockstep.doctor.together import check_meeting
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import read_world
from lockstep.launch.local.on_ranks import temporary_folder
from lockstep.launch.local.signals import StopRequest


def examine(
    devices: str | None = None,
    *,
    runs_dir: Path = Path("runs"),
    quick: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> DoctorReport:
    """Check everything that training on several devices needs.

    Under ``torchrun`` or ``srun``, on any number of nodes, every rank calls this and takes part; the report of
    rank 0 is the whole one, the others' are empty. Otherwise Lockstep starts the ranks itself.

    Args:
        devices: as for training; by default every GPU, or two ranks on the CPU where there is none.
        runs_dir: where runs would go; it need not exist.
        quick: start no ranks and no training.
        say: called with what is being done.

    Raises:
        DeviceError: devices that this machine lacks. KeyboardInterrupt: stopped.
    """
    world = read_world(os.environ)
    detected = detect_devices()
    if devices is None and not world.from_outside:
        usable = any(device.kind == "gpu" and device.supported for device in detected)
        devices = "all" if usable else "cpu,cpu"
    config = resolve({"hardware": {"selected_devices": devices}})
    placement = resolve_placement(config.hardware, config.distributed, world, detected)
    if world.from_outside:
        from lockstep.doctor.outside import examine_as_rank

        return examine_as_rank(placement, world, detected, runs_dir, quick=quick, say=say)
    with StopRequest() as stop, temporary_folder("lockstep-doctor-") as folder:
        say("checking this machine")
        findings = examine_node(placement, world, detected, runs_dir)
        meeting = None
        if not quick:
            _unless_stopped(stop)
            found, meeting = _meeting(placement, folder, say)
            _unless_stopped(stop)
            findings += found
            if all(finding.status != "fail" for finding in found):
                findings.append(_training_step(placement, folder, say))
            else:
                findings.append(Finding("training step", "skip", "the ranks must communicate first", STEP))
        _unless_stopped(stop)
    return DoctorReport(placement.devices, tuple(findings), meeting)


def _unless_stopped(stop: StopRequest) -> None:
    if stop.requested is not None:
        raise KeyboardInterrupt


def _meeting(placement: Placement, folder: Path, say: Callable[[str], None]) -> tuple[list[Finding], Meeting | None]:
    if placement.world_size == 1:
        return [alone(placement)], None
    say(f"starting {placement.world_size} ranks, and summing numbers among them")
    try:
        meeting = let_ranks_meet(placement, folder)
        return list(check_meeting(meeting)), meeting
    except Exception as error:
        return [failed("ranks", TOGETHER, error, by_hand(placement))], None


def _training_step(placement: Placement, folder: Path, say: Callable[[str], None]) -> Finding:
    say("training one step")
    try:
        return step_finding(train_one_step(placement, folder), placement)
    except Exception as error:
        return failed("training step", STEP, error, by_hand(placement))
