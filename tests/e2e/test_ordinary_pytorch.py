"""Ordinary PyTorch on one, two and three ranks, fast and exact, resumed elsewhere, against a plain PyTorch loop.

One launch of ranks trains every entry of a group of :mod:`tests.e2e.catalogue` in turn, and compares the weights.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Subset

from lockstep import Order, Task
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.load import merge
from lockstep.data.order import dropout_seed, sample_rng
from lockstep.data.reader import GENERATORS, draw_keys
from lockstep.engine.state import TrainState
from lockstep.engine.task import Context
from lockstep.hardware.world import World
from lockstep.rundir.folder import RunDir
from tests.attempts import attempt
from tests.e2e.catalogue import CATALOGUE, SAMPLES, Entry, table
from tests.gloo import ROOT, run_ranks

SEED, EPOCHS, GLOBAL_BATCH, STOP_AT = 42, 2, 6, 3
GROUPS = sorted({entry.group for entry in CATALOGUE})
SETTINGS: dict[str, Any] = {
    "training": {
        **{"epochs": EPOCHS, "global_batch_size": GLOBAL_BATCH, "batch_size": GLOBAL_BATCH},
        **{"lanes": 2, "threads": 1},
    },
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "scheduler": {"name": "constant", "warmup_steps": 0},
    "data": {"num_workers": 0},
    "validation": {"sanity_steps": 0},
}
Weights = dict[str, Tensor]
#: Groups and numbers of ranks of `make test`. The others are trained in `make slow`, or, by three ranks, whose shares
#: are uneven, in `make drills`.
QUICK = (("buffers", 2), ("normalisation", 3))
UNEVEN = ("losses", "normalisation")
#: By number of ranks; exact mode needs one that divides the lanes.
MODES: dict[int, tuple[str, ...]] = {2: ("fast", "exact"), 3: ("fast",)}
#: How the text of a :class:`Refused` ends that came before a second step.
EARLY = ("[step 0]", "[step 1]")


class Refused(Exception):
    """A run was refused, or failed: what its error says, and the step at which it came."""


# The plain loop


def plain(entry: Entry) -> Weights:
    """What a hand-written loop on one process makes of the entry: the weights after all epochs."""
    task = entry.task()
    place = TrainState()
    task.context = Context(place)
    task.context.is_training = True
    seed_all(SEED)
    data = task.datasets()
    seed_all(SEED)
    model = task.model()
    extras = nn.ModuleDict(dict(task.modules()))
    parameters = [*model.parameters(), *extras.parameters()]
    optimizer = task.optimizer(model)
    if optimizer is None:
        momentum = {**SETTINGS["optimizer"], **entry.settings.get("optimizer", {})}["momentum"]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=momentum, weight_decay=1e-4)
    scheduler = task.scheduler(optimizer)
    interval = getattr(scheduler, "interval", "metric" if isinstance(scheduler, ReduceLROnPlateau) else "step")
    scheduler = getattr(scheduler, "scheduler", scheduler)
    callbacks = list(task.callbacks())
    clip = entry.settings.get("training", {}).get("max_grad_norm", 1.0)
    step = 0
    for epoch in range(EPOCHS):
        model.train()
        place.epoch = epoch
        for callback in callbacks:
            callback.on_epoch_start(task.context, model)
        for indices in _steps(len(data.train), epoch, bool(entry.batch_statistics)):
            for callback in callbacks:
                callback.on_step_start(task.context, model)
            batch = task.collate([_item(data.train, epoch, int(i)) for i in indices])
            _seed_draws(step)
            for parameter in parameters:
                parameter.grad = None
            total, count = task.loss(model, batch)
            (total / count).sum().backward()
            if float(count):
                if clip:
                    nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
            step += 1
            place.step = step
            if scheduler is not None and interval == "step":
                scheduler.step()
            for callback in callbacks:
                callback.on_step_end(task.context, model)
            for hook, _ in task.hooks():
                hook(place, model)
        if scheduler is not None and interval == "epoch":
            scheduler.step()
        elif scheduler is not None and interval == "metric":
            scheduler.step(_validation_loss(task, model, data.val))
    extra = {f"modules.{name}": value for name, value in extras.state_dict().items()}
    return {name: value.detach().clone() for name, value in {**model.state_dict(), **extra}.items()}


def _steps(samples: int, epoch: int, batchnorm: bool) -> Iterator[Any]:
    """The sample indices of each step; one that is left over joins the step before where BatchNorm needs two."""
    order, start = Order(samples, SEED), 0
    while start < samples:
        stop = min(start + GLOBAL_BATCH, samples)
        stop = samples if batchnorm and samples - stop == 1 else stop
        yield order.slice(epoch, start, stop)
        start = stop


def _item(dataset: Any, epoch: int, index: int) -> Any:
    """Sample ``index``, whose draws depend on the seed, the epoch and the index."""
    if isinstance(dataset, Subset) and hasattr(dataset.dataset, "sample"):
        return dataset.dataset.sample(dataset.indices[index], sample_rng(SEED, epoch, index))
    (key,) = draw_keys(SEED, epoch, np.array([index]))
    for generator in GENERATORS:
        generator.seed(key)
    return dataset[index]


def _validation_loss(task: Any, model: nn.Module, dataset: Any) -> float:
    model.eval()
    with torch.no_grad():
        sums = [task.loss(model, task.collate([dataset[i]])) for i in range(len(dataset))]
    model.train()
    return float(sum(total for total, _ in sums) / sum(count for _, count in sums))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _seed_draws(step: int) -> None:
    """As Lockstep seeds what the forward pass of a single process draws from."""
    for generator in GENERATORS:
        generator.seed(dropout_seed(SEED, step, 0))


# Lockstep, on ranks that are there already


def lockstep_run(entry: Entry, folder: Path, world: World, mode: str, resume: bool = False) -> Weights:
    """Train, or resume, on the ranks of ``world``: the saved weights. Collective."""
    seen: list[Task] = []

    class Seen(entry.task):  # type: ignore[name-defined, misc]
        def model(self) -> nn.Module:
            seen.append(self)
            model: nn.Module = super().model()
            return model

    changes: dict[str, Any] = {"training": {"reproducibility": mode}}
    if world.size > 1:
        changes["checkpoint"] = {"every_steps": STOP_AT, "keep_last": EPOCHS * SAMPLES}
    sections = merge(merge(SETTINGS, dict(entry.settings)), changes)
    try:
        return attempt(Seen, folder, world.rank, world.size, resume=resume, **sections)[0]
    except Exception as error:
        at = max((task.context.step for task in seen), default=0)
        raise Refused(f"{type(error).__name__}: {error} [step {at}]") from error


Outcome = Weights | str


def outcome(entry: Entry, folder: Path, world: World, mode: str, **how: Any) -> Outcome:
    """The weights of a run, or the text of its refusal."""
    try:
        return lockstep_run(entry, folder, world, mode, **how)
    except Refused as refused:
        return str(refused)


def _on_ranks(rank: int, ranks: int, names: list[str], folder: Path) -> dict[str, Outcome]:
    """Train every entry on all ranks, in each mode; a checkpoint is saved after the third step, in mid-epoch."""
    warnings.simplefilter("ignore")  # of torch, about what strangers do
    world, found = World(rank, ranks, rank, ranks), dict[str, Outcome]()
    for number, entry in enumerate(e for e in CATALOGUE if e.name in names):
        for mode in MODES[ranks]:
            found[f"{entry.name} {mode}"] = outcome(entry, folder / f"{number}-{mode}", world, mode)
    return found


def _problems(entry: Entry, folder: Path, ranks: int, mode: str, many: Outcome) -> list[str]:
    """What is wrong with ``many`` on ``ranks``, with one rank, and with one that resumes it, one line each."""
    problems: list[str] = []

    def checked(where: str, found: Outcome) -> Weights | None:
        """The weights, unless it was refused, rightly or not."""
        expected = entry.refusal(mode, "many" if where == "ranks" else "one")
        title = f"{entry.name}: {mode} on {ranks if where == 'ranks' else 1}{' resumed' * (where == 'resumed')}"
        if isinstance(found, str):
            if expected is None or expected not in found or not found.endswith(EARLY):
                words = f"expected to be refused with {expected!r}: " if expected else ""
                problems.append(f"{title}: {words}{' '.join(found.split())[:300]} … {found[-8:]}")
            return None
        if expected is not None:
            problems.append(f"{title}: expected to be refused with {expected!r}")
        return found

    def compare(title: str, ours: Weights | None, theirs: Weights | None, tolerance: float) -> None:
        if ours is None or theirs is None:
            return
        if ours.keys() != theirs.keys():
            problems.append(f"{entry.name}: {mode}, {title}: other names {sorted(ours.keys() ^ theirs.keys())}")
            return
        gaps = {name: gap(ours[name], theirs[name]) for name in ours}
        worst = max(gaps, key=gaps.__getitem__)
        if not gaps[worst] <= tolerance:
            problems.append(f"{entry.name}: {mode}, {title}: {worst} is {gaps[worst]:.2g} apart")

    exact = mode == "exact"
    all_ranks = checked("ranks", many)
    one = checked("one", outcome(entry, folder.with_name(f"{folder.name}-one"), World(), mode))
    own_lanes = exact and (entry.draws or entry.batch_statistics or entry.depends_on_cut)
    if one is not None and not own_lanes:
        compare("one against the plain loop", one, plain(entry), entry.tolerance)
    if all_ranks is None or (not exact and (entry.draws or entry.depends_on_cut)):
        return problems
    tolerance = 0.0 if exact else entry.tolerance
    compare(f"{ranks} against one", all_ranks, one, tolerance)
    if not exact and "exact" in MODES[ranks] and not any(entry.refusal("exact", where) for where in ("one", "many")):
        return problems  # resumed in exact mode, bit for bit; in fast mode from three ranks
    assert CheckpointStore(RunDir(folder).checkpoints).set_aside_after(STOP_AT)
    resumed = outcome(entry, folder, World(), mode, resume=True)
    compare(f"resumed on one after {ranks}", checked("resumed", resumed), one, tolerance)
    return problems


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of an element."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().double().max()) if a.numel() else 0.0


def _mark(group: str, ranks: int) -> tuple[pytest.MarkDecorator, ...]:
    if (group, ranks) in QUICK:
        return ()
    return (pytest.mark.slow,) if ranks == 2 or group in UNEVEN else (pytest.mark.drill,)


@pytest.mark.parametrize(
    ("group", "ranks"),
    [pytest.param(group, ranks, marks=_mark(group, ranks)) for ranks in MODES for group in GROUPS],
)
@pytest.mark.filterwarnings("ignore")
def test_the_catalogue(group: str, ranks: int, tmp_path: Path) -> None:
    entries = [entry for entry in CATALOGUE if entry.group == group]
    found = run_ranks(_on_ranks, ranks, [entry.name for entry in entries], tmp_path, timeout_s=100)[0]
    problems = [
        problem
        for number, entry in enumerate(entries)
        for mode in MODES[ranks]
        for problem in _problems(entry, tmp_path / f"{number}-{mode}", ranks, mode, found[f"{entry.name} {mode}"])
    ]
    assert not problems, "\n".join(problems)


def test_the_page_shows_the_catalogue() -> None:
    assert (ROOT / "docs" / "ordinary-pytorch.md").read_text(encoding="utf-8").endswith(table())
