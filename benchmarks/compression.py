"""Do gradients in 16 bits, or other buckets, make DDP faster over gloo? Steps with and without, on two CPU ranks.

In each round every form takes its steps in turn, within seconds of the others.

.venv/bin/python benchmarks/compression.py --rounds 10 --out benchmarks/results/compression.json
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from pathlib import Path

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import RunConfig
from lockstep.lab.bench.trials import TIMEOUT_S, TrialRank, new_trials

STEPS = 5
WIDTHS = (128, 512, 1024, 2048)
#: Forms of the same model: whether gradients travel in 16 bits, and the bucket size in MiB (None: torch's 25).
FORMS = {"full": (False, None), "half": (True, None), "buckets of 5": (False, 5), "buckets of 100": (False, 100)}


def in_turns(rank: TrialRank, rounds: int) -> None:
    """On a rank: seconds of a step in each form, for models of several widths."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    for width in WIDTHS:
        models = {name: _model(width, *form) for name, form in FORMS.items()}
        samples = torch.randn(64, width)
        times: dict[str, list[float]] = {name: [] for name in FORMS}
        for _ in range(rounds + 1):
            for name, model in models.items():
                dist.barrier()
                started = time.perf_counter()
                for _ in range(STEPS):
                    model(samples).square().sum().backward()
                times[name].append((time.perf_counter() - started) / STEPS)
        megabytes = sum(p.numel() for p in models["full"].parameters()) * 4 / 1e6
        rank.report({"gradients_mb": megabytes, "seconds": {name: found[1:] for name, found in times.items()}})
    dist.destroy_process_group()


def _model(width: int, half: bool, bucket_mb: float | None) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if half:
        model.register_comm_hook(None, _in_16_bits)
    return model


def _in_16_bits(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, and strings are not types
    """What torch's bf16_compress_hook does; that one refuses gloo."""
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with new_trials() as trials:
        outcome = trials.run(in_turns, given.rounds, ranks=2, config=RunConfig())
    if outcome.ended != "done":
        raise SystemExit(outcome.error)
    rows = []
    for row in outcome.rows:
        plain = row["seconds"].pop("full")
        for form, seconds in row["seconds"].items():
            found = {"gradients_mb": round(row["gradients_mb"], 2), "form": form, **report.ratios(seconds, plain)}
            low, high = found["ratio_quartiles"]
            size = found["gradients_mb"]
            print(f"{size} MB of gradients, {form}: {found['ratio']} times as long as plain ({low} to {high})")
            rows.append(found)
    report.write_json(given.out, {**report.header(), "rows": rows})


if __name__ == "__main__":
    main()
