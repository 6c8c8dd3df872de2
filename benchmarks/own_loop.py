"""One loop by hand (DistributedDataParallel on two ranks), with Accelerate, with Fabric, and with ``lockstep.Session``.

::

    pip install -c constraints.txt -e '.[peers]'
    python benchmarks/own_loop.py [--rounds 5] [--seconds 2] [--ranks 1,2] [--json FILE]

Each side trains an MLP, a CNN and a transformer in fp32 on the CPU, on one process and on two gloo ranks with one
thread each, and reports its seconds a step after a warm-up. Sides take turns, each in new processes; a round's ratio
is against the loop by hand of the same round, which gathers rows of the same tensors. Printed are medians,
of wall time and of the CPU time of rank 0, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import header, write_json
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SIDES = ("hand", "accelerate", "fabric", "session")
WARM_UP = 10


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(tokens)).mean(1))
        return logits


def cnn() -> nn.Module:
    sizes = ((3, 16), (16, 32), (32, 32))
    layers = [part for a, b in sizes for part in (nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


#: Model, inputs, samples of a step over all ranks.
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)),
        lambda: torch.randn(131_072, 64),
        64,
    ),
    "cnn": (cnn, lambda: torch.randn(16_384, 3, 32, 32), 32),
    "transformer": (Encoder, lambda: torch.randint(64, (32_768, 32)), 32),
}


class Stopwatch:
    """Counts steps; ``done`` after the warm-up and ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._steps, self._began = seconds, 0, 0.0

    def step(self) -> bool:
        """A step is over; whether it was the last one. Ranks decide by their number of steps, so that all agree."""
        self._steps += 1
        now = time.perf_counter()
        if self._steps == WARM_UP:
            self._began = now
        if self._steps == 2 * WARM_UP:
            pace = (now - self._began) / WARM_UP
            steps = torch.tensor(self._seconds / pace)
            if torch.distributed.is_initialized():
                torch.distributed.broadcast(steps, 0)
            self._last = 2 * WARM_UP + int(steps)
            self._began, self._cpu = time.perf_counter(), time.process_time()
        return self._steps > 2 * WARM_UP and self._steps >= self._last

    @property
    def step_s(self) -> tuple[float, float]:
        """Seconds a step, and CPU seconds of this process."""
        steps = self._last - 2 * WARM_UP
        return (time.perf_counter() - self._began) / steps, (time.process_time() - self._cpu) / steps


def hand(make: Callable[[], nn.Module], data: TensorDataset, batch: int, watch: Stopwatch) -> None:
    ranks, model = int(os.environ.get("WORLD_SIZE", 1)), make()
    sampler: Any = None
    if ranks > 1:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(data, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for epoch in count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        order = torch.tensor(list(sampler)) if sampler is not None else torch.randperm(len(data))
        for indices in order.split(batch // ranks):
            x, y = (column[indices] for column in data.tensors)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if watch.step():
                return


def accelerate(make: Callable[[], nn.Module], data: TensorDataset, batch: int, watch: Stopwatch) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), make()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    loader = DataLoader(data, batch // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            if watch.step():
                return


def fabric(make: Callable[[], nn.Module], data: TensorDataset, batch: int, watch: Stopwatch) -> None:
    from lightning.fabric import Fabric

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    one = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    one.launch()
    model: Any = make()
    model, optimizer = one.setup(model, torch.optim.Adam(model.parameters(), fused=True))
    loader: Any = one.setup_dataloaders(DataLoader(data, batch // ranks, shuffle=True))
    for epoch in count():
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            one.backward(cross_entropy(model(x), y))
            optimizer.step()
            if watch.step():
                return


def session(make: Callable[[], nn.Module], data: TensorDataset, batch: int, watch: Stopwatch) -> None:
    import lockstep

    settings = {"telemetry.progress": "silent", "runs_dir": os.environ["RUNS"]}
    with lockstep.Session(settings, global_batch_size=batch, seed=0) as one:
        model = make()
        model, optimizer = one.prepare(model, torch.optim.Adam(model.parameters(), fused=True))
        for _ in one.epochs(1000):
            for x, y in one.batches(data):
                one.backward(cross_entropy(model(x), y, reduction="sum"), count=len(y))
                one.step(optimizer)
                if watch.step():
                    return


def work(side: str, seconds: float) -> dict[str, tuple[float, float]]:
    """Seconds and CPU seconds a step of each workload, in this process."""
    torch.set_num_threads(1)
    found = {}
    for name, (make, inputs, batch) in WORKLOADS.items():
        torch.manual_seed(0)
        x, watch = inputs(), Stopwatch(seconds)
        data = TensorDataset(x, torch.randint(4, (len(x),)))
        globals()[side](make, data, batch, watch)
        found[name] = watch.step_s
    return found


def measured(side: str, ranks: int, seconds: float) -> dict[str, tuple[float, float]]:
    """:func:`work` in new processes; what rank 0 reports."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "RUNS": folder, "CUDA_VISIBLE_DEVICES": ""}
        out = Path(folder, "found.json")
        command = [sys.executable, *launcher, __file__, "--work", side, "--seconds", str(seconds), "--out", str(out)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
        if not out.exists():
            sys.exit(f"{side} on {ranks} rank(s) failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        found: dict[str, tuple[float, float]] = json.loads(out.read_text())
        return found


def rounds(number: int, seconds: float, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    for place in range(number):
        for ranks in counts:
            sides = random.Random(place).sample(SIDES, len(SIDES))
            found = {side: measured(side, ranks, seconds) for side in sides}
            yield {"round": place, "ranks": ranks, "step_s": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--ranks", default="1,2", help="default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        found = work(options.work, options.seconds)
        if os.environ.get("RANK", "0") == "0":
            options.out.write_text(json.dumps(found))
        return
    report = header()
    rows = list(rounds(options.rounds, options.seconds, [int(n) for n in options.ranks.split(",")]))
    table = []
    for ranks in (1, 2):
        for name in WORKLOADS:
            own = [row["step_s"] for row in rows if row["ranks"] == ranks]
            if not own:
                continue
            row: dict[str, Any] = {"ranks": ranks, "workload": name}
            for place, kind in enumerate(("wall", "cpu")):
                hands = median(step["hand"][name][place] for step in own)
                ratios = {s: median(step[s][name][place] / step["hand"][name][place] for step in own) for s in SIDES}
                row |= {f"hand_{kind}_ms": 1e3 * hands, f"{kind}_ratios": ratios}
                shown = "  ".join(f"{side} {ratio:.2f}" for side, ratio in ratios.items())
                print(f"{ranks} rank(s)  {name:12s} {kind:4s} by hand {1e3 * hands:6.2f} ms a step; ratios: {shown}")
            table.append(row)
    versions = {}
    for package in ("accelerate", "lightning"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    if options.json:
        write_json(options.json, {**report, "versions": versions, "table": table, "rounds": rows})


if __name__ == "__main__":
    main()
