"""Findings about optimizer steps: denominators, windows, clearing, clipping, learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.audit.checks.ranks import first_difference
from lockstep.audit.findings import Finding, finding
from lockstep.audit.trace import Records, Run

#: Relative difference of a gradient's direction that rounding does not make.
_DIRECTION = 5e-3
#: The same of its length.
_SCALE = 1e-2
#: Within this, the reduced gradient is a multiple of the sum of the local ones.
_EXPLAINED = 1e-3


def step_findings(run: Run) -> Iterator[Finding]:
    """Yield findings about single steps."""
    stepped: set[int] = set()
    longest_window = 0
    for step in run.steps:
        end = step.of("step")[0]
        backwards = step.of("backward")
        is_dirty = all(end["optimizer"] in backward.get("dirty", ()) for backward in backwards)
        if end["optimizer"] in stepped and is_dirty and backwards:
            yield finding("AUDIT_ZERO_GRAD", end["site"], {"step": end["step"]})
        stepped.add(end["optimizer"])
        yield from _clips(step)
        if run.has_one_optimizer and _is_recorded(run, step):
            yield from _denominator(run, step, longest_window)
            longest_window = max(longest_window, len(backwards) // run.size)


def _clips(step: Records) -> Iterator[Finding]:
    for clips in zip(*step.of("clip").by("rank").values(), strict=False):
        evidence = {"step": clips[0]["step"], "call": clips[0]["call"]}
        if clips[0]["is_scaled"]:
            yield finding("AUDIT_CLIP_SCALED", clips[0]["site"], evidence)
        # Gradients that are never reduced are another finding.
        if first_difference(step.of("step"), "norms") is None and first_difference(clips, "norms") is not None:
            yield finding("AUDIT_CLIP_LOCAL", clips[0]["site"], evidence)


def _is_recorded(run: Run, step: Records) -> bool:
    """Return whether all micro-batches of a step, equally many on each rank, have gradients and counts."""
    backwards = step.of("backward")
    sampled = [record["gradients"] for record in [*step.of("local"), *step.of("step")]]
    windows = [len(of_rank) for of_rank in backwards.by("rank").values()]
    is_even = windows == windows[:1] * run.size and len(sampled) == len(backwards) + run.size
    return is_even and len({len(gradients) for gradients in sampled}) == 1 and all(b.get("count") for b in backwards)


@np.errstate(invalid="ignore", divide="ignore")
def _ratio(vector: np.ndarray, base: np.ndarray) -> tuple[float, float]:
    """Return the factor that scales ``base`` to ``vector``, and the relative distance that remains; NaN of zeros."""
    factor = float(vector @ base / (base @ base))
    return factor, float(np.linalg.norm(vector - factor * base) / np.linalg.norm(factor * base))


def _denominator(run: Run, step: Records, longest_window: int) -> Iterator[Finding]:
    """Compare the gradient of a step, of each rank, with Σ loss / Σ count over ranks and micro-batches.

    Args:
        longest_window: micro-batches of the longest step before.
    """
    applied = np.array(step.of("step")[0]["gradients"])
    gradients = np.array([local["gradients"] for local in step.of("local")])
    backwards = step.of("backward")
    first = backwards[0]
    loss_line = first["loss_line"] or first["site"]
    counts = [backward["count"] for backward in backwards]
    factors = [backward["factor"] for backward in backwards]
    is_mean = first["reduction"] == "mean"
    weights = [(count if is_mean else 1) / (factor or 1) for count, factor in zip(counts, factors, strict=True)]
    right = np.array(weights) @ gradients / sum(counts)
    reduction, unexplained = _ratio(applied, gradients.sum(0))
    factor, deviation = _ratio(applied, right)
    if unexplained > _EXPLAINED or any(backward["reduction"] != first["reduction"] for backward in backwards):
        return  # something else changes the gradients
    ranks = run.size
    window = len(backwards) // ranks
    evidence = {"step": first["step"], "counts": counts, "factor": factor, "off": deviation}
    evidence |= {"ranks": ranks, "window": window, "longest_window": longest_window}
    if deviation > _DIRECTION and len(set(counts)) > 1:
        yield finding("AUDIT_MEAN_OF_MEANS", loss_line, evidence)
    if deviation > _DIRECTION or None in factors or step.of("clip") or not is_mean:
        return
    # Both are 1 in a right step: averages over ranks, and over micro-batches.
    over_ranks = reduction * ranks
    over_window = window * sum(factors) / len(factors)
    causes = (
        (over_ranks, ranks, "AUDIT_NOT_DIVIDED"),
        (over_window, min(1, window / max(1, longest_window)), "AUDIT_SHORT_WINDOW"),
        (over_window, window, "AUDIT_NOT_DIVIDED"),
        (over_window, 1 / window, "AUDIT_DIVIDED_TWICE"),
        (factor, 1 / ranks, "AUDIT_DIVIDED_TWICE"),
    )
    # A closure or a Trainer calls backward within the step.
    line = loss_line if first["site"] == step.of("step")[0]["site"] else first["site"]
    for measured, expected, code in causes:
        if expected != 1 and all(math.isclose(value, expected, rel_tol=_SCALE) for value in (measured, factor)):
            yield finding(code, line, evidence)
            return


def rate_findings(single_run: Run, several_run: Run) -> Iterator[Finding]:
    """Compare learning rates over the samples of a run on one rank with those on several."""
    runs = (single_run, several_run)
    if not all(run.has_one_optimizer and len(run.steps) > 1 for run in runs):
        return
    single, several = ([end["lr"][0] for end in run.ranks[0].of("step")] for run in runs)
    schedulers = several_run.ranks[0].of("scheduler")
    tops = [max(single), max(several)]
    evidence = {"ranks": several_run.size, "lr_one": tops[0], "lr_many": tops[1]}
    if not schedulers and not math.isclose(*tops, rel_tol=1e-6):
        yield finding("AUDIT_RATE_SCALED", several_run.ranks[0].of("optimizer")[0]["site"], evidence)
    stretch = len(single) / len(several)
    if not schedulers or stretch == 1 or min(tops) <= 0 or any(run.records.of("cut") for run in runs):
        return
    reference, curve = (np.array(rates) / max(rates) for rates in (single, several))
    is_right = _mean_distance(curve, reference, stretch) < 0.05
    is_too_slow = _mean_distance(curve, reference, 1.0) < 0.01 and abs(reference[-1] - curve[-1]) > 0.1
    is_too_fast = _mean_distance(curve, reference, stretch * several_run.size) < 0.01
    if not is_right and (is_too_slow or is_too_fast):
        curves = [rates[:: max(1, len(rates) // 4)] for rates in (single, several)]
        evidence |= {"lr_one": curves[0], "lr_many": curves[1]}
        yield finding("AUDIT_SCHEDULE", schedulers[0]["site"], evidence)


def _mean_distance(curve: np.ndarray, reference: np.ndarray, stretch: float) -> float:
    """Return the mean distance of ``curve[i]`` and ``reference[stretch · i]`` over common positions."""
    positions = np.round(np.arange(len(curve)) * stretch).astype(int)
    is_common = positions < len(reference)
    return float(np.abs(curve[is_common] - reference[positions[is_common]]).mean())
