"""``strategy: fsdp`` computes what one device computes: steps, norms, checkpoints, whatever the ranks and the tail."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import ArrayDataset, Loss, Task, make_plan
from lockstep.api.finished.evaluation import evaluate
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.checkpoint.writer import ShardedStore
from lockstep.config import FsdpConfig, OptimizerConfig, RunConfig, SchedulerConfig
from lockstep.config.load import merge
from lockstep.data.requests import InOrder, Source, Window, windows
from lockstep.engine.ablation import Watched
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.dtensor_state import gathered, own_part
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.step import Update
from lockstep.engine.partition import Undivided
from lockstep.engine.rank_context import Attempt, RankContext, open_writer
from lockstep.engine.resume import load_shared, load_weights
from lockstep.engine.strategies.base import Flags, Replica, Strategy
from lockstep.engine.strategies.fsdp import FsdpStrategy, ShardedModel
from lockstep.errors import UnsupportedError
from lockstep.hardware.world import World
from lockstep.planning import BatchPlan, Plan
from lockstep.planning.decision import Decision, by_key
from lockstep.planning.schedule import resolve_schedule
from lockstep.rundir.folder import RunDir
from tests.dist.runs import assert_equal_runs, go_on, train, used
from tests.e2e.test_drill import FAST, drill, kill_in_training
from tests.e2e.test_train import TOY, finish, start
from tests.fakes import RecordingSink
from tests.gloo import run_ranks
from tests.updates import update_for_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(600)


def undivided(task: Task, model: nn.Module, world: World, precision: str = "32", **sections: Any) -> Undivided:
    plan: Any = SimpleNamespace(placement={"precision": precision}, seed=0)
    nothing: Any = None
    return Undivided(task, model, nothing, RankContext(nothing, world, RunConfig(**sections), plan, CPU, nothing))


class Case(NamedTuple):
    """One training by hand: so many samples and a plan, with or without BatchNorm, and how it differs.

    ``dropout``: blocks have some, by a function, which is switched off as ``lockstep verify`` does.
    """

    samples: int
    accumulate: int = 1
    batchnorm: bool = False
    checkpointing: bool = False
    dropout: bool = False
    sharding: str = "full"
    poison: bool = False
    max_norm: float | None = 0.05
    optimizer: str = "adamw"
    offload: bool = False


class Outcome(NamedTuple):
    """``loaded``: weights and moments after a checkpoint in shards, of other ranks if there is one, has been read."""

    losses: list[float]
    norms: list[float]
    skipped: int
    flags: list[Flags | None]
    weights: dict[str, Tensor]
    moments: dict[str, Any]
    loaded: tuple[dict[str, Tensor], dict[str, Any]] | None = None


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Deep(nn.Module):
    """Blocks of one kind, a weight that two layers share, a parameter of the model itself, and a method of its own."""

    def __init__(self, batchnorm: bool, dropout: bool = False) -> None:
        super().__init__()
        # A bias before BatchNorm has no gradient but rounding noise, which Adam would blow up.
        self.inner = nn.Linear(4, 5, bias=not batchnorm)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(5, 5, bias=not batchnorm),
                Halved() if dropout else nn.Identity(),
                nn.BatchNorm1d(5) if batchnorm else nn.Tanh(),
            )
            for _ in range(2)
        )
        self.tied = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 1)

    def features(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.again(torch.tanh(self.tied(x)))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.features(x) * self.scale)
        return output


class Weighted(Task):
    """Samples hold different numbers of items, so a mean of means would be wrong."""

    def loss(self, model: Any, batch: Any) -> Loss:
        inputs, items = batch
        outputs = model.head(model.features(inputs) * model.scale)
        return Loss(((outputs.squeeze(1) - 1.0) ** 2 * items).sum(), items.sum())


def data_of(case: Case) -> ArrayDataset:
    generator = torch.Generator().manual_seed(case.samples)
    inputs = torch.randn(case.samples, 4, generator=generator, dtype=torch.float64)
    if case.poison:
        inputs[0] = torch.inf
    return ArrayDataset(inputs, torch.randint(1, 9, (case.samples,), generator=generator).double())


def two_epochs(rank: int, ranks: int, case: Case, per_step: int, folder: Path | None = None) -> Outcome:
    torch.manual_seed(0)
    model: nn.Module = Deep(case.batchnorm, case.dropout).double()
    alone = ranks == 1
    micro = per_step // (ranks * case.accumulate)
    plan = BatchPlan(
        samples=case.samples,
        global_batch=per_step,
        batch_size=per_step // case.accumulate if alone else micro,
        accumulate=case.accumulate,
        ranks=ranks,
        least_window=2 if case.batchnorm else 1,
    )
    precision, sharded = Precision("32", CPU, 2.0**-4), None
    if case.batchnorm and not alone:
        model = convert(model)
    task: Task = Watched(Weighted(), model, ("dropout",)) if case.dropout else Weighted()
    if not alone:
        config = FsdpConfig(
            activation_checkpointing=case.checkpointing,
            sharding=case.sharding,  # type: ignore[arg-type]
            cpu_offload=case.offload,
        )
        nodes = 2 if case.sharding == "hybrid" else 1
        world = World(rank, ranks, rank % (ranks // nodes), ranks // nodes)
        sharded = ShardedModel(undivided(task, model, world, fsdp=config))
    schedule, _ = resolve_schedule(
        SchedulerConfig(name="constant", warmup_steps=0),
        lr=0.05,
        total_steps=2 * plan.steps_per_epoch,
        steps_per_epoch=plan.steps_per_epoch,
        offset=0,
    )
    optimizer = build_optimizer(OptimizerConfig(name=case.optimizer, lr=0.05), model, 0.05)  # type: ignore[arg-type]
    update = update_for_model(model, optimizer, schedule, precision, case.max_norm, sharded)
    replica = Replica(task, model, precision, CPU, 0, rank)
    strategy = Strategy(replica) if sharded is None else FsdpStrategy(replica, sharded)
    if isinstance(task, Watched):
        strategy.watching = task.watching
    source = Source(data_of(case), Weighted().collate, 0, InOrder())
    found: list[float] = []
    norms: list[float] = []
    flags = []
    for step, window in enumerate(windows(plan, rank=rank, epoch=0, position=0, epochs=2, ghosts=True)):
        batches = (source.batch(request) for request in window.requests)
        reduced = strategy.gradients(window, batches, step, Flags(stop=float(rank == 1 and step == 1)))
        update.apply(step, reduced.count, reduced.divisor, want_norm=False)
        found.append(float(reduced.total) / float(reduced.count))
        norms.append(float(update.grad_norm) if update.grad_norm is not None else 0.0)
        flags.append(reduced.flags)
    strategy.passes.buffers.check()
    state = gathered({"model": model.state_dict(), "update": update.state_dict()}, keep=True)
    update.load_state_dict(state["update"])
    again = gathered(update.state_dict()["optimizer"]["state"], keep=True)
    loaded = None if folder is None else through_shards(rank, ranks, model, update, folder)
    return Outcome(found, norms, update.skipped, flags, state["model"], again, loaded)


def through_shards(
    rank: int, ranks: int, model: nn.Module, update: Update, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Save in shards, as a checkpoint of step ``ranks``; read the one of the most ranks; weights and moments then."""
    collectives = Collectives(World(rank, ranks, rank, ranks))
    state = {"model": model.state_dict(), "trainer": {"update": update.state_dict(), "task": {"seen": rank}}}
    store = ShardedStore(folder, collectives, ranks)
    store.save(Snapshot(ranks, **own_part(state, is_main=rank == 0), manifest={}))
    snapshot = load_shared(store, store.steps()[-1], collectives, in_pieces=True)
    assert snapshot.trainer["task"] == {"seen": 0}
    load_weights(model, snapshot.model, folder)
    update.load_state_dict(snapshot.trainer["update"])
    return gathered(model.state_dict(), keep=True), gathered(update.state_dict()["optimizer"]["state"], keep=True)


def all_cases(rank: int, ranks: int, cases: list[Case], per_step: int) -> list[Outcome]:
    return [two_epochs(rank, ranks, case, per_step) for case in cases]


def assert_bits(ours: Any, theirs: Any) -> None:
    """The same tensors under the same names, in nested dicts, lists and tuples."""
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_bits(ours[key], value)
    elif isinstance(theirs, list | tuple):
        for mine, value in zip(ours, theirs, strict=True):
            assert_bits(mine, value)
    else:
        assert ours == theirs


CASES = [
    Case(24),
    Case(25, accumulate=2),  # one sample is left for the last step: the other ranks have none
    Case(26, batchnorm=True),
    Case(25, checkpointing=True, max_norm=None),
    Case(13, checkpointing=True, dropout=True),
    Case(25, optimizer="sgd"),
    Case(25, accumulate=2, offload=True),  # a run refuses it on a CPU, which has no other memory; FSDP2 does the same
]


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    """To rounding in single precision, in which the denominator is applied where nothing is clipped."""
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-6)
    assert ours.skipped == theirs.skipped
    assert ours.weights.keys() == theirs.weights.keys()
    for name, value in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=1e-6, atol=1e-7)
    for number, state in theirs.moments.items():
        for name, value in state.items():
            torch.testing.assert_close(ours.moments[number][name], value, rtol=1e-6, atol=1e-7)


POISONED = [Case(13, poison=True), Case(13, poison=True, max_norm=None), Case(1, poison=True)]


class Divided(NamedTuple):
    """What two and three ranks did, by rank; the checkpoint of each case, by its number, is in ``folder``."""

    three: list[list[Outcome]]
    two: list[list[Outcome]]
    poisoned: list[list[Outcome]]
    refusals: list[str]
    writes_parts: list[bool]
    folder: Path


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Divided:
    folder = tmp_path_factory.mktemp("shards")
    three = run_ranks(everything, 3, [], folder, timeout_s=240.0)
    two = run_ranks(everything, 2, POISONED, folder, timeout_s=240.0)
    writes_parts = [r[3] for r in two]
    return Divided([r[0] for r in three], [r[0] for r in two], [r[1] for r in two], two[0][2], writes_parts, folder)


def everything(
    rank: int, ranks: int, poisoned: list[Case], folder: Path
) -> tuple[list[Outcome], list[Outcome], list[str], bool]:
    world = World(rank, ranks, rank, ranks)
    refused, writes_part = refusals(world), is_writing_part(world, folder)
    healthy = [two_epochs(rank, ranks, case, 12, folder / str(number)) for number, case in enumerate(CASES)]
    return healthy, all_cases(rank, ranks, poisoned, 12), refused, writes_part


def test_ranks_that_divide_the_model_compute_what_one_device_computes(divided: Divided) -> None:
    """Losses, norms of the whole gradient, clipped weights and moments, short last steps and empty ranks included."""
    for index, case in enumerate(CASES):
        alone = two_epochs(0, 1, case, 12)
        for outcomes in (*divided.two, *divided.three):
            assert_same(outcomes[index], alone)
            assert [flags.stop for flags in outcomes[index].flags][:3] == [0.0, 1.0, 0.0]


def test_what_three_ranks_save_in_shards_is_read_by_any_bit_for_bit(divided: Divided) -> None:
    """By three, by two, and by one process; uneven rows, tied weights and BatchNorm's whole buffers included."""
    for index in range(len(CASES)):
        saved = divided.three[0][index]
        for outcomes in (*divided.two, *divided.three):
            assert_bits(outcomes[index].loaded, (saved.weights, saved.moments))
        store = CheckpointStore(divided.folder / str(index))
        assert [store.verify(step).shards for step in store.steps()] == [2, 3]
        whole = store.load(3)
        assert_bits((whole.model, whole.trainer["update"]["optimizer"]["state"]), (saved.weights, saved.moments))


def test_a_sample_that_is_not_finite_is_skipped_by_all_ranks_and_spares_the_empty_ones(divided: Divided) -> None:
    """Whether a norm is wanted or not, and where its replay on ranks without samples would spread it."""
    by_rank = divided.poisoned
    for rank in range(2):
        assert [outcome.skipped for outcome in by_rank[rank]] == [2, 2, 2]
        for outcome in by_rank[rank]:
            assert all(value.isfinite().all() for value in outcome.weights.values())
    for index, case in enumerate(POISONED[:2]):
        for name, value in two_epochs(0, 1, case, 12).weights.items():
            torch.testing.assert_close(by_rank[0][index].weights[name], value, rtol=1e-6, atol=1e-7)


def test_models_that_cannot_be_divided_are_refused_by_name(divided: Divided) -> None:
    with_batchnorm, with_scalar, transposed, views, short, alone_on_its_node, frozen_later = divided.refusals
    names = {
        views: ("weight", "view"),
        short: ("frozen", "torch.int16"),
        with_batchnorm: ("BatchNorm1d '1'",),
        with_scalar: ("scale", "shape ()"),
        transposed: ("weight", "shape (3, 2)"),
        alone_on_its_node: ("hybrid",),
        frozen_later: ("1.weight",),
    }
    assert {text: named for text, named in names.items() if not all(name in text for name in named)} == {}


def test_each_rank_writes_its_part(divided: Divided) -> None:
    assert divided.writes_parts == [True, True]


def is_writing_part(world: World, folder: Path) -> bool:
    plan = Plan.model_construct(decisions=by_key([Decision("checkpoints", "", True, "")]))
    attempt = Attempt(
        run_dir=RunDir(folder),
        world=world,
        config=RunConfig(),
        plan=plan,
        number=1,
        sink=RecordingSink(),
        stop_signal=lambda: None,
    )
    with open_writer(attempt, Collectives(world)) as writer:
        return writer is not None and writer.store.takes_parts


def refusals(world: World) -> list[str]:
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    transposed = nn.Linear(2, 3)
    transposed.weight = nn.Parameter(torch.randn(2, 3).T)
    views = nn.Linear(2, 3)
    views.view = nn.Parameter(views.weight.data[1:])
    short = nn.Linear(2, 3)
    short.frozen = nn.Parameter(torch.ones(3, dtype=torch.int16), requires_grad=False)
    told = []
    config, hybrid = FsdpConfig(activation_checkpointing=True), FsdpConfig(sharding="hybrid")
    for model, wanted, where in (
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), config, world),
        (scalar, config, world),
        (transposed, config, world),
        (views, config, world),
        (short, config, world),
        (nn.Linear(2, 2), hybrid, replace(world, local_rank=0, local_size=1, node_rank=world.rank)),
    ):
        with pytest.raises(UnsupportedError) as caught:
            ShardedModel(undivided(Weighted(), model, where, fsdp=wanted))
        told.append(caught.value.what)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sharded = ShardedModel(undivided(Weighted(), model, world))
    replica = Replica(Weighted(), model, Precision("32", CPU, 1.0), CPU, 0, world.rank)
    strategy = FsdpStrategy(replica, sharded)
    model[1].requires_grad_(False)
    with pytest.raises(UnsupportedError) as caught:
        strategy.gradients(Window(0, 0, 0, (), irregular=False), iter(()), 0, Flags())
    return [*told, caught.value.what]


@pytest.mark.drill
def test_hybrid_sharding_over_two_nodes_computes_the_same() -> None:
    cases = [case._replace(sharding="hybrid", checkpointing=False, dropout=False) for case in CASES]
    by_rank = run_ranks(all_cases, 4, cases, 16, timeout_s=240.0)
    for index, case in enumerate(cases):
        alone = two_epochs(0, 1, case, 16)
        for rank in range(4):
            assert_same(by_rank[rank][index], alone)


#: The same global batch for any number of ranks; one rank takes it in one micro-batch, so BatchNorm sees the same.
SAME = {"training": {"global_batch_size": 32, "batch_size": 32}, "task": {"batchnorm": True}}
FSDP = {"hardware": {"strategy": "fsdp"}}
SHARDED = {**FSDP, "checkpoint": {"sharded": "on"}}


def up_to(steps: int | None) -> dict[str, Any]:
    return {"training": {"max_steps": steps}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(TOY, tmp_path_factory.mktemp("alone") / "run", "cpu", SAME)


@pytest.mark.slow
def test_a_run_goes_on_as_ddp_and_on_one_device_and_sees_each_sample_once(alone: RunDir, tmp_path: Path) -> None:
    """Stopped in mid-epoch on three ranks that divide the model, on with two that copy it, then with one.

    The three write their parts of checkpoints themselves; what they leave is one checkpoint like any other, and is
    evaluated alike on one device and on two that divide it. The two have its mirror alone.
    """
    mirror = (tmp_path / "mirror").as_uri()
    mirrored = {**up_to(3), "storage": {"mirror": mirror}}
    run = train(TOY, tmp_path / "run", "cpu,cpu,cpu", merge(SAME, merge(SHARDED, mirrored)))
    assert run.plan()["placement"]["strategy"] == "fsdp"
    assert shards_of(run) == 3
    whole, parts = (evaluate(run, devices=devices, checkpoint="last") for devices in ("cpu", "cpu,cpu"))
    assert parts["metrics"] == pytest.approx(whole["metrics"])
    shutil.rmtree(run.path)
    as_ddp = {"hardware": {"strategy": "ddp"}, **up_to(9)}
    resumed = lockstep.Run(mirror, runs_dir=tmp_path / "runs").resume(config=as_ddp, devices="cpu,cpu")
    assert resumed.exit_code == 0
    run = RunDir(resumed.run_dir)
    assert run.resumed_from() == {1: 0, 2: 3}
    assert shards_of(run) == 0
    go_on(run, "cpu", {"hardware": {"strategy": "auto"}, **up_to(None)})
    assert used(run) == {1: list(range(200)), 2: list(range(200))}
    assert_equal_runs(run, alone)


def shards_of(run: RunDir) -> int:
    store = CheckpointStore(run.checkpoints)
    step = store.step_of("last")
    assert step is not None
    return store.verify(step).shards


@pytest.mark.drill
def test_a_run_of_one_device_goes_on_as_ddp_and_ends_divided_among_two(alone: RunDir, tmp_path: Path) -> None:
    """Weights, moments and metrics go over to fsdp too, whole and in shards, and come back as one file."""
    run = train(TOY, tmp_path / "run", "cpu", merge(SAME, up_to(3)))
    go_on(run, "cpu,cpu", up_to(5))
    go_on(run, "cpu,cpu,cpu", {**FSDP, **up_to(7)})
    assert shards_of(run) == 0
    go_on(run, "cpu,cpu,cpu", {**SHARDED, **up_to(9)})
    go_on(run, "cpu,cpu", {**SHARDED, **up_to(None)})
    assert shards_of(run) == 2
    assert used(run) == {1: list(range(200)), 2: list(range(200))}
    assert_equal_runs(run, alone)
    told = json.loads(finish(start("evaluate", "run", "--json", cwd=tmp_path), timeout_s=300))
    assert told["metrics"]["test_accuracy"] == pytest.approx(run.read().final_metrics["test_accuracy"])
    finish(start("export", "run", "--out", "exported", cwd=tmp_path), timeout_s=300)
    assert "output: (2, 3)" in finish(start("load_example.py", module=(), cwd=tmp_path / "exported"), timeout_s=300)


@pytest.mark.drill
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kills_at_random_moments_while_shards_are_written_lose_no_sample(tmp_path: Path, seed: int) -> None:
    """A save after each step, so that one is nearly always under way."""
    settings = merge(FAST, merge(SHARDED, {"checkpoint": {"every_steps": 1, "keep_last": 1}}))
    run = drill(tmp_path, settings, (3, 2, 3, 2), kill_in_training, seed)
    assert shards_of(run) == 2
    assert CheckpointStore(run.checkpoints).newest_verified(pytest.fail) is not None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"training": {"reproducibility": "exact"}}, "strategy fsdp"),
        ({"training": {"compile": True, "compile_loss": True}}, "training.compile_loss"),
        ({"fsdp": {"cpu_offload": True}}, r"fsdp\.cpu_offload .*CPU"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    whole = merge({"hardware": {"strategy": "fsdp", "selected_devices": "cpu,cpu"}}, settings)
    with pytest.raises(UnsupportedError, match=words):
        make_plan(TOY, whole)


@pytest.mark.drill
def test_verify_finds_that_divided_models_compute_what_one_device_computes(tmp_path: Path) -> None:
    verify = (
        "verify",
        TOY,
        "--strategy",
        "fsdp",
        "--devices",
        "cpu,cpu",
        "--steps",
        "8",
        "--set",
        "task.batchnorm=true",
    )
    finish(start(*verify, cwd=tmp_path), timeout_s=900)
