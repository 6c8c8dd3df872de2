"""``examples/autoencoder``: its programs as a user runs them, and its files among several processes."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.recipes.autoencoder import load_digits
from lockstep.rundir.folder import RunDir
from tests import commands
from tests.conftest import cli_environment
from tests.data.web import Site, serve
from tests.gloo import ROOT, run_ranks

FOLDER = ROOT / "examples" / "autoencoder"


def start(folder: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """``python ARGUMENTS``, with the example's modules, in a folder of the test's own."""
    environ = cli_environment(PYTHONPATH=f"{FOLDER}:{ROOT / 'src'}", **env)
    return commands.start(*arguments, cwd=folder, env=environ, merged=True, lightning=arguments[0] != "-c")


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_its_own_test_passes() -> None:
    assert "Ran 5 tests" in finish(start(FOLDER, "-m", "unittest", "tests/test_lightning_parameters.py"))


@pytest.mark.slow
def test_the_command_line_reconstructs_the_digits(tmp_path: Path) -> None:
    quiet = ("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false")
    config = str(FOLDER / "config" / "cli_config.yaml")
    output = finish(start(tmp_path, "-m", "lightning_trainer", "fit", "-c", config, *quiet))
    assert "- Strategy: SingleDeviceStrategy (1 rank)" in output
    run = RunDir.open(tmp_path / "output" / "cli")
    record = run.read()
    pixels = load_digits("val").images
    assert record.best_metric["val_loss"] < 0.35 * pixels.var(axis=0).mean(), "far better than the mean image"
    assert run.epochs()[0]["lr"] == pytest.approx(0.003)
    assert run.epochs()[-1]["lr"] < 0.0001, "the configuration's optimizer and schedule"
    with Image.open(run.logs / "reconstructions.png") as picture:
        assert picture.size == (12 * 8 * 8, 2 * 8 * 8)
        drawn = np.asarray(picture, dtype=np.float64)[::8, ::8] / 255
    np.testing.assert_allclose(drawn[:8, :8], pixels[0, 0], atol=1 / 255)
    inputs, reconstructions = drawn[:8], drawn[8:]
    assert ((inputs - reconstructions) ** 2).mean() < 0.5 * inputs.var()
    [own] = run.logs.glob("lightning_logs/*")
    assert EventAccumulator(str(own)).Reload().Tags()["images"] == ["reconstructions"]
    assert {"lr", "val_loss"} <= {row for epoch in run.epochs() for row in epoch}
    uploaded = tmp_path / "output" / "uploaded"
    assert (uploaded / "metrics.json").read_bytes() == run.metrics_file.read_bytes()
    assert list(uploaded.glob("checkpoints/step-*/model.safetensors"))
    before = {path: path.read_bytes() for path in tmp_path.glob("output/**/*") if path.is_file()}
    for stage in ("validate", "test", "predict"):
        finish(start(tmp_path, "-m", "lightning_trainer", stage, "-c", config, "--ckpt_path", "output/cli", *quiet[:2]))
    predictions = run.path / "predictions.pt"
    assert {path for path in tmp_path.glob("output/**/*") if path.is_file()} == {*before, predictions}
    assert {path: path.read_bytes() for path in before} == before, "callbacks of the fit do nothing"
    images = torch.from_numpy(load_digits("test").images)
    reconstructions = torch.cat(torch.load(predictions))
    assert reconstructions.shape[0] == len(images)
    assert ((reconstructions.flatten() - images.flatten()) ** 2).mean() < 0.5 * images.var()


@pytest.mark.slow
def test_the_script_trains(tmp_path: Path) -> None:
    config: dict[str, Any] = yaml.safe_load((FOLDER / "config" / "config.yaml").read_text())
    config["training"] = {"epochs": 2, "threads": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    output = finish(start(tmp_path, str(FOLDER / "lightning_train.py"), "config.yaml"))
    assert "best epoch 2:" in output
    run = RunDir.open(next((tmp_path / "output" / "train").iterdir()))
    assert len(run.epochs()) == 2
    assert list(run.logs.glob("**/reconstructions.png"))
    assert json.loads((tmp_path / "output" / "uploaded" / "run.json").read_text())["status"] == "completed"


# Downloads. The file is made here, in the form that the example reads.


def as_table() -> bytes:
    parts = [load_digits(split) for split in ("train", "val", "test")]  # type: ignore[arg-type]
    images = np.concatenate([part.images for part in parts]).reshape(-1, 64) * 16
    table = np.column_stack([images, np.concatenate([part.labels for part in parts])])
    return gzip.compress("\n".join(",".join(f"{value:g}" for value in row) for row in table).encode())


BEFORE = """
import sys
from src.data.pytorch_dataset import DigitsDataset, fetch_digits, is_main_process
file = fetch_digits(sys.argv[1], sys.argv[2], sys.argv[3])
print(is_main_process(), len(DigitsDataset("val", file)))
"""


@pytest.mark.slow
def test_one_download_before_there_is_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    content = as_table()
    with serve(Site(content)) as site:
        arguments = ("-c", BEFORE, str(tmp_path), site.url, hashlib.sha256(content).hexdigest())
        ranks = [start(tmp_path, *arguments, RANK=str(rank), WORLD_SIZE="2", no_proxy="127.0.0.1") for rank in (0, 1)]
        answers = [finish(rank).split() for rank in ranks]
    assert answers == [["True", "197"], ["False", "197"]]
    assert len(site.asked) == 1


def fetch_in_ranks(rank: int, ranks: int, folder: Path, urls: list[str], sha256: str) -> list[str]:
    os.environ["no_proxy"] = "127.0.0.1"
    sys.path.insert(0, str(FOLDER))
    from src.data.pytorch_dataset import fetch_digits  # type: ignore[import-not-found]

    from lockstep.errors import DataError

    answers = []
    for number, url in enumerate(urls):
        try:
            fetch_digits(folder / str(number), url, sha256)
            answers.append("there")
        except DataError as error:
            answers.append(error.why)
    return answers


def test_one_download_among_ranks_and_a_failure_is_everybodys(tmp_path: Path) -> None:
    content = as_table()
    with serve(Site(content)) as good, serve(Site(content, statuses=[404, 404])) as bad:
        found = run_ranks(fetch_in_ranks, 2, tmp_path, [good.url, bad.url], hashlib.sha256(content).hexdigest())
    assert found == [["there", "the server answers 404 Not Found"]] * 2
    assert len(good.asked) == 1
