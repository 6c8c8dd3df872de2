"""Kills itself while saving: ``python make_wrecks.py FOLDER`` leaves one folder a scenario and stage.

A process is forked for each stage, since importing torch for each would take most of the time. Prints
``{"<scenario>": ["<stage>", …]}``: the stages that a save goes through when nobody kills it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from lockstep.checkpoint.content import HashingFile
from lockstep.checkpoint.store import CheckpointStore, Snapshot


def snapshot(step: int, value: float) -> Snapshot:
    model = {"w": torch.full((5000,), value), "b": torch.full((3,), value, dtype=torch.bfloat16)}
    return Snapshot(step, model, {"value": value, "m": torch.full((5000,), value)}, {"value": value})


class Doomed(CheckpointStore):
    """A store whose process dies at a stage; ``half <file>`` is half-way through writing a file."""

    def __init__(self, folder: Path, dies_at: str | None) -> None:
        super().__init__(folder)
        self.stages: list[str] = []
        self._dies_at = dies_at

    def _stage(self, name: str) -> None:
        if name == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.stages.append(name)

    def _open(self, path: Path) -> HashingFile:
        return HalfWritten(path, lambda: self._stage(f"half {path.name}"))


class HalfWritten(HashingFile):
    def __init__(self, path: Path, half: Callable[[], None]) -> None:
        super().__init__(path)
        self._half: Callable[[], None] | None = half

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._half is None or len(view) < 10_000:
            return super().write(view)
        half, self._half = self._half, None
        done = super().write(view[:7000])
        half()
        return done + super().write(view[7000:])


def save_beside(store: CheckpointStore) -> None:
    store.save(snapshot(2, 2.0), best=True)
    store.retain({2})


def save_over(store: CheckpointStore) -> None:
    store.save(snapshot(1, 2.0))


SCENARIOS = {"beside": save_beside, "over": save_over}


def forked(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        _work_and_exit(work)
    return pid


def _work_and_exit(work: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def drill(root: Path) -> dict[str, list[str]]:
    walked: dict[str, list[str]] = {}
    for scenario, save in SCENARIOS.items():
        (root / scenario).mkdir(parents=True)
        healthy = Doomed(root / scenario / "none", None)
        healthy.save(snapshot(1, 1.0))
        healthy.stages.clear()
        save(healthy)
        walked[scenario] = list(healthy.stages)
        for stage in dict.fromkeys(healthy.stages):
            doomed = Doomed(root / scenario / stage.replace(" ", "-"), stage)
            CheckpointStore(doomed.folder).save(snapshot(1, 1.0))
            _, status = os.waitpid(forked(lambda save=save, doomed=doomed: save(doomed)), 0)  # type: ignore[misc]
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (scenario, stage, status)
    return walked


def save_for_ever(folder: Path) -> None:
    store = CheckpointStore(folder)
    for n in range(10_000):
        store.save(snapshot(n // 2 + 1, float(n)), best=n % 3 == 0)
        store.retain(store.steps()[-2:])


def kill_at_random(root: Path, times: int) -> None:
    chance = random.Random(7)
    (root / "random").mkdir(parents=True)
    for n in range(times):
        pid = forked(lambda n=n: save_for_ever(root / "random" / str(n)))  # type: ignore[misc]
        while not list((root / "random" / str(n)).glob("step-*")):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    stages = drill(target)
    kill_at_random(target, int(sys.argv[2]))
    print(json.dumps(stages))
