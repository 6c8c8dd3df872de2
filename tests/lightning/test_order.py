"""Lockstep's order in ``lockstep lightning fit``: every sample once an epoch, also across a stop, on any ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep import Order
from lockstep.lightning.cli import run
from lockstep.rundir.folder import RunDir
from tests.conftest import RunCli
from tests.gloo import ROOT
from tests.lightning.test_cli import write_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

SAMPLES, SEED = 21, 7


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # LightningCLI seeds the process, and leaves word of it


def configuration(
    folder: Path, *, devices: tuple[str, ...] = ("cpu",), callbacks: Any = None, accumulate: int = 1, **numbers: Any
) -> Path:
    trainer = {"max_epochs": 2, "enable_progress_bar": False, "enable_model_summary": False, "callbacks": callbacks}
    trainer["accumulate_grad_batches"] = accumulate
    return write_config(
        folder,
        seed_everything=SEED,
        model={"class_path": "tests.lightning.trainings.Numbers", "init_args": {"samples": SAMPLES, **numbers}},
        trainer=trainer,
        hardware={"selected_devices": list(devices)},
    )


def seen(folder: Path, name: str = "seen", rank: int = 0) -> list[tuple[int, list[int]]]:
    lines = (folder / f"{name}-{rank}.jsonl").read_text().splitlines()
    return [(epoch, samples) for epoch, samples in map(json.loads, lines)]


def in_order(epoch: int) -> list[int]:
    order: list[int] = Order(SAMPLES, SEED).slice(epoch, 0, SAMPLES).tolist()
    return order


def flat(batches: list[tuple[int, list[int]]], epoch: int) -> list[int]:
    return [sample for of_epoch, batch in batches for sample in batch if of_epoch == epoch]


def test_a_stopped_fit_goes_on_with_the_samples_that_it_had_not_seen(tmp_path: Path) -> None:
    path = configuration(tmp_path)
    assert run(["fit", "-c", str(path), "--run_dir", "whole"]) == 0
    whole = seen(tmp_path)
    for epoch in (0, 1):
        assert flat(whole, epoch) == in_order(epoch), "Lockstep's order, new in each epoch, nothing dropped or padded"
    path = configuration(tmp_path, name="ended")
    assert run(["fit", "-c", str(path), "--run_dir", "ended", "--trainer.max_steps", "4"]) == 0
    assert run(["fit", "-c", str(path), "--ckpt_path", "ended"]) == 0
    assert seen(tmp_path, "ended") == whole, "what max_steps ended in mid-epoch, too"


def test_micro_batches_that_batchnorm_cannot_take_are_fewer_and_larger(tmp_path: Path) -> None:
    path = configuration(tmp_path, batch_size=1, batchnorm=True, accumulate=8)
    assert run(["fit", "-c", str(path), "--run_dir", "out"]) == 0
    assert RunDir.open(tmp_path / "out").plan()["decisions"]["accumulate"]["value"] == 4
    assert [len(batch) for epoch, batch in seen(tmp_path) if epoch == 0] == [2, 2, 2, 2, 4, 3, 3, 3]
    assert flat(seen(tmp_path), 0) == in_order(0)


@pytest.mark.parametrize("kind", ["Weighted", "Batched"])
def test_a_loader_keeps_its_own_order_on_one_device(tmp_path: Path, kind: str) -> None:
    path = configuration(tmp_path)
    path.write_text(path.read_text().replace("trainings.Numbers", f"trainings.{kind}"))
    assert run(["fit", "-c", str(path), "--run_dir", "out"]) == 0
    assert [len(flat(seen(tmp_path), epoch)) for epoch in (0, 1)] == [SAMPLES, SAMPLES]
    folder = RunDir.open(tmp_path / "out")
    assert folder.plan()["decisions"]["global_batch"]["value"] == 4
    assert folder.steps()[-1]["samples_seen"] >= 2 * SAMPLES


@pytest.mark.slow
def test_ddp_from_the_command_line_shares_the_order_of_one_process(run_cli: RunCli, tmp_path: Path) -> None:
    """The Trainer's own ``devices`` and ``strategy`` start ranks, too."""
    path = configuration(tmp_path, batchnorm=True)
    config = yaml.safe_load(path.read_text().replace("trainings.Numbers", "trainings.Unequal"))
    config["trainer"] |= {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    path.write_text(yaml.safe_dump({**config, "hardware": {}}))
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    result = run_cli("lightning", "fit", "-c", path, "--run_dir", "out", env=env, lightning=True)
    assert result.code == 0, result.err
    ranks = [seen(tmp_path, rank=rank) for rank in (0, 1)]
    for epoch in (0, 1):
        steps = [a + b for (of_epoch, a), (_, b) in zip(*ranks, strict=True) if of_epoch == epoch]
        assert [sample for step in steps for sample in step] == in_order(epoch)
        assert [len(step) for step in steps] == [8, 8, 5]
    folder = RunDir.open(tmp_path / "out")
    record, rows = folder.read(), folder.epochs()
    assert (record.status, record.placement["world_size"], record.placement["strategy"]) == ("completed", 2, "ddp")
    assert [row["step"] for row in rows] == [3, 6]
    assert [row["val_loss"] for row in rows] == [2.0, 2.0], "the mean of 0 to 4, unequally shared"
    assert all(row["val_most"] == row["val_least"] != 0.0 for row in rows), "rank 0's buffers"
    assert sorted(path.name for path in folder.logs.glob("rank-*.log")) == ["rank-0.log", "rank-1.log"]
