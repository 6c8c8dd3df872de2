"""What an attempt begins with: the latest valid checkpoint, or weights that rank 0 reads, whatever the others see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lockstep
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import CheckpointError, UnreadableError
from lockstep.rundir.folder import RunDir
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.toys import Toy

STEPS: dict[str, Any] = {
    "training": {"max_steps": 8, "early_stopping_patience": 0},
    "scheduler": {"name": "constant", "warmup_steps": 0},
    "checkpoint": {"every_steps": 4, "keep_last": 9},
}


def begin(rank: int, ranks: int, folder: Path, sources: dict[str, Path]) -> dict[str, str]:
    """Train from the weights of each source, which only rank 0 sees; the errors."""
    errors = {}
    for name, source in sources.items():
        errors[name] = ""
        training = {"max_steps": 1, "global_batch_size": 8}
        try:
            attempt(Still, folder / name, rank, ranks, init_from=str(source), training=training)
        except CheckpointError as error:
            errors[name] = str(error)
    return errors


class Still(Toy):
    """Its optimizer changes no weight."""

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0)


def test_what_rank_0_reads_is_every_ranks_weights_or_error(tmp_path: Path) -> None:
    given, absent, broken = tmp_path / "given.safetensors", tmp_path / "absent", tmp_path / "broken.safetensors"
    weights = {name: torch.full_like(value, 3.0) for name, value in Still().model().state_dict().items()}
    save_file(weights, given)
    broken.write_bytes(b"no weights")
    first, second = run_ranks(begin, 2, tmp_path, {"given": given, "absent": absent, "broken": broken})
    assert first == second
    assert first["given"] == ""
    assert f"{absent} " in first["absent"]
    assert f" {broken}" in first["broken"]
    store = CheckpointStore(RunDir(tmp_path / "given").checkpoints)
    for name, value in load_file(store.path_of(1) / "model.safetensors").items():
        assert torch.equal(value, weights[name])


def of_eight_steps(folder: Path) -> tuple[lockstep.Run, CheckpointStore]:
    run = lockstep.train(Toy, STEPS, devices="cpu", save_dir=folder)
    store = CheckpointStore(RunDir(folder).checkpoints)
    assert store.steps() == [4, 8]
    return run, store


def resumed_from(run: lockstep.Run, steps: int) -> int:
    """The step from which a resume continues; it trains ``steps`` in all."""
    run.resume(training={"max_steps": steps})
    _, step = max(RunDir(run.run_dir).resumed_from().items())
    return step


def test_an_attempt_sets_broken_checkpoints_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, store = of_eight_steps(tmp_path / "run")
    (store.path_of(8) / "model.safetensors").write_bytes(b"broken")
    aside = store.folder / "step-00000008.broken"
    assert resumed_from(run, 4) == 4
    shown = capsys.readouterr().out
    assert "step 8 " in shown and f"{aside} " in shown
    assert store.steps() == [4] and (aside / "trainer.pt").is_file()
    (store.path_of(4) / "model.safetensors").write_bytes(b"broken")
    assert resumed_from(run, 1) == 0
    assert "step 4 " in capsys.readouterr().out
    assert store.steps() == [1], "the broken ones would count among the newest that are kept"


def test_an_attempt_does_not_begin_without_a_checkpoint_that_cannot_be_read_now(tmp_path: Path) -> None:
    _, store = of_eight_steps(tmp_path / "run")
    manifest = store.path_of(8) / "manifest.json"
    good = manifest.read_bytes()
    manifest.unlink()
    manifest.symlink_to("/proc/self/mem")  # whose reading fails with EIO
    with pytest.raises(UnreadableError, match=r"manifest\.json"):
        attempt(Toy, tmp_path / "run", resume=True, training={"max_steps": 9})
    assert store.steps() == [4, 8]
    manifest.unlink()
    manifest.write_bytes(good)
    attempt(Toy, tmp_path / "run", resume=True, training={"max_steps": 9})
    assert RunDir(tmp_path / "run").resumed_from()[2] == 8
