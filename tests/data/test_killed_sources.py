"""Ranks are killed, and their run resumes on another number: each kind of data alone, in every sampling."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import lockstep
from lockstep import Mixture, Order, Packed
from lockstep.readers.columns import ArrowFiles, ParquetFiles
from lockstep.readers.records import ClassFolders, CsvFiles, JsonLines, TarShards, TokenFile
from lockstep.rundir.folder import RunDir
from lockstep.verification import verify
from tests.attempts import attempt
from tests.data.test_killed import ROWS, SHARDS, OfFiles, loaded, sample, write
from tests.gloo import run_ranks
from tests.samples import samples_by_step
from tests.toys import FEATURES, Toy

SOURCES = ["parquet", "arrow", "lines", "csv", "tar", "tokens", "folders", "hugging_face"]
SAMPLINGS = ["uniform", "weighted", "balanced", "mixed", "packed"]
#: An epoch of 30 rows ends with a step of two samples, fewer than three ranks.
SETTINGS: Any = {
    "training": {"epochs": 24, "max_steps": 24, "global_batch_size": 7},
    "telemetry": {"record_samples": True},
    "checkpoint": {"every_steps": 3},
    "scheduler": {"name": "constant", "warmup_steps": 0},
}


def opened(source: str, folder: str, shards: range = range(SHARDS)) -> Any:
    """Some of the files; where batches can be gathered, rows stay as they are in the files."""

    def files(suffix: str) -> list[str]:
        return [f"{folder}/{shard}.{suffix}" for shard in shards]

    match source:
        case "parquet":
            return ParquetFiles(files("parquet"))
        case "arrow":
            return ArrowFiles(files("arrow"))
        case "lines":
            return JsonLines(files("jsonl"), transform=sample)
        case "csv":
            return CsvFiles(files("csv"), transform=sample)
        case "tar":
            return TarShards(files("tar"), transform=sample)
        case "tokens":
            return TokenFile(files("bin"), FEATURES + 1, targets=False)
        case "folders":
            whole = ClassFolders(Path(folder) / "classes", loaded)
            return whole if len(shards) == SHARDS else Subset(whole, [*range(shards[0], ROWS, SHARDS)])
    import datasets

    parts = [datasets.load_from_disk(f"{folder}/{shard}.hf") for shard in shards]
    return datasets.concatenate_datasets(parts).with_format("torch")


def save_for_hugging_face(folder: Path) -> None:
    import datasets
    import pyarrow.parquet

    for shard in range(SHARDS):
        table = pyarrow.parquet.read_table(folder / f"{shard}.parquet")
        datasets.Dataset(table).save_to_disk(folder / f"{shard}.hf")


def inputs_of(row: Any) -> tuple[Tensor, Any]:
    """Inputs and label of a sample, or of a batch of them, of any source."""
    if isinstance(row, dict):
        row = row["x"], row["y"]
    elif not isinstance(row, tuple | list):
        row = (row[..., :-1] - 1000) / 100, row[..., -1]
    return torch.as_tensor(row[0], dtype=torch.float32), row[1]


def some_tokens(row: Any) -> list[int]:
    inputs, label = inputs_of(row)
    return [int(value) for value in inputs[: 3 + 4 * int(label)] * 100]


def training_set(cell: str) -> tuple[Any, Any]:
    """The data set, and weights."""
    (source, sampling), folder = cell.split(), os.environ["FOLDER"]
    whole = opened(source, folder)
    if sampling in ("mixed", "packed"):
        parts = {str(shard): opened(source, folder, range(shard, shard + 1)) for shard in range(SHARDS)}
        if sampling == "mixed":
            return Mixture(parts, {"0": 0.7, "1": 0.3}), None
        return Packed(whole, FEATURES, tokens=some_tokens), None
    labels = np.array([int(inputs_of(whole[row])[1]) for row in range(len(whole))])
    weights = {"weighted": np.arange(len(whole)) % 5, "balanced": 1 / np.bincount(labels)[labels]}
    return whole, weights.get(sampling)


class OfOneSource(OfFiles):
    def datasets(self) -> lockstep.Datasets:
        train, weights = training_set(os.environ["KIND"])
        return lockstep.Datasets(train, Toy.datasets(self).val, weights=weights)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        is_packed = isinstance(batch, dict) and "tokens" in batch
        return super().loss(model, batch if is_packed else inputs_of(batch))


def trains(rank: int, size: int, cells: list[str], folder: Path, resume: bool, settings: Any) -> list[Any]:
    found = []
    for cell in cells:
        os.environ["KIND"] = cell
        found.append(attempt(OfOneSource, folder / cell.replace(" ", "-"), rank, size, resume=resume, **settings)[0])
    return found


def check(cells: list[str], folder: Path, seed: int) -> None:
    """Train each cell on one rank until it is killed, then on three, and all to the end on two."""
    chance = random.Random(seed)
    env = {"FOLDER": os.environ["FOLDER"]}
    for cell in cells:
        for ranks in (1, 3):
            killed = [chance.randrange(ranks), chance.randint(4, 7)]
            with pytest.raises(RuntimeError, match=f"rank {killed[0]} died"):
                given = ([cell], folder, ranks > 1, SETTINGS)
                run_ranks(trains, ranks, *given, env={**env, "KILL": json.dumps(killed)})
    weights = run_ranks(trains, 2, cells, folder, True, SETTINGS, env=env, timeout_s=240)[0]
    alone = trains(0, 1, cells, folder / "alone", False, SETTINGS)
    for number, cell in enumerate(cells):
        assert all(torch.allclose(alone[number][name], weights[number][name], atol=1e-4) for name in alone[number])
        compare(cell, RunDir(folder / cell.replace(" ", "-")), RunDir(folder / "alone" / cell.replace(" ", "-")))


def compare(cell: str, run: RunDir, alone: RunDir) -> None:
    """Each step took the samples that the order gives it, and that a run on one rank took."""
    assert len(run.resumed_from()) == 3, "it was killed twice"
    found = samples_by_step(run)
    assert found == samples_by_step(alone)
    dataset, weights = training_set(cell)
    if isinstance(dataset, Mixture) or weights is None:
        seed = alone.plan()["seed"]
        positions = alone.plan()["batch"]["samples"]
        is_mixture = isinstance(dataset, Mixture)
        order = dataset.sampling().order(positions, seed) if is_mixture else Order(positions, seed)
        slices = ((epoch, start) for epoch in count() for start in range(0, positions, 7))
        for step, (epoch, start) in zip(range(1, 25), slices, strict=False):
            assert found[step] == (epoch + 1, Counter(order.slice(epoch, start, min(start + 7, positions)).tolist()))
    assert max(found) == 24


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("pyarrow")
    data = tmp_path / "data"
    data.mkdir()
    write(data)
    for name, value in (("FOLDER", str(data)), ("KIND", ""), ("KILL", "[0, 0]")):
        monkeypatch.setenv(name, value)
    return str(data)


def there(source: str, folder: str) -> None:
    """Skip where the package of ``source`` is missing."""
    if source == "hugging_face":
        pytest.importorskip("datasets")
        save_for_hugging_face(Path(folder))


@pytest.mark.slow
def test_a_mixture_of_shuffled_row_groups_and_tokens_outlive_kills(files: str, tmp_path: Path) -> None:
    check(["parquet mixed", "tokens uniform"], tmp_path, 0)


@pytest.mark.drill
@pytest.mark.parametrize("source", SOURCES)
def test_every_sampling_of_every_source_outlives_kills(source: str, files: str, tmp_path: Path) -> None:
    there(source, files)
    check([f"{source} {sampling}" for sampling in SAMPLINGS], tmp_path, SOURCES.index(source))


@pytest.mark.drill
@pytest.mark.parametrize("source", SOURCES)
def test_exact_mode_and_verify_of_every_source(
    source: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there(source, files)
    cells = [f"{source} {sampling}" for sampling in SAMPLINGS]
    exact = {**SETTINGS, "training": {**SETTINGS["training"], "max_steps": 12, "reproducibility": "exact"}}
    two = run_ranks(trains, 2, cells, tmp_path / "two", False, exact, env={"FOLDER": files}, timeout_s=240)[0]
    for cell, one, many in zip(cells, trains(0, 1, cells, tmp_path / "one", False, exact), two, strict=True):
        assert all(torch.equal(one[name], many[name]) for name in one), cell
    monkeypatch.setenv("KIND", f"{source} uniform")
    settings = {**SETTINGS, "runs_dir": str(tmp_path), "hardware": {"selected_devices": ["cpu"] * 3}}
    assert verify(OfOneSource, settings, steps=12).outcome in ("identical", "equal")
