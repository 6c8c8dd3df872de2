"""Whether several devices compute what one computes, for the user's own task: both are run and compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import RunConfig
from lockstep.engine.task import Task
from lockstep.errors import UnsupportedError, UsageError
from lockstep.hardware.world import read_world
from lockstep.launch.prepare import native_settings, prepare
from lockstep.verification import diagnose
from lockstep.verification.diagnose import Cause
from lockstep.verification.experiments import Comparison, Lab, Variant
from lockstep.verification.report import BLIND, Outcome, VerifyReport
from lockstep.verification.trajectory import (
    FACTOR,
    ROUNDING,
    Floor,
    Gap,
    floor_of,
    gap_between,
    order_effect,
)

__all__ = ["VerifyReport", "verify"]


def verify(
    task: Task | type[Task] | str,
    config: RunConfig | Mapping[str, Any] | None = None,
    *,
    steps: int = 24,
    eval_batches: int = 8,
    say: Callable[[str], None] = lambda line: None,
) -> VerifyReport:
    """Train the same steps on one device and on the chosen ones, and compare the results.

    Half of the steps lie before an epoch's end, so that the short last batch and a validation are among them.
    What rounding alone changes is measured on one device, with the samples of each micro-batch in other orders.
    Each run is a complete run of Lockstep, with the user's strategy, loader and precision, in a temporary folder.

    See :func:`lockstep.verify`.
    """
    if read_world(os.environ).from_outside:
        fix = "start it without them"
        raise UnsupportedError("verify starts its own ranks", why="torchrun or srun has started this process", fix=fix)
    if steps < 1:
        raise UsageError(f"invalid value for --steps: {steps}", fix="use at least 1; the default is 24")
    prepared = prepare(task, native_settings(task, config))
    plan = prepared.plan
    if len(plan.placement["devices"]) < 2:
        what = f"verify compares several devices with one, and {', '.join(plan.placement['devices'])} is one"
        raise UsageError(what, fix="name two or more: --devices gpu:0,gpu:1, or --devices cpu,cpu for two CPU ranks")
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        lab = Lab(task, prepared.config, plan, steps, eval_batches, Path(folder), say)
        if lab.config.launch.nodes not in (None, "1"):
            lab.notes.append("launch.nodes is ignored: all ranks that were compared are on this machine")
        return _report(lab)


def _report(lab: Lab) -> VerifyReport:
    """The order of the runs, each decided by the results of those before."""
    configured = lab.compare()
    one, many = configured.one, configured.many

    def different(compared: Comparison, floor: Floor, *causes: Cause) -> VerifyReport:
        return _conclude(lab, compared, floor, configured.gap, causes, "different")

    def same(compared: Comparison, floor: Floor, outcome: Outcome) -> VerifyReport:
        """Unless a run that is interrupted and resumed shows otherwise."""
        cause = diagnose.interrupted(lab, Variant("many", compared.off, precision=compared.precision), floor)
        as_configured = lab.compare(compared.off).gap if outcome == "equal in float32" else configured.gap
        return _conclude(lab, compared, floor, as_configured, () if cause is None else (cause,), outcome)

    # What is wrong whatever the losses are; then nothing can be said about rounding.
    cause = diagnose.other_samples(lab, one, many) or diagnose.diverged(many) or diagnose.not_finite(one, many)
    nothing = floor_of([], one)
    if cause is not None:
        return different(configured, nothing, cause)
    same_weights = one.fingerprint == many.fingerprint and np.array_equal(one.loss, many.loss, equal_nan=True)
    if same_weights and not configured.gap["validation loss"].max(initial=0) > ROUNDING:
        return same(configured, nothing, "identical")
    again = lab.run(Variant("one", repeat=1))
    cause = diagnose.unseeded(one, again)
    if cause is not None:
        return different(configured, nothing, cause)
    quiet: tuple[str, ...] = ("dropout",) if "dropout" in one.draws else ()
    floor, compared = _floor(lab, quiet, gap_between(one, again)), configured
    if lab.plan.reproducibility == "fast":
        if floor.parting(compared.gap) is None:
            return same(compared, floor, "equal")
        if quiet:
            compared = lab.compare(quiet)
            if floor.parting(compared.gap) is None:
                return same(compared, floor, "equal without dropout")
        if diagnose.rounds_more(lab.plan) and diagnose.is_rounding(compared.gap, lab.plan):
            in_float32 = lab.compare(quiet, "32")
            if floor.parting(in_float32.gap) is None:
                return same(in_float32, floor, "equal in float32")
    return different(compared, floor, *_causes(lab, compared, floor, quiet))


def _floor(lab: Lab, quiet: tuple[str, ...], repeated: Gap) -> Floor:
    """What rounding does: the same samples in each micro-batch, in other orders; on a GPU, repetition too."""
    base, gaps = lab.run(Variant("one", quiet)), [repeated]
    if set(base.draws) - {"dropout"}:
        lab.notes.append(
            f"the forward pass draws random numbers ({', '.join(base.draws)}), so the noise floor could not be "
            "measured; the rounding of float32 is used instead"
        )
        return floor_of(gaps, base)
    for arrangement in ("reversed", "shuffled"):
        arranged = lab.run(Variant("one", quiet, trace=arrangement))
        gap, when = gap_between(base, arranged), f"with the samples of each batch {arrangement}"
        if base.first_other_samples(arranged) is not None:
            lab.notes.append(
                f"{when} the data set returns other samples: each depends on those read before it, so that run says "
                "nothing about rounding"
            )
        elif (effect := order_effect(gap)) is not None:
            lab.notes.append(
                f"{when} the loss of step {effect[0]} differs by {effect[1]:.1e}: it depends on their order, so that "
                "run says nothing about rounding"
            )
        else:
            gaps.append(gap)
    return floor_of(gaps, base)


def _causes(lab: Lab, compared: Comparison, floor: Floor, quiet: tuple[str, ...]) -> list[Cause]:
    """Likely causes of what lies beyond the floor, the likeliest first."""
    parting = floor.parting(compared.gap) or ("weights", len(compared.one) - 1)
    merged = diagnose.unmerged(compared.one, *parting)
    if merged is not None:
        return [merged]
    found = list(diagnose.evidence(compared.one, compared.many, lab.devices))
    if any(cause.code == "initial-weights" for cause in found):
        return found
    # A wrong count or rate may be there without having made the difference: what an experiment shows comes first.
    found = [*diagnose.experiments(lab, quiet, floor), *found]
    found = found or list(diagnose.other_draws(compared.one.draws, lab.plan))
    cause = None if found else diagnose.grouping(lab, quiet, floor)
    return found or [cause or diagnose.unknown(compared.one, compared.many, *parting)]


def _conclude(
    lab: Lab, comparison: Comparison, floor: Floor, as_configured: Gap, causes: Sequence[Cause], outcome: Outcome
) -> VerifyReport:
    plan = lab.plan
    if causes:
        outcome = "not finite" if causes[0].code == "not-finite" else "different"
    else:
        blind = np.flatnonzero(floor["loss"] * FACTOR > BLIND)
        if blind.size and blind[0] > 0:
            lab.notes.append(
                f"from step {int(blind[0]) + 1} on rounding errors have grown so far that the loss says little"
            )
        lab.notes += [
            f"the {cause.code} differs, without effect in these steps: {cause.what}; {cause.fix}"
            for cause in diagnose.evidence(comparison.one, comparison.many, lab.devices)
        ]
    return VerifyReport(
        task=plan.task.name,
        devices=tuple(plan.placement["devices"]),
        strategy=plan.placement["strategy"],
        reproducibility=plan.reproducibility,
        global_batch=plan.batch.global_batch,
        outcome=outcome,
        causes=tuple(causes),
        notes=tuple(lab.notes),
        comparison=comparison,
        floor=floor,
        as_configured=as_configured,
    )
