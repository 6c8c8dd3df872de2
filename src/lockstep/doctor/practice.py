"""The practical part: real ranks on the chosen devices, and one training step from the data to the checkpoint."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config import resolve
from lockstep.doctor.finding import Finding, first_line
from lockstep.doctor.ranks import TIMEOUT_S, Meeting, meet
from lockstep.errors import LockstepError
from lockstep.hardware.resolve import Placement
from lockstep.launch.failure.causes import find_cause
from lockstep.launch.local.on_ranks import run_on_ranks
from lockstep.launch.run_claim import create_folder

if TYPE_CHECKING:
    from lockstep.engine.state import RunResult

TASK = "har"
TOGETHER = "several devices train together only if their processes reach each other"
STEP = "a whole step: data, forward, backward, all-reduce, optimizer, validation and checkpoint, as `train` does it"


def alone(placement: Placement) -> Finding:
    """The finding in place of a meeting when there is one rank."""
    name = placement.devices[0]
    what = f"single process: no communication to check (--devices {name},{name} starts two ranks on this device)"
    return Finding("ranks", "skip", what, TOGETHER)


def let_ranks_meet(placement: Placement, folder: Path) -> Meeting:
    """Start a rank on each device of ``placement``; what they measured.

    Raises:
        LockstepError: a rank failed. KeyboardInterrupt: stopped.
    """
    run = create_folder(resolve({"save_dir": str(folder / "ranks")}))
    meeting: Meeting = run_on_ranks(meet, placement, folder=run, ranks=placement.world_size)[0]
    return meeting


def train_one_step(placement: Placement, folder: Path) -> RunResult:
    """One step of the built-in task on the devices of ``placement``, from its data to the checkpoint.

    Raises:
        LockstepError: it failed. KeyboardInterrupt: stopped.
    """
    from lockstep.launch.api import train

    settings = {
        "save_dir": str(folder / "step"),
        "hardware": {"selected_devices": list(placement.devices)},
        "distributed": {"timeout_s": TIMEOUT_S},
        "telemetry": {"progress": "silent", "tensorboard": "off"},
        "debug": {"fast_dev_run": True},
    }
    with contextlib.redirect_stdout(sys.stderr):
        result = train(TASK, settings)
    if result.exit_code >= 128:
        raise KeyboardInterrupt
    return result


def step_finding(result: RunResult, placement: Placement) -> Finding:
    """The finding of a training step that ended."""
    where = f"{placement.world_size} rank(s) on {', '.join(placement.devices)}"
    if result.exit_code == 0 and result.status == "completed" and result.step == 1:
        loss = result.metrics.get("val_loss")
        text = "" if loss is None else f", validation loss {loss:.3f}"
        return Finding("training step", "ok", f"{TASK} took a step with {where}{text}", STEP)
    what = f"{TASK} with {where} ended as {result.status} after {result.step} steps (exit code {result.exit_code})"
    return Finding("training step", "fail", what, STEP, by_hand(placement))


def failed(name: str, why: str, error: BaseException, fix: str) -> Finding:
    """The finding that an error in the practical part makes; ``fix``: where neither error nor cause has one."""
    text = first_line(error)
    if isinstance(error, LockstepError):
        fix = error.fix or fix
    else:
        cause = find_cause(f"{type(error).__name__}: {error}")
        text, fix = (f"{text} ({cause.title})", cause.advice) if cause else (text, fix)
    return Finding(name, "fail", text, why, fix)


def by_hand(placement: Placement) -> str:
    """How to run only what failed here."""
    devices = ",".join(placement.devices)
    return f"run only this: lockstep train {TASK} --devices {devices} --fast-dev-run"
