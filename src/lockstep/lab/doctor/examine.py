"""The order of the checks: this machine, ranks that communicate, a training step.

The ranks check together, whether Lockstep or another launcher has started them, on one node or several.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
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
from lockstep.lab.doctor.ranks import PATIENCE, RANKS, check_meeting, measure
from lockstep.lab.doctor.report import Check, DoctorReport, Finding, Meeting, merged
from lockstep.launch.local.on_ranks import run_on_ranks
from lockstep.launch.local.worker import Rank
from lockstep.launch.meeting.membership import group
from lockstep.launch.meeting.preparation import TrainRequest, prepare_together
from lockstep.launch.prepare import settle
from lockstep.launch.process.signals import Stopped, StopRequest
from lockstep.launch.rank import train_as_rank
from lockstep.launch.run_claim import create_folder

TASK = "har"
STEP = Check(
    "training step",
    "a whole step: data, forward, backward, all-reduce, optimizer, validation and checkpoint, as `train` does it",
)
#: The training step as a command.
_COMMAND = f"lockstep train {TASK} --fast-dev-run"
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
                run = create_folder(resolve({"save_dir": str(folder / "ranks")}))
                ranks = placement.world_size
                findings, meeting = run_on_ranks(_as_rank, placement, findings, folder=run, ranks=ranks)[0]
        except Exception as error:
            if not world.is_main:
                raise RunError(f"rank {world.rank} stopped checking: {error}", fix="see rank 0's report") from error
            findings = [
                *findings,
                RANKS.failed(error, _CANNOT_MEET if world.from_outside else _by_hand(placement)),
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


def _as_rank(rank: Rank, placement: Placement, findings: Sequence[Finding]) -> tuple[Sequence[Finding], Meeting | None]:
    """Check as a rank that Lockstep's launcher has started; ``findings``: of its caller."""
    return check_together(rank, rank.world, placement, findings if rank.world.is_main else (), rank.folder.path.parent)


def check_together(
    launched: Rank | None,
    world: World,
    placement: Placement,
    findings: Sequence[Finding],
    folder: Path,
    *,
    quick: bool = False,
) -> tuple[Sequence[Finding], Meeting | None]:
    """Gather the ``findings`` of all nodes, sum numbers among the ranks, and train a step. Collective.

    ``folder``: for temporary files; that of rank 0 is used. ``launched``: of a rank that Lockstep's launcher has
    started.
    """
    meeting = None
    with group(world, resolve(PATIENCE), placement.as_dict(), folder) as team:
        everywhere = merged(finding for node in team.collectives.all_gather(findings) for finding in node)
        if quick:
            return everywhere, None
        if world.size > 1:
            meeting = measure(team, placement)
        folder = team.collectives.broadcast(folder)
    everywhere += check_meeting(meeting) if meeting else [_alone(placement)]
    if meeting and any(row.wrong for row in meeting.all_reduce):
        return [*everywhere, STEP("skip", "the ranks must communicate first")], meeting
    return [*everywhere, *_train_together(launched, world, placement, folder)], meeting


def _alone(placement: Placement) -> Finding:
    name = placement.devices[0]
    more = f"--devices {name},{name} starts two ranks on this device"
    return RANKS("skip", f"single process: no communication to check ({more})")


def _train_together(launched: Rank | None, world: World, placement: Placement, folder: Path) -> list[Finding]:
    """Train one step on all ranks, in ``folder`` on each node; return the finding of rank 0 and failures of others."""
    try:
        finding = _training_step(launched, world, placement, folder)
        with group(world, resolve(PATIENCE), placement.as_dict(), folder) as team:  # all ranks have left the training
            first, *findings = team.collectives.all_gather(finding)
    finally:
        if world.local_rank == 0:
            shutil.rmtree(folder / "step", ignore_errors=True)
    failed = {rank: other for rank, other in enumerate(findings, start=1) if other.status == "fail"}
    return [first, *(replace(other, what=f"rank {rank}: {other.what}") for rank, other in failed.items())]


def _training_step(launched: Rank | None, world: World, placement: Placement, folder: Path) -> Finding:
    """Train a few steps of the built-in task, from its data to the checkpoint, as :func:`lockstep.train` does."""
    settings = {
        "save_dir": str(folder / "step"),
        "hardware": {"selected_devices": list(placement.devices)},
        **PATIENCE,
        "telemetry": {"progress": "silent", "tensorboard": "off"},
        "debug": {"fast_dev_run": True},
    }
    fix = _by_hand(placement) if not world.from_outside else "to see the error, start this in the same way: " + _COMMAND
    try:
        task, config = settle(TASK, settings)
        request = TrainRequest(resume=False, given=settings, as_given=False)
        with contextlib.redirect_stdout(sys.stderr):
            result = train_as_rank(
                world, config, lambda team, claim: prepare_together(team, task, config, request, claim), launched
            )
    except (Exception, SystemExit) as error:
        return STEP.failed(error, fix)
    if result.exit_code >= 128:
        raise Stopped(result.exit_code)
    ranks = f"{many(placement.world_size, 'rank')} on {', '.join(placement.devices)}"
    if result.exit_code == 0 and result.status == "completed" and result.step:
        return STEP("ok", f"{TASK} took {many(result.step, 'step')} with {ranks}")
    text = f"{TASK} with {ranks} ended as {result.status} after {result.step} steps (exit code {result.exit_code})"
    return STEP("fail", text, fix)


def _by_hand(placement: Placement) -> str:
    """Return the command that runs only the training step."""
    return f"run only this: {_COMMAND} --devices {','.join(placement.devices)}"
