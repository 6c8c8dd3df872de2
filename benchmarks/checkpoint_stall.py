"""How long training stands still for a checkpoint: copied and written in the background, or saved in line.

::

    python benchmarks/checkpoint_stall.py [--rounds 7] [--folder DIR] [--json FILE]

A model of 50 M parameters with AdamW's state (600 MB in float32), one intra-op thread. In every round, after
everything that was written before has reached the disk:

background     what ``engine/fit.py`` does: copy to host memory, hand over to the writer; training goes on
inline         ``torch.save`` of the same state, as most loops do it
inline, fsync  the same, until the file is on the disk

The background save also hashes what it writes, makes it durable and reads it back. Meanwhile training steps go
on; *lost* is the stall and what those steps take longer than others. The first copy has to get its memory, so
it is given by itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import header, ratios, write_json
from torch import nn

from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.checkpoint.writer import BackgroundWriter

WIDTH, LAYERS, BATCH = 2500, 8, 16


class Training:
    """Steps of a plain network; its state is what a checkpoint holds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._inputs = torch.randn(BATCH, WIDTH)

    def step(self) -> float:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - started

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "trainer": {"optimizer": self.optimizer.state_dict()}}


class Background:
    """Saves as a run does, and trains on meanwhile."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training = training
        self._done: list[float] = []
        self._writer = BackgroundWriter(CheckpointStore(folder), lambda *_: self._done.append(time.perf_counter()))
        self._step = 0

    def save(self) -> tuple[float, float, list[float]]:
        """Seconds of the stall and of the save, and of each step during the save."""
        started = time.perf_counter()
        self._step += 1
        copy = self._writer.to_host(self._training.state())
        self._writer.submit(Snapshot(self._step, copy["model"], copy["trainer"], {}), keep=[])
        stall = time.perf_counter() - started
        self._done.clear()
        steps = []
        while not self._done:
            steps.append(self._training.step())
            self._writer.poll()
        # The last step outlasted the save.
        return stall, self._done[0] - started, steps[:-1]

    def close(self) -> None:
        self._writer.close()


def inline(state: dict[str, Any], path: Path, fsync: bool) -> float:
    started = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        if fsync:
            file.flush()
            os.fsync(file.fileno())
    return time.perf_counter() - started


def settled(measure: Callable[[], Any]) -> Any:
    """Measure when nothing waits to be written."""
    os.sync()
    return measure()


def rounds_of(training: Training, folder: Path, rounds: int) -> dict[str, list[float]]:
    background, path = Background(training, folder / "checkpoints"), folder / "inline.pt"
    first = settled(background.save)[0]
    times: dict[str, list[float]] = {
        name: [] for name in ("background", "save", "step", "busy_step", "lost", "inline", "inline_fsync")
    }
    try:
        for _ in range(rounds):
            times["step"].append(statistics.mean(training.step() for _ in range(5)))
            stall, save, busy = settled(background.save)
            times["background"].append(stall)
            times["save"].append(save)
            times["busy_step"].append(statistics.mean(busy))
            times["lost"].append(stall + sum(busy) - len(busy) * times["step"][-1])
            times["inline"].append(settled(lambda: inline(training.state(), path, fsync=False)))
            times["inline_fsync"].append(settled(lambda: inline(training.state(), path, fsync=True)))
    finally:
        background.close()
    return {"first": [first], **times}


def show(report: dict[str, Any]) -> None:
    seconds = report["seconds"]
    print(f"stall, background     {seconds['background']:7.3f} s   (the first one {seconds['first']:.3f} s)")
    for name in ("inline", "inline_fsync"):
        found = report[f"{name}_to_background"]
        low, high = found["ratio_quartiles"]
        times = f"{found['ratio']:.1f} times as long ({low:.1f} to {high:.1f})"
        print(f"stall, {name:12}   {seconds[name]:7.3f} s   {times}")
    slower = report["step_during_save_to_step"]["ratio"]
    print(f"background save       {seconds['save']:7.3f} s   a step takes {slower:.2f} times as long meanwhile")
    print(f"lost in all           {seconds['lost']:7.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = Training()
    training.step()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        times = rounds_of(training, Path(folder), options.rounds)
    report: dict[str, Any] = {
        **header(),
        "rounds": options.rounds,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "seconds": {name: round(statistics.median(values), 4) for name, values in times.items()},
        "inline_to_background": ratios(times["inline"], times["background"]),
        "inline_fsync_to_background": ratios(times["inline_fsync"], times["background"]),
        "inline_fsync_to_lost": ratios(times["inline_fsync"], times["lost"]),
        "step_during_save_to_step": ratios(times["busy_step"], times["step"]),
    }
    show(report)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
