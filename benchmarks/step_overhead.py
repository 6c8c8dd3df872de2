"""What a step costs beyond the arithmetic: Lockstep, a hand-written loop and the floor, interleaved in one process.

    python benchmarks/step_overhead.py [--steps 1000] [--rounds 15] [--no-clip] [--json FILE]

MLP 561-128-6, batch 32, AdamW, float32, one intra-op thread.

floor      batches lie in memory, fused optimizer, nothing else; clips when we clip
hand       DataLoader over the same tensors, fused optimizer, ``loss.item()`` every 50 steps
lockstep   order, gather, loss and count, clipping, logging to JSON lines, heartbeat: what a user gets

Prints the median over rounds of each time and of each ratio to the floor.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import lockstep
from lockstep import Datasets, Loss, Task
from lockstep.data.arrays import ArrayDataset

BATCH, SAMPLES = 32, 32 * 2000  # an epoch is longer than a measurement: no checkpoint falls into it


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 561, generator=generator), torch.randint(0, 6, (SAMPLES,), generator=generator)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(561, 128), nn.ReLU(), nn.Linear(128, 6))


class Mlp(Task):
    def datasets(self) -> Datasets:
        return Datasets(ArrayDataset(*data()))

    def model(self) -> nn.Module:
        return mlp()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return model(batch[0]), batch[1]

    def metrics(self) -> MetricCollection:
        return MetricCollection({"accuracy": MulticlassAccuracy(6)})


def loop(batches: Any, clip: bool, log: bool) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step, (inputs, labels) in enumerate(batches):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if log and step % 50 == 0:
            loss.item()


def floor(steps: int, clip: bool) -> float:
    inputs, labels = data()
    batches = [(inputs[i : i + BATCH].clone(), labels[i : i + BATCH].clone()) for i in range(0, SAMPLES, BATCH)]
    started = time.perf_counter()
    loop((batches[step % len(batches)] for step in range(steps)), clip, log=False)
    return (time.perf_counter() - started) / steps


def hand(steps: int, clip: bool) -> float:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=BATCH, shuffle=True)
    started = time.perf_counter()
    for _ in range(max(1, steps * BATCH // SAMPLES)):
        loop(loader, clip, log=True)
    return (time.perf_counter() - started) / (max(1, steps * BATCH // SAMPLES) * len(loader))


def ours(steps: int, clip: bool) -> float:
    """Between the first and the last logged step, so that set-up is left out and logging is in."""
    marks: list[float] = []

    class Timed(Mlp):
        def hooks(self) -> Any:
            return [(lambda result, model: marks.append(time.perf_counter()), 50)]

    with tempfile.TemporaryDirectory() as folder:
        lockstep.train(
            Timed(),
            {
                "save_dir": str(Path(folder) / "run"),
                "hardware": {"selected_devices": ["cpu"]},
                "training": {
                    "epochs": 10**6,
                    "max_steps": steps + 50,
                    "threads": 1,
                    "max_grad_norm": 1.0 if clip else None,
                },
                "telemetry": {"progress": "off"},
                "checkpoint": {"keep_last": 1},
            },
        )
    return (marks[-1] - marks[0]) / (50 * (len(marks) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    candidates: dict[str, Callable[[int, bool], float]] = {"floor": floor, "hand": hand, "lockstep": ours}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for measure in candidates.values():
        measure(200, not options.no_clip)
    for _ in range(options.rounds):
        for name, measure in candidates.items():
            times[name].append(measure(options.steps, not options.no_clip))
    report: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread",
        "torch": torch.__version__,
        "clip": not options.no_clip,
        "steps": options.steps,
        "rounds": options.rounds,
    }
    for name, values in times.items():
        ratios = sorted(value / base for value, base in zip(values, times["floor"], strict=True))
        quarter = len(ratios) // 4
        report[name] = {
            "us_per_step": round(statistics.median(values) * 1e6, 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_quartiles": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
        }
        print(f"{name:9} {report[name]['us_per_step']:8.1f} µs a step   {report[name]['ratio']:.3f} × floor")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
