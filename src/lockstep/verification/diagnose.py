"""Find the cause of a difference: compare the inputs of two runs, then experiment until the difference disappears."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.errors import LockstepError
from lockstep.planning import Plan
from lockstep.planning.batch import OWN
from lockstep.verification.experiments import Lab, Variant
from lockstep.verification.trajectory import BUFFER, Floor, Gap, Trajectory, gap_between

#: A repeated run whose first loss differs by more than this does not differ by rounding in another order.
UNSEEDED = 1e-4


#: Names of causes in reports and JSON; docs/same-result.md explains each.
Code = Literal[
    "order",
    "unseeded-data",
    "stateful-data",
    "ranks-diverge",
    "not-finite",
    "initial-weights",
    "unseeded-forward",
    "denominator",
    "learning-rate",
    "batchnorm",
    "precision",
    "random-draws",
    "grouping",
    "buffers",
    "resume",
    "validation",
    "unknown",
]


@dataclass(frozen=True)
class Cause:
    """The cause of a difference: a stable ``code``, the observation, and its fix."""

    code: Code
    what: str
    fix: str


_SAME_MODEL = "build the same model on every rank, from torch's, NumPy's or Python's global generators"


def other_samples(lab: Lab, single: Trajectory, many: Trajectory) -> Cause | None:
    """Explain why the two runs read other samples, if they did. Runs one device again, up to twice."""
    if single.first_other_samples(many) is None:
        return None
    keyed = (
        "draw from `random`, `numpy.random` or torch's global generator, which Lockstep seeds for each sample, or in "
        "`sample(index, rng)` from the generator that is passed in"
    )
    keyed = OWN if lab.plan.task.streams else keyed
    if single.first_other_samples(lab.run(Variant("one", repeat=1))) is not None:
        return Cause(
            "unseeded-data",
            "one device that repeats its run gets other samples too: the data set returns something else each time, as "
            "by random draws in `__getitem__` from an unseeded generator, or by the time",
            keyed,
        )
    if single.first_other_samples(lab.run(Variant("one", trace="reversed"))) is not None:
        return Cause(
            "stateful-data",
            "one device that reads the samples of each batch in reverse order gets other samples too: a sample depends "
            "on those read before it, as by random draws in `__getitem__` from a generator that the data set keeps",
            keyed,
        )
    return Cause(
        "order",
        "one device always gets the same samples: the data set depends on the rank or the number of ranks "
        "(a sampler, a shard or padding inside it), or on the process that opened it",
        "return sample i for index i in every process; Lockstep divides the samples among the ranks",
    )


def diverged(many: Trajectory) -> Cause | None:
    """Report ranks with a replica of the model whose weights differ from those of rank 0."""
    divergence = many.divergence
    if divergence is None:
        return None
    if divergence.by == "start":
        return Cause(
            "initial-weights",
            f"rank {divergence.rank} starts from other weights than rank 0, first in {divergence.parameter}: model() "
            "depends on the rank or draws random numbers without a seed",
            _SAME_MODEL,
        )
    if divergence.by == "merge":
        return Cause(
            "buffers",
            f"after step {divergence.step}, when ranks have merged their buffers, {divergence.parameter} of rank "
            f"{divergence.rank} is not that of rank 0",
            "declare how ranks merge it, in `buffer_reduction` of its module",
        )
    by = {
        "gradient": "its gradient differs too: a hook or callback changes gradients on each rank alone",
        "optimizer": "its gradient is the same: the optimizer, a hook inside the step, or a module that initialises "
        "its parameters in its first forward draws random numbers or depends on the rank",
        "hook": "they agreed before the task's hooks were called: a hook draws random numbers or depends on the rank",
    }[divergence.by]
    return Cause(
        "ranks-diverge",
        f"after step {divergence.step} rank {divergence.rank} has other weights than rank 0, first in "
        f"{divergence.parameter}; {by}",
        "draw from a generator with the same seed on every rank (torch.Generator().manual_seed(seed + step)), or draw "
        "on one rank and broadcast it with lockstep.collectives(); call a model that initialises itself in model()",
    )


def not_finite(single: Trajectory, many: Trajectory) -> Cause | None:
    """Report steps whose loss is not finite in both runs: NaN equals NaN, which proves nothing."""
    steps = min(len(single), len(many))
    is_finite = np.isfinite(single.loss[:steps]) | np.isfinite(many.loss[:steps])
    lost = np.flatnonzero(~is_finite & (single.count[:steps] > 0))
    if not lost.size:
        return None
    return Cause(
        "not-finite",
        f"the loss is NaN or infinite at step {int(lost[0]) + 1}, on one device too, so from there on nothing can be "
        "compared",
        "lower the learning rate, or find the operator with --set debug.detect_anomaly=true; then verify again",
    )


def interrupted(lab: Lab, variant: Variant, floor: Floor) -> Cause | None:
    """Compare the run of ``variant``, interrupted and resumed on one device, with the uninterrupted one."""
    whole = lab.run(variant)
    try:
        continuation = lab.resumed(variant)
    except LockstepError as error:
        problem = f"the run cannot be resumed: {error.what}" + f" ({error.why})" * bool(error.why)
        return Cause("resume", problem, error.fix)
    if continuation is None:
        return None
    step, resumed = continuation
    both = whole.then(step, resumed)
    parting = floor.parting(gap_between(whole, both))
    other = whole.first_other_samples(both)
    exact = lab.plan.reproducibility == "exact" and whole.fingerprint != both.fingerprint
    if parting is None and not exact and other is None:
        return None
    fix = (
        "let the checkpoint restore it: values that training changes belong into the optimizer's state, into buffers "
        "or into Task.state_dict(), and random numbers come from torch's global generator"
    )
    if lab.plan.task.streams and other is not None:
        fix = "give the training stream state_dict() and load_state_dict(), which restore its position"
    first = _first_after_resume(whole, resumed, both, step, parting)
    return Cause("resume", f"stopped after step {step} and resumed on one device, {first}", fix)


def _first_after_resume(
    whole: Trajectory, resumed: Trajectory, both: Trajectory, step: int, parting: tuple[str, int] | None
) -> str:
    """Describe the first difference, in the order of causes and effects."""
    other = whole.first_other_samples(both)
    if other is not None:
        return f"the samples of step {other} are others"
    settings = [
        f"{name} = {values[0]:g} (was {whole.settings[name][step]:g})"
        for name, values in resumed.settings.items()
        if name in whole.settings and not np.isclose(values[0], whole.settings[name][step], equal_nan=True)
    ]
    if settings:
        return f"the optimizer's param_groups are not restored: {', '.join(settings)}"
    if not np.array_equal(resumed.weights[0], whole.weights[step], equal_nan=True):
        return f"the weights are not those of the checkpoint, first in {whole.furthest_parameter(both, step)}"
    quantity, index = parting or ("weights", len(whole) - 1)
    when = f"validation {index + 1}" if quantity == "validation loss" else f"step {index + 1}"
    if quantity.startswith(BUFFER):
        when = f"step {both.merged[index + 1]}"
    draws = ", ".join(sorted(set(whole.draws) - {"dropout"}))
    likely = f"or random numbers, among them those of {draws}" if draws else "or random numbers"
    return f"the {quantity} is the first to differ, at {when}: state that no checkpoint keeps, {likely}"


def unseeded(single: Trajectory, again: Trajectory) -> Cause | None:
    """Report a run on one device whose repetition gives another result."""
    if single.first_other_samples(again) is not None:
        return Cause(
            "unseeded-data",
            "the data set returns other samples when the same run is repeated: it draws random numbers without a seed",
            "draw in `sample(index, rng)` from the generator that is passed in",
        )
    if not np.array_equal(single.weights[0], again.weights[0]):
        return Cause(
            "initial-weights",
            "a repeated run starts from other weights: model() draws random numbers without a seed",
            _SAME_MODEL,
        )
    if gap_between(single, again)["loss"][:1].max(initial=0) > UNSEEDED:
        return Cause(
            "unseeded-forward",
            "the same run, repeated, has another loss at step 1: dropout or another random draw of the forward pass "
            "has no seed",
            "draw from torch's global generator (nn.Dropout does), which is seeded at every step",
        )
    return None


def evidence(single: Trajectory, many: Trajectory, devices: int) -> Iterator[Cause]:
    """Yield differences between the inputs of the two runs, other than samples."""
    steps = min(len(single), len(many))
    if not np.array_equal(single.weights[0], many.weights[0]):
        yield Cause(
            "initial-weights",
            "the runs start from other weights: model() depends on the rank or on something without a seed",
            _SAME_MODEL,
        )
    single_counts = single.count[:steps]
    many_counts = many.count[:steps]
    # A count that is a sum of weights is rounded, differently in other groups of samples.
    whole = (single_counts == single_counts.round()) & (many_counts == many_counts.round())
    differs = np.where(whole, single_counts != many_counts, ~np.isclose(single_counts, many_counts, rtol=1e-5, atol=0))
    for step in np.flatnonzero(differs)[:1]:
        yield Cause(
            "denominator",
            f"at step {step + 1} the loss counts {single.count[step]:g} on one device and {many.count[step]:g} on "
            f"{devices}, for the same samples: a mean over each micro-batch, averaged again over ranks",
            "return Loss(sum, count): reduction='sum' and the number of items that were summed",
        )
    apart = ~np.isclose(single.lr[:steps], many.lr[:steps], rtol=1e-9, atol=0)
    for step in np.flatnonzero(np.any(apart, axis=1))[:1]:
        yield Cause(
            "learning-rate",
            f"at step {step + 1} the optimizer's learning rate is {single.lr[step].tolist()} on one device and "
            f"{many.lr[step].tolist()} on {devices}",
            "leave it to optimizer.lr_scaling, which the plan shows, and do not scale it in the task",
        )


def experiments(lab: Lab, quiet: tuple[str, ...], floor: Floor) -> Iterator[Cause]:
    """Yield features without which the runs agree. Runs more variants."""
    plan = lab.plan
    per_rank = plan.reproducibility == "fast"  # in exact mode statistics are those of a lane, on any devices
    if per_rank and plan.task.has_batchnorm and floor.parting(lab.compare((*quiet, "batchnorm")).gap) is None:
        yield Cause(
            "batchnorm",
            "with BatchNorm's batch statistics switched off the runs agree: each device normalises by the "
            "statistics of its part of the batch",
            "set distributed.sync_batchnorm to auto or on, use reproducibility exact, or a norm without batch "
            "statistics",
        )
    if rounds_more(plan) and floor.parting(lab.compare(quiet, "32").gap) is None:
        yield Cause(
            "precision",
            f"in float32 the runs agree, and at step 1 they differ by more than the rounding of "
            f"{plan.placement['precision']}",
            "use precision 32, or look for values near the limits of the precision (overflow, tiny gradients)",
        )


def rounds_more(plan: Plan) -> bool:
    """Return whether the run computes in less than float32."""
    return plan.number_format.is_half or plan.value("matmul_precision") == "high"


def is_rounding(gap: Gap, plan: Plan) -> bool:
    """Return whether the first step, which starts from equal weights, differs by the precision's rounding at most."""
    apart = max(gap["loss"][:1].max(initial=0), gap["gradient norm"][:1].max(initial=0))
    return bool(apart <= 8 * plan.number_format.epsilon)


def other_draws(draws: tuple[str, ...], plan: Plan) -> Iterator[Cause]:
    """Report random numbers that no experiment can switch off; in exact mode they are the same on any devices."""
    operators = sorted(set(draws) - {"dropout"})
    if operators and plan.reproducibility == "fast":
        yield Cause(
            "random-draws",
            f"the forward pass draws random numbers ({', '.join(operators)}), and in fast mode ranks "
            "draw different ones",
            "--reproducibility exact draws per lane, the same on any devices",
        )


def grouping(lab: Lab, quiet: tuple[str, ...], floor: Floor) -> Cause | None:
    """Report a result of one device that changes if it takes the ranks' parts in turn."""
    whole = lab.run(Variant("one", quiet))
    parts = lab.run(Variant("parts", quiet))
    gap = gap_between(whole, parts)
    if floor.parting(gap) is None:
        return None
    if lab.config.task.model_dump().get("native_steps") is not None:  # a LightningModule
        return Cause(
            "grouping",
            "one device that takes the same samples in smaller micro-batches gets another result (losses differ by up "
            f"to {gap['loss'].max(initial=0):.1e}): the module's loss is not the mean of its samples' losses, because "
            "it divides by something else (class weights, ignored targets, tokens) or compares the samples of a batch",
            "return a mean over samples; or write a lockstep.Task: Loss(total, count) has the divisor of the mean",
        )
    return Cause(
        "grouping",
        "one device that takes the same samples in smaller micro-batches gets another result (losses differ by up to "
        f"{gap['loss'].max(initial=0):.1e}): a sample's loss depends on the others in its micro-batch (statistics, "
        "padding to the longest), on how often loss() has been called, or, of a LightningModule, on a mean over "
        "something else than samples (class weights, ignored targets, tokens)",
        "make the loss a sum over samples and its count their number, Loss(total, count); replace statistics over the "
        "batch; mask padding in every layer that reads it; read the step from Task.context",
    )


def unmerged(single: Trajectory, quantity: str, index: int) -> Cause | None:
    """Report a buffer that is the first to differ."""
    if not quantity.startswith(BUFFER):
        return None
    name = quantity.removeprefix(BUFFER)
    return Cause(
        "buffers",
        f"the buffer {name} differs after step {single.merged[index + 1]}, though losses, gradients and weights agree: "
        "ranks change it, and merging it does not give what one device has",
        "declare how ranks merge it: `buffer_reduction` of its module ('mean', 'sum', 'max' or 'same'), or compute it "
        "from values that do not depend on how the batch is split",
    )


def unknown(single: Trajectory, many: Trajectory, quantity: str, index: int) -> Cause:
    """Describe an unexplained difference by the quantity that differs first."""
    if quantity == "validation loss":
        return Cause(
            "validation",
            f"training agrees and validation {index + 1} does not: evaluation depends on the rank or the number of "
            "ranks, or its data set draws random numbers",
            "look in evaluate(), validate() and the validation data for RANK, WORLD_SIZE and random numbers",
        )
    symptoms = {
        "loss": "the loss differs first: the forward pass depends on the rank or the number of ranks",
        "gradient norm": "the losses agree and the gradients do not: a backward pass that depends on the rank, or a "
        "hook that changes gradients",
        "weights": "losses and gradients agree and the weights do not: the optimizer depends on the number of ranks or "
        f"changes parameters that have no gradient, or a hook changes weights; furthest is "
        f"{single.furthest_parameter(many, index + 1)}",
    }
    fix = "look there for RANK, WORLD_SIZE and torch.distributed"
    return Cause("unknown", f"{symptoms[quantity]} (step {index + 1})", fix)
