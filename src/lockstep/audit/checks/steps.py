"""Findings about optimizer steps: denominators, windows, clearing, clipping, learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.audit.findings import Finding
from lockstep.audit.trace import RunTrace, Step

#: Relative difference of a gradient's direction that rounding does not make.
_DIRECTION = 5e-3
#: The same of its length.
_SCALE = 1e-2
#: Within this, the reduced gradient is a multiple of the sum of the local ones.
_EXPLAINED = 1e-3

Vector = list[float]


def step_findings(run: RunTrace) -> Iterator[Finding]:
    """Findings about single steps; each code at most once."""
    yield from _once(_uncleared(run))
    yield from _once(_clips(run))
    if run.has_one_optimizer and not run.is_sharded:
        yield from _once(_denominators(run))


def _once(findings: Iterator[Finding]) -> Iterator[Finding]:
    codes = set()
    for finding in findings:
        if finding.code not in codes:
            codes.add(finding.code)
            yield finding


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
        for clips in zip(*(step.clips for step in steps), strict=False):
            evidence = {"step": steps[0].number, "call": clips[0]["call"]}
            if clips[0]["scaled"]:
                message = f"{clips[0]['call']} before scaler.unscale_ in step {steps[0].number}"
                yield Finding("AUDIT_CLIP_SCALED", clips[0]["site"], message, evidence)
            at_clip = [flatten(clip["grad"]) for clip in clips]
            at_step = [flatten(step.look["grad"]) for step in steps if step.look]
            if len(at_step) == len(at_clip) > 1 and _differ(at_clip) and not _differ(at_step):
                message = f"the ranks clip different gradients in step {steps[0].number}, and reduce them afterwards"
                yield Finding("AUDIT_CLIP_LOCAL", clips[0]["site"], message, evidence)


def _differ(vectors: Sequence[Vector]) -> bool:
    return any(_distance(vectors[0], vector) > 1e-5 * _length(vectors[0]) for vector in vectors[1:])


def flatten(rows: Sequence[Sequence[float]]) -> Vector:
    """Join the sampled entries of all parameters."""
    return [value for row in rows for value in row]


def _length(vector: Vector) -> float:
    return math.sqrt(math.fsum(value * value for value in vector))


def _distance(first: Vector, second: Vector) -> float:
    return math.dist(first, second) if len(first) == len(second) else math.inf


def _ratio(vector: Vector, base: Vector) -> tuple[float, float]:
    """Return the factor that scales ``base`` to ``vector``, and the relative distance that remains."""
    square = math.fsum(value * value for value in base)
    factor = math.fsum(a * b for a, b in zip(vector, base, strict=True)) / square if square else 0.0
    scaled = [factor * value for value in base]
    length = _length(scaled)
    return factor, _distance(vector, scaled) / length if length else math.inf


def _denominators(run: RunTrace) -> Iterator[Finding]:
    window_size = 0
    for steps in run.aligned_steps():
        micro_batches = [pair for step in steps for pair in step.micro_batches]
        sizes = {len(step.micro_batches) for step in steps}
        look = steps[0].look
        is_complete = look is not None and all(local and local["grad"] and b["count"] for b, local in micro_batches)
        if not is_complete or not micro_batches or len(sizes) != 1 or look is None:
            continue
        finding = _denominator(steps, micro_batches, flatten(look["grad"]), window_size)
        window_size = max(window_size, *sizes)
        if finding is not None:
            yield finding


def _denominator(steps: list[Step], micro_batches: list[Any], applied: Vector, window_size: int) -> Finding | None:
    """Compare the gradient of a step with Σ loss / Σ count over its ranks and micro-batches."""
    ranks = len(steps)
    window = len(steps[0].micro_batches)
    counts = [backward["count"] for backward, _ in micro_batches]
    factors = [backward["factor"] for backward, _ in micro_batches]
    kinds = {backward["kind"] for backward, _ in micro_batches}
    locals_ = [flatten(local["grad"]) for _, local in micro_batches]
    if len(kinds) != 1 or any(len(vector) != len(applied) for vector in locals_) or not _length(applied):
        return None
    is_mean = kinds == {"mean"}
    weights = [(count if is_mean else 1) / (factor or 1) for count, factor in zip(counts, factors, strict=True)]
    total = sum(counts)
    right = [
        math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total for values in zip(*locals_, strict=True)
    ]
    summed = [math.fsum(values) for values in zip(*locals_, strict=True)]
    reduced, unexplained = _ratio(applied, summed)
    factor, deviation = _ratio(applied, right)
    clips = {clip["call"] for step in steps for clip in step.clips}
    if unexplained > _EXPLAINED or "clip_grad_value_" in clips:
        return None  # something else changes the gradients
    backward = micro_batches[0][0]
    line = backward["line"] if backward["site"] == steps[0].record["site"] else backward["site"]
    line = line or backward["site"]
    evidence = {"step": steps[0].number, "counts": counts, "factor": factor, "deviation": deviation}
    if deviation > _DIRECTION:
        if len(set(counts)) == 1:
            return None
        off = _distance(applied, right) / _length(right) if not clips and None not in factors else deviation
        message = f"counts of step {steps[0].number} are {_shown(counts)}: its gradient is off by {off:.1%}"
        return Finding("AUDIT_MEAN_OF_MEANS", backward["line"] or line, message, {**evidence, "off": off})
    if None in factors or clips or not is_mean or abs(factor - 1) < _SCALE:
        return None
    return _scale(evidence, line, (ranks, window, window_size), (reduced * ranks, window * sum(factors) / len(factors)))


def _shown(counts: list[float]) -> str:
    texts = [f"{count:g}" for count in counts[:8]]
    return ", ".join(texts) + (", …" if len(counts) > 8 else "")


def _scale(
    evidence: dict[str, Any], line: str | None, sizes: tuple[int, int, int], ratios: tuple[float, float]
) -> Finding | None:
    """Explain a gradient that is a multiple of the right one.

    ``sizes``: ranks, micro-batches of the window, of the longest window before. ``ratios``: 1 where the reduction
    averages over ranks, and where the factors of the losses average over micro-batches.
    """
    ranks, window, longest = sizes
    reduction, accumulation = ratios
    factor = evidence["factor"]
    text = f"the gradient of step {evidence['step']} is {factor:.4g} times the mean over its samples"

    def is_near(value: float, target: float) -> bool:
        return abs(value / target - 1) < _SCALE

    if ranks > 1 and is_near(reduction, ranks) and is_near(factor, ranks):
        return Finding("AUDIT_NOT_DIVIDED", line, f"{text}: summed over {ranks} ranks", evidence)
    if window < longest and is_near(accumulation, window / longest) and is_near(factor, window / longest):
        message = f"{text}: {window} micro-batches are divided by {longest}"
        return Finding("AUDIT_SHORT_WINDOW", line, message, evidence)
    if window > 1 and is_near(accumulation, window) and is_near(factor, window):
        return Finding("AUDIT_NOT_DIVIDED", line, f"{text}: summed over {window} micro-batches", evidence)
    if window > 1 and is_near(accumulation, 1 / window) and is_near(factor, 1 / window):
        return Finding("AUDIT_DIVIDED_TWICE", line, f"{text}: divided twice by {window} micro-batches", evidence)
    if ranks > 1 and is_near(factor, 1 / ranks):
        return Finding("AUDIT_DIVIDED_TWICE", line, f"{text}: divided twice by {ranks} ranks", evidence)
    return None


def rate_findings(single_run: RunTrace, several_run: RunTrace) -> Iterator[Finding]:
    """Compare learning rates over the samples of a run on one rank with those on several."""
    runs = (single_run, several_run)
    ranks = several_run.size
    curves = [[step.record["lr"][0] for step in run.first.steps if step.record["lr"]] for run in runs]
    single, several = curves
    if len(single) < 2 or len(several) < 2 or not all(run.has_one_optimizer for run in runs):
        return
    made = several_run.first.of("scheduler")
    tops = max(single), max(several)
    if tops[0] <= 0 or tops[1] <= 0:
        return
    made_optimizer = several_run.first.of("optimizer")
    ratio = tops[1] / tops[0]
    if not made and abs(ratio - 1) > 1e-6 and made_optimizer:
        message = f"the learning rate is {tops[0]:g} on one rank and {tops[1]:g} on {ranks}"
        yield Finding("AUDIT_RATE_SCALED", made_optimizer[0]["site"], message, {"lr": list(tops)})
    has_ended = not any(rank.of("cut") or rank.of("ended") for run in runs for rank in run.ranks)
    depends_on_metric = any(record["name"] == "ReduceLROnPlateau" for record in made)
    if not made or depends_on_metric or not has_ended or len(single) == len(several):
        return
    relative = [[rate / top for rate in curve] for curve, top in zip(curves, tops, strict=True)]
    stretch = len(single) / len(several)
    right = _mean_distance(relative[1], relative[0], stretch)
    if right < 0.05:
        return
    message = ""
    if _mean_distance(relative[1], relative[0], 1.0) < 0.01 and abs(relative[0][-1] - relative[1][-1]) > 0.1:
        message = f"the schedule on {ranks} ranks has reached {1 / stretch:.0%} of its steps at the end"
    elif _mean_distance(relative[1], relative[0], stretch * ranks) < 0.01:
        message = f"the schedule runs {ranks} times as fast over the samples on {ranks} ranks as on one"
    if message:
        evidence = {"lr_one": single[:: max(1, len(single) // 8)], "lr_many": several[:: max(1, len(several) // 8)]}
        yield Finding("AUDIT_SCHEDULE", made[0]["site"], message, evidence)


def _mean_distance(curve: Vector, reference: Vector, stretch: float) -> float:
    """Return the mean distance of ``curve[i]`` and ``reference[stretch · i]`` over common positions."""
    pairs = [
        (value, reference[round(position * stretch)])
        for position, value in enumerate(curve)
        if round(position * stretch) < len(reference)
    ]
    return math.inf if len(pairs) < 2 else sum(abs(a - b) for a, b in pairs) / len(pairs)
