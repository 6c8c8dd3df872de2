"""Do two versions of Lockstep train the same weights? For changes that must not change a result.

::

    git worktree add ../before main
    python benchmarks/same_weights.py ../before . [--python PATH] [--only WORDS] [--json FILE]

Each checkout trains small tasks, two loops of ``examples/own_loop`` and a LightningModule on one and two CPU ranks,
stops some after half of their steps and resumes them. Compared are the weights of the last checkpoint, and the losses,
gradient norms and learning rates of all steps and epochs: bit for bit in exact mode, and to 1e-7 in fast mode.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import Datasets, Loss, Task

LOOPS = Path(__file__).parents[1] / "examples" / "own_loop"
#: Largest difference in fast mode, relative to the largest value of a tensor or of a column.
TOLERANCE = 1e-7
#: Columns of the rows of a run that depend on time.
_TIMES = ("samples_per_s", "items_per_s", "duration_s", "data_wait_share", "time", "mfu")

Values = dict[str, Tensor]


def _points(samples: int, seed: int, shape: tuple[int, ...] = (6,)) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, *shape, generator=draw)
    return TensorDataset(inputs, (inputs.flatten(1).sum(1) > 0).long())


class Points(Task):
    """Dropout, AdamW, and a last window that is smaller than the others."""

    def datasets(self) -> Datasets:
        return Datasets(train=_points(42, 0), val=_points(10, 1), test=_points(10, 2))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        return Loss(cross_entropy(model(inputs), labels, reduction="sum"), len(labels))


class Images(Points):
    """BatchNorm, SGD with momentum, clipping, and a layer that is unfrozen in the second epoch."""

    def datasets(self) -> Datasets:
        return Datasets(train=_points(42, 0, (2, 6, 6)), val=_points(10, 1, (2, 6, 6)))

    def model(self) -> nn.Module:
        layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
        layers[0].requires_grad_(False)
        return nn.Sequential(*layers)

    def hooks(self) -> Any:
        return [(_unfreeze, 6)]


def _unfreeze(step: Any, model: Any) -> None:
    model[0].requires_grad_(True)


class Sentences(Points):
    """Padded sentences of 2 to 7 tokens; the loss counts tokens."""

    def datasets(self) -> Datasets:
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 8, (30,), generator=draw).tolist()
        lines = [torch.randint(0, 12, (length + 1,), generator=draw) for length in lengths]
        samples = [(line[:-1], line[1:]) for line in lines]
        return Datasets(train=samples[:22], val=samples[22:])

    def collate(self, samples: Any) -> Any:
        words, labels = zip(*samples, strict=True)
        return pad_sequence(words, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, labels = batch
        scores = model(words).flatten(0, 1)
        return Loss(cross_entropy(scores, labels.flatten(), reduction="sum"), (labels != -100).sum())


def _module() -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

        def training_step(self, batch: Any, number: int) -> Tensor:
            return cross_entropy(self.layers(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01)

        def train_dataloader(self) -> Any:
            return DataLoader(_points(42, 0), batch_size=4, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(_points(10, 1), batch_size=4)

    torch.manual_seed(0)
    return Module()


class Case(NamedTuple):
    """A task, the name of a loop, or what makes a module, with its settings. ``stops_at``: the step to resume after."""

    name: str
    subject: Any
    settings: Mapping[str, Any]
    reproducibility: str
    ranks: int
    stops_at: int | None = None

    @property
    def title(self) -> str:
        return f"{self.name}, {self.reproducibility}, {self.ranks} rank{'s' * (self.ranks > 1)}"


_TASKS: tuple[tuple[type[Task], dict[str, Any]], ...] = (
    (Points, {"averaging.name": "ema", "training.batch_size": 2}),
    (Images, {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "training.max_grad_norm": 0.5}),
    (Sentences, {"scheduler.name": "plateau", "scheduler.patience": 0, "optimizer.lr": 0.05}),
)


def cases() -> Iterator[Case]:
    """All that is compared."""
    for ranks in (1, 2):
        for reproducibility in ("fast", "exact"):
            for task, settings in _TASKS:
                stops_at = 7 if task is not Sentences else None
                yield Case(task.__name__, task, settings, reproducibility, ranks, stops_at)
            for loop in ("classifier", "gan"):
                yield Case(loop, loop, {}, reproducibility, ranks)
        yield Case("LightningModule", _module, {}, "fast", ranks, stops_at=7)
    yield Case("gan in 4 parts", "gan", {"training.batch_size": 16}, "fast", 1)


def train(case: Case, folder: Path) -> None:
    """Train ``case`` in ``folder``, the run's."""
    arguments: dict[str, Any] = {"devices": ",".join(["cpu"] * case.ranks), "save_dir": str(folder)}
    settings = {"training.reproducibility": case.reproducibility, "telemetry.log_interval": 1, **case.settings}
    if isinstance(case.subject, str):
        lockstep.Session.launch(_run_loop, str(LOOPS / f"{case.subject}_session.py"), config=settings, **arguments)
        return
    if isinstance(case.subject, type):
        fit = partial(lockstep.train, case.subject())
        arguments |= {"epochs": 3, "global_batch_size": 8}
    else:
        from lockstep.lightning import fit as fit_module

        fit = partial(fit_module, case.subject())
        arguments |= {"epochs": 3}
    if case.stops_at is not None:
        fit(config=settings, max_steps=case.stops_at, **arguments)
        settings["training.max_steps"] = None
    fit(config=settings, resume=case.stops_at is not None, **arguments)


def _run_loop(script: str) -> None:
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script)


def values_of(folder: Path) -> Values:
    """The last checkpoint's weights of a run, and the columns of its rows."""
    [weights] = folder.glob("checkpoints/last/model.safetensors")
    values = {f"weight {name}": value for name, value in load_file(weights).items()}
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    epochs = json.loads((folder / "metrics.json").read_text())["epochs"]
    for kind, rows in (("step", steps), ("epoch", epochs)):
        for name in {name for row in rows for name in row} - {*_TIMES}:
            column = [row.get(name) for row in rows]
            numbers = [math.nan if value is None else value for value in column if not isinstance(value, str | dict)]
            values[f"{kind} {name}"] = torch.tensor(numbers, dtype=torch.float64)
    return values


def difference(before: Values, after: Values) -> tuple[float, str]:
    """The largest relative difference, and of what; infinite where names, shapes or types differ."""
    largest = 0.0, ""
    for name in sorted({**before, **after}):
        one, other = before.get(name), after.get(name)
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            return math.inf, name
        if torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            continue
        scale = one.double().abs().nan_to_num().max().clamp(min=1e-12)
        apart = ((one.double() - other.double()).abs() / scale).nan_to_num(nan=math.inf).max().item()
        largest = max(largest, (apart, name))
    return largest


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="folder with src/lockstep")
    parser.add_argument("--python", default=sys.executable, help="interpreter with Lockstep's dependencies")
    parser.add_argument("--only", default="", help="cases whose title has these words")
    parser.add_argument("--json", type=Path, help="file for the differences")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if all(word in case.title for word in arguments.only.split())]
    with tempfile.TemporaryDirectory() as folder:
        sides = [Path(folder, name) for name in ("before", "after")]
        logs = [open(f"{side}.log", "w") for side in sides]  # noqa: SIM115  # of processes that run at the same time
        started = [
            subprocess.Popen(
                [arguments.python, __file__, "--trained-in", str(side), *(case.title for case in chosen)],
                env={**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")},
                cwd=folder,
                stdout=log,
                stderr=log,
            )
            for side, checkout, log in zip(sides, arguments.checkouts, logs, strict=True)
        ]
        codes = [process.wait() for process in started]
        for checkout, log, code in zip(arguments.checkouts, logs, codes, strict=True):
            log.close()
            if code:
                print(f"{Path(log.name).read_text()}\ntraining failed in {checkout}", file=sys.stderr)
                return 1
        report = []
        for case in chosen:
            values = [values_of(side / case.title) for side in sides]
            apart, name = difference(*values)
            is_same = apart <= (0.0 if case.reproducibility == "exact" else TOLERANCE)
            report.append({"case": case.title, "difference": apart, "of": name, "is_same": is_same})
            mark = "" if is_same else f"differs: {name}"
            print(f"{case.title:28} {len(values[0]):4} tensors and columns  {apart:<8.2g} {mark}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2))
    return 0 if all(row["is_same"] for row in report) else 1


if __name__ == "__main__":
    if sys.argv[1] == "--trained-in":
        for each in cases():
            if each.title in sys.argv[3:]:
                train(each, Path(sys.argv[2], each.title))
    else:
        sys.exit(_main())
