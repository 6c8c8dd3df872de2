"""The checks under ``torchrun`` or ``srun``, on one node or several."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from lockstep.doctor.finding import Finding
from lockstep.doctor.node import examine_node, merged
from lockstep.doctor.practice import STEP, TOGETHER, alone, failed, step_finding, train_one_step
from lockstep.doctor.ranks import TIMEOUT_S, joined, measure
from lockstep.doctor.report import DoctorReport
from lockstep.doctor.together import check_meeting
from lockstep.engine.distributed.collectives import Collectives
from lockstep.errors import RunError
from lockstep.hardware import parent_death
from lockstep.hardware.device import Device
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World, rendezvous
from lockstep.launch.local.signals import StopRequest

REACH = (
    "see that every rank is there and runs the same command, and that nodes reach each other: "
    "look for a firewall, and choose the interface (GLOO_SOCKET_IFNAME)"
)
AGAIN = "to see the error: start `lockstep train har --fast-dev-run` in the same way"


def examine_as_rank(
    placement: Placement,
    world: World,
    detected: Sequence[Device],
    runs_dir: Path,
    *,
    quick: bool,
    say: Callable[[str], None],
) -> DoctorReport:
    """This process is one of ``world.size`` ranks; rank 0's report is about all of them, the others' are empty."""
    os.environ.update(rendezvous(os.environ))
    parent_death.die_with_parent(os.getppid())
    if world.is_main:
        say(f"checking {world.nodes} node(s), {world.size} rank(s)")
    # Each node's first rank checks it, before any rank has opened its GPU.
    findings = examine_node(placement, world, detected, runs_dir) if world.local_rank == 0 else []
    try:
        with joined(world, placement) as store:
            collectives = Collectives(world, timeout_s=TIMEOUT_S)
            gathered = collectives.gather(findings)
            findings = merged(finding for node in gathered or [] for finding in node)
            if world.nodes > 1:
                findings += _shared_folder(collectives, runs_dir)
            meeting = measure(collectives, world, placement) if world.size > 1 and not quick else None
            folder = Path(collectives.broadcast(f"{tempfile.gettempdir()}/lockstep-doctor-{uuid.uuid4().hex}"))
    except Exception as error:
        if not world.is_main:
            raise RunError(f"rank {world.rank} stopped checking: {error}", fix="see rank 0's report") from error
        return DoctorReport(placement.devices, (*findings, failed("ranks", TOGETHER, error, REACH)))
    if not quick:
        findings += check_meeting(meeting) if meeting else [alone(placement)]
        findings = _train_together(placement, world, store, folder, findings)
    devices = tuple(rank.device for rank in meeting.ranks) if meeting else placement.devices
    return DoctorReport(devices, tuple(findings) if world.is_main else (), meeting)


def _shared_folder(collectives: Collectives, runs_dir: Path) -> list[Finding]:
    """Whether all nodes see one and the same folder for runs."""
    why = "rank 0 writes the run; without a shared folder the other nodes cannot read it when they resume"
    probe = ""
    if collectives.is_main:
        with contextlib.suppress(OSError):
            there = next(folder for folder in (runs_dir.absolute(), *runs_dir.absolute().parents) if folder.is_dir())
            descriptor, probe = tempfile.mkstemp(prefix=".lockstep-doctor-", dir=there)
            os.close(descriptor)
    probe = collectives.broadcast(probe)
    seen = collectives.all_gather(bool(probe) and Path(probe).exists())
    if not collectives.is_main:
        return []
    if probe:
        Path(probe).unlink(missing_ok=True)
    if all(seen):
        return [Finding("shared run folder", "ok", "all nodes see the same folder", why)]
    fix = "give a folder on shared storage with --runs-dir (train: --save-dir), or resume with the same rank 0"
    return [Finding("shared run folder", "warn", "not all nodes see the folder of rank 0", why, fix)]


def _train_together(
    placement: Placement, world: World, store: Store, folder: Path, findings: list[Finding]
) -> list[Finding]:
    """``findings`` and that of a training step; on rank 0 also what went wrong with it on the others.

    Each rank leaves its error, or nothing, in ``store``. Each node's first rank removes the folder there when all
    have done so; rank 0, whose store it may be, goes last.
    """
    with StopRequest():  # what arrives meanwhile ends the training in order
        try:
            try:
                finding = step_finding(train_one_step(placement, folder), placement)
            except (Exception, SystemExit) as error:
                finding = failed("training step", STEP, error, AGAIN)
            store.set(f"left/{world.rank}", finding.what if finding.status == "fail" else "")
            errors = _errors_of_others(store, world) if world.local_rank == 0 else []
        finally:
            if world.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
    return [*findings, finding, *errors]


def _errors_of_others(store: Store, world: World) -> list[Finding]:
    """Waits for all ranks."""
    try:
        store.wait([f"left/{rank}" for rank in range(world.size)], timedelta(seconds=TIMEOUT_S))
    except RuntimeError:
        return []  # a rank was lost: rank 0's own step has failed for it, too
    if not world.is_main:
        return []
    texts = {rank: store.get(f"left/{rank}").decode() for rank in range(1, world.size)}
    fix = "fix this first: the other ranks' errors may follow from it"
    return [Finding("training step", "fail", f"rank {rank}: {text}", STEP, fix) for rank, text in texts.items() if text]
