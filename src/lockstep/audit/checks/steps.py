"""Findings about optimizer steps: denominators, windows, clearing, clipping, learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
        is_dirty = all(end["optimizer"] in backward.get("dirty", ()) for backward in step.of("backward"))
        if end["optimizer"] in stepped and is_dirty and step.of("backward"):
            yield finding("AUDIT_ZERO_GRAD", end["site"], {"step": end["step"]})
        stepped.add(end["optimizer"])
        yield from _clips(run, step)
        if run.has_one_optimizer and not run.is_sharded and _is_recorded(run, step):
            yield from filter(None, [_denominator(run, step, longest_window)])
            longest_window = max(longest_window, len(step.of("backward")) // run.size)


def _clips(run: Run, step: Records) -> Iterator[Finding]:
    applied = step.of("applied")
    is_reduced = len(applied) == run.size and first_difference(applied, "norms") is None
    for clips in zip(*step.of("clip").by("rank").values(), strict=False):
        evidence = {"step": clips[0]["step"], "call": clips[0]["call"]}
        if clips[0]["is_scaled"]:
            yield finding("AUDIT_CLIP_SCALED", clips[0]["site"], evidence)
        if is_reduced and first_difference(clips, "norms") is not None:
            yield finding("AUDIT_CLIP_LOCAL", clips[0]["site"], evidence)


def _ratio(vector: np.ndarray, base: np.ndarray) -> tuple[float, float]:
    """Return the factor that scales ``base`` to ``vector``, and the relative distance that remains."""
    factor = float(vector @ base / (base @ base or 1.0))
    scaled = factor * base
    length = np.linalg.norm(scaled)
    return factor, float(np.linalg.norm(vector - scaled) / length) if length else math.inf


def _is_recorded(run: Run, step: Records) -> bool:
    """Return whether all micro-batches of a step, equally many on each rank, have gradients and counts."""
    backwards = step.of("backward")
    gradients = [local["gradients"] for local in step.of("local")]
    has_all = len(gradients) == len(backwards) and all(gradients) and all(b.get("count") for b in backwards)
    windows = [len(of_rank) for of_rank in backwards.by("rank").values()]
    return has_all and windows == windows[:1] * run.size and bool(step.of("applied"))


def _denominator(run: Run, step: Records, longest_window: int) -> Finding | None:
    """Compare the gradient of a step, of each rank, with Σ loss / Σ count over ranks and micro-batches.

    Args:
        longest_window: micro-batches of the longest step before.
    """
    applied = np.array(step.of("applied")[0]["gradients"])
    backwards = step.of("backward")
    vectors = [np.array(local["gradients"]) for local in step.of("local")]
    counts = [backward["count"] for backward in backwards]
    factors = [backward["factor"] for backward in backwards]
    reductions = {backward["reduction"] for backward in backwards}
    clips = {clip["call"] for clip in step.of("clip")}
    has_shape = all(vector.shape == applied.shape for vector in vectors)
    if len(reductions) != 1 or not has_shape or not applied.any() or "clip_grad_value_" in clips:
        return None
    gradients = np.stack(vectors)
    scales = [(count if reductions == {"mean"} else 1) / (f or 1) for count, f in zip(counts, factors, strict=True)]
    right = np.array(scales) @ gradients / sum(counts)
    reduction, unexplained = _ratio(applied, gradients.sum(0))
    factor, deviation = _ratio(applied, right)
    if unexplained > _EXPLAINED:
        return None  # something else changes the gradients
    first = backwards[0]
    ranks = run.size
    window = len(backwards) // ranks
    evidence = {"step": first["step"], "counts": counts, "factor": factor, "deviation": deviation}
    evidence |= {"ranks": ranks, "window": window, "longest_window": longest_window}
    if deviation > _DIRECTION and len(set(counts)) > 1:
        is_scaled = bool(clips) or None in factors
        evidence["off"] = deviation if is_scaled else float(np.linalg.norm(applied - right) / np.linalg.norm(right))
        return finding("AUDIT_MEAN_OF_MEANS", first["loss_line"] or first["site"], evidence)
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
    line = (first["site"] == step.of("step")[0]["site"] and first["loss_line"]) or first["site"]
    for measured, expected, code in causes:
        if expected != 1 and all(math.isclose(value, expected, rel_tol=_SCALE) for value in (measured, factor)):
            return finding(code, line, evidence)
    return None


def rate_findings(single_run: Run, several_run: Run) -> Iterator[Finding]:
    """Compare learning rates over the samples of a run on one rank with those on several."""
    runs = (single_run, several_run)
    single, several = ([end["lr"][0] for end in run.ranks[0].of("step") if end["lr"]] for run in runs)
    if min(len(single), len(several)) < 2 or not all(run.has_one_optimizer for run in runs):
        return
    schedulers = several_run.ranks[0].of("scheduler")
    optimizers = several_run.ranks[0].of("optimizer")
    tops = [max(single), max(several)]
    evidence = {"ranks": several_run.size, "lr_one": tops[0], "lr_many": tops[1]}
    if not schedulers and optimizers and not math.isclose(*tops, rel_tol=1e-6):
        yield finding("AUDIT_RATE_SCALED", optimizers[0]["site"], evidence)
    is_cut = any(run.records.of("cut") for run in runs)
    depends_on_metric = any(record["name"] == "ReduceLROnPlateau" for record in schedulers)
    stretch = len(single) / len(several)
    if not schedulers or depends_on_metric or is_cut or stretch == 1 or min(tops) <= 0:
        return
    reference, curve = ([rate / max(rates) for rate in rates] for rates in (single, several))
    is_right = _mean_distance(curve, reference, stretch) < 0.05
    is_too_slow = _mean_distance(curve, reference, 1.0) < 0.01 and abs(reference[-1] - curve[-1]) > 0.1
    is_too_fast = _mean_distance(curve, reference, stretch * several_run.size) < 0.01
    if not is_right and (is_too_slow or is_too_fast):
        curves = [rates[:: max(1, len(rates) // 4)] for rates in (single, several)]
        evidence |= {"lr_one": curves[0], "lr_many": curves[1]}
        yield finding("AUDIT_SCHEDULE", schedulers[0]["site"], evidence)


def _mean_distance(curve: Sequence[float], reference: Sequence[float], stretch: float) -> float:
    """Return the mean distance of ``curve[i]`` and ``reference[stretch · i]`` over common positions."""
    positions = [(value, round(index * stretch)) for index, value in enumerate(curve)]
    distances = [abs(value - reference[position]) for value, position in positions if position < len(reference)]
    return math.inf if len(distances) < 2 else sum(distances) / len(distances)
