"""Saving beside training: one at a time, nothing lost, failures told once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.checkpoint.writer import BackgroundWriter
from lockstep.errors import CheckpointError, LockstepError, StorageError
from lockstep.telemetry.progress_board import pulse
from tests.conftest import cli_environment


class Gated(CheckpointStore):
    """Saves wait until told to go on; counts how many are under way at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go, self.begun = threading.Event(), threading.Event()
        self.under_way = self.most = self.thread = 0

    def save(self, snapshot: Snapshot, best: bool = False) -> Path:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.thread = threading.get_native_id()
        self.begun.set()
        assert self.go.wait(60)
        try:
            return super().save(snapshot, best)
        finally:
            self.under_way -= 1


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, {"w": torch.full((4,), float(step))}, {"step": step}, {})


def test_submit_returns_while_the_save_is_under_way(tmp_path: Path) -> None:
    store = Gated(tmp_path)
    saved: list[tuple[int, Path, bool]] = []
    writer = BackgroundWriter(store, lambda *event: saved.append(event))
    writer.submit(snapshot(1), best=True)
    assert store.begun.wait(60)
    writer.poll()
    assert saved == [] and store.steps() == []
    assert pulse.sign.writer == store.thread, "who watches for a hang knows whose bytes count"
    store.go.set()
    writer.wait()
    assert saved == [(1, store.path_of(1), True)] and store.step_of("best") == 1
    assert pulse.sign.writer == 0
    writer.wait()
    writer.close()
    assert len(saved) == 1


def test_saves_never_overlap_and_keep_their_order(tmp_path: Path) -> None:
    store = Gated(tmp_path)
    store.go.set()
    saved: list[int] = []
    threads: set[str] = set()

    def on_saved(step: int, path: Path, best: bool) -> None:
        saved.append(step)
        threads.add(threading.current_thread().name)

    writer = BackgroundWriter(store, on_saved)
    for step in range(1, 9):
        writer.submit(snapshot(step), keep={step - 1})
    writer.close()
    assert saved == list(range(1, 9)) and store.most == 1 and store.steps() == [7, 8]
    assert threads == {threading.current_thread().name}, "events come in the caller's thread"


def test_the_new_checkpoint_stays_although_it_is_not_named(tmp_path: Path) -> None:
    writer = BackgroundWriter(CheckpointStore(tmp_path))
    for step in (1, 2):
        writer.submit(snapshot(step), keep=())
    writer.close()
    assert writer.store.steps() == [2]


@pytest.mark.parametrize("surfaces_in", ["submit", "wait", "close", "poll"])
def test_a_failed_save_is_raised_once(tmp_path: Path, surfaces_in: str) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    saved: list[int] = []
    writer = BackgroundWriter(CheckpointStore(tmp_path / "checkpoints"), lambda step, path, best: saved.append(step))
    calls = {"submit": lambda: writer.submit(snapshot(2)), "wait": writer.wait, "close": writer.close}

    def poll_until_raised() -> None:
        for _ in range(600):
            writer.poll()
            threading.Event().wait(0.1)

    writer.submit(snapshot(1))
    with pytest.raises(StorageError) as caught:
        calls.get(surfaces_in, poll_until_raised)()
    assert str(tmp_path) in caught.value.what and caught.value.fix
    writer.close()
    assert saved == []


@pytest.mark.parametrize(
    ("trainer", "kind"),
    [({"task": Path()}, CheckpointError), ({"task": threading.Lock()}, StorageError)],
    ids=["class", "lock"],
)
def test_a_state_that_cannot_be_saved_says_so(
    tmp_path: Path, trainer: dict[str, Any], kind: type[LockstepError]
) -> None:
    writer = BackgroundWriter(CheckpointStore(tmp_path))
    writer.submit(Snapshot(1, {}, trainer, {}))
    with pytest.raises(kind) as caught:
        writer.wait()
    assert caught.value.why and caught.value.fix and list(tmp_path.iterdir()) == []


def test_training_goes_on_while_its_copy_is_saved(tmp_path: Path) -> None:
    store = Gated(tmp_path)
    writer = BackgroundWriter(store)
    weight = torch.zeros(1000)
    for step in range(1, 4):
        store.go.set()
        copy = writer.to_host({"model": {"w": weight}, "trainer": {"moment": weight}})
        store.go.clear()
        writer.submit(Snapshot(step, copy["model"], copy["trainer"], {}))
        weight += 1
    store.go.set()
    writer.close()
    for step in range(1, 4):
        loaded = store.load(step)
        assert torch.equal(loaded.model["w"], torch.full((1000,), step - 1.0))
        assert torch.equal(loaded.trainer["moment"], loaded.model["w"])


def test_a_normal_end_of_the_process_waits_for_the_save_and_for_nothing_else(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from pathlib import Path\n"
        "from lockstep.checkpoint.store import CheckpointStore, Snapshot\n"
        "from lockstep.checkpoint.writer import BackgroundWriter\n"
        "writer = BackgroundWriter(CheckpointStore(Path(sys.argv[1])))\n"
        "writer.submit(Snapshot(1, {'w': torch.ones(5_000_000)}, {}, {}))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=cli_environment())
    assert (ended.returncode, ended.stderr) == (0, "")
    assert CheckpointStore(tmp_path).newest_verified(pytest.fail) == 1
