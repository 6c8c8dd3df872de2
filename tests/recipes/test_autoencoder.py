from __future__ import annotations

import hashlib
import importlib.util
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep import train
from lockstep.errors import ConfigError
from lockstep.lab.report.source import read_run
from lockstep.recipes.autoencoder import AutoencoderConfig, AutoencoderTask, load_digits
from lockstep.recipes.autoencoder.model import Autoencoder
from lockstep.rundir.folder import RunDir
from tests.gloo import ROOT


def converter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_digits", ROOT / "scripts/convert_digits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_carries_all_digits() -> None:
    parts = [load_digits("train"), load_digits("val"), load_digits("test")]
    assert [len(part.images) for part in parts] == [1400, 197, 200]
    for part in parts:
        assert part.images.shape[1:] == (1, 8, 8)
        assert part.images.dtype == np.float32
        assert (part.images.min(), part.images.max()) == (0, 1)
        assert set(part.labels.tolist()) == set(range(10))
    whole = np.concatenate([part.images for part in parts])
    assert len(np.unique(whole.reshape(len(whole), -1), axis=0)) == 1797, "no image is in two splits"


def test_provenance_and_licence_lie_beside_the_data() -> None:
    text = files("lockstep.recipes.autoencoder").joinpath("digits.txt").read_text()
    assert converter().SHA256 in text
    assert "CC BY 4.0" in text
    assert "The scikit-learn developers" in text


def test_another_file_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "digits.csv.gz"
    other.write_bytes(b"something else")
    assert converter().main([str(other), "--output", str(tmp_path / "out.npz")]) == 2
    assert hashlib.sha256(b"something else").hexdigest() in capsys.readouterr().err
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize(("hidden", "code"), [((128, 64), 16), ((), 1), ((7, 5, 3), 2)])
def test_the_decoder_mirrors_the_encoder(hidden: tuple[int, ...], code: int) -> None:
    model = Autoencoder(hidden=hidden, code=code)
    images = torch.rand(3, 1, 8, 8)
    assert model.encoder(images).shape == (3, code)
    reconstructions = model(images)
    assert reconstructions.shape == images.shape
    assert 0 <= reconstructions.min() <= reconstructions.max() <= 1
    shapes = [tuple(p.shape) for p in model.parameters() if p.dim() == 2]
    assert shapes == [shape[::-1] for shape in reversed(shapes)]


def test_the_loss_is_the_mean_squared_error_of_pixels() -> None:
    task = AutoencoderTask(AutoencoderConfig())
    model, images = task.model(), torch.rand(5, 1, 8, 8)
    loss, rows = task.validate(model, (images,))
    assert loss.count == 5 * 64
    expected = ((model(images) - images) ** 2).mean()
    torch.testing.assert_close(loss.total / loss.count, expected)
    torch.testing.assert_close(task.loss(model, (images,)).total, loss.total)
    metrics = task.metrics()
    metrics.update(*rows)
    found = metrics.compute()
    torch.testing.assert_close(found["mse"], expected.detach())
    torch.testing.assert_close(found["psnr"], -10 * torch.log10(expected.detach()))


def test_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fix: .*--data-dir"):
        train("autoencoder", {"data": {"data_dir": "somewhere"}})


@pytest.mark.long
def test_it_learns_and_its_run_folder_is_mirrored(tmp_path: Path) -> None:
    """The copy is a run folder in which `last` and `best` mean what they meant; pictures show what it reconstructs."""
    settings = {
        "save_dir": str(tmp_path / "run"),
        "hardware": {"selected_devices": ["cpu"]},
        "training": {"epochs": 6, "threads": 1},
        "storage": {"mirror": f"file://{tmp_path}/copy"},
        "telemetry": {"progress": "silent"},
    }
    result = train("autoencoder", settings)
    mean_image = load_digits("val").images.var(axis=0).mean()
    assert result.metrics["val_loss"] < 0.7 * mean_image
    run, copy = RunDir.open(tmp_path / "run"), RunDir.open(tmp_path / "copy")
    assert copy.read() == run.read()
    assert copy.epochs() == run.epochs()
    files = sorted(path.name for path in run.pictures.iterdir())
    assert files == [f"reconstructions-epoch-000{epoch}.png" for epoch in range(1, 7)]
    assert files == sorted(path.name for path in copy.pictures.iterdir())
    with Image.open(run.pictures / files[-1]) as picture:
        drawn = np.asarray(picture, dtype=np.float64)[::8, ::8] / 255
    images = load_digits("val").images[:12, 0]
    np.testing.assert_allclose(drawn[:8], np.concatenate(list(images), axis=1), atol=1 / 255)
    assert 0 < ((drawn[:8] - drawn[8:]) ** 2).mean() < 0.7 * drawn[:8].var()
    logged = EventAccumulator(str(run.logs), {"images": 0}).Reload().Images("reconstructions")
    assert [(image.step, image.width, image.height) for image in logged] == [(44 * k, 768, 128) for k in range(1, 7)]
    assert read_run(run).drawn == {"reconstructions": (run.pictures / files[-1]).read_bytes()}
    more = {**settings, "save_dir": str(copy.path), "storage": {"mirror": None}}
    more["training"] = {"epochs": 7, "threads": 1}
    assert train("autoencoder", more, resume=True).step == 7 * 44
    assert [row["epoch"] for row in copy.epochs()] == list(range(1, 8))
