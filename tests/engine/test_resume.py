"""What an attempt begins with: the newest good checkpoint, or weights that rank 0 reads, whatever the others see."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.config import RunConfig
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.rank_context import RankContext
from lockstep.engine.resume import judge_afresh, load_initial_weights, load_latest
from lockstep.engine.state import TrainState
from lockstep.errors import CheckpointError, UnreadableError
from lockstep.events import Note
from lockstep.hardware.world import World
from lockstep.rundir.folder import RunDir
from tests.fakes import RecordingSink
from tests.gloo import run_ranks
from tests.rundir.runs import make_run


def begin(rank: int, ranks: int, sources: list[tuple[Path | None, Path | None]]) -> list[float | str]:
    """What a rank's weight is, or what it is told, for what each rank names."""
    collectives = Collectives(World(rank, ranks, rank, ranks))
    found: list[float | str] = []
    for named in sources:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, -1.0)
        try:
            load_initial_weights(model, named[rank], collectives)
            found.append(model.weight.item())
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_what_rank_0_reads_is_every_ranks_weights_or_error(tmp_path: Path) -> None:
    here, absent, broken = tmp_path / "here.safetensors", tmp_path / "absent", tmp_path / "broken.safetensors"
    save_file({"weight": torch.full((1, 1), 3.0)}, here)
    broken.write_bytes(b"no weights")
    sources: list[tuple[Path | None, Path | None]] = [
        *((here, here), (here, absent), (here, None), (None, None)),
        *((absent, here), (broken, here)),
    ]
    first, second = run_ranks(begin, 2, sources)
    assert first == second
    assert first[:4] == [3.0, 3.0, 3.0, -1.0]
    assert f"{absent} holds no weights" in first[4]
    assert f"cannot read {broken}" in first[5]


def checkpoints(folder: Path, *steps: int) -> CheckpointStore:
    """Those of a run in ``folder``."""
    store = CheckpointStore(make_run(folder).checkpoints)
    for step in steps:
        store.save(Snapshot(step, {"weight": torch.full((3,), float(step))}, {"step": step}, {"epoch": 0}))
    return store


def begin_attempt(store: CheckpointStore) -> tuple[int | None, list[str]]:
    """From which step an attempt goes on, and the warnings."""
    heard = RecordingSink()
    plan: Any = None
    run = RunDir(store.folder.parent)
    rank = RankContext(run, World(), RunConfig(), plan, torch.device("cpu"), Collectives(World()), sink=heard)
    snapshot = load_latest(rank)
    return snapshot and snapshot.step, [event.text for event in heard.events if isinstance(event, Note)]


def test_an_attempt_sets_broken_checkpoints_aside(tmp_path: Path) -> None:
    store = checkpoints(tmp_path / "run", 4, 8)
    (store.path_of(8) / "model.safetensors").write_bytes(b"broken")
    step, (warning, aside) = begin_attempt(store)
    assert step == 4 and "step 8 is broken" in warning
    assert aside.startswith(f"{store.folder / 'step-00000008.broken'} was set aside")
    assert store.steps() == [4] and (store.folder / "step-00000008.broken" / "trainer.pt").is_file()
    (store.path_of(4) / "model.safetensors").write_bytes(b"broken")
    step, (warning, _) = begin_attempt(store)
    assert step is None and "step 4 is broken" in warning
    assert store.steps() == [], "they would count among the newest that are kept"


def test_an_attempt_does_not_begin_without_a_checkpoint_that_cannot_be_read_now(tmp_path: Path) -> None:
    store = checkpoints(tmp_path / "run", 4, 8)
    manifest = store.path_of(8) / "manifest.json"
    good = manifest.read_bytes()
    manifest.unlink()
    manifest.symlink_to("/proc/self/mem")  # whose reading fails with EIO
    with pytest.raises(UnreadableError, match=r"manifest\.json"):
        begin_attempt(store)
    assert store.steps() == [4, 8]
    manifest.unlink()
    manifest.write_bytes(good)
    assert begin_attempt(store) == (8, [])


@pytest.mark.parametrize(
    ("before", "shown"), [(["val_score", "max"], "val_score (max)"), (["val_score"], "['val_score'] (unknown)")]
)
def test_another_metric_than_the_checkpoints_starts_the_best_again(before: Any, shown: str) -> None:
    state = TrainState(step=3, best_value=0.5, best_metric={"val_score": 0.5}, evaluations_without_gain=2)
    plan: Any = SimpleNamespace(monitor="val_loss", mode="min", total_steps=9)
    note = judge_afresh(state, {"monitor": before}, plan)
    assert note is not None
    assert f"judged by {shown} and is now judged by val_loss (min)" in note
    assert (state.best_value, state.best_metric, state.evaluations_without_gain) == (None, {}, 0)
