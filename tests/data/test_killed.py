"""Ranks are killed, and their run resumes on another number: every kind of file, however its samples are chosen."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import resource
import signal
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset

import lockstep
from lockstep import Mixture, Packed
from lockstep.readers.records import ClassFolders, CsvFiles, JsonLines, TarShards, TokenFile
from lockstep.rundir.files import read_jsonl
from lockstep.rundir.folder import RunDir
from lockstep.verification import verify
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.samples import used_samples
from tests.toys import CLASSES, FEATURES, Toy, arrays

ROWS, SHARDS = 30, 2
KINDS = ["uniform", "weighted", "balanced", "mixed", "packed", "stream"]


def write(folder: Path) -> None:
    """The same rows in every kind of file, two files of each."""
    import pyarrow as pa
    import pyarrow.parquet

    inputs, labels = arrays(ROWS, 1)
    tokens = torch.cat([(inputs * 100 + 1000).long(), labels[:, None]], 1).numpy().astype(np.uint16)
    for shard, part in enumerate(np.array_split(np.arange(ROWS), SHARDS)):
        rows = [{"x": inputs[row].tolist(), "y": int(labels[row])} for row in part]
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with (folder / f"{shard}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["x", "y"], *([json.dumps(row["x"]), row["y"]] for row in rows)])
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number, row in zip(part.tolist(), rows, strict=True):
                for extension, content in (("x.json", json.dumps(row["x"])), ("cls", str(row["y"]))):
                    member = tarfile.TarInfo(f"{number:03d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content.encode()))
        x = pa.FixedSizeListArray.from_arrays(pa.array(inputs[part].numpy().reshape(-1)), FEATURES)
        table = pa.table({"x": x, "y": labels[part].numpy()})
        pyarrow.parquet.write_table(table, folder / f"{shard}.parquet", row_group_size=4)
        with pa.OSFile(str(folder / f"{shard}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
            out.write_table(table, max_chunksize=4)
        tokens[part].tofile(folder / f"{shard}.bin")
        for number, row in zip(part.tolist(), rows, strict=True):
            place = folder / "classes" / str(row["y"])
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number}.json").write_text(json.dumps(row["x"]))


def sample(row: Any) -> tuple[Tensor, int]:
    x = row["x"] if "x" in row else row["x.json"]
    x = json.loads(x) if isinstance(x, str) else x
    return torch.tensor(np.asarray(x, np.float32)), int(row["y"] if "y" in row else row["cls"])


class OfTokens:
    def __init__(self, folder: str) -> None:
        self.tokens = TokenFile(folder, FEATURES + 1, targets=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.tokens[index]
        return torch.tensor((row[:-1] - 1000) / 100, dtype=torch.float32), int(row[-1])


def loaded(path: Path) -> Tensor:
    return torch.tensor(json.loads(path.read_text()))


def parts(folder: str) -> dict[str, Any]:
    from lockstep.readers.columns import ArrowFiles, ParquetFiles

    found: dict[str, Any] = {kind.__name__: kind(folder, transform=sample) for kind in (JsonLines, CsvFiles, TarShards)}
    found |= {kind.__name__: kind(folder, transform=sample) for kind in (ParquetFiles, ArrowFiles)}
    return found | {"tokens": OfTokens(folder), "folders": ClassFolders(Path(folder) / "classes", loaded)}


class Lines:
    """A stream with a cursor."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.at = rows, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def some_tokens(row: tuple[Tensor, int]) -> list[int]:
    return [int(value) for value in row[0][: 3 + 4 * row[1]] * 100]


def training_set(kind: str, folder: str) -> tuple[Any, Any]:
    """The data set, and weights."""
    every = parts(folder)
    if kind == "mixed":
        inner = {name: every.pop(name) for name in ("CsvFiles", "ArrowFiles")}
        shares = {"CsvFiles": 0.7, "ArrowFiles": 0.3}
        return Mixture({**every, "inner": Mixture(inner, shares)}, {**dict.fromkeys(every, 1.0), "inner": 2.5}), None
    whole: Any = ConcatDataset(every.values())
    if kind == "packed":  # two sources of texts
        lines, rest = every.pop("JsonLines"), ConcatDataset(every.values())
        texts = {"a": Packed(lines, FEATURES, tokens=some_tokens), "b": Packed(rest, FEATURES, tokens=some_tokens)}
        return Mixture(texts, {"a": 0.7, "b": 0.3}), None
    if kind == "stream":
        return Lines(whole), None
    if kind == "balanced":
        labels = np.array([whole[index][1] for index in range(len(whole))])
        return whole, 1 / np.bincount(labels)[labels]
    return whole, None if kind == "uniform" else np.arange(len(whole)) % 5


class OfFiles(Toy):
    def datasets(self) -> lockstep.Datasets:
        train, weights = training_set(os.environ["KIND"], os.environ["FOLDER"])
        return lockstep.Datasets(train, super().datasets().val, weights=weights)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        if isinstance(batch, dict):
            batch = batch["tokens"] / 100, (batch["documents"].sum(1) + batch["positions"].sum(1)) % CLASSES
        return super().loss(model, batch)

    def _misbehave(self) -> None:
        self.calls += 1
        rank, call = json.loads(os.environ.get("KILL", "[0, 0]"))
        if self.calls == call and os.environ.get("RANK", "0") == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)


SETTINGS: Any = {
    "training": {"max_steps": 24, "global_batch_size": 18},
    "data": {"epoch_samples": 150},
    "telemetry": {"record_samples": True},
    "checkpoint": {"every_steps": 3},
    "scheduler": {"name": "constant", "warmup_steps": 0},
}


def trains(rank: int, size: int, kinds: list[str], folder: Path, resume: bool) -> dict[str, dict[str, Tensor]]:
    found = {}
    for kind in kinds:
        os.environ["KIND"] = kind
        found[kind] = attempt(OfFiles, folder / kind, rank, size, resume=resume, **SETTINGS)[0]
    return found


def losses(folder: Path) -> dict[int, float]:
    """By step, of the latest attempt that took it."""
    return {row["step"]: row["loss"] for row in read_jsonl(folder / "steps.jsonl")}


Worlds = list[tuple[int, list[int]]]


def check(worlds: dict[str, Worlds], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train each kind on each number of ranks of its ``worlds`` until one is killed; then all to the end, on two."""
    pytest.importorskip("pyarrow")
    data = folder / "data"
    data.mkdir()
    write(data)
    env = {"FOLDER": str(data)}
    monkeypatch.setenv("FOLDER", str(data))
    for kind, killed in worlds.items():
        for number, (ranks, kill) in enumerate(killed):
            with pytest.raises(RuntimeError, match=f"rank {kill[0]} died"):
                run_ranks(trains, ranks, [kind], folder, number > 0, env={**env, "KILL": json.dumps(kill)})
    weights = run_ranks(trains, 2, [*worlds], folder, True, env=env, timeout_s=120)[0]
    for kind in worlds:
        monkeypatch.setenv("KIND", kind)
        compare(kind, folder, weights[kind])


def compare(kind: str, folder: Path, weights: dict[str, Tensor]) -> None:
    """A killed run and its ``weights`` with a run on one rank."""
    run = RunDir(folder / kind)
    alone_in = folder / f"{kind}-whole"
    whole = attempt(OfFiles, alone_in, **SETTINGS)[0]
    assert all(torch.allclose(whole[name], weights[name], atol=1e-4) for name in whole)
    found, alone = losses(run.path), losses(alone_in)  # the last rows of a killed rank may be missing
    assert found == pytest.approx({step: alone[step] for step in found}, rel=1e-3)
    assert len(found) > len(alone) / 2
    used = used_samples(run)
    assert used == used_samples(RunDir(alone_in))
    dataset, _ = training_set(kind, os.environ["FOLDER"])
    expected: list[Any] = []
    if kind == "stream":
        expected = [range(0, 150), range(150, 300)]
    elif isinstance(dataset, Mixture):
        order = dataset.sampling().order(150, RunDir(alone_in).plan()["seed"])
        expected = [order.slice(epoch, 0, 150).tolist() for epoch in range(2)]
    for epoch, indices in zip(sorted(used), expected, strict=False):
        assert used[epoch] == Counter(indices)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_sample_is_lost_or_repeated_when_ranks_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check({kind: [(3, [number % 3, 11])] for number, kind in enumerate(KINDS)}, tmp_path, monkeypatch)


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_many_kills(kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    worlds = [(ranks, [chance.randrange(ranks), chance.randint(4, 8)]) for ranks in (1, 3, 2, 4)]
    check({kind: worlds}, tmp_path, monkeypatch)


def trains_exactly(rank: int, size: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    found, settings = (
        {},
        {**SETTINGS, "training": {**SETTINGS["training"], "max_steps": 12, "reproducibility": "exact"}},
    )
    for kind in KINDS:
        os.environ["KIND"] = kind
        found[kind] = attempt(OfFiles, folder / f"{kind}-{size}", rank, size, **settings)[0]
    return found


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("pyarrow")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    monkeypatch.setenv("FOLDER", str(tmp_path / "data"))
    monkeypatch.setenv("KIND", "")
    return str(tmp_path / "data")


@pytest.mark.slow
def test_exact_mode_has_equal_bits_on_one_and_two_ranks(files: str, tmp_path: Path) -> None:
    two = run_ranks(trains_exactly, 2, tmp_path, env={"FOLDER": files}, timeout_s=120)[0]
    one = trains_exactly(0, 1, tmp_path)
    for kind, weights in one.items():
        assert all(torch.equal(weights[name], two[kind][name]) for name in weights), kind


@pytest.mark.drill
@pytest.mark.parametrize("kind", KINDS)
def test_verify_on_three_ranks(kind: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIND", kind)
    settings = {**SETTINGS, "runs_dir": str(tmp_path), "hardware": {"selected_devices": ["cpu"] * 3}}
    assert verify(OfFiles, settings, steps=12).outcome in ("identical", "equal")


# --- More data than memory -------------------------------------------------------------------------------------------

LIMIT_MB, FILES, WIDE = 220, 20, 1024


class Large(OfFiles):
    """20 Parquet files of 12 MB each, 240 MB in all."""

    def datasets(self) -> lockstep.Datasets:
        from lockstep.readers.columns import ParquetFiles

        rows = ParquetFiles(os.environ["FOLDER"], transform=lambda row: (row["x"][:FEATURES], row["label"]))
        return lockstep.Datasets(rows, Toy.datasets(self).val)


def write_large(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(FILES):
        x = np.full((3000, WIDE), number, np.float32)
        x[:, 0] = np.arange(3000) / 3000
        flat = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), WIDE)
        table = pa.table({"x": flat, "label": np.arange(3000) % 3})
        pq.write_table(table, folder / f"{number:02d}.parquet", row_group_size=500, compression="zstd")


def trains_large(rank: int, size: int, folder: Path, resume: bool) -> None:
    """Under a limit of :data:`LIMIT_MB` for what is allocated from here on, as ``ulimit -d`` sets it."""
    import pyarrow.parquet as pq

    used = re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())
    assert used is not None
    most = int(used[1]) * 1024 + LIMIT_MB * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    settings: Any = {
        "training": {"max_steps": 60, "global_batch_size": 1000, "batch_size": 500},
        "telemetry": {"record_samples": True},
        "checkpoint": {"every_steps": 5},
    }
    attempt(Large, folder, rank, size, resume=resume, **settings)
    with pytest.raises(MemoryError):
        pq.read_table(os.environ["FOLDER"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_more_data_than_memory_two_ranks_killed_and_one_resumes(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "data").mkdir()
    write_large(tmp_path / "data")
    # Arrow's own allocator reserves a GB at once.
    env = {"FOLDER": str(tmp_path / "data"), "ARROW_DEFAULT_MEMORY_POOL": "system"}
    with pytest.raises(RuntimeError, match="rank 1 died"):
        run_ranks(trains_large, 2, tmp_path / "run", False, env={**env, "KILL": "[1, 13]"})
    run_ranks(trains_large, 1, tmp_path / "run", True, env=env)
    used = used_samples(RunDir(tmp_path / "run"))
    assert used == {1: Counter(range(3000 * FILES))}
