"""Saving beside training: one at a time, nothing lost, failures told once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.checkpoint.writer import BackgroundWriter, HostBuffers
from lockstep.errors import CheckpointError, LockstepError, StorageError
from tests.conftest import cli_environment


class Gated(CheckpointStore):
    """Saves wait until told to go on; counts how many are under way at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go, self.begun = threading.Event(), threading.Event()
        self.under_way = self.most = 0

    def save(self, snapshot: Snapshot, best: bool = False) -> Path:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
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
    store.go.set()
    writer.wait()
    assert saved == [(1, store.path_of(1), True)] and store.step_of("best") == 1
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


@pytest.mark.slow
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


def test_a_copy_does_not_change_when_training_goes_on() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    copy = HostBuffers().copy(state)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moment = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    assert all(torch.equal(copy["model"][name], tensor) for name, tensor in before.items())
    assert torch.equal(copy["optimizer"]["state"][0]["exp_avg"], moment)
    assert copy["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=5), st.integers(2, 4))
def test_used_again_buffers_hold_the_newest_values(shapes: list[list[int]], times: int) -> None:
    buffers = HostBuffers()
    for n in range(times):
        state = {"tensors": [torch.full(shape, float(n)) for shape in shapes], "n": n}
        copy = buffers.copy(state)
        assert copy["n"] == n and all(map(torch.equal, copy["tensors"], state["tensors"]))


def test_memory_is_used_again_until_a_shape_or_type_changes() -> None:
    buffers = HostBuffers()
    places = [buffers.copy({"w": tensor})["w"].data_ptr() for tensor in (torch.zeros(4000), torch.ones(4000))]
    assert places[0] == places[1]
    assert buffers.copy({"w": torch.ones(40, 100)})["w"].shape == (40, 100)
    assert buffers.copy({"w": torch.ones(40, 100, dtype=torch.bfloat16)})["w"].dtype == torch.bfloat16


def test_tied_tensors_stay_tied_and_others_stay_apart() -> None:
    buffers = HostBuffers()
    shared = torch.arange(4.0)
    for state in (
        {"a": shared, "b": shared, "part": shared[:2]},
        {"a": shared + 1, "b": shared + 2, "part": shared[:2]},
        {"a": shared, "b": shared, "part": shared[2:]},
    ):
        copy = buffers.copy(state)
        assert all(torch.equal(copy[name], tensor) for name, tensor in state.items())
        assert (copy["a"] is copy["b"]) == (state["a"] is state["b"])


def test_places_with_like_names_do_not_share_memory() -> None:
    buffers = HostBuffers()
    state: dict[Any, Any] = {
        "a/b": torch.tensor([1.0]),
        "a": {"b": torch.tensor([2.0])},
        0: torch.tensor([3.0]),
        "0": torch.tensor([4.0]),
    }
    for _ in range(2):
        copy = buffers.copy(state)
        assert [copy["a/b"].item(), copy["a"]["b"].item(), copy[0].item(), copy["0"].item()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor(True),
        torch.zeros(0, 4),
        torch.rand(3, 4).T,
        torch.rand(8)[::2],
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.rand(3).bfloat16(),
        torch.rand(1).expand(5),
        torch.rand(3, dtype=torch.complex64).conj(),
        nn.Parameter(torch.rand(3)),
    ],
)
def test_any_dense_tensor_is_copied_contiguous(tensor: Tensor) -> None:
    copy = HostBuffers().copy([tensor])[0]
    assert torch.equal(copy, tensor) and copy.is_contiguous() and not copy.requires_grad
    assert tensor.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


def test_containers_and_plain_values_are_copied() -> None:
    inner = [1, {"x": "y"}]
    copy = HostBuffers().copy(OrderedDict(a=inner, b=(1.5, None), c=b"raw"))
    inner.append(2)
    assert copy == {"a": [1, {"x": "y"}], "b": (1.5, None), "c": b"raw"} and type(copy) is dict


def test_a_tensor_without_values_is_refused_by_its_place() -> None:
    for tensor in (torch.empty(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises(CheckpointError, match="optimizer/3/odd"):
            HostBuffers().copy({"optimizer": {3: {"odd": tensor}}})


@pytest.mark.gpu
def test_a_gpu_state_arrives_whole_in_page_locked_memory() -> None:
    buffers = HostBuffers()
    weight = torch.zeros(10_000_000, device="cuda")
    for n in range(3):
        weight.fill_(n)
        copy = buffers.copy({"w": weight, "tied": weight})
        weight.fill_(99)
        assert (
            copy["w"].is_pinned()
            and copy["tied"] is copy["w"]
            and torch.equal(copy["w"], torch.full((10_000_000,), float(n)))
        )
