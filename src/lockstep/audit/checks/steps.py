"""Findings about optimizer steps: denominators, windows, clearing, clipping, learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.audit.findings import Finding
from lockstep.audit.trace import Record, RunTrace, Step

#: Relative difference of a gradient's direction that rounding does not make.
_DIRECTION = 5e-3
#: The same of its length.
_SCALE = 1e-2
#: Within this, the reduced gradient is a multiple of the sum of the local ones.
_EXPLAINED = 1e-3


def step_findings(run: RunTrace) -> Iterator[Finding]:
    """Yield findings about single steps."""
    yield from _uncleared(run)
    longest_window = 0
    for steps in run.aligned_steps():
        yield from _clips(steps)
        if run.has_one_optimizer and not run.is_sharded and _is_recorded(steps):
            yield from filter(None, [_denominator(steps, longest_window)])
            longest_window = max(longest_window, len(steps[0].of("backward")))


def _uncleared(run: RunTrace) -> Iterator[Finding]:
    stepped: set[int] = set()
    for step in run.first.steps:
        number = int(step.about["optimizer"])
        clean = [backward.get("is_clean", []) for backward in step.of("backward")]
        is_dirty = bool(clean) and all(len(flags) >= number and not flags[number - 1] for flags in clean)
        if number in stepped and is_dirty:
            yield Finding("AUDIT_ZERO_GRAD", step.about["site"], {"step": step.number})
        stepped.add(number)


def _clips(steps: list[Step]) -> Iterator[Finding]:
    for clips in zip(*(step.of("clip") for step in steps), strict=False):
        evidence = {"step": steps[0].number, "call": clips[0]["call"]}
        if clips[0]["is_scaled"]:
            yield Finding("AUDIT_CLIP_SCALED", clips[0]["site"], evidence)
        applied = [step.applied for step in steps if step.applied]
        if len(applied) == len(steps) > 1 and _differ(clips) and not _differ(applied):
            yield Finding("AUDIT_CLIP_LOCAL", clips[0]["site"], evidence)


def _vector(record: Record) -> np.ndarray:
    """Join the sampled gradients of all parameters: float64, shape (entries,)."""
    return np.array([value for row in record["gradients"] for value in row])


def _differ(records: Sequence[Record]) -> bool:
    first, *vectors = map(_vector, records)
    tolerance = 1e-5 * np.linalg.norm(first)
    return any(vector.shape != first.shape or np.linalg.norm(first - vector) > tolerance for vector in vectors)


def _ratio(vector: np.ndarray, base: np.ndarray) -> tuple[float, float]:
    """Return the factor that scales ``base`` to ``vector``, and the relative distance that remains."""
    factor = float(vector @ base / (base @ base or 1.0))
    scaled = factor * base
    length = np.linalg.norm(scaled)
    return factor, float(np.linalg.norm(vector - scaled) / length) if length else math.inf


def _is_recorded(steps: list[Step]) -> bool:
    """Whether all micro-batches of a step, equally many on each rank, have gradients and counts."""
    backwards = [backward for step in steps for backward in step.of("backward")]
    gradients = [local["gradients"] for step in steps for local in step.of("local")]
    has_all = len(gradients) == len(backwards) and all(gradients) and all(b.get("count") for b in backwards)
    return has_all and len({len(step.of("backward")) for step in steps}) == 1 and steps[0].applied is not None


def _denominator(steps: list[Step], longest_window: int) -> Finding | None:
    """Compare the gradient of a step, of each rank, with Σ loss / Σ count over ranks and micro-batches.

    Args:
        longest_window: micro-batches of the longest step before.
    """
    applied = _vector(steps[0].applied or {})
    backwards = [backward for step in steps for backward in step.of("backward")]
    vectors = [_vector(local) for step in steps for local in step.of("local")]
    counts = [backward["count"] for backward in backwards]
    factors = [backward["factor"] for backward in backwards]
    reductions = {backward["reduction"] for backward in backwards}
    clips = {clip["call"] for step in steps for clip in step.of("clip")}
    has_shape = all(vector.shape == applied.shape for vector in vectors)
    if len(reductions) != 1 or not has_shape or not applied.any() or "clip_grad_value_" in clips:
        return None
    gradients = np.stack(vectors)
    scales = [(count if reductions == {"mean"} else 1) / (f or 1) for count, f in zip(counts, factors, strict=True)]
    right = np.array(scales) @ gradients / sum(counts)
    reduction, unexplained = _ratio(applied, gradients.sum(0))
    factor, deviation = _ratio(applied, right)
    first = backwards[0]
    ranks = len(steps)
    window = len(backwards) // ranks
    evidence = {"step": steps[0].number, "counts": counts, "factor": factor, "deviation": deviation}
    evidence |= {"ranks": ranks, "window": window, "longest_window": longest_window}
    if unexplained > _EXPLAINED:
        return None  # something else changes the gradients
    if deviation > _DIRECTION and len(set(counts)) > 1:
        is_scaled = bool(clips) or None in factors
        evidence["off"] = deviation if is_scaled else float(np.linalg.norm(applied - right) / np.linalg.norm(right))
        return Finding("AUDIT_MEAN_OF_MEANS", first["loss_line"] or first["site"], evidence)
    if deviation > _DIRECTION or None in factors or clips or reductions != {"mean"}:
        return None
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
    line = (first["site"] == steps[0].about["site"] and first["loss_line"]) or first["site"]
    for measured, expected, code in causes:
        if expected != 1 and all(math.isclose(value, expected, rel_tol=_SCALE) for value in (measured, factor)):
            return Finding(code, line, evidence)
    return None


def rate_findings(single_run: RunTrace, several_run: RunTrace) -> Iterator[Finding]:
    """Compare learning rates over the samples of a run on one rank with those on several."""
    runs = (single_run, several_run)
    single, several = ([step.about["lr"][0] for step in run.first.steps if step.about["lr"]] for run in runs)
    if min(len(single), len(several)) < 2 or not all(run.has_one_optimizer for run in runs):
        return
    top_of_one = max(single)
    top_of_many = max(several)
    ranks = several_run.size
    schedulers = several_run.first.of("scheduler")
    optimizers = several_run.first.of("optimizer")
    if not schedulers and optimizers and not math.isclose(top_of_one, top_of_many, rel_tol=1e-6):
        evidence = {"ranks": ranks, "lr_one": top_of_one, "lr_many": top_of_many}
        yield Finding("AUDIT_RATE_SCALED", optimizers[0]["site"], evidence)
    is_cut = any(rank.of("cut") for run in runs for rank in run.ranks)
    depends_on_metric = any(record["name"] == "ReduceLROnPlateau" for record in schedulers)
    stretch = len(single) / len(several)
    if not schedulers or depends_on_metric or is_cut or stretch == 1 or min(top_of_one, top_of_many) <= 0:
        return
    reference = [rate / top_of_one for rate in single]
    curve = [rate / top_of_many for rate in several]
    is_right = _mean_distance(curve, reference, stretch) < 0.05
    is_too_slow = _mean_distance(curve, reference, 1.0) < 0.01 and abs(reference[-1] - curve[-1]) > 0.1
    is_too_fast = _mean_distance(curve, reference, stretch * ranks) < 0.01
    if not is_right and (is_too_slow or is_too_fast):
        curves = [rates[:: max(1, len(rates) // 4)] for rates in (single, several)]
        evidence = {"ranks": ranks, "lr_one": curves[0], "lr_many": curves[1]}
        yield Finding("AUDIT_SCHEDULE", schedulers[0]["site"], evidence)


def _mean_distance(curve: Sequence[float], reference: Sequence[float], stretch: float) -> float:
    """Return the mean distance of ``curve[i]`` and ``reference[stretch · i]`` over common positions."""
    positions = [(value, round(index * stretch)) for index, value in enumerate(curve)]
    distances = [abs(value - reference[position]) for value, position in positions if position < len(reference)]
    return math.inf if len(distances) < 2 else sum(distances) / len(distances)
