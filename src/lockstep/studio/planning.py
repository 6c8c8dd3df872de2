"""The answer of ``POST /api/plan``: the plan, its problem, and every label of the hardware section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from lockstep.config import Precision, RunConfig
from lockstep.errors import LockstepError, PrecisionError, UsageError
from lockstep.events import Note
from lockstep.hardware.device import Device
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import World


def answer(
    problem: LockstepError | None,
    placement: Placement | None = None,
    plan: dict[str, Any] | None = None,
    *,
    later: bool = False,
) -> dict[str, Any]:
    """The answer without what needs valid settings.

    Args:
        later: the data is missing and will be downloaded: the run may start without a plan.
    """
    notes = [asdict(note) for note in placement.notes] if placement is not None else []
    if later:
        text = "The data is downloaded when the run starts; the plan is made then."
        notes.append(asdict(Note("data_downloaded_later", text)))
    blocked = problem is not None and not later
    return {
        "run": {"enabled": not blocked, "reason": problem.what if problem is not None and blocked else None},
        "problem": problem.as_dict() if problem else None,
        "labels": _labels(placement, plan),
        "notes": plan["notes"] if plan is not None else notes,
        "warnings": [],
        "precisions": [{"value": value, "supported": True, "reason": None} for value in get_args(Precision)],
        "plan": plan,
        "preview": None,
    }


def place(config: RunConfig, devices: Sequence[Device]) -> Placement:
    """Where this would compute on these devices. Raises :class:`LockstepError`."""
    in_process = config.pipeline.in_process
    return resolve_placement(config.hardware, config.distributed, World(), devices, in_process=in_process)


def _labels(placement: Placement | None, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    gpus = placement is not None and placement.accelerator == "gpu"
    several = placement is not None and placement.world_size > 1 and not placement.spec.divides
    batch = plan["batch"] if plan else {"ranks": 1, "devices_per_rank": 1, "accumulate": 1}
    workers, ranks = plan["loader"]["num_workers"] if plan else 0, batch["ranks"]
    in_all = f", {workers * ranks} in all" if ranks > 1 and workers else ""
    rate = plan["decisions"]["lr"] if plan else {}
    return {
        "effective_batch": plan and plan["effective_batch"],
        "effective_batch_shown": ranks * batch["devices_per_rank"] > 1 or batch["accumulate"] > 1,
        "multi_gpu": "Multi-GPU (DDP) will be used automatically." if gpus and several else None,
        "cpu_ignored": next((n.text for n in placement.notes if n.key == "cpu_ignored"), None) if placement else None,
        "learning_rate": f"Learning rate {rate['shown']}: {rate['reason']}" if plan else None,
        "workers": f"Loader workers: {workers} per rank{in_all}" if plan else None,
    }


def precisions(config: RunConfig, devices: Sequence[Device]) -> list[dict[str, Any]]:
    """Which precisions the chosen devices can compute, asked of the same function that decides it for a run."""
    answers = []
    for precision in get_args(Precision):
        reason = None
        try:
            hardware = config.hardware.model_copy(update={"precision": precision})
            place(config.model_copy(update={"hardware": hardware}), devices)
        except PrecisionError as error:
            reason = f"{error.what}: {error.why}"
        except UsageError:
            pass  # another setting is wrong, and `problem` says so
        answers.append({"value": precision, "supported": reason is None, "reason": reason})
    return answers


def warnings(placement: Placement | None, users: Mapping[str, Sequence[str]]) -> list[str]:
    if placement is None or placement.accelerator != "gpu":
        return []
    return [
        f"{device} is used by {', '.join(users[device])}, which {'is' if len(users[device]) == 1 else 'are'} running: "
        "both will be slower, and may run out of memory"
        for device in dict.fromkeys(placement.devices)
        if users.get(device)
    ]
