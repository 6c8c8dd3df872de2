"""Verify that several devices compute the same result as one, by running and comparing both."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
    exact_floor,
    floor_of,
    gap_between,
    order_effect,
)

__all__ = ["VerifyReport", "verify"]

#: Parameters that a note lists by name.
_NAMED = 5


def verify(
    task: Task | type[Task] | str,
    overrides: Mapping[str, Any],
    *,
    steps: int = 24,
    eval_batches: int = 8,
    say: Callable[[str], None] = lambda line: None,
) -> VerifyReport:
    """Train the same steps on one device and on the chosen ones, and compare the results.

    Half of the steps lie before an epoch's end, so that the short last batch and a validation are among them.
    The effect of rounding is measured on one device, with the samples of each micro-batch in other orders.
    Each run is a complete run of Lockstep, with the user's strategy, loader and precision, in a temporary folder.

    See :func:`lockstep.verify`. ``overrides``: nested settings that differ from the defaults.
    """
    if read_world(os.environ).from_outside:
        fix = "start it without torchrun or srun"
        raise UnsupportedError(
            "verify starts the ranks itself", why="this process is a rank of torchrun or srun", fix=fix
        )
    if steps < 1:
        raise UsageError(f"invalid value for --steps: {steps}", fix="use at least 1; the default is 24")
    prepared = prepare(task, native_settings(task, overrides))
    plan = prepared.plan
    if len(plan.placement["devices"]) < 2:
        raise UsageError(
            f"verify compares several devices with one, and {', '.join(plan.placement['devices'])} is one",
            fix="name two or more: --devices gpu:0,gpu:1, or --devices cpu,cpu for two CPU ranks",
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        lab = Lab(task, prepared.config, plan, steps, eval_batches, Path(folder), say)
        if lab.config.launch.nodes not in (None, "1"):
            lab.notes.append("launch.nodes is ignored: all ranks that were compared are on this machine")
        return _report(lab)


def _report(lab: Lab) -> VerifyReport:
    """Start the runs in order, each decided by the results of the previous ones."""
    configured = lab.compare()
    single = configured.one
    many = configured.many

    def different(compared: Comparison, floor: Floor, *causes: Cause) -> VerifyReport:
        return _conclude(lab, compared, floor, configured.gap, causes, "different")

    def same(compared: Comparison, floor: Floor, outcome: Outcome) -> VerifyReport:
        """Conclude that the results agree, unless an interrupted and resumed run differs."""
        cause = diagnose.interrupted(lab, Variant("many", compared.off, precision=compared.precision), floor)
        as_configured = lab.compare(compared.off).gap if outcome == "equal in float32" else configured.gap
        return _conclude(lab, compared, floor, as_configured, () if cause is None else (cause,), outcome)

    # Errors that do not depend on the losses; they make rounding unknowable.
    cause = diagnose.other_samples(lab, single, many) or diagnose.diverged(many) or diagnose.not_finite(single, many)
    nothing = floor_of([], single)
    if cause is not None:
        return different(configured, nothing, cause)
    same_weights = single.fingerprint == many.fingerprint and np.array_equal(single.loss, many.loss, equal_nan=True)
    if same_weights and not configured.gap["validation loss"].max(initial=0) > ROUNDING:
        return same(configured, nothing, "identical")
    again = lab.run(Variant("one", repeat=1))
    cause = diagnose.unseeded(single, again)
    if cause is not None:
        return different(configured, nothing, cause)
    quiet: tuple[str, ...] = ("dropout",) if "dropout" in single.draws else ()
    is_fast = lab.plan.reproducibility == "fast"
    floor = _floor(lab, quiet) if is_fast else exact_floor(single)
    compared = configured = lab.compare()
    if is_fast:
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


def _floor(lab: Lab, quiet: tuple[str, ...]) -> Floor:
    """Measure rounding: the same samples in each micro-batch, in other orders; on a GPU, repetition too.

    Parameters that rounding alone moves are left out of all comparisons from here on, and named.
    """
    base = lab.run(Variant("one", quiet))
    pairs = [(Variant("one"), Variant("one", repeat=1))]
    if set(base.draws) - {"dropout"}:
        lab.notes.append(
            f"the forward pass draws random numbers ({', '.join(base.draws)}), so the noise floor could not be "
            "measured; the rounding of float32 is used instead"
        )
    for arrangement in () if set(base.draws) - {"dropout"} else ("reversed", "shuffled"):
        variant = Variant("one", quiet, trace=arrangement)
        arranged = lab.run(variant)
        gap = gap_between(base, arranged)
        when = f"with the samples of each batch {arrangement}"
        if base.first_other_samples(arranged) is not None:
            lab.notes.append(
                f"{when} the data set returns other samples: each depends on those read before it, so that run does "
                "not measure rounding"
            )
        elif (effect := order_effect(gap)) is not None:
            lab.notes.append(
                f"{when} the loss of step {effect[0]} differs by {effect[1]:.1e}: it depends on their order, so that "
                "run does not measure rounding"
            )
        else:
            pairs.append((Variant("one", quiet), variant))
    lab.not_compared = {name for pair in pairs for name in lab.run(pair[0]).moved_by_rounding(lab.run(pair[1]))}
    if lab.not_compared:
        names = sorted(lab.not_compared)
        listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        lab.notes.append(
            f"not compared: the weights of {listed}. Rounding alone moves them, as Adam moves a bias before a "
            "normalisation, whose gradient is zero: with the same samples in another order they differ after one step"
        )
    gaps = [gap_between(lab.run(first), lab.run(second)) for first, second in pairs]
    return floor_of(gaps, lab.run(Variant("one", quiet)))


def _causes(lab: Lab, compared: Comparison, floor: Floor, quiet: tuple[str, ...]) -> list[Cause]:
    """List likely causes of differences beyond the floor, the likeliest first."""
    parting = floor.parting(compared.gap) or ("weights", len(compared.one) - 1)
    merged = diagnose.unmerged(compared.one, *parting)
    if merged is not None:
        return [merged]
    causes = list(diagnose.evidence(compared.one, compared.many, lab.devices))
    if any(cause.code == "initial-weights" for cause in causes):
        return causes
    # A wrong count or rate may exist without causing the difference, so causes that an experiment shows come first.
    causes = [*diagnose.experiments(lab, quiet, floor), *causes]
    causes = causes or list(diagnose.other_draws(compared.one.draws, lab.plan))
    is_fast = lab.plan.reproducibility == "fast"
    cause = diagnose.grouping(lab, quiet, floor) if is_fast and not causes else None
    return causes or [cause or diagnose.unknown(compared.one, compared.many, *parting)]


def _conclude(
    lab: Lab, comparison: Comparison, floor: Floor, as_configured: Gap, causes: Sequence[Cause], outcome: Outcome
) -> VerifyReport:
    plan = lab.plan
    if causes:
        outcome = "not finite" if causes[0].code == "not-finite" else "different"
    else:
        for quantity, compared in (("loss", "losses"), ("weights", "weights")):
            blind = np.flatnonzero(floor[quantity] * FACTOR > BLIND)
            if blind.size and blind[0] > 0:
                step = int(blind[0]) + 1
                lab.notes.append(f"from step {step} on rounding errors have grown too large to compare {compared}")
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
