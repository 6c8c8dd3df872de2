"""Findings about optimizer steps: denominators, windows, clearing, clipping, learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.audit.findings import Finding
from lockstep.audit.trace import RunTrace, Step

#: Relative difference of a gradient's direction that rounding does not make.
_DIRECTION = 5e-3
#: The same of its length.
_SCALE = 1e-2
#: Within this, the reduced gradient is a multiple of the sum of the local ones.
_EXPLAINED = 1e-3


def step_findings(run: RunTrace) -> Iterator[Finding]:
    """Yield findings about single steps."""
    yield from _uncleared(run)
    yield from _clips(run)
    if run.has_one_optimizer and not run.is_sharded:
        yield from _denominators(run)


def _uncleared(run: RunTrace) -> Iterator[Finding]:
    stepped: set[int] = set()
    for step in run.first.steps:
        number = int(step.record["optimizer"])
        looks = [backward["clean"] for backward, _ in step.micro_batches if "clean" in backward]
        is_complete = bool(looks) and len(looks) == len(step.micro_batches)
        if number in stepped and is_complete and not any(clean[number - 1] for clean in looks if len(clean) >= number):
            message = f"the gradients of step {step.number} begin with those of the step before"
            yield Finding("AUDIT_ZERO_GRAD", step.record["site"], message, {"step": step.number})
        stepped.add(number)


def _clips(run: RunTrace) -> Iterator[Finding]:
    for steps in run.aligned_steps():
        number = steps[0].number
        for clips in zip(*(step.clips for step in steps), strict=False):
            call = clips[0]["call"]
            evidence = {"step": number, "call": call}
            if clips[0]["scaled"]:
                message = f"{call} before scaler.unscale_ in step {number}"
                yield Finding("AUDIT_CLIP_SCALED", clips[0]["site"], message, evidence)
            at_clip = [_vector(clip["grad"]) for clip in clips]
            at_step = [_vector(step.look["grad"]) for step in steps if step.look]
            if len(at_step) == len(at_clip) > 1 and _differ(at_clip) and not _differ(at_step):
                message = f"the ranks clip different gradients in step {number}, and reduce them afterwards"
                yield Finding("AUDIT_CLIP_LOCAL", clips[0]["site"], message, evidence)


def _vector(rows: Sequence[Sequence[float]]) -> Tensor:
    """Join the sampled entries of all parameters: float64, shape (entries,)."""
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def _differ(vectors: Sequence[Tensor]) -> bool:
    first = vectors[0]
    return any(
        vector.shape != first.shape or bool((first - vector).norm() > 1e-5 * first.norm()) for vector in vectors[1:]
    )


def _ratio(vector: Tensor, base: Tensor) -> tuple[float, float]:
    """Return the factor that scales ``base`` to ``vector``, and the relative distance that remains."""
    square = float(base @ base)
    factor = float(vector @ base) / square if square else 0.0
    length = abs(factor) * math.sqrt(square)
    return factor, float((vector - factor * base).norm()) / length if length else math.inf


def _denominators(run: RunTrace) -> Iterator[Finding]:
    longest_window = 0
    for steps in run.aligned_steps():
        micro_batches = [pair for step in steps for pair in step.micro_batches]
        windows = {len(step.micro_batches) for step in steps}
        look = steps[0].look
        is_complete = look is not None and all(local and local["grad"] and b["count"] for b, local in micro_batches)
        if not is_complete or not micro_batches or len(windows) != 1 or look is None:
            continue
        finding = _denominator(steps, micro_batches, _vector(look["grad"]), longest_window)
        longest_window = max(longest_window, *windows)
        if finding is not None:
            yield finding


def _denominator(steps: list[Step], micro_batches: list[Any], applied: Tensor, longest_window: int) -> Finding | None:
    """Compare the gradient of a step with Σ loss / Σ count over its ranks and micro-batches."""
    counts = [backward["count"] for backward, _ in micro_batches]
    factors = [backward["factor"] for backward, _ in micro_batches]
    kinds = {backward["kind"] for backward, _ in micro_batches}
    vectors = [_vector(local["grad"]) for _, local in micro_batches]
    if len(kinds) != 1 or any(vector.shape != applied.shape for vector in vectors) or not applied.any():
        return None
    is_mean = kinds == {"mean"}
    local_gradients = torch.stack(vectors)
    weights = [(count if is_mean else 1) / (factor or 1) for count, factor in zip(counts, factors, strict=True)]
    right = torch.tensor(weights, dtype=torch.float64) @ local_gradients / sum(counts)
    reduction, unexplained = _ratio(applied, local_gradients.sum(0))
    factor, deviation = _ratio(applied, right)
    clips = {clip["call"] for step in steps for clip in step.clips}
    if unexplained > _EXPLAINED or "clip_grad_value_" in clips:
        return None  # something else changes the gradients
    backward = micro_batches[0][0]
    number = steps[0].number
    evidence = {"step": number, "counts": counts, "factor": factor, "deviation": deviation}
    if deviation > _DIRECTION:
        if len(set(counts)) == 1:
            return None
        is_scaled = bool(clips) or None in factors
        off = deviation if is_scaled else float((applied - right).norm() / right.norm())
        shown = ", ".join(f"{count:g}" for count in counts[:8]) + ", …" * (len(counts) > 8)
        message = f"counts of step {number} are {shown}: its gradient is off by {off:.1%}"
        line = backward["line"] or backward["site"]
        return Finding("AUDIT_MEAN_OF_MEANS", line, message, {**evidence, "off": off})
    if None in factors or clips or not is_mean or abs(factor - 1) < _SCALE:
        return None
    window = len(steps[0].micro_batches)
    cause = _cause_of_factor(
        factor,
        reduction=reduction * len(steps),
        accumulation=window * sum(factors) / len(factors),
        ranks=len(steps),
        window=window,
        longest_window=longest_window,
    )
    if cause is None:
        return None
    code, reason = cause
    text = f"the gradient of step {number} is {factor:.4g} times the mean over its samples: {reason}"
    # A closure or a Trainer calls backward within the step.
    is_inside = backward["site"] == steps[0].record["site"]
    return Finding(code, (is_inside and backward["line"]) or backward["site"], text, evidence)


def _cause_of_factor(
    factor: float, *, reduction: float, accumulation: float, ranks: int, window: int, longest_window: int
) -> tuple[str, str] | None:
    """Return code and reason of a gradient that is ``factor`` times the right one, if ranks or windows explain it.

    Args:
        factor: 1 for a right gradient.
        reduction: 1 if the reduction averages over ranks.
        accumulation: 1 if the factors of the losses average over micro-batches.
        ranks: number of ranks.
        window: micro-batches of the step.
        longest_window: micro-batches of the longest step before.
    """
    in_window = f"{window} micro-batches"
    short = window / max(1, longest_window)
    causes = (
        (ranks > 1, reduction, ranks, "AUDIT_NOT_DIVIDED", f"summed over {ranks} ranks"),
        (short < 1, accumulation, short, "AUDIT_SHORT_WINDOW", f"{in_window} are divided by {longest_window}"),
        (window > 1, accumulation, window, "AUDIT_NOT_DIVIDED", f"summed over {in_window}"),
        (window > 1, accumulation, 1 / window, "AUDIT_DIVIDED_TWICE", f"divided twice by {in_window}"),
        (ranks > 1, factor, 1 / ranks, "AUDIT_DIVIDED_TWICE", f"divided twice by {ranks} ranks"),
    )
    for applies, measured, expected, code, reason in causes:
        if applies and all(abs(value / expected - 1) < _SCALE for value in (measured, factor)):
            return code, reason
    return None


def rate_findings(single_run: RunTrace, several_run: RunTrace) -> Iterator[Finding]:
    """Compare learning rates over the samples of a run on one rank with those on several."""
    runs = (single_run, several_run)
    ranks = several_run.size
    single, several = ([step.record["lr"][0] for step in run.first.steps if step.record["lr"]] for run in runs)
    if len(single) < 2 or len(several) < 2 or not all(run.has_one_optimizer for run in runs):
        return
    tops = max(single), max(several)
    if min(tops) <= 0:
        return
    schedulers = several_run.first.of("scheduler")
    optimizers = several_run.first.of("optimizer")
    if not schedulers and optimizers and abs(tops[1] / tops[0] - 1) > 1e-6:
        message = f"the learning rate is {tops[0]:g} on one rank and {tops[1]:g} on {ranks}"
        yield Finding("AUDIT_RATE_SCALED", optimizers[0]["site"], message, {"lr": list(tops)})
    has_ended = not any(rank.of("cut") or rank.of("ended") for run in runs for rank in run.ranks)
    depends_on_metric = any(record["name"] == "ReduceLROnPlateau" for record in schedulers)
    if not schedulers or depends_on_metric or not has_ended or len(single) == len(several):
        return
    relative_single = [rate / tops[0] for rate in single]
    relative_several = [rate / tops[1] for rate in several]
    stretch = len(single) / len(several)
    if _mean_distance(relative_several, relative_single, stretch) < 0.05:
        return
    is_same_by_step = _mean_distance(relative_several, relative_single, 1.0) < 0.01
    if is_same_by_step and abs(relative_single[-1] - relative_several[-1]) > 0.1:
        message = f"the schedule on {ranks} ranks has reached {1 / stretch:.0%} of its steps at the end"
    elif _mean_distance(relative_several, relative_single, stretch * ranks) < 0.01:
        message = f"the schedule runs {ranks} times as fast over the samples on {ranks} ranks as on one"
    else:
        return
    evidence = {"lr_one": single[:: max(1, len(single) // 8)], "lr_many": several[:: max(1, len(several) // 8)]}
    yield Finding("AUDIT_SCHEDULE", schedulers[0]["site"], message, evidence)


def _mean_distance(curve: Sequence[float], reference: Sequence[float], stretch: float) -> float:
    """Return the mean distance of ``curve[i]`` and ``reference[stretch · i]`` over common positions."""
    positions = [(value, round(index * stretch)) for index, value in enumerate(curve)]
    distances = [abs(value - reference[position]) for value, position in positions if position < len(reference)]
    return math.inf if len(distances) < 2 else sum(distances) / len(distances)
