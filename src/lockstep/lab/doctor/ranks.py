"""Checks of several ranks: whether they meet, whether their sums are right, how fast, and a training step."""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.config import resolve
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.runtime import rank_device
from lockstep.errors import many
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.lab.bench.comm import bus_factor, call_time
from lockstep.lab.doctor.report import AllReduce, Check, Finding, Meeting, RankFacts, merged, size_text
from lockstep.launch.local.worker import Rank
from lockstep.launch.meeting.membership import Team, group
from lockstep.launch.meeting.preparation import TrainRequest, prepare_together
from lockstep.launch.prepare import settle
from lockstep.launch.process.signals import Stopped
from lockstep.launch.rank import train_as_rank

#: Configuration of ranks that meet for a check: how long a rank waits for the others, in seconds.
PATIENCE = {"distributed": {"timeout_s": 60.0}}
#: Bytes: the latency; a small bucket; enough to fill the line (DDP sends buckets of 25 MiB).
SIZES = (4 << 10, 1 << 20, 64 << 20)
RANKS = Check("ranks", "several devices train together only if their processes reach each other")
#: Minimum bus bandwidth; less means a fault: a GPU pair without peer access, or a network of 1 Gbit/s.
MIN_BUS_GB_S = {"nccl": 2.0, "gloo": 0.1}
#: Gradients of a model with 25 million parameters in float32, such as ResNet-50.
EXAMPLE_BYTES = 100_000_000
TASK = "har"
STEP = Check(
    "training step",
    "a whole step: data, forward, backward, all-reduce, optimizer, validation and checkpoint, as `train` does it",
)
#: The training step as a command.
_COMMAND = f"lockstep train {TASK} --fast-dev-run"


def check_as_rank(
    rank: Rank, placement: Placement, findings: Sequence[Finding]
) -> tuple[Sequence[Finding], Meeting | None]:
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
    fix = by_hand(placement) if not world.from_outside else "to see the error, start this in the same way: " + _COMMAND
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


def by_hand(placement: Placement) -> str:
    """Return the command that runs only the training step."""
    return f"run only this: {_COMMAND} --devices {','.join(placement.devices)}"


def measure(team: Team, placement: Placement) -> Meeting:
    """Gather facts and all-reduces of all ranks. Collective; the result is the same on every rank."""
    world = team.world
    device = rank_device(placement.devices, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    name = placement.devices[world.local_rank % len(placement.devices)]
    facts = RankFacts(rank=world.rank, host=socket.gethostname(), device=name)
    sums = tuple(_all_reduce(team.collectives, device, size) for size in SIZES)
    return Meeting(
        backend=placement.backend or "gloo", ranks=tuple(team.collectives.all_gather(facts)), all_reduce=sums
    )


def _all_reduce(collectives: Collectives, device: torch.device, size: int) -> AllReduce:
    # Whole numbers far below 2^24, so float32 sums are exact in any order.
    pattern = torch.arange(size // 4, dtype=torch.float32, device=device) % 251
    tensor = pattern + collectives.rank
    dist.all_reduce(tensor)
    ranks = collectives.size
    is_correct = torch.equal(tensor, pattern * ranks + ranks * (ranks - 1) / 2)
    wrong = tuple(rank for rank, correct in enumerate(collectives.all_gather(is_correct)) if not correct)
    tensor.zero_()
    seconds = call_time(collectives, lambda: dist.all_reduce(tensor), device)
    bus = bus_factor("all_reduce", ranks) * size / seconds / 1e9
    return AllReduce(bytes=size, seconds=seconds, bus_gb_s=bus, wrong=wrong)


def check_meeting(meeting: Meeting) -> Iterator[Finding]:
    """Yield the findings on ranks that have met; different versions and settings were refused by name before."""
    has_several_hosts = len({rank.host for rank in meeting.ranks}) > 1
    devices = ", ".join(
        f"{rank.rank} on {rank.device}" + (f" of {rank.host}" if has_several_hosts else "") for rank in meeting.ranks
    )
    yield RANKS("ok", f"{len(meeting.ranks)} ranks met over {meeting.backend}: {devices}")
    yield _check_sums(meeting)
    yield _check_bandwidth(meeting.backend, meeting.all_reduce)


def _check_sums(meeting: Meeting) -> Finding:
    check = Check(
        "all-reduce", "a step's gradients are summed over all ranks: a wrong sum trains a wrong model without an error"
    )
    rows = meeting.all_reduce
    wrong = [f"rank {', '.join(map(str, row.wrong))} at {size_text(row.bytes)}" for row in rows if row.wrong]
    if not wrong:
        return check("ok", f"the sums are right on every rank ({', '.join(size_text(row.bytes) for row in rows)})")
    fix = "test the machine's memory (memtest86+), and reinstall torch"
    if meeting.backend == "nccl":
        fix = (
            "try NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1: if the sums are right then, switch off PCIe access control "
            "services (ACS) and the IOMMU; else exchange the GPU or memory"
        )
    return check("fail", f"wrong sums on {'; '.join(wrong)}", fix)


def _check_bandwidth(backend: str, rows: Sequence[AllReduce]) -> Finding:
    check = Check(
        "bandwidth",
        "each step waits until the gradients are summed; this time decides whether more devices are faster",
        "set NCCL_DEBUG=INFO and look which path NCCL takes; see the finding on peer access"
        if backend == "nccl"
        else "end other programs that use the cores; between nodes, choose a faster interface (GLOO_SOCKET_IFNAME)",
    )
    smallest = rows[0]
    largest = rows[-1]
    example_s = EXAMPLE_BYTES / largest.bytes * largest.seconds
    text = (
        f"{largest.bus_gb_s:.2f} GB/s per rank, latency {smallest.seconds * 1e3:.2f} ms; the gradients of 25 million "
        f"parameters take about {example_s * 1e3:,.0f} ms"
    )
    if largest.bus_gb_s < MIN_BUS_GB_S[backend]:
        return check("warn", f"{text}; {backend} should reach {MIN_BUS_GB_S[backend]:g} GB/s")
    return check("ok", text)
