"""A validation of 100,000 samples with 1,000 outputs each, on two ranks, against a hand-written loop; in turns.

.venv/bin/python benchmarks/evaluation.py --rounds 5 --out benchmarks/results/evaluation.json

Two gloo ranks on CPU, one thread each, a linear model, top-1 and top-5 accuracy of torchmetrics. *hand*: each rank
evaluates its half, torchmetrics sums the states over ranks. *merged*: ``Task.metrics`` returns them too. *rows*:
it returns them in an object with ``update`` and ``compute`` alone, so every row goes to rank 0. *Memory*: what a rank's
resident memory grows by, at its highest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lockstep import ArrayDataset, Loss, Task
from lockstep.config import RunConfig
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.evaluate import Evaluator, evaluate
from lockstep.engine.optim.precision import Precision
from lockstep.lab.bench.measure import peak_memory, reset_peak_memory
from lockstep.lab.bench.trials import TIMEOUT_S, TrialRank, new_trials
from lockstep.planning import LoaderPlan

RANKS, SAMPLES, INPUTS, OUTPUTS, BATCH = 2, 100_000, 64, 1000, 100
CPU = torch.device("cpu")


def accuracies(**options: Any) -> MetricCollection:
    options = {"num_classes": OUTPUTS, "average": "micro", "validate_args": False, **options}
    return MetricCollection(
        {"accuracy": MulticlassAccuracy(**options), "top5": MulticlassAccuracy(top_k=5, **options)},
        compute_groups=False,
    )


class Classes(Task):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.validate(model, batch)[0]

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Tensor, ...]]:
        outputs = model(batch[0])
        return Loss(nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)), (outputs, batch[1])

    def metrics(self) -> Any:
        return accuracies()


class Rows:
    def __init__(self) -> None:
        found = accuracies(sync_on_compute=False)  # rank 0 alone has one
        self.update, self.compute = found.update, found.compute


class ByRows(Classes):
    def metrics(self) -> Rows:
        return Rows()


def by_hand(model: nn.Module, data: tuple[Tensor, Tensor], rank: int) -> dict[str, float]:
    metrics, sums = accuracies(), torch.zeros(2, dtype=torch.float64)
    half = SAMPLES // RANKS
    model.eval()
    with torch.inference_mode():
        for start in range(rank * half, (rank + 1) * half, BATCH):
            inputs, labels = (part[start : start + BATCH] for part in data)
            outputs = model(inputs)
            sums += torch.tensor([nn.functional.cross_entropy(outputs, labels, reduction="sum").item(), len(outputs)])
            metrics.update(outputs, labels)
    dist.all_reduce(sums)
    return {"loss": (sums[0] / sums[1]).item(), **{name: value.item() for name, value in metrics.compute().items()}}


def in_turns(rank: TrialRank, rounds: int) -> None:
    """On a rank: seconds and bytes of each form."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    collectives = Collectives(rank.world)
    torch.manual_seed(0)
    data = torch.randn(SAMPLES, INPUTS), torch.randint(OUTPUTS, (SAMPLES,))
    model = nn.Linear(INPUTS, OUTPUTS)

    def lockstep(task: Task) -> dict[str, float]:
        loader = LoaderPlan(num_workers=0, prefetch_factor=2, persistent_workers=False, pin_memory=False)
        evaluator = Evaluator(collectives, CPU, Precision("32", CPU, 1.0), loader, BATCH, seed=0)
        return evaluate(evaluator, task, model, ArrayDataset(*data))

    forms: dict[str, Callable[[], dict[str, float]]] = {
        "hand": lambda: by_hand(model, data, rank.world.rank),
        "merged": lambda: lockstep(Classes()),
        "rows": lambda: lockstep(ByRows()),
    }
    for _ in range(rounds + 1):
        row: dict[str, Any] = {}
        for name, form in forms.items():
            collectives.barrier()
            reset_peak_memory([CPU])
            before, started = peak_memory([CPU])[0], time.perf_counter()
            values = form()
            collectives.barrier()
            row[name] = {
                "seconds": time.perf_counter() - started,
                "memory": max(collectives.all_gather(peak_memory([CPU])[0] - before)),
                "values": {key: round(value, 5) for key, value in values.items()},
            }
        rank.report(row)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    header = report.header()
    with new_trials() as trials:
        outcome = trials.run(in_turns, given.rounds, ranks=RANKS, config=RunConfig())
    if outcome.ended != "done":
        raise SystemExit(outcome.error)
    first, *rows = outcome.rows
    result: dict[str, Any] = {}
    for name in first:
        if first[name]["values"] != first["hand"]["values"]:
            raise SystemExit(f"{name} found {first[name]['values']}, the hand-written loop {first['hand']['values']}")
        result[name] = {
            "seconds": round(statistics.median(row[name]["seconds"] for row in rows), 2),
            "memory_mb_first": round(first[name]["memory"] / 1e6),
            "memory_mb": round(max(row[name]["memory"] for row in rows) / 1e6),
            **report.ratios([row[name]["seconds"] for row in rows], [row["hand"]["seconds"] for row in rows]),
        }
        print(name, result[name])
    report.write_json(given.out, {**header, "rounds": given.rounds, "forms": result})


if __name__ == "__main__":
    main()
