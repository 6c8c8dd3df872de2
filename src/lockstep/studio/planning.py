"""``POST /api/plan``: the plan and every label of the hardware section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from lockstep.config import Precision, RunConfig, resolve
from lockstep.config.load import merge
from lockstep.errors import LockstepError, PrecisionError, UsageError
from lockstep.events import Note
from lockstep.hardware.device import Device
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import World
from lockstep.studio.settings import Wanted

MULTI_GPU = "Multi-GPU (DDP) will be used automatically."

#: ``(task, config, devices)`` → the plan as JSON has it; raises :class:`LockstepError`.
MakePlan = Callable[[str, Mapping[str, Any], Sequence[Device]], dict[str, Any]]


def make_answer(
    wanted: Wanted, devices: Sequence[Device], users: Mapping[str, Sequence[str]], make_plan: MakePlan
) -> dict[str, Any]:
    """The answer, without the command's preview.

    Args:
        users: of each device, the live runs of this folder.
    """
    config = resolve(wanted.mapping())
    placement, problem = place(config, devices)
    plan: dict[str, Any] | None = None
    notes: list[dict[str, Any]] = []
    blocked = problem is not None
    if placement is not None:
        # A plan must not download data: the run does.
        looking = merge(wanted.mapping(), {"data": {"download": False}})
        try:
            plan = make_plan(wanted.task, looking, devices)
            notes = plan["notes"]
        except LockstepError as error:
            later = config.data.download and error.code == "DATA_NOT_USABLE"
            problem, blocked = error, not later
            notes = [asdict(note) for note in placement.notes]
            if later:
                text = "The data is downloaded when the run starts; the plan is made then."
                notes.append(asdict(Note("data_downloaded_later", text)))
    return {
        "run": {"enabled": not blocked, "reason": problem.what if blocked and problem else None},
        "problem": problem.as_dict() if problem else None,
        "labels": _labels(placement, plan),
        "notes": notes,
        "warnings": _warnings(placement, users),
        "precisions": _precisions(config, devices),
        "plan": plan,
    }


def refusal(problem: LockstepError) -> dict[str, Any]:
    """The answer to invalid settings: the form stays usable, and Run is disabled."""
    return {
        "run": {"enabled": False, "reason": problem.what},
        "problem": problem.as_dict(),
        "labels": _labels(None, None),
        "notes": [],
        "warnings": [],
        "precisions": [{"value": value, "supported": True, "reason": None} for value in get_args(Precision)],
        "plan": None,
        "preview": None,
    }


def place(config: RunConfig, devices: Sequence[Device]) -> tuple[Placement | None, LockstepError | None]:
    """Where this would compute on these devices, or why it cannot."""
    try:
        in_process = config.pipeline.in_process
        return resolve_placement(config.hardware, config.distributed, World(), devices, in_process=in_process), None
    except LockstepError as error:
        return None, error


def _labels(placement: Placement | None, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    gpus = placement is not None and placement.accelerator == "gpu"
    several = placement is not None and placement.world_size > 1 and not placement.spec.divides
    ignored = [note.text for note in placement.notes if note.key == "cpu_ignored"] if placement else []
    labels: dict[str, Any] = {
        "effective_batch": None,
        "effective_batch_shown": False,
        "multi_gpu": MULTI_GPU if gpus and several else None,
        "cpu_ignored": ignored[0] if ignored else None,
        "learning_rate": None,
        "workers": None,
    }
    if plan is None:
        return labels
    batch, workers = plan["batch"], plan["loader"]["num_workers"]
    rate = plan["decisions"]["lr"]
    return labels | {
        "effective_batch": plan["effective_batch"],
        "effective_batch_shown": batch["ranks"] * batch["devices_per_rank"] > 1 or batch["accumulate"] > 1,
        "learning_rate": f"Learning rate {rate['shown']}: {rate['reason']}",
        "workers": f"Loader workers: {workers} per rank"
        + (f", {workers * batch['ranks']} in all" if batch["ranks"] > 1 and workers else ""),
    }


def _precisions(config: RunConfig, devices: Sequence[Device]) -> list[dict[str, Any]]:
    """Which precisions the chosen devices can compute, asked of the same function that decides it for a run."""
    answers = []
    for precision in get_args(Precision):
        hardware = config.hardware.model_copy(update={"precision": precision})
        reason = None
        try:
            resolve_placement(hardware, config.distributed, World(), devices, in_process=config.pipeline.in_process)
        except PrecisionError as error:
            reason = f"{error.what}: {error.why}"
        except UsageError:
            pass  # another setting is wrong, and `problem` says so
        answers.append({"value": precision, "supported": reason is None, "reason": reason})
    return answers


def _warnings(placement: Placement | None, users: Mapping[str, Sequence[str]]) -> list[str]:
    if placement is None or placement.accelerator != "gpu":
        return []
    return [
        f"{device} is used by {', '.join(users[device])}, which {'is' if len(users[device]) == 1 else 'are'} running: "
        "both will be slower, and may run out of memory"
        for device in dict.fromkeys(placement.devices)
        if users.get(device)
    ]
