"""``bench lr``: the learning-rate range test (Smith 2017, https://arxiv.org/abs/1506.01186, section 3.3).

The rate grows exponentially from step to step until the loss diverges. The trial has the seed and data order of the
run, and its weights are not saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.errors import UsageError
from lockstep.lab.bench.report import BenchReport, Say
from lockstep.lab.bench.timing import Stopwatch, on_site, training
from lockstep.lab.bench.trials import Case, Subject, TrialRank, new_trials
from lockstep.planning import Schedule

#: Weight of the past in the smoothed loss, an average of about :data:`MEMORY` losses; with fewer it is noise.
SMOOTHING = 0.9
MEMORY = round(1 / (1 - SMOOTHING))
#: The test ends when the smoothed loss is this many times its best, after :data:`LEAST_STEPS`.
DIVERGED = 4.0
LEAST_STEPS = 10
#: A fall of the smoothed loss counts when it is more than ``FALL + FALL_OF_FEW / n`` times the scatter of the n losses
#: before: of 20,000 curves of noise alone, each cut at all lengths from 12 to 200, none falls so far. The second part
#: is for few losses, whose scatter is uncertain: five of them may be alike by chance.
FALL = 2.5
FALL_OF_FEW = 50.0
#: A slope is that of a line through this share of the points, on both sides.
WINDOW = 1 / 20


class Ramp(Schedule):
    """An exponential ramp from ``first`` to ``last`` over ``total_steps``."""

    first: float
    last: float

    def at(self, step: int) -> float:
        return float(self.first * (self.last / self.first) ** (step / max(1, self.total_steps - 1)))


class Proposal(NamedTuple):
    """Learning rates; ``steepest``: where the loss falls fastest, ``tenth``: a tenth of that with the least loss."""

    lr: float
    steepest: float
    tenth: float
    reason: str


def bench_lr(
    subject: Subject, *, steps: int = 100, first: float = 1e-6, last: float = 10.0, say: Say = lambda line: None
) -> BenchReport:
    """Train ``steps`` steps on the chosen devices while the rate grows from ``first`` to ``last``."""
    if steps < LEAST_STEPS:
        raise UsageError(f"{steps} steps are too few for a curve", fix=f"use --steps 100, at least {LEAST_STEPS}")
    if not 0 < first < last:
        raise UsageError(f"the rate cannot grow from {first:g} to {last:g}", fix="use --min-lr 1e-6 --max-lr 10")
    base = subject.base
    global_batch = base.plan.batch.global_batch
    samples = base.plan.task.train_samples
    smaller_batch: dict[str, Any] = {"training": {"global_batch_size": samples}} if samples < global_batch else {}
    case = subject.case({}, smaller_batch, steps=steps - 1, warm_up=1)
    settings = {
        "devices": list(base.placement.devices),
        "steps": steps,
        "min_lr": first,
        "max_lr": last,
        "global_batch": case.plan.batch.global_batch,
        "smoothing": SMOOTHING,
        "seed": case.plan.seed,
    }
    report = BenchReport("lr", subject.name, settings)
    with report.kept(), new_trials() as trials:
        say(f"learning rate {first:g} to {last:g} in {steps} steps")
        outcome = trials.run_case(sweep, case, first, last, task=base.task)
        report.rows += outcome.rows
        if outcome.error:
            report.notes.append(f"the ranks failed: {outcome.error}")
    conclude(report, own_optimizer=case.plan.task.optimizer_lr is not None)
    if smaller_batch:
        report.notes.append(f"the data set has only {samples} samples for a global batch of {global_batch}")
    return report


def sweep(rank: TrialRank, case: Case, first: float, last: float) -> None:
    """Train as one rank: one step and one row for each rate, until the loss diverges."""
    plan = case.plan
    ramp = Ramp(**{**plan.schedule.model_dump(), "offset": 0, "total_steps": plan.total_steps}, first=first, last=last)
    average = 0.0
    best = math.inf
    with on_site(rank, case.config, plan) as site:
        watch = Stopwatch(site.device)
        with training(site, case.config, plan.model_copy(update={"schedule": ramp}), watch) as (_, steps):
            for result in steps:
                rank.check()
                loss = float(result.loss_total) / max(1.0, float(result.loss_count))
                average = SMOOTHING * average + (1 - SMOOTHING) * loss
                # Without the bias of the average's start at zero (Kingma and Ba 2015, section 3).
                smoothed = average / (1 - SMOOTHING**result.step)
                if not math.isfinite(smoothed):
                    break
                best = min(best, smoothed)
                rank.report({"step": result.step, "lr": result.lr, "loss": loss, "smoothed": smoothed})
                if has_diverged(smoothed, best, result.step) or result.step == plan.total_steps:
                    break


def has_diverged(smoothed: float, best: float, step: int) -> bool:
    return not math.isfinite(smoothed) or (step >= LEAST_STEPS and smoothed - best > (DIVERGED - 1) * abs(best))


def propose(rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float]) -> Proposal | None:
    """Propose the rate at which the smoothed loss falls fastest per factor of the rate, before its minimum.

    At most a tenth of the rate with the lowest loss, since the loss grows beyond it. ``None``: the loss falls no
    further than noise.
    """
    first = min(MEMORY, len(rates) // 4)
    half = max(1, int(len(rates) * WINDOW))
    if len(rates) <= first + 2 * half:
        return None
    lowest = first + int(np.argmin(smoothed[first:]))
    # Differences of neighbouring losses. Outliers count: the smoothed loss falls after one, too.
    scatter = float(np.std(np.diff(losses[: lowest + 1]))) / math.sqrt(2) if lowest else math.inf
    if max(smoothed[first : lowest + 1]) - smoothed[lowest] <= (FALL + FALL_OF_FEW / max(1, lowest)) * scatter:
        return None
    logs = np.log(rates)
    last = max(first + half, min(lowest, len(rates) - half - 1))
    spans = [slice(index - half, index + half + 1) for index in range(first + half, last + 1)]
    slopes = [np.polyfit(logs[span], smoothed[span], 1)[0] for span in spans]
    steepest = rates[first + half + int(np.argmin(slopes))]
    tenth = rates[lowest] / 10
    if steepest <= tenth:
        return Proposal(steepest, steepest, tenth, "there the loss falls fastest")
    return Proposal(tenth, steepest, tenth, f"a tenth of {rates[lowest]:.2g}, where the loss is least")


def conclude(report: BenchReport, *, own_optimizer: bool) -> None:
    """Write the verdict. ``own_optimizer``: the task makes the optimizer, so ``--lr`` has no effect."""
    rows: list[dict[str, Any]] = report.rows
    if len(rows) < LEAST_STEPS or report.notes:  # a note says that it was stopped, or has failed
        report.verdict = "no proposal: too little was measured"
        return
    rates, losses, smoothed = ([row[name] for row in rows] for name in ("lr", "loss", "smoothed"))
    proposal = propose(rates, losses, smoothed)
    if proposal is None:
        report.verdict = "no proposal: at every rate tried, the loss decreases by less than its noise"
        report.notes.append("use more --steps, a larger batch, or another range of rates")
        return
    report.extra = {"proposal": proposal._asdict()}
    use = f"make the task's optimizer with lr={proposal.lr:.2g}" if own_optimizer else f"use --lr {proposal.lr:.2g}"
    report.verdict = f"{use}: {proposal.reason}"
    report.notes.append(
        f"steepest descent at {proposal.steepest:.2g}; a tenth of the rate with the least loss is {proposal.tenth:.2g}"
    )
    if len(rows) < report.settings["steps"]:
        report.notes.append(f"the loss diverged at {rows[-1]['lr']:.2g}, after {len(rows)} steps")
    report.notes.append(
        f"it applies to the global batch of {report.settings['global_batch']}: use --lr-scaling none, or scale it"
    )
