"""What the plan of a loop of the user's says: the loop has its own optimizers and schedulers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.config import RunConfig
from lockstep.config.sections import OptimizerConfig, TrainingConfig
from lockstep.planning.decision import Decision, by_key
from lockstep.planning.plan import Plan


def of_session(plan: Plan) -> Plan:
    """``plan`` with the decisions that the loop takes itself, and without notes on settings that it does not use."""

    def own(decision: Decision) -> Decision:
        if decision.key == "lr":
            return replace(decision, reason="the loop's own optimizer (its first parameter group)")
        if decision.key == "schedule":
            return replace(decision, value="loop", shown="loop", reason="prepared schedulers, or the loop itself")
        return decision

    decisions = by_key(own(d) for d in plan.decisions.values() if d.key not in ("warmup", "monitor", "weight_decay"))
    notes = tuple(note for note in plan.notes if not note.key.startswith(("lr_", "warmup", "optimizer", "schedule")))
    return plan.model_copy(update={"decisions": decisions, "notes": notes})


def sized(config: RunConfig, *, has_batch_size: bool, ranks: int, accumulate: int | None, lr: float) -> RunConfig:
    """``config`` with the sizes of a loop over batches.

    Args:
        has_batch_size: whether the user has set ``training.batch_size``; else a rank's share is one micro-batch for
            each of ``accumulate``.
        lr: of the loop's first optimizer.
    """
    training = config.training
    parts, update = training.accumulate if accumulate is None else accumulate, dict[str, Any]()
    if training.global_batch_size is None:
        update["accumulate"] = parts
    else:
        most = -(-training.global_batch_size // (ranks * parts))
        update["batch_size"] = min(training.batch_size, most) if has_batch_size else most
    settings: dict[str, Any] = {"training": TrainingConfig.model_validate({**training.model_dump(), **update})}
    if lr > 0:
        settings["optimizer"] = OptimizerConfig.model_validate({**config.optimizer.model_dump(), "lr": lr})
    return config.model_copy(update=settings)
