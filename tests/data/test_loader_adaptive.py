"""The number of loader processes follows from the first batches; the batches do not follow from it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import lockstep
from lockstep.cli.main import main
from lockstep.data.loader import make_loader
from lockstep.data.requests import BatchRequest, InOrder, Source
from lockstep.hardware.detect import usable_cores
from lockstep.planning import LoaderPlan
from lockstep.planning.loader import worth_trying
from tests.toys import Toy

BATCH, BATCHES = 4, 120


class Waiting:
    """Samples that take their time, ``in_worker`` seconds in a loader process (``None``: it dies); each draws."""

    def __init__(self, in_training: float, in_worker: float | None) -> None:
        self.pauses = in_training, in_worker

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        is_worker = multiprocessing.parent_process() is not None
        pause = self.pauses[is_worker]
        if pause is None:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep((pause or 0) / BATCH)
        return index, random.random(), int(is_worker)


def requests() -> list[BatchRequest]:
    epochs = [(epoch, start) for epoch in (0, 1) for start in range(0, BATCH * BATCHES // 2, BATCH)]
    return [BatchRequest(epoch, 0, start, start + BATCH) for epoch, start in epochs]


@pytest.mark.parametrize(
    ("in_training", "in_worker", "ends_in"),
    [(0.04, 0.004, 1), (0.01, 0.1, 0), (0.01, None, 0)],
    ids=["they help", "they do not", "they die"],
)
def test_processes_are_kept_if_steps_are_faster_with_them(
    in_training: float, in_worker: float | None, ends_in: int
) -> None:
    plan = LoaderPlan(num_workers=0, most_workers=2, prefetch_factor=2, pin_memory=False)
    source, said = Source(Waiting(in_training, in_worker), default_collate, 3, InOrder()), list[tuple[int, str]]()

    def settled(workers: int, text: str) -> None:
        said.append((workers, text))

    with contextlib.closing(make_loader(source, requests(), plan, 0, largest=BATCH, settled=settled)) as loader:
        found = []
        for batch in loader:
            time.sleep(0.01)  # a step
            found.append(batch)
    expected = [Source(Waiting(0, 0), default_collate, 3, InOrder()).batch(request) for request in requests()]
    assert len(found) == len(expected)
    for (indices, drawn, _), (same_indices, same_drawn, _) in zip(found, expected, strict=True):
        assert torch.equal(indices, same_indices)
        assert torch.equal(drawn, same_drawn)
    places = [int(where[0]) for *_, where in found]
    assert places[0] == 0
    assert (1 in places) == (in_worker is not None)
    assert places[-1] == ends_in
    ((workers, text),) = said
    assert (workers == 0) == ("in the training process" in text.partition(":")[0]) == (ends_in == 0)
    assert ("failed (" in text) == (in_worker is None)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_more_processes_are_tried_while_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lockstep.data.loader.worth_trying", lambda *seen: 1
    )  # what it expects follows from the machine
    plan = LoaderPlan(num_workers=0, most_workers=2, prefetch_factor=2, pin_memory=False)
    source, said = Source(Waiting(0.04, 0.02), default_collate, 3, InOrder()), list[tuple[int, str]]()
    with contextlib.closing(
        make_loader(source, requests(), plan, 0, largest=BATCH, settled=lambda *found: said.append(found))
    ) as loader:
        indices = [int(index) for batch in loader for index in batch[0]]
    assert indices == [index for request in requests() for index in range(request.start, request.stop)]
    ((workers, text),) = said
    assert workers == 2
    assert re.search(r"\b1 worker\b", text)
    assert not multiprocessing.active_children()


def test_a_loader_that_is_closed_early_leaves_no_process() -> None:
    plan = LoaderPlan(num_workers=0, most_workers=2, prefetch_factor=2, pin_memory=False)
    source = Source(Waiting(0.01, 0.004), default_collate, 3, InOrder())
    with contextlib.closing(make_loader(source, requests(), plan, 0, largest=BATCH)) as loader:
        for *_, where in loader:
            time.sleep(0.01)
            if where[0]:
                break
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("load_s", "step_s", "size", "cores", "workers"),
    [
        (1e-3, 10e-3, 0, 2, 0),  # loading hardly matters
        (1e-3, 1.8e-3, 0, 2, 0),  # handing over takes longer
        (10e-3, 20e-3, 0, 8, 2),  # one would be just too slow
        (100e-3, 110e-3, 0, 8, 7),
        (5e-3, 5.5e-3, 0, 1, 0),  # no core for it
        (18e-3, 20.7e-3, 33_554_432, 2, 2),  # samples of 1 MB: two copy and load at once
        (20e-3, 21e-3, 200_000_000, 2, 0),  # copying is slower than loading
    ],
)
def test_processes_are_tried_where_they_should_help(
    load_s: float, step_s: float, size: int, cores: int, workers: int
) -> None:
    assert worth_trying(load_s, step_s, size, cores) == workers


class OpensFiles(Toy):
    """Reading the first sample opens a file, which stays open."""

    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(_Lazily(lambda: Path(__file__).open("rb")))


class OpensDatabase(Toy):
    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(_Lazily(lambda: sqlite3.connect(os.environ["DATABASE"])))


class ConnectsForValidation(Toy):
    """Only the validation set has a connection."""

    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(_Lazily(lambda: contextlib.closing(None)), _Lazily(socket.socket))


class _Lazily:
    def __init__(self, opens: Callable[[], Any]) -> None:
        self.opens, self.opened = opens, None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        self.opened = self.opened or self.opens()
        return np.ones(4, dtype=np.float32), 0

    def __del__(self) -> None:
        if hasattr(self.opened, "close"):
            self.opened.close()


@pytest.mark.parametrize("task", [OpensFiles, OpensDatabase, ConnectsForValidation])
@pytest.mark.parametrize("given", [[], ["--num-workers", "auto"]])
def test_what_reading_opens_is_not_shared_with_processes(
    given: list[str],
    task: type[Toy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DATABASE", str(tmp_path / "samples.db"))
    assert main(["plan", f"{__name__}:{task.__name__}", "--devices", "cpu", "--json", *given]) == 0
    assert '"most_workers": 0' in capsys.readouterr().out


def test_the_plan_names_how_many_processes_there_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "tests.toys:Toy", "--devices", "cpu", "--set", "task.dataset=plain"]
    assert main(command) == 0
    assert re.search(rf"\b0 workers .*\b{usable_cores()}\b", capsys.readouterr().out)
    assert main([*command, "--num-workers", "2"]) == 0
    assert "0 workers" not in capsys.readouterr().out


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "1025"])
def test_anything_else_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tests.toys:Toy", "--devices", "cpu", "--num-workers", value]) == 2
    assert "it must be `auto` or a number from 0" in capsys.readouterr().err
