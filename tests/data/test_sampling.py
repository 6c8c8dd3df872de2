"""Weights, balanced classes and epochs of any length: statistics, and the same samples on any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import ConcatDataset, Subset, TensorDataset, WeightedRandomSampler

import lockstep
from lockstep import Mixture, Order
from lockstep.config.sections import DataConfig
from lockstep.data import select
from lockstep.data.requests import BatchRequest, Source, Window, windows
from lockstep.data.sampling import BucketedOrder, SampleOrder, logarithm, resolve_sampling
from lockstep.data.stream import Stream, StreamOrder
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.planning.batch import BatchPlan, resolve_batch
from lockstep.rundir.folder import RunDir
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.samples import used_samples
from tests.toys import Toy, arrays


def order_of(weights: Any, samples: int, seed: int = 3, positions: int | None = None, **data: Any) -> SampleOrder:
    sampling = resolve_sampling(range(samples), weights, DataConfig(**data))
    assert sampling is not None
    return sampling.order(positions or sampling.facts.positions, seed)


def assert_in_proportion(counts: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> None:
    """A chi-square test of fixed seeds: it passes always or never."""
    expected = weights / weights.sum() * counts.sum()
    assert not counts[expected == 0].any()
    drawn = expected > 0
    statistic = float(((counts - expected)[drawn] ** 2 / expected[drawn]).sum())
    p = stats.chi2.sf(statistic, drawn.sum() - 1)
    assert 1e-5 < p < 1 - 1e-5, p


WEIGHTS = np.array([0.0, 1, 2, 3, 0, 10, 0.5, 0] * 25)


def test_with_replacement_samples_come_in_proportion_to_their_weights() -> None:
    order = order_of(WEIGHTS, 200, positions=100_000)
    epochs = [order.slice(epoch, 0, 100_000) for epoch in (0, 1)]
    for epoch in epochs:
        assert_in_proportion(np.bincount(epoch, minlength=200), WEIGHTS)
    # Neighbours, and the same position of two epochs, have no more in common than two draws do.
    equal = 100_000 * ((WEIGHTS / WEIGHTS.sum()) ** 2).sum()
    for same in (epochs[0] == epochs[1], epochs[0][1:] == epochs[0][:-1]):
        assert abs(same.sum() - equal) < 5 * np.sqrt(equal)


def test_without_replacement_heavy_samples_come_first() -> None:
    """The first sample of an epoch has the probabilities of one draw, and no sample comes twice."""
    weights, firsts = WEIGHTS[:8], []
    order = order_of(weights, 8, replacement=False)
    for epoch in range(4_000):
        drawn = order.slice(epoch, 0, 5)
        assert len(set(drawn.tolist())) == 5
        firsts.append(drawn[0])
    assert_in_proportion(np.bincount(firsts, minlength=8), weights)
    with pytest.raises(ConfigError, match=r"(?s)\b6 samples.*data\.replacement"):
        lockstep.plan(Weighing(weights=weights), {"data": {"replacement": False, "epoch_samples": 6}})


@pytest.mark.parametrize("tiny", [5e-324, 1e-310, 1e-300])
def test_the_smallest_weights_are_drawn_in_proportion_and_those_of_zero_never(tiny: float) -> None:
    weights = np.array([0.0, 1.0, tiny, 0.0, 2 * tiny, tiny])
    drawn = [order_of(weights, 6, replacement=False).slice(epoch, 0, 4).tolist() for epoch in range(2_000)]
    assert all(sorted(epoch) == [1, 2, 4, 5] and epoch[0] == 1 for epoch in drawn)
    assert_in_proportion(np.bincount([epoch[1] for epoch in drawn], minlength=6), weights * (weights < 0.5))
    alone = order_of(weights * (weights < 0.5), 6, positions=20_000).slice(0, 0, 20_000)
    assert_in_proportion(np.bincount(alone, minlength=6), weights * (weights < 0.5))


def test_weights_of_any_dtype_are_their_numbers() -> None:
    numbers = [0.5, 1.0, 2.0]
    expected = order_of(numbers, 3, positions=100).slice(0, 0, 100)
    for weights in (torch.tensor(numbers, dtype=torch.bfloat16), torch.tensor(numbers).half(), np.float32(numbers)):
        assert np.array_equal(order_of(weights, 3, positions=100).slice(0, 0, 100), expected)
    with pytest.raises(DataError, match="complex"):
        order_of(np.array([1j, 1, 1]), 3)


def test_samples_without_a_label_are_no_class() -> None:
    dataset = TensorDataset(torch.zeros(100, 1), torch.tensor([0] * 60 + [1] * 10 + [-100] * 30))
    sampling = resolve_sampling(dataset, None, DataConfig(sampling="balanced"))
    assert sampling is not None and "30 samples" in sampling.facts.kind
    drawn = sampling.order(10_000, 1).slice(0, 0, 10_000)
    assert_in_proportion(np.bincount(dataset.tensors[1][drawn].numpy() + 100, minlength=102)[100:], np.ones(2))


@given(st.floats(2**-54, 1, exclude_max=True))
def test_the_logarithm_is_one(value: float) -> None:
    assert logarithm(np.array([value]))[0] == pytest.approx(np.log(value), rel=1e-14)


def test_every_class_is_drawn_equally_often() -> None:
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)
    whole = TensorDataset(torch.zeros(1000, 1), labels)
    for dataset in (whole, Subset(ConcatDataset([whole, whole]), range(500, 1500))):
        sampling = resolve_sampling(dataset, None, DataConfig(sampling="balanced"))
        assert sampling is not None
        drawn = sampling.order(30_000, 1).slice(0, 0, 30_000)
        classes = torch.stack([dataset[i][1] for i in drawn.tolist()])
        assert_in_proportion(classes.bincount(minlength=3).numpy(), np.ones(3))


def test_a_curriculum_has_the_weights_of_its_epoch() -> None:
    order = order_of(lambda epoch: np.eye(4)[epoch % 4], 4)
    assert [set(order.slice(epoch, 0, 4).tolist()) for epoch in range(4)] == [{0}, {1}, {2}, {3}]


def test_a_curriculum_is_asked_for_the_epochs_of_the_run_alone() -> None:
    weights = [np.ones(4)]
    assert sorted(order_of(lambda epoch: weights[epoch], 4).slice(0, 0, 4).tolist())


@pytest.mark.parametrize("positions", [3, 10, 17, 40])
def test_epochs_of_another_length_show_each_sample_once_before_any_again(positions: int) -> None:
    order = order_of(None, 10, positions=positions)
    run = np.concatenate([order.slice(epoch, 0, positions) for epoch in range(30)])
    rounds = run[: len(run) // 10 * 10].reshape(-1, 10)
    assert (np.sort(rounds) == np.arange(10)).all()
    assert len({tuple(row) for row in rounds.tolist()}) > 1


def test_torchs_sampler_is_taken_over() -> None:
    sampler = WeightedRandomSampler([1.0, 2.0, 0.0], 1000, replacement=True)
    sampling = resolve_sampling(range(3), sampler, DataConfig())
    assert sampling is not None
    assert (sampling.facts.positions, sampling.facts.kind) == (1000, "weighted, with replacement")
    assert_in_proportion(np.bincount(sampling.order(1000, 0).slice(0, 0, 1000), minlength=3), np.array([1.0, 2.0, 0.0]))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0, 2.0], r"\(2,\) .*\b3\b"),
        ([1.0, -1.0, 1.0], "sample 1 .*-1"),
        ([1.0, 1.0, float("nan")], "sample 2 .*nan"),
        ([0, 0, 0], "sum .* 0"),
        (["a", "b", "c"], "numbers"),
        ([10**400, 1, 1], "numbers"),
        (lambda epoch: [1.0], r"\bepoch\b"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        order_of(weights, 3)


def test_settings_that_lack_what_they_need_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)\bweighted\b.*weights="):
        order_of(None, 3, sampling="weighted")
    with pytest.raises(ConfigError, match=r"(?s)\brange\b.*data\.label_column"):
        order_of(None, 3, sampling="balanced")


def test_a_predicate_chooses_samples() -> None:
    chosen = select(range(10), lambda number: number % 3 == 0)
    assert [chosen[i] for i in range(len(chosen))] == [0, 3, 6, 9]


# --- The same samples on any number of ranks -------------------------------------------------------------------------

KINDS = ["uniform", "cycled", "weighted", "without", "curriculum", "balanced", "mixture", "stages"]


def some_order(kind: str, samples: int, positions: int, seed: int) -> SampleOrder:
    weights = np.arange(1, samples + 1) % 7 + 0.5
    if kind in ("mixture", "stages"):
        stages = {40: {"a": 0.1, "b": 0.9}, 55: {"a": 1, "b": 0}} if kind == "stages" else None
        inner: Any = Mixture({"c": range(samples), "d": range(3)}, {"c": 1, "d": 2}) if stages else range(samples)
        mixture = Mixture({"a": inner, "b": range(2)}, {"a": 0.6, "b": 0.4}, stages)
        return mixture.sampling().order(positions, seed)
    if kind == "balanced":
        data = TensorDataset(torch.arange(samples) % 3)
        sampling = resolve_sampling(data, None, DataConfig(sampling="balanced"))
        assert sampling is not None
        return sampling.order(positions, seed)
    given: Any = {"weighted": weights, "without": weights, "curriculum": lambda epoch: weights + epoch}.get(kind)
    positions = samples if kind == "uniform" else min(samples, positions) if kind == "without" else positions
    return order_of(given, samples, seed, positions, replacement=kind != "without")


def order_by(length: bool, kind: str, samples: int, positions: int, seed: int) -> SampleOrder:
    order = some_order(kind, samples, positions, seed)
    return BucketedOrder(order, np.arange(samples + 5) % 4, 12, 4) if length and type(order) is not Order else order


class Killed(NamedTuple):
    """An attempt that is killed after ``steps``."""

    ranks: int
    steps: int
    batch_size: int


ATTEMPTS = st.lists(st.builds(Killed, st.integers(1, 6), st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=4)


def batches(
    order: SampleOrder, attempts: list[Killed], epochs: int, *, ghosts: bool, **sizes: Any
) -> Iterator[tuple[Window, ...]]:
    """The windows of all ranks, step by step: each attempt resumes where the one before was killed; the last one ends.

    What a configuration does not allow on these ranks is left out.
    """
    epoch = position = 0
    for killed in [*attempts, attempts[0]._replace(steps=10**9)]:
        ranks = killed.ranks if sizes["lanes"] is None else 2 ** (killed.ranks // 2)
        synced = sizes["has_batchnorm"] and ranks > 1 and sizes["lanes"] is None
        try:
            batch, _ = resolve_batch(
                samples=order.samples, ranks=ranks, devices_per_rank=1, batch_size=killed.batch_size,
                sync_batchnorm=synced, **sizes,
            )  # fmt: skip
        except (ConfigError, DataError):
            continue
        walks = [
            windows(batch, rank=rank, epoch=epoch, position=position, epochs=epochs, ghosts=ghosts or synced)
            for rank in range(ranks)
        ]
        left = batch.steps_left(position) + (epochs - epoch - 1) * batch.steps_per_epoch
        done = 0
        for done, of_ranks in enumerate(zip(*walks, strict=True), start=1):
            yield of_ranks
            epoch, position = of_ranks[0].epoch, of_ranks[0].stop
            if done >= killed.steps:
                break
        else:
            assert done == left, "the plan counts the steps that there are"


@given(
    kind=st.sampled_from(KINDS),
    by_length=st.booleans(),
    samples=st.integers(3, 60),
    positions=st.integers(3, 90),
    dealt=st.sampled_from([None, 1, 8]),
    attempts=ATTEMPTS,
    seed=st.integers(0, 2**40),
    global_batch_size=st.integers(1, 40),
    accumulate=st.integers(1, 4),
    tail=st.sampled_from(["spread", "merge", "drop"]),
    lanes=st.sampled_from([None, 8]),
    has_batchnorm=st.booleans(),
)
def test_no_sample_is_lost_or_repeated_however_often_the_number_of_ranks_changes(
    kind: str, by_length: bool, samples: int, positions: int, dealt: int | None, attempts: list[Killed], seed: int,
    **sizes: Any,
) -> None:  # fmt: skip
    order, again = (order_by(by_length, kind, samples, positions, seed) for _ in range(2))
    source = Source(range(10**6), None, 3, order, dealt)  # type: ignore[arg-type]
    alone = {"tail": sizes["tail"], "global_batch": sizes["global_batch_size"], "samples": order.samples}
    one = BatchPlan(batch_size=1, accumulate=1, ranks=1, least_window=1 + sizes["has_batchnorm"], **alone)
    whole = windows(one, rank=0, epoch=0, position=0, epochs=3, ghosts=False)
    for of_ranks, expected in zip(batches(order, attempts, 3, ghosts=True, **sizes), whole, strict=False):
        assert {window[:3] for window in of_ranks} == {expected[:3]}
        requests = [request for window in of_ranks for request in window.requests if request.size and not request.ghost]
        places = [place for request in requests for place in source.places(request).tolist()]
        indices = [index for request in requests for index in source.indices(request).tolist()]
        ordered = again.slice(expected.epoch, 0, order.samples)
        assert sorted(places) == [*range(expected.start, expected.stop)]
        assert indices == ordered[places].tolist()


@given(
    items=st.integers(1, 60),
    attempts=ATTEMPTS,
    global_batch_size=st.integers(1, 40),
    accumulate=st.integers(1, 4),
    has_batchnorm=st.booleans(),
    turns=st.randoms(use_true_random=False),
)
def test_ranks_read_a_stream_in_any_turn(items: int, attempts: list[Killed], turns: Random, **sizes: Any) -> None:
    """Also the samples that a rank without any replays."""
    stream, order = Stream(ItemNumbers(items), 50), StreamOrder(50, 0)
    for of_ranks in batches(order, attempts, 3, ghosts=True, tail="spread", lanes=None, **sizes):
        if len(of_ranks) != len(stream._asked):
            begin = of_ranks[0].epoch * order.samples + of_ranks[0].start
            stream._asked, stream._window = [begin] * len(of_ranks), sizes["global_batch_size"]
        waiting = {rank: [*window.requests] for rank, window in enumerate(of_ranks) if window.requests}
        while waiting:
            rank = turns.choice([*waiting])
            request = waiting[rank].pop(0)
            numbers = order.slice(request.epoch, request.start, request.stop).tolist()
            assert stream._read(numbers, rank) == [number % items for number in numbers]
            waiting = {rank: left for rank, left in waiting.items() if left}


class ItemNumbers:
    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.items))


class Drawing:
    """Draws in each of the two ways."""

    def __len__(self) -> int:
        return 4

    def sample(self, index: int, rng: np.random.Generator) -> tuple[int, float]:
        return index, rng.random()


class Draws:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


@pytest.mark.parametrize("dataset", [Drawing(), Draws()])
def test_a_sample_that_comes_twice_draws_twice(dataset: Any) -> None:
    order = order_of([1.0, 0, 0, 0], 4, positions=12)
    source = Source(dataset, torch.utils.data.default_collate, 3, order)
    whole = source.batch(BatchRequest(0, 0, 0, 12))
    parts = [source.batch(BatchRequest(0, 0, start, start + 4)) for start in (0, 4, 8)]
    assert len(set(whole[1].tolist())) == 12
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])


class Weighing(Toy):
    """The toy with weights; the last of three classes is rare in them."""

    class Config(Toy.Config):
        weights: Any = None

    def __init__(self, config: Any = None, weights: Any = None) -> None:
        super().__init__(config)
        self.weights = weights

    def datasets(self) -> lockstep.Datasets:
        given = super().datasets()
        if self.weights is not None:
            return lockstep.Datasets(range(len(self.weights)), weights=self.weights)
        weights = WeightedRandomSampler((arrays(200, 1)[1] != 2).double() + 0.01, 120)
        return lockstep.Datasets(given.train, given.val, weights=weights)


def runs(rank: int, size: int, folder: Path) -> dict[str, Any] | None:
    """On two ranks: the first half of a run, and another one whole; returns the weights of that on rank 0."""
    settings: dict[str, Any] = {"telemetry": {"record_samples": True}, "checkpoint": {"every_steps": 1}}
    attempt(Weighing, folder / "parts", rank, size, training={"max_steps": 5, "global_batch_size": 16}, **settings)
    exact = {"reproducibility": "exact", "global_batch_size": 16, "lanes": 4}
    return attempt(Weighing, folder / "exact", rank, size, training=exact, **settings)[0]


@pytest.mark.slow
def test_weighted_training_on_ranks_resumes_on_one_and_has_equal_bits(tmp_path: Path) -> None:
    weights = run_ranks(runs, 2, tmp_path)[0]
    attempt(Weighing, tmp_path / "parts", resume=True, training={"max_steps": 16})
    plan = RunDir(tmp_path / "parts").plan()
    assert (plan["batch"]["samples"], plan["order"]["sampling"]) == (120, "weighted, with replacement")
    order = order_of(Weighing().datasets().weights, 200, seed=42)
    assert used_samples(RunDir(tmp_path / "parts")) == {
        epoch + 1: Counter(order.slice(epoch, 0, 120).tolist()) for epoch in (0, 1)
    }
    exact = {"reproducibility": "exact", "global_batch_size": 16, "lanes": 4}
    alone, _ = attempt(Weighing, tmp_path / "alone", training=exact)
    assert all(torch.equal(weights[name], alone[name]) for name in alone)
    with pytest.raises((ConfigError, CheckpointError), match="weights"):
        attempt(Toy, tmp_path / "parts", resume=True, training={"max_steps": 20})
