"""The order of the checks: this machine, ranks that communicate, a training step.

Lockstep starts the ranks, or takes part in those of ``torchrun`` or ``srun``, on one node or several.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.config import resolve
from lockstep.errors import RunError, many
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import World, read_world
from lockstep.lab.doctor.gpus import check_gpus
from lockstep.lab.doctor.machine import check_machine
from lockstep.lab.doctor.ranks import PATIENCE, RANKS, check_meeting, measure, meet
from lockstep.lab.doctor.report import Check, DoctorReport, Finding, Meeting, merged
from lockstep.launch.local.on_ranks import run_on_ranks
from lockstep.launch.meeting.membership import group
from lockstep.launch.process.signals import StopRequest
from lockstep.launch.run_claim import create_folder

TASK = "har"
STEP = Check(
    "training step",
    "a whole step: data, forward, backward, all-reduce, optimizer, validation and checkpoint, as `train` does it",
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
    if world.from_outside:
        return _as_rank(placement, world, runs_dir, quick=quick, say=say)
    with StopRequest() as stop, tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        say("checking this machine")
        findings = _this_node(placement, world, runs_dir)
        meeting = None
        if not quick and stop.requested is None:
            rank_findings, meeting = _meeting(placement, Path(folder), say)
            findings += rank_findings
            if any(finding.status == "fail" for finding in rank_findings):
                findings.append(STEP("skip", "the ranks must communicate first"))
            elif stop.requested is None:
                say("training one step")
                findings.append(_training_step(placement, Path(folder), _by_hand(placement)))
        if stop.requested is not None:
            raise KeyboardInterrupt
    return DoctorReport(placement.devices, tuple(findings), meeting)


def _this_node(placement: Placement, world: World, runs_dir: Path) -> list[Finding]:
    """Return the findings of this machine; starts no rank and leaves no file."""
    findings = [*check_gpus(placement.devices, detect_devices()), *check_machine(placement, world, runs_dir)]
    return [replace(finding, node=socket.gethostname()) for finding in findings]


def _meeting(placement: Placement, folder: Path, say: Say) -> tuple[list[Finding], Meeting | None]:
    if placement.world_size == 1:
        return [_alone(placement)], None
    say(f"starting {placement.world_size} ranks, and summing numbers among them")
    try:
        run = create_folder(resolve({"save_dir": str(folder / "ranks")}))
        meeting: Meeting = run_on_ranks(meet, placement, folder=run, ranks=placement.world_size)[0]
        return list(check_meeting(meeting)), meeting
    except Exception as error:
        return [RANKS.failed(error, _by_hand(placement))], None


def _alone(placement: Placement) -> Finding:
    name = placement.devices[0]
    more = f"--devices {name},{name} starts two ranks on this device"
    return RANKS("skip", f"single process: no communication to check ({more})")


def _training_step(placement: Placement, folder: Path, fix: str) -> Finding:
    """Train a few steps of the built-in task, from its data to the checkpoint.

    ``fix``: used if an error has no other fix.
    """
    from lockstep.launch.api import train

    settings = {
        "save_dir": str(folder / "step"),
        "hardware": {"selected_devices": list(placement.devices)},
        **PATIENCE,
        "telemetry": {"progress": "silent", "tensorboard": "off"},
        "debug": {"fast_dev_run": True},
    }
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = train(TASK, settings)
    except (Exception, SystemExit) as error:
        return STEP.failed(error, fix)
    if result.exit_code >= 128:
        raise KeyboardInterrupt
    ranks = f"{many(placement.world_size, 'rank')} on {', '.join(placement.devices)}"
    if result.exit_code == 0 and result.status == "completed" and result.step:
        return STEP("ok", f"{TASK} took {many(result.step, 'step')} with {ranks}")
    text = f"{TASK} with {ranks} ended as {result.status} after {result.step} steps (exit code {result.exit_code})"
    return STEP("fail", text, _by_hand(placement))


def _by_hand(placement: Placement) -> str:
    """Return the command that runs only the training step."""
    return f"run only this: lockstep train {TASK} --devices {','.join(placement.devices)} --fast-dev-run"


def _as_rank(placement: Placement, world: World, runs_dir: Path, *, quick: bool, say: Say) -> DoctorReport:
    """Check as one of ``world.size`` ranks; rank 0's report is about all of them, those of other ranks are empty."""
    if world.is_main:
        say(f"checking {many(world.nodes, 'node')}, {many(world.size, 'rank')}")
    # Each node's first rank checks it, before any rank has opened its GPU.
    findings = _this_node(placement, world, runs_dir) if world.local_rank == 0 else []
    meeting = None
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-", ignore_cleanup_errors=True) as folder:
        try:
            with group(world, resolve(PATIENCE), placement.as_dict(), Path(folder)) as team:
                findings = merged(finding for node in team.collectives.all_gather(findings) for finding in node)
                if world.size > 1 and not quick:
                    meeting = measure(team, placement)
                first_folder = Path(team.collectives.broadcast(folder))
            if not quick:
                findings += check_meeting(meeting) if meeting else [_alone(placement)]
                findings += _train_together(placement, world, first_folder)
        except Exception as error:
            if not world.is_main:
                raise RunError(f"rank {world.rank} stopped checking: {error}", fix="see rank 0's report") from error
            fix = (
                "see that every rank is there and runs the same command, and that nodes reach each other: "
                "look for a firewall, and choose the interface (GLOO_SOCKET_IFNAME)"
            )
            findings.append(RANKS.failed(error, fix))
    devices = tuple(rank.device for rank in meeting.ranks) if meeting else placement.devices
    return DoctorReport(devices, tuple(findings) if world.is_main else (), meeting)


def _train_together(placement: Placement, world: World, folder: Path) -> list[Finding]:
    """Train one step on all ranks, in ``folder`` on each node; return the finding of rank 0 and failures of others."""
    fix = "to see the error: start `lockstep train har --fast-dev-run` in the same way"
    try:
        finding = _training_step(placement, folder, fix)
        with group(world, resolve(PATIENCE), placement.as_dict(), folder) as team:  # all ranks have left the training
            first, *findings = team.collectives.all_gather(finding)
    finally:
        if world.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    failed = {rank: other for rank, other in enumerate(findings, start=1) if other.status == "fail"}
    return [first, *(replace(other, what=f"rank {rank}: {other.what}") for rank, other in failed.items())]
