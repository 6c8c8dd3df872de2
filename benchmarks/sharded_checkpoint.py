"""How long fsdp training stands still for a checkpoint: gathered on rank 0, and each rank its part; in turns.

.venv/bin/python benchmarks/sharded_checkpoint.py --rounds 5 --out benchmarks/results/sharded-checkpoint.json

Two gloo ranks on CPU, one thread each; models with AdamW's state. *Stall*: until the slowest rank may go on training.
*Write*: until the checkpoint is on disk, hashed and in its place, nothing else going on. *Memory*: what rank 0's
highest use of memory grows by in a stall, after the first one, whose buffers stay.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import report
import torch
import torch.distributed as dist
from torch import nn

from lockstep import Datasets, Task
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.checkpoint.writer import BackgroundWriter, ShardedStore
from lockstep.config import RunConfig
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.dtensor_state import gathered, own_part
from lockstep.engine.partition import Undivided
from lockstep.engine.rank_context import RankContext
from lockstep.engine.strategies.fsdp import ShardedModel
from lockstep.lab.bench.measure import peak_memory, reset_peak_memory
from lockstep.lab.bench.trials import TIMEOUT_S, TrialRank, new_trials
from lockstep.rundir.folder import RunDir

RANKS, LAYERS = 2, 8
WIDTHS = (512, 1024, 2048, 3072)
CPU = torch.device("cpu")


def in_turns(rank: TrialRank, rounds: int, folder: Path) -> None:
    """On a rank: seconds and bytes of both forms, for models of several widths."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    collectives = Collectives(rank.world)
    for width in WIDTHS:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        plan: Any = SimpleNamespace(placement={"precision": "32"})
        context = RankContext(RunDir(folder), rank.world, RunConfig(), plan, CPU, collectives)
        ShardedModel(Undivided(Task(), model, Datasets(None), context))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        row: dict[str, Any] = {"state_mb": 12e-6 * sum(p.numel() for p in model.parameters())}
        stores = {
            "whole": CheckpointStore(folder / f"whole-{width}"),
            "sharded": ShardedStore(folder / f"sharded-{width}", Collectives(rank.world), RANKS),
        }
        for name in stores:
            row |= {f"{name}_{what}": [] for what in ("stall_s", "write_s", "memory")}
        writers = {name: BackgroundWriter(store) for name, store in stores.items()}
        for number in range(1, rounds + 2):
            for name, writer in writers.items():
                found = one_save(writer, model, optimizer, collectives, number)
                if number > 1:
                    for what, value in found.items():
                        row[f"{name}_{what}"].append(value)
        for writer in writers.values():
            writer.close()
        rank.report(row)
        if rank.world.is_main:
            for store in stores.values():
                shutil.rmtree(store.folder)
    dist.destroy_process_group()


def one_save(
    writer: BackgroundWriter, model: nn.Module, optimizer: torch.optim.Optimizer, collectives: Collectives, step: int
) -> dict[str, float]:
    """As ``engine/fit.py`` does it."""
    reset_peak_memory([CPU])
    before = peak_memory([CPU])[0]
    collectives.barrier()
    started = time.perf_counter()
    main, parts = collectives.is_main, writer.store.takes_parts
    state = {"model": model.state_dict(), "trainer": {"update": optimizer.state_dict(), "task": {}}}
    state = own_part(state, is_main=main) if parts else gathered(state, keep=main)
    if main or parts:
        writer.submit(Snapshot(step, **writer.to_host(state), manifest={}), keep=[])
    del state
    stall = time.perf_counter() - started
    grown = peak_memory([CPU])[0] - before
    writer.wait()
    collectives.barrier()
    stall = max(collectives.all_gather(stall))
    return {"stall_s": stall, "write_s": time.perf_counter() - started, "memory": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, new_trials() as trials:
        outcome = trials.run(in_turns, given.rounds, Path(folder), ranks=RANKS, config=RunConfig())
    if outcome.ended != "done":
        raise SystemExit(outcome.error)
    rows = []
    for row in outcome.rows:
        found: dict[str, Any] = {"state_mb": round(row["state_mb"])}
        for what in ("stall_s", "write_s"):
            found[what] = report.ratios(row[f"whole_{what}"], row[f"sharded_{what}"])
            found[what] |= {name: sorted(row[f"{name}_{what}"])[given.rounds // 2] for name in ("whole", "sharded")}
        found["memory_mb"] = {name: max(row[f"{name}_memory"]) / 1e6 for name in ("whole", "sharded")}
        print(found)
        rows.append(found)
    report.write_json(given.out, {**report.header(), "rows": rows})


if __name__ == "__main__":
    main()
