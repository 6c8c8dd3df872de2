"""The order of the checks: this machine, ranks that communicate, a training step.

Lockstep starts the ranks, or takes part in those of ``torchrun`` or ``srun``, on one node or several.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from lockstep.config import resolve
from lockstep.doctor.finding import Finding, failed
from lockstep.doctor.node import examine_node, merged
from lockstep.doctor.ranks import TIMEOUT_S, TOGETHER, Meeting, check_meeting, joined, measure, meet
from lockstep.doctor.report import DoctorReport
from lockstep.engine.distributed.collectives import Collectives
from lockstep.errors import RunError, many
from lockstep.hardware import parent_death
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import World, read_world, rendezvous
from lockstep.launch.local.on_ranks import run_on_ranks
from lockstep.launch.local.signals import StopRequest
from lockstep.launch.run_claim import create_folder

TASK = "har"
STEP = "a whole step: data, forward, backward, all-reduce, optimizer, validation and checkpoint, as `train` does it"
REACH = (
    "see that every rank is there and runs the same command, and that nodes reach each other: "
    "look for a firewall, and choose the interface (GLOO_SOCKET_IFNAME)"
)
Say = Callable[[str], None]
AGAIN = "to see the error: start `lockstep train har --fast-dev-run` in the same way"


def examine(
    devices: str | None = None, *, runs_dir: Path = Path("runs"), quick: bool = False, say: Say = lambda line: None
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
        return examine_as_rank(placement, world, runs_dir, quick=quick, say=say)
    with StopRequest() as stop, tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as name:
        folder = Path(name)
        say("checking this machine")
        findings = examine_node(placement, world, detected, runs_dir)
        meeting = None
        if not quick:
            _unless_stopped(stop)
            found, meeting = _meeting(placement, folder, say)
            _unless_stopped(stop)
            findings += found
            if all(finding.status != "fail" for finding in found):
                say("training one step")
                findings.append(training_step(placement, folder, by_hand(placement)))
            else:
                findings.append(Finding("training step", "skip", "the ranks must communicate first", STEP))
        _unless_stopped(stop)
    return DoctorReport(placement.devices, tuple(findings), meeting)


def _unless_stopped(stop: StopRequest) -> None:
    if stop.requested is not None:
        raise KeyboardInterrupt


def _meeting(placement: Placement, folder: Path, say: Say) -> tuple[list[Finding], Meeting | None]:
    if placement.world_size == 1:
        return [alone(placement)], None
    say(f"starting {placement.world_size} ranks, and summing numbers among them")
    try:
        run = create_folder(resolve({"save_dir": str(folder / "ranks")}))
        meeting: Meeting = run_on_ranks(meet, placement, folder=run, ranks=placement.world_size)[0]
        return list(check_meeting(meeting)), meeting
    except Exception as error:
        return [failed("ranks", TOGETHER, error, by_hand(placement))], None


def alone(placement: Placement) -> Finding:
    """The finding in place of a meeting when there is one rank."""
    name = placement.devices[0]
    what = f"single process: no communication to check (--devices {name},{name} starts two ranks on this device)"
    return Finding("ranks", "skip", what, TOGETHER)


def training_step(placement: Placement, folder: Path, fix: str) -> Finding:
    """The finding of one step of the built-in task on ``placement``, from its data to the checkpoint.

    Args:
        fix: where an error that stops it has none.

    Raises:
        KeyboardInterrupt: stopped.
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
        return failed("training step", STEP, error, fix)
    if result.exit_code >= 128:
        raise KeyboardInterrupt
    where = f"{many(placement.world_size, 'rank')} on {', '.join(placement.devices)}"
    if result.exit_code == 0 and result.status == "completed" and result.step == 1:
        loss = result.metrics.get("val_loss")
        text = "" if loss is None else f", validation loss {loss:.3f}"
        return Finding("training step", "ok", f"{TASK} took a step with {where}{text}", STEP)
    what = f"{TASK} with {where} ended as {result.status} after {result.step} steps (exit code {result.exit_code})"
    return Finding("training step", "fail", what, STEP, by_hand(placement))


def by_hand(placement: Placement) -> str:
    """How to run only what failed here."""
    devices = ",".join(placement.devices)
    return f"run only this: lockstep train {TASK} --devices {devices} --fast-dev-run"


def examine_as_rank(placement: Placement, world: World, runs_dir: Path, *, quick: bool, say: Say) -> DoctorReport:
    """This process is one of ``world.size`` ranks; rank 0's report is about all of them, the others' are empty."""
    os.environ.update(rendezvous(os.environ))
    parent_death.die_with_parent(os.getppid())
    if world.is_main:
        say(f"checking {many(world.nodes, 'node')}, {many(world.size, 'rank')}")
    # Each node's first rank checks it, before any rank has opened its GPU.
    findings = examine_node(placement, world, detect_devices(), runs_dir) if world.local_rank == 0 else []
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
            finding = training_step(placement, folder, AGAIN)
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
