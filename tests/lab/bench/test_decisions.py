"""What is proposed from measurements: workers, batch sizes, learning rates, precisions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.lab.bench.batch_size import RESOLUTION, next_batch
from lockstep.lab.bench.loader import HEADROOM, recommend, worker_counts
from lockstep.lab.bench.lr import SMOOTHING, Ramp, has_diverged, propose
from lockstep.lab.bench.lr import conclude as conclude_lr
from lockstep.lab.bench.report import BenchReport

RATES = st.dictionaries(st.integers(0, 64), st.floats(1, 1e6), min_size=1)


@given(RATES, st.floats(1, 1e6))
def test_the_fewest_workers_that_keep_up_are_recommended(rates: dict[int, float], demand: float) -> None:
    advice = recommend(rates, demand)
    enough = [workers for workers, rate in rates.items() if rate >= HEADROOM * demand]
    if enough:
        assert advice.num_workers == min(enough)
    else:
        assert rates[advice.num_workers] >= 0.95 * max(rates.values())
    assert advice.bound == ("data" if rates[advice.num_workers] < demand else "compute")
    assert str(advice.num_workers) in advice.reason


@given(st.integers(1, 256))
def test_worker_counts_go_from_none_to_all_cores(cores: int) -> None:
    counts = worker_counts(cores)
    assert counts == sorted(set(counts))
    assert {0, 1, cores} <= set(counts)


@given(st.integers(0, 5000), st.integers(1, 4096), st.integers(1, 256))
def test_the_search_ends_near_the_largest_batch_that_fits(limit: int, most: int, first: int) -> None:
    fits, fails, tried = 0, None, []
    candidate: int | None = min(first, most)
    while candidate is not None:
        assert 1 <= candidate <= most
        assert candidate not in tried, "nothing is tried twice"
        tried.append(candidate)
        if candidate <= limit:
            fits = candidate
        else:
            fails = candidate
        candidate = next_batch(fits, fails, most)
    best = min(limit, most)
    assert fits <= best
    assert best - fits <= max(1, int(fits * RESOLUTION)) if fits else best == 0
    assert len(tried) < 40


def curve(best: float, steps: int = 101) -> tuple[list[float], list[float]]:
    """A loss that falls around a hundredth of ``best``, is least there, and grows."""
    rates = [1e-6 * 1e7 ** (step / (steps - 1)) for step in range(steps)]
    fall = [1 / (1 + (100 * rate / best) ** 2) for rate in rates]
    return rates, [1 + 2 * down + (rate / best) ** 4 for down, rate in zip(fall, rates, strict=True)]


def smoothed(losses: list[float]) -> list[float]:
    averages = itertools.accumulate(losses, lambda mean, loss: SMOOTHING * mean + (1 - SMOOTHING) * loss, initial=0.0)
    return [mean / (1 - SMOOTHING**count) for count, mean in enumerate(averages) if count]


@given(st.floats(1e-3, 1.0))
def test_the_proposal_lies_where_the_loss_falls(best: float) -> None:
    rates, losses = curve(best)
    found = propose(rates, losses, losses)
    assert found is not None
    assert best / 1000 < found.steepest < best / 10
    assert found.lr == min(found.steepest, found.tenth)


@pytest.mark.parametrize(("own", "begins"), [(False, "use --lr 0.0"), (True, "make the task's optimizer with lr=0.0")])
def test_the_verdict_names_where_the_rate_is_set(own: bool, begins: str) -> None:
    report = BenchReport("lr", "toy", {"steps": 101, "global_batch": 32})
    rates, losses = curve(0.5)
    report.rows += [{"lr": lr, "loss": loss, "smoothed": loss} for lr, loss in zip(rates, losses, strict=True)]
    conclude_lr(report, own_optimizer=own)
    assert report.verdict.startswith(begins)


@given(st.floats(1e-2, 1.0), st.integers(0, 1000))
def test_noise_in_the_first_losses_decides_nothing(best: float, seed: int) -> None:
    rates, losses = curve(best)
    noisy = (np.array(losses) + np.random.default_rng(seed).normal(0, 0.2, len(losses))).tolist()
    found = propose(rates, noisy, smoothed(noisy))
    assert found is not None
    assert best / 1000 < found.lr < best


@given(st.integers(0, 100_000), st.integers(12, 200))
@example(20, 20)
@example(11_003, 12)
def test_noise_alone_gives_no_proposal(seed: int, steps: int) -> None:
    losses = (2 + np.random.default_rng(seed).normal(0, 0.3, steps)).tolist()
    rates = [1e-6 * 1.05**step for step in range(steps)]
    assert propose(rates, losses, smoothed(losses)) is None


def test_a_loss_that_never_falls_gives_no_proposal() -> None:
    growing = [1.0, 2.0, 3.0, 4.0]
    assert propose([1e-3, 1e-2, 1e-1, 1.0], growing, growing) is None
    assert propose([1e-3, 1e-2], [1.0, 0.5], [1.0, 0.5]) is None


def test_divergence_is_seen_for_losses_of_any_sign() -> None:
    assert has_diverged(math.nan, 1.0, 1)
    assert has_diverged(4.1, 1.0, 20)
    assert not has_diverged(4.1, 1.0, 5)
    assert not has_diverged(-0.9, -1.0, 20)
    assert has_diverged(2.5, -1.0, 20)


def test_the_ramp_is_exponential() -> None:
    ramp = Ramp(name="constant", lr=1e-3, total_steps=5, steps_per_epoch=1, first=1e-4, last=1.0)
    assert [ramp.at(step) for step in range(5)] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
