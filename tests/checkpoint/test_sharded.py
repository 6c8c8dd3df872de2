"""Checkpoints of several ranks: whole or not there, whoever fails or dies, and read whatever the division was."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from lockstep.checkpoint.content import HashingFile, mark, open_pieces
from lockstep.checkpoint.manifest import file_names, read_manifest, shard
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.checkpoint.writer import BackgroundWriter, ShardedStore
from lockstep.engine.distributed.collectives import Collectives
from lockstep.errors import CheckpointError, CollectiveError, StorageError
from lockstep.hardware.world import World
from tests.gloo import run_ranks

ROWS = 5


def whole(value: float) -> Tensor:
    return value + torch.arange(2.0 * ROWS).reshape(ROWS, 2)


def part(rank: int, ranks: int, step: int) -> Snapshot:
    """Of two divided tensors (one of them twice, under two names), the third rank of three has no rows of ``short``."""
    rows = whole(step).chunk(ranks)[rank]
    short = torch.full((2,), float(step)).chunk(ranks)[rank] if rank < 2 else torch.empty(0)
    model = {"w": rows, "tied": rows, "short": short, **({"mean": torch.tensor(float(step))} if rank == 0 else {})}
    trainer = {"value": step, "moments": {0: mark("moments.0")}, "list": [1, mark("moments.0")]}
    return Snapshot(step, model, trainer if rank == 0 else {}, {"epoch": step}, {"moments.0": 2 * rows})


def assert_whole(store: CheckpointStore, step: int, shards: int) -> None:
    manifest = store.verify(step)
    assert manifest.files.keys() == file_names(shards) and manifest.aliases == {"tied": "w"}
    found = store.load(step)
    assert found.model.keys() == {"w", "tied", "short", "mean"} and found.manifest == {"epoch": step}
    assert torch.equal(found.model["w"], whole(step)) and torch.equal(found.model["tied"], whole(step))
    assert torch.equal(found.model["short"], torch.full((2,), float(step))) and found.model["mean"] == step
    assert found.trainer["value"] == step and torch.equal(found.trainer["moments"][0], 2 * whole(step))
    assert torch.equal(found.trainer["list"][1], 2 * whole(step))


class Failing(ShardedStore):
    """Its rank has no space left for, or is killed in the middle of, the model of step ``at``."""

    at, killed = -1, False

    def save(self, snapshot: Snapshot, best: bool = False) -> Path:
        self._armed = snapshot.step == self.at
        return super().save(snapshot, best)

    def _open(self, path: Path) -> HashingFile:
        return HalfWritten(path, self.killed) if self._armed else super()._open(path)


class HalfWritten(HashingFile):
    def __init__(self, path: Path, killed: bool) -> None:
        super().__init__(path)
        self._killed = killed

    def write(self, data: Any) -> NoReturn:
        super().write(memoryview(data).cast("B")[:7])
        if self._killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_store(folder: Path, rank: int, ranks: int, shards: int | None = None) -> Failing:
    return Failing(folder, Collectives(World(rank, ranks, rank, ranks)), shards or ranks)


def work(rank: int, ranks: int, folder: Path, doomed: int) -> None:
    """Saves of all kinds; at the end rank ``doomed`` dies in one. What a rank has to tell it leaves in a file."""
    told = saved_beside(rank, ranks, folder / "run")
    dist.barrier()
    over = open_store(folder / "over", rank, ranks, shards=2)
    for _ in range(2):  # the last rank holds what another one has, too; the second time nothing is new
        over.save(part(rank, 2, 7) if rank < 2 else Snapshot(7, {}, {}, {}))
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    store = open_store(folder / "killed", rank, ranks)
    store.killed, store.at = True, 2 if rank == doomed else -1
    writer = BackgroundWriter(store)
    writer.submit(part(rank, ranks, 1))
    writer.submit(part(rank, ranks, 2))
    with pytest.raises(CollectiveError, match="step 2"):
        writer.wait()
    (folder / f"survived-{rank}").touch()


def saved_beside(rank: int, ranks: int, folder: Path) -> list[Any]:
    """Steps 1 to 4 in the background, while the ranks go on talking in the default group; the last rank fails at 3."""
    store = open_store(folder, rank, ranks)
    store.at = 3 if rank == ranks - 1 else -1
    saved: list[int] = []
    writer = BackgroundWriter(store, lambda step, path, best: saved.append(step))
    value, error = torch.ones(1), ""
    for step in range(1, 5):
        try:
            writer.submit(part(rank, ranks, step), best=step == 1, keep={2})
        except StorageError as caught:
            error = caught.what
            writer.submit(part(rank, ranks, step), keep={2})
        for _ in range(50):
            dist.all_reduce(value)
            value /= ranks
    writer.close()
    assert value == 1.0
    return [saved, error]


@pytest.fixture(scope="module", params=[2, pytest.param(0, marks=pytest.mark.drill)])
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks leave of their work."""
    folder, doomed = tmp_path_factory.mktemp("shards"), request.param
    with pytest.raises(RuntimeError, match=f"rank {doomed} died"):
        run_ranks(work, 3, folder, doomed)
    assert sum((folder / f"survived-{rank}").exists() for rank in range(3)) == 2
    return folder


def test_ranks_save_beside_their_training_and_hear_together_of_one_that_cannot(left: Path) -> None:
    for rank in range(3):
        saved, error = json.loads((left / f"told-{rank}.json").read_text())
        assert saved == [1, 2, 4] and error.startswith("no space ") and "step-00000003" in error
    store = CheckpointStore(left / "run")
    assert store.steps() == [1, 2, 4] and (store.step_of("last"), store.step_of("best")) == (4, 1)
    assert {path.name for path in store.folder.iterdir()} == {"last", "best", *(f"step-0000000{n}" for n in (1, 2, 4))}
    for step in store.steps():
        assert_whole(store, step, 3)
    assert_whole(CheckpointStore(left / "over"), 7, 2)


def test_a_damaged_shard_is_named_and_its_checkpoint_passed_over(left: Path) -> None:
    store = CheckpointStore(left / "run")
    # Older Locksteps are told that they are too old.
    assert read_manifest(store.path_of(4)).as_json()["format_version"] == 2
    damaged = store.path_of(4) / shard("model", 1, 3)
    content = damaged.read_bytes()
    for damage, words in ((content[:-1] + b"\xff", "is damaged"), (content[:-1], "is damaged"), (None, "cannot read")):
        damaged.unlink() if damage is None else damaged.write_bytes(damage)
        with pytest.raises(CheckpointError, match=words) as caught:
            store.load(4)
        assert str(damaged) in caught.value.what and caught.value.why and caught.value.fix
        heard: list[str] = []
        assert store.newest_verified(heard.append) == 2 and len(heard) == 1 and damaged.name in heard[0]
    damaged.write_bytes(content)
    assert_whole(store, 4, 3)


def test_a_rank_killed_in_the_middle_of_its_write_leaves_the_checkpoint_before(left: Path) -> None:
    store = CheckpointStore(left / "killed")
    assert store.newest_verified(pytest.fail) == 1 and store.steps() == [1]
    store.clean_temporary()
    assert {path.name for path in store.folder.iterdir()} == {"last", "step-00000001"}
    assert_whole(store, 1, 3)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    bounds=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64]),
)
def test_any_rows_are_read_whatever_the_division_was(
    counts: list[int], bounds: tuple[int, int], dtype: torch.dtype
) -> None:
    tensor = (torch.arange(3.0 * sum(counts)) % 7).reshape(sum(counts), 3).to(dtype)
    start, stop = (min(bound, sum(counts)) for bound in sorted(bounds))
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / f"{number}.safetensors" for number in range(len(counts))]
        for path, rows in zip(paths, tensor.split(counts), strict=True):
            save_file({"w": rows.contiguous()}, path)
        found = open_pieces(paths, {"tied": "w"})
        for piece in found.values():
            assert piece.shape == tensor.shape and piece.dtype == dtype
            assert torch.equal(piece.rows(start, stop), tensor[start:stop]) and torch.equal(piece.whole(), tensor)
