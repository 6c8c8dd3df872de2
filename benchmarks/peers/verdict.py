"""From what the trainers did to the rows of the table: pure arithmetic on ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from peers.probe import LR, VALIDATION_SAMPLES

Shares = list[list[float]]

#: Shares are differences of float32 numbers.
TOLERANCE = 1e-4


class Verdict(NamedTuple):
    """``observed`` in words, the ``figures`` behind it, and whether it is what arithmetic asks for."""

    observed: str
    figures: dict[str, Any]
    right: bool


def shares(steps: Sequence[dict[str, Any]], before: Sequence[float] | None = None) -> Shares:
    """Of every sample in every step: [steps][samples]. ``before`` is the ledger that the first step found."""
    found: Shares = []
    for step in steps:
        after = step["ledger"]
        before = before or [0.0] * len(after)
        # The ledger holds sums of float32 multiples of the learning rate.
        found.append([(a - b) / -LR for a, b in zip(after, before, strict=True)])
        before = after
    return found


def taken(share: Sequence[float]) -> list[int]:
    """The samples that a step took."""
    return [index for index, value in enumerate(share) if value > TOLERANCE]


def validation(result: dict[str, Any]) -> Verdict:
    count, mean = result["count"], result["mean"]
    truth = (VALIDATION_SAMPLES - 1) / 2
    return Verdict(
        f"{count:g} samples counted, mean {mean:.3f}",
        {"count": count, "mean": mean, "true_count": VALIDATION_SAMPLES, "true_mean": truth},
        count == VALIDATION_SAMPLES and abs(mean - truth) < TOLERANCE,
    )


def accumulation(result: dict[str, Any], item: str = "sample") -> Verdict:
    """The gradient of each window against Σ loss / Σ count of its items, where all shares are 1 / n."""
    windows = shares(result["steps"])
    sums = [sum(window) for window in windows]
    weights = [value * len(taken(window)) for window in windows for value in window if value > TOLERANCE]
    seen = [index for window in windows for index in taken(window)]
    twice, missed = len(seen) - len(set(seen)), len(windows[0]) - len(set(seen))
    observed = f"gradients × {', '.join(f'{value:.3g}' for value in sums)}; a {item} weighs {_span(weights)}"
    observed += f"; {twice} counted twice" if twice else ""
    observed += f"; {missed} left out" if missed else ""
    figures = {"window_sums": sums, f"{item}_weight": [min(weights), max(weights)], "twice": twice, "missed": missed}
    right = max(abs(weight - 1) for weight in weights) < 10 * TOLERANCE and not twice and not missed
    return Verdict(observed, figures, right)


def _span(weights: Sequence[float]) -> str:
    low, high = min(weights), max(weights)
    return f"{low:.3g}" if high - low < 10 * TOLERANCE else f"{low:.3g} to {high:.3g}"


def resume(first: dict[str, Any], second: dict[str, Any], stop_after: int, global_batch: int) -> Verdict:
    """How often each sample of the interrupted epoch moved the weights, before the stop and after it."""
    kept = [step for step in first["steps"] if step["step"] <= stop_after]
    epoch = (stop_after - 1) * global_batch // len(kept[0]["ledger"])
    steps = [*zip(kept, shares(kept), strict=True)]
    steps += zip(second["steps"], shares(second["steps"], kept[-1]["ledger"]), strict=True)
    of_epoch = [share for step, share in steps if step["epoch"] == epoch]
    times = [round(sum(sample) * global_batch) for sample in zip(*of_epoch, strict=True)]
    repeated, missed = sum(count - 1 for count in times if count > 1), sum(count == 0 for count in times)
    observed = f"{repeated} of {len(times)} repeated, {missed} never seen"
    figures = {"repeated": repeated, "never_seen": missed, "samples": len(times), "steps_of_epoch": len(of_epoch)}
    return Verdict(observed, figures, repeated == missed == 0)


def equal(one: dict[str, Any], several: dict[str, Any]) -> Verdict:
    """The same training on one rank and on several."""
    pairs = [*zip(shares(one["steps"]), shares(several["steps"]), strict=True)]
    same = sum(taken(a) == taken(b) for a, b in pairs)
    loss = max(abs(a["loss"] - b["loss"]) for a, b in zip(one["steps"], several["steps"], strict=True))
    weight = max(abs(a - b) for a, b in zip(one["weights"], several["weights"], strict=True))
    observed = f"same samples in {same} of {len(pairs)} steps; loss differs by {loss:.1e}, weights by {weight:.1e}"
    figures = {"same_steps": same, "steps": len(pairs), "loss_difference": loss, "weight_difference": weight}
    return Verdict(observed, figures, same == len(pairs) and weight < 1e-5)
