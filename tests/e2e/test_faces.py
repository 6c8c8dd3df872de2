"""Entries of the catalogue written as a loop with a Session and as a LightningModule, against the plain PyTorch loop.

``test_ordinary_pytorch.py`` trains the entries as tasks. A face trains those that it can express: neither a scheduler,
callbacks, hooks and modules of a task nor its context, and no draws that only a task's order repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from lockstep import Task
from tests.attempts import without_fsync
from tests.e2e.catalogue import CATALOGUE, Entry
from tests.e2e.test_ordinary_pytorch import EPOCHS, GLOBAL_BATCH, SEED, SETTINGS, Weights, gap, plain, seed_all

QUIET: dict[str, Any] = {
    "telemetry": {"progress": "silent", "system_metrics": False, "tensorboard": "off"},
    "training": {"threads": 1},
}
#: Parts of a task that a loop of one's own has no place for.
OF_TASKS = ("scheduler", "callbacks", "hooks", "modules")


def can_be_a_loop(entry: Entry) -> bool:
    has_more = any(name in vars(kind) for kind in entry.task.__mro__[:-1] if kind is not Task for name in OF_TASKS)
    return not (entry.refused or entry.draws or has_more or "Task.context" in entry.name)


ENTRIES = [entry for entry in CATALOGUE if can_be_a_loop(entry)]


def parts(entry: Entry) -> tuple[Task, Any, nn.Module, torch.optim.Optimizer, float | None]:
    """Task, training set, model, optimizer and the norm to clip to, as the plain loop has them."""
    task: Any = entry.task()
    seed_all(SEED)
    data = task.datasets()
    seed_all(SEED)
    model = task.model()
    momentum = {**SETTINGS["optimizer"], **entry.settings.get("optimizer", {})}["momentum"]
    optimizer = task.optimizer(model)
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=1e-4)
    return task, data.train, model, optimizer, entry.settings.get("training", {}).get("max_grad_norm", 1.0)


def by_session(entry: Entry, folder: Path | None, mode: str = "fast") -> Weights:
    task, train, model, optimizer, clip = parts(entry)
    settings = {**QUIET, "training": {**QUIET["training"], "reproducibility": mode}}
    with lockstep.Session(settings, global_batch_size=GLOBAL_BATCH, seed=SEED, save_dir=folder) as session:
        model, optimizer = session.prepare(model, optimizer)
        for _ in session.epochs(EPOCHS):
            model.train()
            for batch in session.batches(train, collate=task.collate):
                total, count = task.loss(model, batch)
                session.backward(total.sum(), count=count)
                session.step(optimizer, max_norm=clip)
    return dict(model.state_dict())


def on_a_rank(name: str, mode: str) -> Weights:
    """Train the entry of this name as one of the ranks that have been started."""
    return by_session(next(entry for entry in ENTRIES if entry.name == name), None, mode)


def by_lightning(entry: Entry, folder: Path, devices: Sequence[str] = ("cpu",)) -> Weights:
    from lightning.pytorch import LightningModule

    from lockstep.lightning import fit

    task, train, model, optimizer, clip = parts(entry)

    model.train()  # Lightning leaves each layer in its mode

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            total, count = task.loss(self.model, batch)
            return (total / count).sum() if float(count) else None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    loader = DataLoader(train, GLOBAL_BATCH // len(devices), shuffle=True, collate_fn=task.collate)
    training = {**QUIET["training"], "epochs": EPOCHS, "seed": SEED, "max_grad_norm": clip}
    config = {**QUIET, "training": training, "save_dir": str(folder)}
    run = fit(Module(), loader, hardware={"selected_devices": devices}, config=config)
    return {name.removeprefix("model."): value for name, value in run.load_model("last").state_dict().items()}


_CLIPS = "the gradients of the optimizer's parameters are clipped, not those of the whole model"
_DRAWS = "what a data set draws depends on epoch and rank, not on the sample"
#: By face, entries that it does not train as the plain loop does, and why.
OTHERS: dict[str, dict[str, str]] = {
    "session": {"only a part of the model in the optimizer": _CLIPS},
    "lightning": {
        "only a part of the model in the optimizer": _CLIPS,
        "state in param_groups (Prodigy, D-Adaptation, Schedule-Free)": "its step() must call the closure",
        "augmentation drawn from random": _DRAWS,
        "augmentation drawn from numpy.random": _DRAWS,
        "augmentation drawn from torch": _DRAWS,
        "Subset of a data set with sample(index, rng)": _DRAWS,
    },
}
FACES: dict[str, Callable[[Entry, Path], Weights]] = {"session": by_session, "lightning": by_lightning}
TWO_RANKS = "lightning on two ranks"
FACES[TWO_RANKS] = partial(by_lightning, devices=("cpu", "cpu"))
OTHERS[TWO_RANKS] = {
    **OTHERS["lightning"],
    **dict.fromkeys(
        [
            "nn.TransformerEncoder, causal",
            "LSTM over a PackedSequence",
            "bidirectional GRU, padded",
            "tied weights (embedding and output)",
            "a position table that grows with the input",
            "loss per token, lines of different lengths",
            "class weights: Σ weight as the count",
            "BatchNorm where one sample is left over",
        ],
        "Lightning takes the mean of the ranks' means, whose counts differ",
    ),
    "InstanceNorm with running statistics beside BatchNorm": "the statistics are those of rank 0",
    **dict.fromkeys(
        [
            "a buffer removed in the first forward pass",
            "a buffer of int16, and one made by expand()",
            "steps whose labels are all ignored",
            "a branch used in some steps only, with weight decay",
            "a layer that is never used, with weight decay",
        ],
        "Lightning or DistributedDataParallel refuses it",
    ),
    **dict.fromkeys(
        [
            "one open file for training and validation",
            "an SQLite table",
        ],
        "it cannot be pickled",
    ),
}


def problems(face: str, entries: list[Entry], folder: Path) -> list[str]:
    """Entries whose weights are not those of the plain loop, one line each."""
    found = []
    for number, entry in enumerate(entry for entry in entries if entry.name not in OTHERS[face]):
        try:
            weights = FACES[face](entry, folder / str(number))
        except Exception as error:
            found.append(f"{entry.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        expected = plain(entry)
        if weights.keys() != expected.keys():
            found.append(f"{entry.name}: other names {sorted(weights.keys() ^ expected.keys())}")
            continue
        gaps = {name: gap(weights[name], value) for name, value in expected.items()}
        worst = max(gaps, key=gaps.__getitem__)
        if not gaps[worst] <= entry.tolerance:
            found.append(f"{entry.name}: {worst} is {gaps[worst]:.2g} apart")
    return found


SLOW = [pytest.param(TWO_RANKS, ENTRIES[::16], marks=pytest.mark.slow, id=f"{TWO_RANKS}, some")]
SOME = [pytest.param(face, ENTRIES[::6], id=f"{face}, some") for face in ("session", "lightning")]
ALL = [pytest.param(face, ENTRIES, marks=pytest.mark.drill, id=f"{face}, all") for face in FACES]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("face", "entries"), [*SOME, *SLOW, *ALL])
def test_a_face_trains_the_entries_as_the_plain_loop(face: str, entries: list[Entry], tmp_path: Path) -> None:
    with without_fsync():
        found = problems(face, entries, tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ranks", "entries"),
    [
        pytest.param(2, ENTRIES[::16], id="2 ranks, some"),
        pytest.param(2, ENTRIES, marks=pytest.mark.drill, id="2 ranks, all"),
        pytest.param(3, ENTRIES[::4], marks=pytest.mark.drill, id="3 ranks, some"),
    ],
)
def test_a_session_on_several_ranks_trains_the_entries_as_on_one(
    ranks: int, entries: list[Entry], tmp_path: Path
) -> None:
    """In exact mode bit for bit, and in fast mode as the plain loop."""
    found = []
    for number, entry in enumerate(entry for entry in entries if entry.name not in OTHERS["session"]):
        alone = by_session(entry, tmp_path / f"{number}", "exact")
        for mode, expected, tolerance in (("exact", alone, 0.0), ("fast", plain(entry), entry.tolerance)):
            folder = tmp_path / f"{number}-{mode}"
            devices = ",".join(["cpu"] * ranks)
            weights = lockstep.Session.launch(on_a_rank, entry.name, mode, devices=devices, save_dir=folder)
            gaps = {name: gap(weights[name], value) for name, value in expected.items()}
            if not (max(gaps.values()) <= tolerance or (mode == "fast" and entry.depends_on_cut)):
                found.append(f"{entry.name}, {mode}: {gaps}")
    assert not found, "\n".join(found)
