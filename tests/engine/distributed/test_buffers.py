"""Buffers that change in training: one device and several agree on them, or they are refused with their name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from lockstep import ArrayDataset, Loss, Task
from lockstep._compat.torch import broadcast_module
from lockstep.config import DistributedConfig
from lockstep.data.requests import InOrder, Source, windows
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.engine.optim.precision import Precision
from lockstep.engine.strategies.base import Flags, Replica, Strategy
from lockstep.engine.strategies.ddp import DdpStrategy, FlatStrategy
from lockstep.engine.strategies.exact import ExactStrategy
from lockstep.engine.trained import build_model
from lockstep.errors import UnsupportedError
from lockstep.hardware.world import World
from lockstep.planning.batch import resolve_batch
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.toys import Toy

CPU = torch.device("cpu")
WIDTH = 4


class Sum(Task):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss((model(batch[0]) - 1).square().sum(), len(batch[0]))


class Counter(nn.Module):
    """Counts samples, and keeps the mean and the largest of their first features."""

    count: Tensor
    level: Tensor
    highest: Tensor

    def __init__(self, **reduction: str) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2, dtype=torch.long))
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("highest", torch.tensor(-torch.inf))
        self.buffer_reduction = reduction

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.count += len(inputs)
            self.level.lerp_(inputs[:, 0].mean().detach(), 0.1)
            self.highest.copy_(torch.maximum(self.highest, inputs[:, 0].max()))
        return inputs


class Cache(nn.Module):
    """A position table that is made in the first forward pass and grows; and what else may happen to a buffer."""

    table: Tensor
    mask: Tensor | None

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.register_buffer("shared", shared)
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("gone", torch.ones(3))
        self.register_buffer("later", None)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > len(self.table):
            self.table = torch.arange(float(len(inputs)))
        self.shared = self.shared.clone()
        self.mask, self.later = None, torch.ones(2)
        if hasattr(self, "gone"):
            del self.gone
        return inputs


class ByRank(nn.Module):
    """A random vector of a rank: what no reduction can know."""

    noise: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.register_buffer("noise", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        self.noise += self.rank
        return inputs


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*layers, first, nn.Linear(WIDTH, 1))


def train(
    model: nn.Module,
    rank: int,
    ranks: int,
    *,
    kind: str = "flat",
    sync: bool | None = None,
    samples: int = 50,
    global_batch: int = 12,
    accumulate: int = 1,
    after: Callable[[Any, int], None] = lambda strategy, step: None,
) -> dict[str, Tensor]:
    """An epoch in steps of 12, the last one of 2 samples; the state of the model after it."""
    plan, _ = resolve_batch(
        samples=samples, ranks=ranks, devices_per_rank=1, batch_size=-(-global_batch // (ranks * accumulate)),
        accumulate=1, global_batch_size=global_batch, tail="spread", lanes=8 if kind == "exact" else None,
        has_batchnorm=sync is not None, sync_batchnorm=bool(sync) and ranks > 1,
    )  # fmt: skip
    if sync and ranks > 1:
        model = convert(model)
    precision = Precision("32", CPU, 2.0**-3)
    replica = Replica(Sum(), model, precision, CPU, 0, rank)
    strategy: Strategy
    if kind == "exact":
        strategy = ExactStrategy(replica, World(rank=rank, size=ranks))
    elif ranks == 1:
        strategy = Strategy(replica)
    else:
        strategy = FlatStrategy(replica) if kind == "flat" else DdpStrategy(replica, DistributedConfig())
    data = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
    source = Source(ArrayDataset(data), Sum().collate, 0, InOrder())
    for step, window in enumerate(windows(plan, rank=rank, epoch=0, position=0, epochs=1, ghosts=bool(sync))):
        batches = (source.batch(request) for request in window.requests)
        reduced = strategy.gradients(window, batches, step, Flags())
        factor = reduced.divisor / (precision.seed_value() * float(reduced.count))
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * factor * parameter.grad
        after(strategy, step)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_often(strategy: Any, step: int) -> None:
    if step % 2:
        strategy.passes.buffers.check()


MERGED = {"count": "sum", "level": "mean", "highest": "max"}
NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {"parametrized": spectral_norm, "old": old_spectral_norm}


def spectral(norm: str) -> nn.Module:
    torch.manual_seed(2)
    return net(NORMS[norm](nn.Linear(WIDTH, WIDTH)))


class Rows(nn.Module):
    """InstanceNorm over (N, C, L) beside BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.rows = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, inputs: Tensor) -> Tensor:
        shaped = self.batch(inputs).view(-1, 2, WIDTH // 2)
        return (self.rows(shaped) + shaped).flatten(1)


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "frozen": lambda: Frozen(WIDTH).train(),
    "cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "untracked": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "plain": lambda: nn.BatchNorm1d(WIDTH, affine=False),
    "one channel": lambda: nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.BatchNorm1d(1), nn.Flatten()),
    "twice": lambda: nn.Sequential(*[nn.BatchNorm1d(WIDTH)] * 2),
}


def refused(rank: int, ranks: int, layer: nn.Module, **settings: Any) -> tuple[int, str, str]:
    """After how many steps training ends, and how."""
    steps: list[int] = []
    try:
        train(net(layer), rank, ranks, after=lambda strategy, step: steps.append(step), **settings)
    except UnsupportedError as error:
        return len(steps), error.what, error.fix
    return len(steps), "", ""


def on_ranks(rank: int, ranks: int) -> dict[str, Any]:
    """What the tests below look at; one start of processes for all of them."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    for kind in ("flat", "ddp"):
        for often in (False, True):
            after = check_often if often else lambda strategy, step: None
            found[f"merged {kind} {often}"] = train(net(Counter(**MERGED)), rank, ranks, kind=kind, after=after)
            found[f"unsynchronised {kind} {often}"] = train(
                net(nn.BatchNorm1d(WIDTH)), rank, ranks, kind=kind, sync=False, after=after
            )
        found[f"ghosts {kind}"] = train(
            net(Counter(**MERGED), nn.BatchNorm1d(WIDTH)), rank, ranks, kind=kind, sync=True
        )
        found[f"instance {kind}"] = train(net(Rows()), rank, ranks, kind=kind, sync=True)
        for norm in NORMS:
            for accumulate in (1, 2):
                found[f"{norm} {kind} {accumulate}"] = train(
                    spectral(norm), rank, ranks, kind=kind, accumulate=accumulate
                )
        shared = torch.ones(2)
        found[f"cache {kind}"] = train(
            net(Cache(shared), Cache(shared)), rank, ranks, kind=kind, samples=51, after=check_often
        )
    for layer, build in LAYERS.items():
        found[f"layer {layer}"] = train(net(build()), rank, ranks, sync=True)
    found["counter"] = refused(rank, ranks, Counter(level="mean", highest="max"))
    found["by rank"] = refused(rank, ranks, ByRank(rank))
    local = ByRank(rank)
    local.buffer_reduction = {"noise": "local"}
    found["local"] = refused(rank, ranks, local)
    local.buffer_reduction = {"noise": "same"}
    found["same"] = refused(rank, ranks, local)
    for norm in NORMS:
        found[f"exact {norm}"] = train(spectral(norm), rank, ranks, kind="exact")
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 4, timeout_s=120.0)


def assert_equal(states: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for state in states:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "ddp"])
def test_declared_buffers_are_merged_after_every_step_whenever_they_are_saved(by_rank: Any, kind: str) -> None:
    expected = train(net(Counter()), 0, 1)
    for found in by_rank:
        once, often = (found[f"merged {kind} {often}"] for often in (False, True))
        assert all(torch.equal(once[name], often[name]) for name in once)
        assert once["0.count"].tolist() == [50, 50]
        assert once["0.highest"] == expected["0.highest"]
        assert all(torch.equal(once[name], by_rank[0][f"merged {kind} False"][name]) for name in once)
    # The mean of means of equal shares; the last step has unequal ones too, where two ranks have none.
    assert_equal([found[f"merged {kind} False"] for found in by_rank], expected)


@pytest.mark.parametrize("kind", ["flat", "ddp"])
def test_running_statistics_do_not_depend_on_when_they_are_saved_and_agree(by_rank: Any, kind: str) -> None:
    first = by_rank[0][f"unsynchronised {kind} False"]
    for found in by_rank:
        for often in (False, True):
            assert all(
                torch.equal(value, found[f"unsynchronised {kind} {often}"][name]) for name, value in first.items()
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "ddp"])
def test_a_replayed_sample_changes_no_buffer(by_rank: Any, kind: str) -> None:
    expected = train(net(Counter(), nn.BatchNorm1d(WIDTH)), 0, 1, sync=True)
    assert_equal([found[f"ghosts {kind}"] for found in by_rank], expected)


@pytest.mark.parametrize("kind", ["flat", "ddp"])
def test_instance_statistics_beside_synchronised_batchnorm_are_those_of_one_device(by_rank: Any, kind: str) -> None:
    assert_equal([found[f"instance {kind}"] for found in by_rank], train(net(Rows()), 0, 1, sync=True))


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_any_setting_of_batchnorm_is_that_of_one_device(by_rank: Any, layer: str) -> None:
    expected = train(net(LAYERS[layer]()), 0, 1, sync=True)
    assert_equal([found[f"layer {layer}"] for found in by_rank], expected)
    exact = train(net(LAYERS[layer]()), 0, 1, kind="exact", sync=False)
    for name, value in expected.items():
        assert not name.endswith("tracked") or torch.equal(value, exact[name])


@pytest.mark.parametrize("norm", NORMS)
def test_spectral_normalisation_takes_one_step_of_the_power_method_a_step(by_rank: Any, norm: str) -> None:
    """On any number of ranks and micro-batches: what a plain loop over whole batches computes."""
    model = spectral(norm)
    data = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
    for batch in data.split(12):
        model.zero_grad()
        (model(batch) - 1).square().sum().div(len(batch)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
    expected = model.state_dict()
    for accumulate in (1, 3):
        assert_equal([train(spectral(norm), 0, 1, accumulate=accumulate)], expected)
        for kind in ("flat", "ddp"):
            assert_equal([found[f"{norm} {kind} {min(accumulate, 2)}"] for found in by_rank], expected)
    alone = train(spectral(norm), 0, 1, kind="exact")
    assert_equal([alone], expected)
    for found in by_rank:
        assert all(torch.equal(value, alone[name]) for name, value in found[f"exact {norm}"].items())


def test_caches_and_shared_replaced_and_removed_buffers_are_left_alone(by_rank: Any) -> None:
    shared = torch.ones(2)
    for found in by_rank:
        assert found["cache flat"]["0.later"].tolist() == [1, 1]
    alone = train(net(Cache(shared), Cache(shared)), 0, 1, kind="exact", samples=51, after=check_often)
    assert "0.gone" not in alone
    # On ranks with a different longest batch each.
    assert by_rank[0]["cache ddp"].keys() == alone.keys()


def test_what_changes_with_the_data_is_refused_in_the_first_steps_with_its_name(by_rank: Any) -> None:
    for found in by_rank:
        # Equal on all ranks after the first step, but on one device it would be another number.
        assert found["counter"][0] == 1
        assert "0.count " in found["counter"][1]
        assert "model.0.buffer_reduction = {'count': '" in found["counter"][2]
        assert found["by rank"][0] == 0
        assert "0.noise " in found["by rank"][1]
        assert "{'noise': 'mean'}" in found["by rank"][2]
        assert found["local"][1] == ""
        assert found["same"][0] == 0
        assert re.search(r"0\.noise .*\bsame\b", found["same"][1])


def test_a_refusal_names_all_buffers_with_a_line_for_each_module() -> None:
    """A package's codebook (vector quantisation) has three, reduced by the package itself: one error, not three."""
    _, what, fix = refused(0, 1, nn.Sequential(Counter(), Counter(count="local")), kind="exact")
    assert "0.0.count, 0.0.level, 0.1.level " in what
    assert "model.0.0.buffer_reduction = {'count': 'local', 'level': 'local'}; model.0.1" in fix


def test_exact_mode_refuses_what_changes_with_the_lanes() -> None:
    steps, what, fix = refused(0, 1, Counter(), kind="exact")
    assert steps == 1
    assert "0.count, 0.level " in what
    assert "local" in fix
    assert refused(0, 1, Counter(**dict.fromkeys(MERGED, "local")), kind="exact") == (5, "", "")


def test_one_device_refuses_nothing_that_changes() -> None:
    assert refused(0, 1, Counter()) == (5, "", "")


@pytest.mark.parametrize("kind", ["flat", "exact"])
@pytest.mark.parametrize("reduction", [{"valeu": "mean"}, {"count": "median"}])
def test_a_wrong_declaration_is_refused_at_the_start_on_one_device_too(kind: str, reduction: dict[str, str]) -> None:
    steps, what, _ = refused(0, 1, Counter(**reduction), kind=kind)
    assert steps == 0
    assert next(iter(reduction)) in what


RARE = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


class Rare(Toy):
    """Buffers and frozen parameters of types that gloo does not send, and a buffer made by ``expand()``."""

    def model(self) -> nn.Module:
        model = super().model()
        rank = torch.tensor(int(os.environ.get("RANK", "0")))
        for number, dtype in enumerate(RARE):
            model.register_buffer(f"buffer{number}", (torch.tensor([[3, 5], [7, 1]]) + rank).to(dtype).T)
            model.register_buffer(f"scalar{number}", (rank + 2).to(dtype))
        model.frozen = nn.Parameter((torch.tensor([9, 4]) + rank).to(torch.int16), requires_grad=False)
        model.register_buffer("expanded", (torch.tensor([[1.5], [2.5]]) + rank).expand(2, 4))
        return model


RUN: dict[str, Any] = {"training": {"epochs": 1, "global_batch_size": 16}}


def in_double(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without types that torch cannot unpickle."""
    return {name: value.double() for name, value in weights.items()}


def rare(rank: int, size: int, folder: Path) -> list[dict[str, Tensor]]:
    first, _ = attempt(Rare, folder / "ddp", rank, size, **RUN, distributed={"bucket_cap_mb": 1})
    resumed, _ = attempt(Rare, folder / "ddp", rank, size, resume=True, training={"epochs": 2})
    return [in_double(first), in_double(resumed)]


def test_types_that_are_not_sent_and_expanded_buffers_train_on_ranks_and_resume(tmp_path: Path) -> None:
    run: dict[str, Any] = {"training": {"epochs": 2, "global_batch_size": 16}}
    first, _ = attempt(Rare, tmp_path / "alone", **RUN)
    alone, _ = attempt(Rare, tmp_path / "alone", resume=True, **run)
    for name in ("expanded", "frozen", "buffer0", "buffer5"):
        assert torch.equal(first[name], alone[name])
    assert alone["expanded"].tolist() == [[1.5] * 4, [2.5] * 4]
    for results in run_ranks(rare, 2, tmp_path):
        for found, expected in zip(results, (first, alone), strict=True):
            torch.testing.assert_close(found, in_double(expected), rtol=1e-4, atol=1e-5)


def broadcast(rank: int, size: int) -> dict[str, Tensor]:
    os.environ["RANK"] = str(rank)
    model = build_model(Rare())
    broadcast_module(model)
    return in_double(model.state_dict())


def test_every_rank_gets_the_values_of_rank_0() -> None:
    main, other = run_ranks(broadcast, 2)
    assert all(torch.equal(value, other[name]) for name, value in main.items())
    assert main["scalar1"] == 2 and main["buffer1"].tolist() == [[3, 7], [5, 1]]
