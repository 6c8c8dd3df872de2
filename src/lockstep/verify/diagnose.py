"""Where two runs part, and why: evidence first (what the runs were given), then experiments (what makes it go away)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.plan import Plan
from lockstep.verify.lab import Lab, Variant
from lockstep.verify.trajectory import Floor, Trajectory, gap_between

#: How many times the noise floor two runs of equal meaning may be apart. Rounding of one and of many devices is not
#: the same rounding; differences in meaning are larger by orders of magnitude.
FACTOR = 30.0
#: A repetition that is further apart at its very first loss is no rounding of kernels in another order.
UNSEEDED = 1e-4


#: What a cause is called, in reports and JSON; docs/same-result.md explains each.
Code = Literal[
    "order",
    "unseeded-data",
    "stateful-data",
    "initial-weights",
    "unseeded-forward",
    "denominator",
    "learning-rate",
    "batchnorm",
    "precision",
    "random-draws",
    "grouping",
    "unknown",
]


@dataclass(frozen=True)
class Cause:
    """Why two runs differ: a stable ``code``, what was seen, and how to fix it."""

    code: Code
    what: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        return {"code": self.code, "what": self.what, "fix": self.fix}


def other_samples(lab: Lab, one: Trajectory, many: Trajectory) -> Cause | None:
    """Why the two runs were given other samples, if they were. Runs one device again, up to twice."""
    if one.first_other_samples(many) is None:
        return None
    keyed = (
        "draw from `random`, `numpy.random` or torch's global generator, which Lockstep seeds for each sample, or in "
        "`sample(index, rng)` from the generator that is passed in"
    )
    if one.first_other_samples(lab.run(Variant("one", repeat=1))) is not None:
        return Cause(
            "unseeded-data",
            "one device that repeats its run gets other samples too: the data set returns something else "
            "each time, for example random draws in `__getitem__` from an unseeded generator, or the time",
            keyed,
        )
    if one.first_other_samples(lab.run(Variant("one", trace="reversed"))) is not None:
        return Cause(
            "stateful-data",
            "one device that reads the samples of each batch in reverse order gets other samples too: a sample "
            "depends on those read before it, for example random draws in `__getitem__` from a generator that the data "
            "set keeps",
            keyed,
        )
    return Cause(
        "order",
        "one device always gets the same samples: the data set depends on the rank or the number of ranks "
        "(a sampler, a shard or padding inside it), or on the process that opened it",
        "return sample i for index i in every process; Lockstep divides the samples among the ranks",
    )


def unseeded(one: Trajectory, again: Trajectory) -> Cause | None:
    """Whether the same run on one device gives another result when it is repeated."""
    if one.first_other_samples(again) is not None:
        return Cause(
            "unseeded-data",
            "the data set returns other samples when the same run is repeated: it draws random numbers without a seed",
            "draw in `sample(index, rng)` from the generator that is passed in",
        )
    if not np.array_equal(one.weights[0], again.weights[0]):
        return Cause(
            "initial-weights",
            "a repeated run starts from other weights: model() draws random numbers without a seed",
            "draw from torch's, NumPy's or Python's global generators, which are seeded before model() is called",
        )
    if gap_between(one, again).loss[:1].max(initial=0) > UNSEEDED:
        return Cause(
            "unseeded-forward",
            "the same run, repeated, has another loss at step 1: dropout or another random draw of the forward pass "
            "has no seed",
            "draw from torch's global generator (nn.Dropout does), which is seeded at every step",
        )
    return None


def evidence(one: Trajectory, many: Trajectory, devices: int) -> Iterator[Cause]:
    """What the two runs were given that should be the same and is not, beside the samples."""
    steps = min(len(one), len(many))
    if not np.array_equal(one.weights[0], many.weights[0]):
        yield Cause(
            "initial-weights",
            "the runs start from other weights: model() depends on the rank or on something without a seed",
            "build the same model on every rank, from torch's, NumPy's or Python's global generators",
        )
    counts = np.flatnonzero(one.count[:steps] != many.count[:steps])
    if counts.size:
        step = int(counts[0])
        yield Cause(
            "denominator",
            f"at step {step + 1} the loss counts {one.count[step]:g} on one device and {many.count[step]:g} on "
            f"{devices}, for the same samples: a mean over each micro-batch, averaged again over ranks",
            "return Loss(sum, count): reduction='sum' and the number of items that were summed",
        )
    rates = np.flatnonzero(np.any(~np.isclose(one.lr[:steps], many.lr[:steps], rtol=1e-9, atol=0), axis=1))
    if rates.size:
        step = int(rates[0])
        yield Cause(
            "learning-rate",
            f"at step {step + 1} the optimizer's learning rate is {one.lr[step].tolist()} on one device and "
            f"{many.lr[step].tolist()} on {devices}",
            "leave it to optimizer.lr_scaling, which the plan shows, and do not scale it in the task",
        )


def experiments(lab: Lab, quiet: tuple[str, ...], floor: Floor) -> Iterator[Cause]:
    """What makes the difference go away when it is switched off in both runs. Runs more variants."""
    plan = lab.plan
    if plan.task.has_batchnorm:
        off = (*quiet, "batchnorm")
        one, many = lab.run(Variant("one", off)), lab.run(Variant("many", off))
        if floor.parting(gap_between(one, many), FACTOR) is None:
            yield _batchnorm(plan)
    if plan.placement["precision"] != "32":
        one, many = (lab.run(Variant(where, quiet, precision="32")) for where in ("one", "many"))
        if floor.parting(gap_between(one, many), FACTOR) is None:
            yield Cause(
                "precision",
                f"in float32 the runs agree: what differs is the rounding of {plan.placement['precision']}",
                "nothing need be mended; take precision 32 where it matters",
            )


def other_draws(draws: tuple[str, ...], plan: Plan) -> Iterator[Cause]:
    """Random numbers that no experiment can switch off; in exact mode they are the same on any devices."""
    others = sorted(set(draws) - {"dropout"})
    if others and plan.reproducibility == "fast":
        yield Cause(
            "random-draws",
            f"the forward pass draws random numbers ({', '.join(others)}), and in fast mode each rank draws its own",
            "--reproducibility exact draws per lane, the same on any devices",
        )


def grouping(lab: Lab, quiet: tuple[str, ...], floor: Floor) -> Cause | None:
    """Whether one device that takes the ranks' parts in turn parts from itself too."""
    one, parts = lab.run(Variant("one", quiet)), lab.run(Variant("parts", quiet))
    if floor.parting(gap_between(one, parts), FACTOR) is None:
        return None
    return Cause(
        "grouping",
        "one device that takes the same samples in smaller micro-batches parts from itself: a sample's loss depends "
        "on which others are in its micro-batch",
        "make the loss a sum over samples and its count their number; replace statistics over the batch",
    )


def _batchnorm(plan: Plan) -> Cause:
    agree = "with BatchNorm's batch statistics switched off the runs agree"
    if plan.sync_batchnorm and plan.batch.accumulate > 1:
        return Cause(
            "batchnorm",
            f"{agree}: with {plan.batch.accumulate} micro-batches a step, its statistics depend on how the step is cut",
            "set training.accumulate to 1 with a larger batch_size, or use reproducibility exact",
        )
    return Cause(
        "batchnorm",
        f"{agree}: each device normalises by the statistics of its own part of the batch",
        "set distributed.sync_batchnorm to auto or on, use reproducibility exact, or a norm without batch statistics",
    )


def unknown(quantity: str, place: int) -> Cause:
    """The last word when nothing explains it: what parted first says where to look."""
    where = {
        "loss": "the loss parts first: the forward pass depends on the rank or the number of ranks",
        "gradient norm": "the losses agree and the gradients do not: a backward pass that depends on the rank, or a "
        "hook that changes gradients",
        "weights": "losses and gradients agree and the weights do not: the optimizer depends on the rank, or a hook "
        "changes weights",
        "validation loss": "training agrees and validation does not: it depends on the rank, or on buffers that no "
        "rule merges",
    }
    when = f"{'validation' if quantity == 'validation loss' else 'step'} {place + 1}"
    return Cause("unknown", f"{where[quantity]} ({when})", "look there for RANK, WORLD_SIZE and torch.distributed")
