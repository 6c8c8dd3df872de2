"""Any split of a step over ranks and micro-batches trains as one process does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import ArrayDataset, Datasets, Loss, Task, TaskConfig
from lockstep.events import StepLogged
from tests.attempts import attempt
from tests.gloo import run_ranks


class Weighted(Task):
    """Samples hold different numbers of items, so a mean of means would be wrong; in double precision."""

    class Config(TaskConfig):
        samples: int = 8
        batchnorm: bool = False
        poison: bool = False

    def datasets(self) -> Datasets:
        samples = self.config.samples
        generator = torch.Generator().manual_seed(samples)
        inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
        if self.config.poison:
            inputs[0] = float("inf")
        return Datasets(ArrayDataset(inputs, torch.randint(1, 9, (samples,), generator=generator).double()))

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(8) if self.config.batchnorm else nn.Identity()
        return nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 1)).double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, items = batch
        errors = (model(inputs).squeeze(1) - 1.0) ** 2 * items
        return Loss(errors.sum(), items.sum())


@dataclass(frozen=True)
class Case:
    """An epoch of ``samples``; a step has ``accumulate`` micro-batches of ``batch`` samples on each of ``ranks``.

    ``buckets``: torch's DDP reduces; otherwise one message a step.
    """

    ranks: int
    samples: int
    batch: int
    accumulate: int = 1
    batchnorm: bool = False
    poison: bool = False
    buckets: bool = False
    profile: str | None = None

    @property
    def whole(self) -> Case:
        """One process takes the same steps; BatchNorm sees what it sees over all ranks."""
        if self.batchnorm:
            return Case(1, self.samples, self.batch * self.ranks, self.accumulate, batchnorm=True)
        return Case(1, self.samples, self.batch, self.accumulate * self.ranks, poison=self.poison)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "task": {"samples": self.samples, "batchnorm": self.batchnorm, "poison": self.poison},
            "training": {
                "epochs": 1,
                "batch_size": self.batch,
                "global_batch_size": self.batch * self.accumulate * self.ranks,
                "max_grad_norm": None,
                "max_skipped_share": 1.0,
            },
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
            "scheduler": {"name": "constant", "warmup_steps": 0},
            "distributed": {"bucket_cap_mb": 1} if self.buckets else {},
            "telemetry": {"profile": self.profile},
        }


def plain_cases(ranks: int) -> list[Case]:
    draw = random.Random(ranks)
    cases = []
    for number in range(6):
        batch, accumulate = draw.randint(1, 5), draw.randint(1, 3)
        samples = draw.randint(2, 4 * ranks * batch * accumulate)
        cases.append(Case(ranks, samples, batch, accumulate, buckets=number % 2 == 1))
    return cases


def synchronised_cases(ranks: int) -> list[Case]:
    """Windows of every size from two samples on: with fewer samples than ranks one of them replays a ghost.

    A sample too few for a step joins the one before, and several micro-batches are those of one process.
    """
    sizes = [(4, 1, samples) for samples in (2, 3, 4 * ranks + 1, 4 * ranks + 3)]
    sizes += [(batch, 2, samples) for batch in (1, 3) for samples in (ranks + 1, 11)]
    return [
        Case(ranks, samples, batch, accumulate, batchnorm=True, buckets=number % 2 == 1)
        for number, (batch, accumulate, samples) in enumerate(sizes)
    ]


def poisoned_cases(ranks: int) -> list[Case]:
    """Of three ranks, one has no sample of the last step, or two have none of the only one."""
    return [
        Case(ranks, samples, 2, poison=True, buckets=buckets)
        for samples in (7, 1)
        for buckets in (False, True)
        if ranks == 3
    ]


#: Their second step is profiled.
ACCUMULATING = [Case(2, 32 * accumulate, 4, accumulate, profile="2:2") for accumulate in (1, 4)]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float | None]
    skipped: list[int]
    weights: dict[str, Tensor]


def trained(rank: int, case: Case, folder: Path) -> Trained:
    weights, events = attempt(Weighted, folder, rank, case.ranks, **case.settings)
    rows = [event for event in events if isinstance(event, StepLogged)]
    columns = [row.loss or 0.0 for row in rows], [row.grad_norm for row in rows], [row.skipped_steps for row in rows]
    return Trained(*columns, weights)


def cases_of(ranks: int) -> list[Case]:
    synchronised = synchronised_cases(ranks) if ranks < 4 else []
    return [*plain_cases(ranks), *synchronised, *poisoned_cases(ranks), *(ACCUMULATING if ranks == 2 else ())]


def all_cases(rank: int, ranks: int, folder: Path) -> list[Trained]:
    return [trained(rank, case, folder / str(number)) for number, case in enumerate(cases_of(ranks))]


Together = Callable[[int], tuple[Path, dict[Case, Trained]]]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    """What N ranks train, by case, and the folder of the runs; they are started once."""

    @cache
    def on(ranks: int) -> tuple[Path, dict[Case, Trained]]:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        first, *_ = run_ranks(all_cases, ranks, folder, timeout_s=120.0)
        return folder, dict(zip(cases_of(ranks), first, strict=True))

    return on


def assert_same(ours: Trained, theirs: Trained, case: Case) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6), case
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-6), case
    assert ours.skipped == theirs.skipped, case
    for name, value in theirs.weights.items():
        if "running" not in name:
            torch.testing.assert_close(ours.weights[name], value, rtol=1e-6, atol=1e-9, msg=f"{case}: {name}")


@pytest.mark.parametrize("ranks", [2, 3, *(pytest.param(ranks, marks=pytest.mark.drill) for ranks in (4, 5))])
def test_any_split_trains_as_one_process(together: Together, tmp_path: Path, ranks: int) -> None:
    for number, case in enumerate(plain_cases(ranks)):
        alone = trained(0, case.whole, tmp_path / str(number))
        assert len(alone.losses) >= 1
        assert_same(together(ranks)[1][case], alone, case)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_synchronised_batchnorm_trains_as_on_the_whole_batch(together: Together, tmp_path: Path, ranks: int) -> None:
    for number, case in enumerate(synchronised_cases(ranks)):
        assert_same(together(ranks)[1][case], trained(0, case.whole, tmp_path / str(number)), case)


def test_an_infinite_sample_on_one_rank_is_seen_by_all_ranks_and_by_the_empty_ones(
    together: Together, tmp_path: Path
) -> None:
    for number, case in enumerate(poisoned_cases(3)):
        alone = trained(0, case.whole, tmp_path / str(number))
        ours = together(3)[1][case]
        assert ours.skipped == alone.skipped and ours.skipped[-1] == 1, case
        for name, value in alone.weights.items():
            assert value.isfinite().all()
            torch.testing.assert_close(ours.weights[name], value, rtol=1e-6, atol=1e-9)


def test_accumulation_reduces_once_however_many_micro_batches_there_are(together: Together) -> None:
    folder, _ = together(2)
    calls = []
    for case in ACCUMULATING:
        profile = folder / str(cases_of(2).index(case)) / "profile" / "rank-0.json"
        operators = json.loads(profile.read_text())["operators"]
        calls.append(sum(row["calls"] for row in operators if row["name"] == "gloo:all_reduce"))
    one, four = calls
    assert one == four > 0
