"""Do N devices compute what one computes? Asked of the user's own task, settled by running both."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import RunConfig
from lockstep.engine.task import Task
from lockstep.errors import UnsupportedError, UsageError
from lockstep.hardware.world import read_world
from lockstep.launch.prepare import prepare
from lockstep.verify.diagnose import (
    FACTOR,
    Cause,
    evidence,
    experiments,
    grouping,
    other_draws,
    other_samples,
    unknown,
    unseeded,
)
from lockstep.verify.lab import Lab, Variant
from lockstep.verify.report import BLIND, Comparison, Outcome, VerifyReport
from lockstep.verify.trajectory import ROUNDING, Floor, Gap, Trajectory, floor_of, gap_between

__all__ = ["VerifyReport", "verify"]

#: A rearranged batch whose first loss is further off than this did not differ by rounding alone.
NOT_ROUNDING = 1e-3


def verify(
    task: Task | type[Task] | str,
    config: RunConfig | Mapping[str, Any] | None = None,
    *,
    steps: int = 24,
    eval_batches: int = 8,
    say: Callable[[str], None] = lambda line: None,
) -> VerifyReport:
    """Train the same steps on one device and on the chosen ones, and say whether they compute the same.

    Half of the steps lie before an epoch's end, so that the short last batch and a validation are among them.
    What rounding alone does is measured on one device, with the samples of each micro-batch in other orders.
    Each run is a whole run of Lockstep, with the user's strategy, loader and precision, in a folder that is removed.

    Args:
        task: an object, a class, or a name as on the command line.
        config: as for :func:`lockstep.train`; it must name two devices or more (``cpu,cpu`` will do).
        steps: optimizer steps of each run.
        eval_batches: batches of each validation.
        say: told what is being run.

    Raises:
        LockstepError: the devices or settings cannot be, or a run failed.
    """
    if read_world(os.environ).from_outside:
        raise UnsupportedError(
            "verify starts its own ranks", why="torchrun or srun has started some", fix="run it by itself"
        )
    if steps < 1:
        raise UsageError(f"{steps} steps show nothing", fix="take --steps 24, or any number from 1 on")
    prepared = prepare(task, config)
    plan = prepared.plan
    if plan.task.loader is not None:
        raise UnsupportedError(
            "verify compares runs of a lockstep.Task, and this is a LightningModule",
            why="its losses are means of its own, so several devices do not promise what one gives",
            fix="write a lockstep.Task (docs/from-lightning.md)",
        )
    if len(plan.placement["devices"]) < 2:
        raise UsageError(
            f"verify compares several devices with one, and {', '.join(plan.placement['devices'])} is one",
            fix="name two or more: --devices gpu:0,gpu:1, or --devices cpu,cpu for a rehearsal",
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        lab = Lab(task, prepared.config, plan, steps, eval_batches, Path(folder), say)
        return _Verification(lab).report()


class _Verification:
    """The order of the runs, each decided by what the ones before have shown."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._notes: list[str] = []
        if lab.config.launch.nodes not in (None, "1"):
            self._notes.append("launch.nodes is left out: the ranks that were compared are all on this machine")

    def report(self) -> VerifyReport:
        lab, plan = self._lab, self._lab.plan
        one, many = lab.run(Variant("one")), lab.run(Variant("many"))
        as_configured = gap_between(one, many)
        configured = Comparison((), one, many, as_configured)
        causes: list[Cause] = []
        cause = other_samples(lab, one, many)
        if cause is not None:
            # Nothing else can be compared: neither the losses nor what rounding makes of them.
            return self._conclude(configured, floor_of([], one), as_configured, "different", [cause])
        if _identical(one, many):
            floor = floor_of([], one)
            return self._conclude(configured, floor, as_configured, "identical", causes)
        again = lab.run(Variant("one", repeat=1))
        cause = unseeded(one, again)
        if cause is not None:
            return self._conclude(configured, floor_of([], one), as_configured, "different", [cause])
        quiet: tuple[str, ...] = ("dropout",) if "dropout" in one.draws else ()
        floor = self._floor(quiet, gap_between(one, again))
        if plan.reproducibility == "fast":
            if floor.parting(as_configured, FACTOR) is None:
                return self._conclude(configured, floor, as_configured, "equal", causes)
            if quiet:
                configured = self._compare(quiet)
                if floor.parting(configured.gap, FACTOR) is None:
                    return self._conclude(configured, floor, as_configured, "equal without dropout", causes)
        causes = self._causes(configured, floor, quiet)
        return self._conclude(configured, floor, as_configured, "different", causes)

    def _compare(self, off: tuple[str, ...]) -> Comparison:
        one, many = self._lab.run(Variant("one", off)), self._lab.run(Variant("many", off))
        return Comparison(off, one, many, gap_between(one, many))

    def _floor(self, quiet: tuple[str, ...], repeated: Gap) -> Floor:
        """What rounding does: the same samples in each micro-batch, in other orders; on a GPU, repetition too."""
        base = self._lab.run(Variant("one", quiet))
        gaps = [repeated]
        if set(base.draws) - {"dropout"}:
            self._notes.append(
                f"the forward pass draws random numbers ({', '.join(base.draws)}), so the noise floor could not be "
                "measured; float32 rounding stands in for it"
            )
            return floor_of(gaps, base)
        for arrangement in ("reversed", "shuffled"):
            arranged = self._lab.run(Variant("one", quiet, trace=arrangement))
            gap = gap_between(base, arranged)
            if base.first_other_samples(arranged) is not None:
                self._notes.append(
                    f"with the samples of each batch {arrangement} the data set returns other samples: each depends "
                    "on those read before it, so that run says nothing about rounding"
                )
            elif gap.loss[0] > NOT_ROUNDING:
                self._notes.append(
                    f"with the samples of each batch {arrangement} the first loss differs by {gap.loss[0]:.1e}: it "
                    "depends on their order, so that run says nothing about rounding"
                )
            else:
                gaps.append(gap)
        return floor_of(gaps, base)

    def _causes(self, compared: Comparison, floor: Floor, quiet: tuple[str, ...]) -> list[Cause]:
        found = list(evidence(compared.one, compared.many, self._lab.devices))
        if any(cause.code == "initial-weights" for cause in found):
            return found
        # A wrong count or rate may be there without having made the difference: what an experiment shows comes first.
        found = [*experiments(self._lab, quiet, floor), *found]
        if not found:
            found = list(other_draws(compared.one.draws, self._lab.plan))
        if not found:
            cause = grouping(self._lab, quiet, floor)
            found = [cause] if cause is not None else []
        if not found:
            parting = floor.parting(compared.gap, FACTOR) or ("weights", 0)
            found = [unknown(*parting)]
        return found

    def _conclude(
        self, comparison: Comparison, floor: Floor, as_configured: Gap, outcome: Outcome, causes: list[Cause]
    ) -> VerifyReport:
        plan, lab = self._lab.plan, self._lab
        self._note_blindness(floor)
        if not causes:
            self._notes += [
                f"the {cause.code} differs without consequence in these steps: {cause.what}; {cause.fix}"
                for cause in evidence(comparison.one, comparison.many, lab.devices)
            ]
        return VerifyReport(
            task=plan.task.name,
            devices=tuple(plan.placement["devices"]),
            strategy=plan.placement["strategy"],
            reproducibility=plan.reproducibility,
            global_batch=plan.batch.global_batch,
            outcome=outcome,
            verdict=_verdict(outcome, comparison, floor, as_configured, lab.devices),
            causes=tuple(causes),
            notes=tuple(self._notes),
            comparison=comparison,
            floor=floor,
            as_configured=as_configured,
        )

    def _note_blindness(self, floor: Floor) -> None:
        blind = np.flatnonzero(floor.values["loss"] * FACTOR > BLIND)
        if blind.size and floor.values["loss"][0] * FACTOR <= BLIND:
            self._notes.append(
                f"from step {int(blind[0]) + 1} on rounding alone has grown so far that the loss decides little"
            )


def _identical(one: Trajectory, many: Trajectory) -> bool:
    same_weights = one.fingerprint == many.fingerprint and np.array_equal(one.loss, many.loss, equal_nan=True)
    return same_weights and not gap_between(one, many).validation.max(initial=0) > ROUNDING


def _verdict(outcome: Outcome, comparison: Comparison, floor: Floor, as_configured: Gap, devices: int) -> str:
    gap, steps = comparison.gap, len(comparison.gap.loss)
    most, noise = gap.loss.max(initial=0), floor.values["loss"].max(initial=0)
    if outcome == "identical":
        return (
            f"IDENTICAL: {devices} devices and one have the same weights bit for bit after {steps} steps "
            f"(sha256 {comparison.one.fingerprint[:12]}…)"
        )
    if outcome == "equal":
        return (
            f"EQUAL to rounding: over {steps} steps the losses of {devices} devices and one are at most {most:.1e} "
            f"apart (noise floor {noise:.1e})"
        )
    if outcome == "equal without dropout":
        return (
            f"EQUAL to rounding without dropout: over {steps} steps the losses of {devices} devices and one are at "
            f"most {most:.1e} apart (noise floor {noise:.1e}); with dropout {as_configured.loss.max():.1e}, since in "
            "fast mode each rank draws its own masks (--reproducibility exact makes them the same)"
        )
    other = comparison.one.first_other_samples(comparison.many)
    if other is not None:
        return f"DIFFERENT: from step {other} on the samples of {devices} devices are not those of one"
    quantity, place = floor.parting(gap, FACTOR) or ("weights", steps - 1)
    since = f"in validation {place + 1}" if quantity == "validation loss" else f"from step {place + 1} on"
    return (
        f"DIFFERENT: {since} the {quantity} of {devices} devices and one are {gap.items()[quantity][place]:.1e} apart "
        f"(noise floor {floor.values[quantity][place]:.1e})"
    )
