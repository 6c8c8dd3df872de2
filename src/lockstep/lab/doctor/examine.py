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
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from lockstep.config import resolve
from lockstep.engine.distributed.collectives import Collectives
from lockstep.errors import RunError, many
from lockstep.hardware import parent_death
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import World, read_world, rendezvous
from lockstep.lab.doctor.gpus import check_gpus
from lockstep.lab.doctor.machine import check_machine
from lockstep.lab.doctor.ranks import RANKS, TIMEOUT_S, check_meeting, joined, measure, meet
from lockstep.lab.doctor.report import Check, DoctorReport, Finding, Meeting, merged
from lockstep.launch.local.on_ranks import run_on_ranks
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
    """Train one step of the built-in task, from its data to the checkpoint.

    ``fix``: used if an error has no other fix.
    """
    from lockstep.launch.api import train

    settings = {
        "save_dir": str(folder / "step"),
        "hardware": {"selected_devices": list(placement.devices)},
        "distributed": {"timeout_s": TIMEOUT_S},
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
    if result.exit_code == 0 and result.status == "completed" and result.step == 1:
        return STEP("ok", f"{TASK} took a step with {ranks}")
    text = f"{TASK} with {ranks} ended as {result.status} after {result.step} steps (exit code {result.exit_code})"
    return STEP("fail", text, _by_hand(placement))


def _by_hand(placement: Placement) -> str:
    """Return the command that runs only the training step."""
    return f"run only this: lockstep train {TASK} --devices {','.join(placement.devices)} --fast-dev-run"


def _as_rank(placement: Placement, world: World, runs_dir: Path, *, quick: bool, say: Say) -> DoctorReport:
    """Check as one of ``world.size`` ranks; rank 0's report is about all of them, those of other ranks are empty."""
    os.environ.update(rendezvous(os.environ))
    parent_death.die_with_parent(os.getppid())
    if world.is_main:
        say(f"checking {many(world.nodes, 'node')}, {many(world.size, 'rank')}")
    # Each node's first rank checks it, before any rank has opened its GPU.
    findings = _this_node(placement, world, runs_dir) if world.local_rank == 0 else []
    try:
        with joined(world, placement) as store:
            collectives = Collectives(world, timeout_s=TIMEOUT_S)
            findings = merged(finding for node in collectives.all_gather(findings) for finding in node)
            if world.nodes > 1:
                findings.append(_shared_folder(collectives, runs_dir))
            meeting = measure(collectives, world, placement) if world.size > 1 and not quick else None
            folder = Path(collectives.broadcast(f"{tempfile.gettempdir()}/lockstep-doctor-{uuid.uuid4().hex}"))
    except Exception as error:
        if not world.is_main:
            raise RunError(f"rank {world.rank} stopped checking: {error}", fix="see rank 0's report") from error
        fix = (
            "see that every rank is there and runs the same command, and that nodes reach each other: "
            "look for a firewall, and choose the interface (GLOO_SOCKET_IFNAME)"
        )
        return DoctorReport(placement.devices, (*findings, RANKS.failed(error, fix)))
    if not quick:
        findings += check_meeting(meeting) if meeting else [_alone(placement)]
        findings += _train_together(placement, world, store, folder)
    devices = tuple(rank.device for rank in meeting.ranks) if meeting else placement.devices
    return DoctorReport(devices, tuple(findings) if world.is_main else (), meeting)


def _shared_folder(collectives: Collectives, runs_dir: Path) -> Finding:
    """Check that all nodes see the same folder for runs."""
    check = Check(
        "shared run folder",
        "rank 0 writes the run; without a shared folder the other nodes cannot read it when they resume",
        "give a folder on shared storage with --runs-dir (train: --save-dir), or resume with the same rank 0",
    )
    probe = ""
    if collectives.is_main:
        with contextlib.suppress(OSError):
            ancestors = (runs_dir.absolute(), *runs_dir.absolute().parents)
            existing = next(folder for folder in ancestors if folder.is_dir())
            descriptor, probe = tempfile.mkstemp(prefix=".lockstep-doctor-", dir=existing)
            os.close(descriptor)
    probe = collectives.broadcast(probe)
    is_shared = all(collectives.all_gather(bool(probe) and Path(probe).exists()))
    if probe and collectives.is_main:
        Path(probe).unlink(missing_ok=True)
    return check("ok" if is_shared else "warn", f"{'all' if is_shared else 'not all'} nodes see the folder of rank 0")


def _train_together(placement: Placement, world: World, store: Store, folder: Path) -> list[Finding]:
    """Train one step on all ranks; on rank 0, add the errors of the other ranks.

    Each rank writes its error, or an empty text, to ``store``. Each node's first rank removes the folder of the node
    after all have done so. Rank 0, which may serve the store, ends last.
    """
    names = {rank: f"left/{rank}" for rank in range(world.size)}
    fix = "to see the error: start `lockstep train har --fast-dev-run` in the same way"
    with StopRequest():  # signals end the training in order
        try:
            findings = [_training_step(placement, folder, fix)]
            store.set(names[world.rank], findings[0].what if findings[0].status == "fail" else "")
            if world.local_rank == 0:
                store.wait(list(names.values()), timedelta(seconds=TIMEOUT_S))
        except RuntimeError:
            return findings  # a rank was lost, which has failed the step of rank 0 too
        finally:
            if world.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
    if world.is_main:
        errors = {rank: store.get(name).decode() for rank, name in names.items() if rank > 0}
        fix = "fix this first: the other ranks' errors may follow from it"
        findings += [STEP("fail", f"rank {rank}: {text}", fix) for rank, text in errors.items() if text]
    return findings
