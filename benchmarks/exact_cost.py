"""What ``reproducibility: exact`` costs: time a step against ``fast``, interleaved block by block.

::

    python benchmarks/exact_cost.py [--blocks 40] [--json FILE]

Two ranks on the CPU (and one), 8 lanes, one intra-op thread a rank, float32, AdamW with clipping:

HAR CNN    the built-in task at its defaults, its training windows, global batch 64
MLP        561-128-6 on random rows, global batches 64 and 256

With several ranks ``fast`` synchronises BatchNorm unless told otherwise; the CNN is measured both ways.
The runs that are compared are ordinary runs in processes of their own, side by side, which take turns of a few
steps: a hook hands the turn on and waits for the next. So other load on the machine meets all of them alike.
Ratios are taken between turns of the same round: of wall-clock time, and of rank 0's CPU time, which other load
hardly changes but which does not count waiting for the other rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import header, ratios, write_json
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import lockstep
from lockstep import ArrayDataset, Datasets, Loss, Task
from lockstep.tasks.har import HarTask
from lockstep.tasks.har.models import Mlp

WARM_UP = 3


@dataclass(frozen=True)
class Setting:
    """A model and a batch, the ways to train it, and the steps of a turn."""

    name: str
    task: str
    global_batch: int
    turn: int
    ways: tuple[str, ...] = ("fast", "exact")


#: A way is the reproducibility, and what the run sets besides.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fast": ("fast", {}),
    "fast, unsynced BN": ("fast", {"distributed": {"sync_batchnorm": "off"}}),
    "exact": ("exact", {}),
}
CNN = Setting("HAR CNN, batch 64", "TrainingHar", 64, 5)
MLP = Setting("MLP, batch 64", "TrainingMlp", 64, 40)
LARGE_MLP = Setting("MLP, batch 256", "TrainingMlp", 256, 20)
#: Settings by number of ranks.
SETTINGS = {2: (replace(CNN, ways=tuple(WAYS)), MLP, LARGE_MLP), 1: (CNN, MLP, LARGE_MLP)}

#: Seconds a step by way and by clock ("wall", "cpu"), one for each turn.
Times = dict[str, dict[str, list[float]]]


class Turns:
    """A hook: notes how long a turn took, hands on, and waits until the turn comes round again.

    Every run has a pipe in ``folder``; a byte in it is the turn. All ranks of a run wait together.
    """

    def __init__(self, folder: Path, place: int, runs: int, blocks: int) -> None:
        self._own, self._next = (os.open(folder / str(n % runs), os.O_RDWR) for n in (place, place + 1))
        self._out = folder / f"{place}.json"
        self._blocks = blocks
        self._main = os.environ.get("RANK", "0") == "0"
        self._started: tuple[float, float] | None = None
        self._turns: list[dict[str, float]] = []

    def __call__(self, result: Any, model: Any) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        if self._started is not None:
            self._turns.append({"wall": wall - self._started[0], "cpu": cpu - self._started[1]})
            if self._main:
                os.write(self._next, b".")
        if len(self._turns) == self._blocks:
            if self._main:
                self._out.write_text(json.dumps(self._turns))
            return
        if self._main:
            os.read(self._own, 1)
        if dist.is_initialized():
            dist.barrier()
        self._started = time.perf_counter(), time.process_time()


class _TakesTurns:
    def hooks(self) -> Any:
        folder, place, runs, blocks, turn = os.environ["EXACT_COST_TURNS"].split(":")
        return [(Turns(Path(folder), int(place), int(runs), int(blocks)), int(turn))]


class TrainingHar(_TakesTurns, HarTask):
    """Without validation and test, so that a run is nothing but steps."""

    def datasets(self) -> Datasets:
        return Datasets(super().datasets().train)


class TrainingMlp(_TakesTurns, Task):
    def datasets(self) -> Datasets:
        generator = torch.Generator().manual_seed(0)
        samples = 64_000
        labels = torch.randint(0, 6, (samples,), generator=generator)
        return Datasets(ArrayDataset(torch.randn(samples, 1, 561, generator=generator), labels))

    def model(self) -> nn.Module:
        return Mlp(1, 6, 561)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return model(batch[0]), batch[1]

    def metrics(self) -> MetricCollection:
        return MetricCollection({"accuracy": MulticlassAccuracy(6)})


def train(setting: Setting, way: str, ranks: int, blocks: int, folder: Path) -> None:
    """Body of a process that :func:`measure` started."""
    reproducibility, others = WAYS[way]
    config = {
        "save_dir": str(folder / f"run-{way}"),
        "hardware": {"selected_devices": ["cpu"] * ranks},
        "training": {
            "epochs": 10**6,
            "max_steps": setting.turn * (blocks + 1),
            "global_batch_size": setting.global_batch,
            "batch_size": setting.global_batch,
            "threads": 1,
            "reproducibility": reproducibility,
        },
        "telemetry": {"progress": "off", "tensorboard": "off"},
        **others,
    }
    lockstep.train(f"{__file__}:{setting.task}", config)


def measure(setting: Setting, ranks: int, blocks: int) -> Times:
    """Seconds a step, by way, turn and clock."""
    runs, number = [], len(setting.ways)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for place in range(number):
            os.mkfifo(folder / str(place))
        first = os.open(folder / "0", os.O_RDWR)
        os.write(first, b".")
        for place, way in enumerate(setting.ways):
            turns = f"{folder}:{place}:{number}:{blocks + WARM_UP}:{setting.turn}"
            task = json.dumps({"name": setting.name, "way": way, "ranks": ranks, "blocks": blocks + WARM_UP})
            runs.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--run", task, "--folder", name],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "EXACT_COST_TURNS": turns},
                    stdout=subprocess.DEVNULL,
                )
            )
        try:
            _wait(runs)
        finally:
            for run in runs:
                run.kill()
                run.wait()
            os.close(first)
        found = [json.loads((folder / f"{place}.json").read_text())[WARM_UP:] for place in range(number)]
    return {
        way: {clock: [turn[clock] / setting.turn for turn in turns] for clock in ("wall", "cpu")}
        for way, turns in zip(setting.ways, found, strict=True)
    }


def _wait(runs: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended well; when one fails, the others would wait for their turn for ever."""
    while any(run.poll() is None for run in runs):
        if any(run.poll() for run in runs):
            break
        time.sleep(0.1)
    if any(run.poll() for run in runs):
        raise SystemExit("a run failed")


def summary(name: str, times: Times) -> dict[str, Any]:
    """Of each way its time, and its ratio to each kind of ``fast``."""
    rows: dict[str, Any] = {}
    for way, clocks in times.items():
        bases = [base for base in times if WAYS[base][0] == "fast" and base != way]
        rows[way] = {
            "ms_per_step": {clock: round(statistics.median(clocks[clock]) * 1e3, 3) for clock in clocks},
            "to": {base: {clock: ratios(clocks[clock], times[base][clock]) for clock in clocks} for base in bases},
        }
        milliseconds = rows[way]["ms_per_step"]
        print(f"  {name:17} {way:17} {milliseconds['wall']:6.2f} ms, CPU {milliseconds['cpu']:6.2f} ms")
        for base, found in rows[way]["to"].items():
            low, high = found["wall"]["ratio_quartiles"]
            wall, cpu = found["wall"]["ratio"], found["cpu"]["ratio"]
            print(f"{'':24}{wall:.2f} ({low:.2f} to {high:.2f}), CPU {cpu:.2f} × {base}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40, help="turns of each run")
    parser.add_argument("--json", type=Path)
    # What a process of this script is started with by itself.
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        ranks = options.run["ranks"]
        setting = next(s for s in SETTINGS[ranks] if s.name == options.run["name"])
        train(setting, options.run["way"], ranks, options.run["blocks"], options.folder)
        return
    report: dict[str, Any] = {**header(), "blocks": options.blocks}
    for ranks, settings in SETTINGS.items():
        print(f"{ranks} rank(s)")
        report[f"ranks_{ranks}"] = {s.name: summary(s.name, measure(s, ranks, options.blocks)) for s in settings}
    write_json(options.json, report)


if __name__ == "__main__":
    main()
