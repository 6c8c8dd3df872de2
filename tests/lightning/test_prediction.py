"""``lockstep predict`` and ``Run.predict`` of a LightningModule's run: what its ``predict_step`` returns."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from lockstep.checkpoint.store import CheckpointStore
from lockstep.cli.main import main
from lockstep.errors import DataError, TaskError, UnsupportedError
from lockstep.lightning import fit
from lockstep.rundir.folder import RunDir
from tests.lightning import own
from tests.lightning.trainings import Numbers, Weight

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")

SETTINGS: dict[str, Any] = {
    "training": {"threads": 1, "epochs": 2},
    "telemetry": {"progress": "silent", "system_metrics": False},
    "hardware": {"selected_devices": ["cpu"]},
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # modules write down what they have seen


def trained(module: Any, folder: Path, data: Any = None) -> lockstep.Run:
    return fit(module, data, config={**SETTINGS, "save_dir": str(folder / "run")})


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


@pytest.mark.slow
def test_each_sample_of_a_split_has_a_row_the_same_on_one_and_two_ranks(tmp_path: Path) -> None:
    """Of one batch, which one of the ranks has, of two, and of six in training, with ``shuffle``."""
    lockstep.train("tests.lightning.trainings:Tenfold", {**SETTINGS, "save_dir": str(tmp_path / "run")})
    run = lockstep.Run(tmp_path / "run")
    assert main(["predict", str(run.run_dir)]) == 0
    default = rows_of(run.run_dir / "predictions-predict.csv")
    assert [(int(row["index"]), int(row["tenfold"])) for row in default] == [(n, 10 * n) for n in range(5)]
    layer = run.load_model("best").layer
    expected = layer(torch.arange(5.0)[:, None])[:, 0].tolist()
    assert [float(row["output"]) for row in default] == pytest.approx(expected, rel=1e-6)
    for split, samples in (("predict", 5), ("val", 4), ("train", 21)):
        files = [run.predict(split, tmp_path / f"{split}-{n}.csv", devices=",".join(["cpu"] * n)) for n in (1, 2)]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert [int(row["tenfold"]) for row in rows_of(files[0])] == [10 * number for number in range(samples)]


class OfSamples(Weight):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"weight": self.layer[0].weight[0].expand(len(batch))}


def test_an_object_is_predicted_and_evaluated_with_the_checkpoint_and_keeps_its_weights(tmp_path: Path) -> None:
    """Its validation gets worse, so the first of two epochs is the best."""
    module = OfSamples()
    run = trained(module, tmp_path)
    weight = module.layer[0].weight.item()
    best = CheckpointStore(RunDir(run.run_dir).checkpoints).load(6).model["layer.0.weight"].item()
    assert best != weight
    assert run.predict()["weight"].tolist() == pytest.approx([best] * 5, rel=1e-6)
    assert run.evaluate("val") == {"val_loss": 0.0}
    assert module.layer[0].weight.item() == weight


class Several(Numbers):
    """Two loaders, one of them of data without a length; each batch has two columns."""

    def predict_dataloader(self) -> Any:
        return [DataLoader(torch.arange(3), batch_size=2), DataLoader(Streamed(), batch_size=2)]  # type: ignore[arg-type]

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch, 2 * batch


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(10, 13))


def test_rows_of_several_loaders_name_the_loader(tmp_path: Path) -> None:
    rows = trained(Several(), tmp_path).predict()
    assert list(rows) == ["dataloader", "index", "output_0", "output_1"]
    expected = [(0, n, n, 2 * n) for n in range(3)] + [(1, n, 10 + n, 20 + 2 * n) for n in range(3)]
    assert list(rows.itertuples(index=False, name=None)) == expected


def test_other_stages_of_a_data_module_are_set_up(tmp_path: Path) -> None:
    class Staged(own.Numbered):
        def setup(self, stage: str) -> None:
            super().setup(stage)
            self.stage = stage

        def test_dataloader(self) -> Any:
            assert self.stage == "test"
            return super().test_dataloader()

    class Predicting(own.Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"number": batch[2]}

    run = trained(Predicting(), tmp_path, Staged())
    assert run.predict("test")["number"].tolist() == list(range(11))
    with pytest.raises(DataError, match=r"predict_dataloader\(\)"):
        run.predict()


def test_what_has_no_rows_is_one_error(tmp_path: Path) -> None:
    run = trained(Weight(), tmp_path)
    with pytest.raises(TaskError, match=r"predict_step\(\)"):
        run.predict()
    for arguments in ({"loss": True}, {"data": TensorDataset(torch.ones(3))}):
        with pytest.raises(UnsupportedError):
            run.predict(**arguments)
