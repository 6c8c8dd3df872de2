"""Samples in files: each is read by its number, and wrong files are named."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import pickle
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import default_collate

import lockstep
from lockstep import Mixture, Order, Packed
from lockstep.config.sections import DataConfig
from lockstep.data import select
from lockstep.data.reader import Reader
from lockstep.data.sampling import resolve_sampling
from lockstep.engine.fingerprint import feed
from lockstep.errors import DataError, LockstepError
from lockstep.events import Note
from lockstep.readers import files as files_module
from lockstep.readers.columns import ArrowFiles, ParquetFiles
from lockstep.readers.records import ClassFolders, CsvFiles, JsonLines, TarShards, TokenFile
from lockstep.rundir.files import read_jsonl
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.toys import FEATURES, Toy, arrays

ROWS = 500


def json_lines(folder: Path, rows: int = ROWS) -> JsonLines:
    for number, part in enumerate(np.array_split(np.arange(rows), 3)):
        lines = [json.dumps({"row": int(row), "text": "ü" * (int(row) % 7)}) + "\n" * (1 + row % 2) for row in part]
        (folder / f"{number}.jsonl").write_text("".join(lines).rstrip("\n"), encoding="utf-8")
    return JsonLines(folder)


def csv_files(folder: Path, rows: int = ROWS) -> CsvFiles:
    for number, part in enumerate(np.array_split(np.arange(rows), 3)):
        lines = [f'{row},"a ""quoted""\nbreak, {row}"\n' for row in part]
        (folder / f"{number}.csv").write_text("row,text\n" + "".join(lines), encoding="utf-8")
    return CsvFiles(folder)


def tar_shards(folder: Path, rows: int = ROWS) -> TarShards:
    for number, part in enumerate(np.array_split(np.arange(rows), 3)):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for row in part.tolist():
                for extension, content in (
                    ("cls", str(row)),
                    ("txt", "x" * (row * 3)),
                    ("seg.json", json.dumps([row])),
                ):
                    member = tarfile.TarInfo(f"part/{row:05d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content.encode()))
    return TarShards(folder)


@pytest.mark.parametrize(
    ("make", "row_of"),
    [
        (json_lines, lambda sample: sample["row"]),
        (csv_files, lambda sample: int(sample["row"])),
        (tar_shards, lambda sample: sample["cls"]),
    ],
)
def test_records_are_read_by_their_number(make: Callable[[Path], Any], row_of: Any, tmp_path: Path) -> None:
    records = make(tmp_path)
    assert len(records) == ROWS
    for index in np.random.default_rng(0).permutation(ROWS)[:100].tolist():
        assert row_of(records[index]) == index
    copy = next(records.folder.rglob("*.arrow")).stat()
    assert type(records)(records.files).folder == records.folder, "the copy follows from the files"
    assert next(records.folder.rglob("*.arrow")).stat().st_ino == copy.st_ino, "which are copied once"
    assert row_of(pickle.loads(pickle.dumps(records))[7]) == 7


def bins(folder: Path) -> TokenFile:
    for number in range(3):
        np.arange(100 * number, 100 * number + 10 * number + 8, dtype=np.uint16).tofile(folder / f"{number}.bin")
    return TokenFile(folder, 4)


def parquet(folder: Path) -> Any:
    pytest.importorskip("pyarrow")
    from lockstep.readers.columns import ParquetFiles

    write_parquet(folder, 400)
    return ParquetFiles(folder)


def class_folders(folder: Path) -> ClassFolders:
    for number in range(3):
        (folder / "a").mkdir(exist_ok=True)
        (folder / "a" / f"{number}.txt").write_text(str(number))
    return ClassFolders(folder, Path.read_text)


def packed(folder: Path) -> Packed:
    return Packed([range(length) for length in range(1, 30)], 16)


@pytest.mark.parametrize(
    "make", [json_lines, csv_files, tar_shards, bins, parquet, class_folders, packed], ids=lambda make: make.__name__
)
def test_a_data_set_is_a_sequence(make: Callable[[Path], Any], tmp_path: Path) -> None:
    """Negative numbers count from the end, and iteration ends, since a number beyond it is an IndexError."""
    samples = make(tmp_path)
    assert len(list(samples)) == len(samples)
    for index in (-1, -len(samples)):
        assert digest(samples[index]) == digest(samples[len(samples) + index])
    for index in (len(samples), -len(samples) - 1):
        with pytest.raises(IndexError):
            samples[index]


def digest(sample: Any) -> Any:
    found = hashlib.sha256()
    feed(found, sample)
    return found.hexdigest()


def test_tokens_of_several_files_do_not_run_together(tmp_path: Path) -> None:
    tokens = bins(tmp_path)
    assert [sample[0] for sample in tokens] == [0, 100, 104, 108, 112, 200, 204, 208, 212, 216, 220]
    indices = np.array([10, 0, 4, 3, 10])
    assert tokens.gathered(indices).tolist() == [tokens[index].tolist() for index in indices.tolist()]
    assert Reader(tokens, default_collate, 1).gathers
    (tmp_path / "9.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"9\.bin .*small"):
        TokenFile(tmp_path, 4)


def test_a_sample_of_a_shard_has_all_members(tmp_path: Path) -> None:
    sample = tar_shards(tmp_path)[4]
    assert sample == {"__key__": "part/00004", "cls": 4, "txt": "x" * 12, "seg.json": [4]}
    assert csv_files(tmp_path)[3]["text"] == 'a "quoted"\nbreak, 3'


def test_another_file_is_copied_again(tmp_path: Path) -> None:
    assert len(json_lines(tmp_path, 30)) == 30
    assert len(json_lines(tmp_path, 40)) == 40
    file = tmp_path / "0.jsonl"
    before = file.stat()
    file.write_text(file.read_text().replace('"row": 3', '"row": 8'))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert JsonLines(tmp_path)[3]["row"] == 8, "equal in size and time"


def test_tokens_are_mapped_and_row_10_to_the_9_is_at_hand(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "small.bin")
    small = TokenFile(tmp_path / "small.bin", 10)
    assert len(small) == 99
    assert small[98].tolist() == list(range(980, 991))
    with (tmp_path / "sparse.bin").open("wb") as file:
        file.seek(2 * (10**9 + 8))
        file.write(np.array([1, 2, 3], np.uint16).tobytes())
    tokens = TokenFile(tmp_path / "sparse.bin", 1)
    assert tokens[10**9 + 8].tolist() == [1, 2]
    assert Order(len(tokens), 1).slice(3, 10**9, 10**9 + 3).max() < len(tokens)


def test_folders_are_classes(tmp_path: Path) -> None:
    for name in ("cat", "ant", ".ipynb_checkpoints", "__MACOSX"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text(name)
    folders = ClassFolders(tmp_path, Path.read_text, suffix=".txt")
    assert (folders.classes, [folders[0], folders[1]]) == (["ant", "cat"], [("ant", 0), ("cat", 1)])
    assert resolve_sampling(folders, None, DataConfig(sampling="balanced")) is not None


def test_what_is_wrong_with_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.jsonl.*\.ndjson"):
        JsonLines(tmp_path)
    with pytest.raises(DataError, match=r"gone\.jsonl .*missing"):
        JsonLines(tmp_path / "gone.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    records = JsonLines(tmp_path / "bad.jsonl")
    with pytest.raises(DataError, match=r"record 2 .*bad\.jsonl"):
        records[1]
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="have no sample"):
        JsonLines(tmp_path / "empty.jsonl")
    (tmp_path / "1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "2.csv").write_text("a,c\n1,2\n")
    with pytest.raises(DataError, match=r"\b2\.csv differ"):
        CsvFiles([tmp_path / "1.csv", tmp_path / "2.csv"])
    (tmp_path / "3.csv").write_text("a,b\n1,2,3\n")
    with pytest.raises(DataError, match=r"(?s)3\.csv.*\b3 .*\b2\b"):
        CsvFiles(tmp_path / "3.csv")[0]
    (tmp_path / "tar").mkdir()
    tar_shards(tmp_path / "tar")
    shard = tmp_path / "tar" / "1.tar"
    shard.write_bytes(shard.read_bytes()[: -200 * 512 - 100])
    with pytest.raises(DataError, match=r"\b1\.tar .*read"):
        TarShards(shard)
    (tmp_path / "no.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"no\.bin .*small"):
        TokenFile(tmp_path / "no.bin", 4)
    with pytest.raises(DataError, match=r"nowhere .*\bfolders"):
        ClassFolders(tmp_path / "nowhere", Path.read_text)


def test_files_behind_urls_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data", 100)
    json_lines(tmp_path / "data", 9)
    bins(tmp_path / "data")
    for _ in range(2):
        lines, rows = (kind(f"file://{tmp_path}/data") for kind in (JsonLines, ParquetFiles))
        tokens = TokenFile(f"file://{tmp_path}/data/*.bin", 4)
        assert (len(lines), lines[8]["row"], len(rows), len(tokens)) == (9, 8, 100, 11)
        assert len(JsonLines(f"file://{tmp_path}/data/*.jsonl")) == 9
    assert len([*(tmp_path / "cache" / "datasets").iterdir()]) == 3, "one of them of local names"
    for path in (tmp_path / "data").glob("[0-9]*"):
        path.unlink()
    assert {rows[row]["label"].item() for row in range(100)} <= {0, 1, 2}, "the copies are read"
    for kind in (JsonLines, ParquetFiles):
        with pytest.raises(DataError, match=rf"0\{kind.suffixes[0]} .*read"):
            kind(f"file://{tmp_path}/data/0{kind.suffixes[0]}")
    with pytest.raises(DataError, match=r"nowhere\.bin .*copied"):
        TokenFile(f"file://{tmp_path}/nowhere.bin", 4)


# --- Columns ---------------------------------------------------------------------------------------------------------


def write_parquet(folder: Path, rows: int = ROWS, files: int = 4) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    inputs, labels = arrays(rows, 1)
    for number, part in enumerate(np.array_split(np.arange(rows), files)):
        flat = pa.array(inputs[part].numpy().reshape(-1))
        columns = {
            "inputs": pa.FixedSizeListArray.from_arrays(flat, FEATURES),
            "label": pa.array(labels[part].numpy()),
            "text": pa.array([f"row {row}" if row % 3 else None for row in part]),
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=40)
        with (
            pa.OSFile(str(folder / f"{number}.arrow"), "wb") as file,
            pa.ipc.new_file(file, pa.table(columns).schema) as out,
        ):
            for batch in pa.table(columns).to_batches(max_chunksize=40):
                out.write_batch(batch)


@pytest.mark.parametrize("kind", ["ParquetFiles", "ArrowFiles"])
def test_rows_of_columns_are_read_by_their_number(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from lockstep.readers import columns

    write_parquet(tmp_path)
    inputs, labels = arrays(ROWS, 1)
    rows = getattr(columns, kind)(tmp_path)
    assert len(rows) == ROWS
    for row in (0, 39, 40, 124, 125, 499):
        assert np.array_equal(rows[row]["inputs"], inputs[row].numpy())
        assert (rows[row]["label"], rows[row]["text"]) == (labels[row], f"row {row}" if row % 3 else None)
    pattern = tmp_path / f"*{rows.suffixes[0]}"
    named = pickle.loads(pickle.dumps(getattr(columns, kind)(pattern, columns=["label"])))
    assert named[123] == {"label": labels[123]}
    plain = getattr(columns, kind)(tmp_path, columns=["inputs", "label"])
    assert (plain.is_plain, named.is_plain, rows.is_plain) == (True, True, False)
    indices = np.array([499, 3, 3, 39, 40, 200])
    whole = Reader(plain, default_collate, 1).batch(0, indices, 0)
    single = default_collate([plain[index] for index in indices.tolist()])
    assert whole.keys() == single.keys()
    assert all(torch.equal(whole[name], single[name]) and whole[name].dtype == single[name].dtype for name in whole)


@pytest.mark.parametrize("kind", ["ParquetFiles", "ArrowFiles"])
def test_columns_of_any_type_give_what_single_rows_give(kind: str, tmp_path: Path) -> None:
    """Whole batches are made of numbers only; values that are missing in one row group change no other row."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather
    import pyarrow.parquet

    from lockstep.readers import columns

    numbers = np.arange(60, dtype=np.float32)
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(120.0)), 2)
    table = {
        "flag": pa.array(numbers > 30),
        "half": pa.array(numbers.astype(np.float16)),
        "pair": pairs,
        "struct": pa.array([{"a": row} for row in range(60)]),
        "list": pa.array([[row] * 3 for row in range(60)]),
        "holes": pa.array([None if row == 45 else row / 3 for row in range(60)], pa.float32()),
        "pairs with holes": pa.array([None if row == 45 else [row, 0] for row in range(60)], pa.list_(pa.int64(), 2)),
    }
    pa.parquet.write_table(pa.table(table), tmp_path / "0.parquet", row_group_size=20)
    pyarrow.feather.write_feather(pa.table(table), tmp_path / "0.feather", compression="uncompressed", chunksize=20)

    def opened(*names: str) -> Any:
        return getattr(columns, kind)(tmp_path, columns=names)

    for name in table:
        rows = opened(name)
        assert rows.is_plain == (name in ("flag", "half", "pair")), name
        indices = np.array([23, 1, 19, 23])
        whole = Reader(rows, default_collate, 1).batch(0, indices, 0)
        single = default_collate([rows[index] for index in indices.tolist()])
        assert digest(whole) == digest(single), name
    holes = opened("holes", "pairs with holes")
    assert holes[45] == {"holes": None, "pairs with holes": None}
    for first, second in ([39, 45], [45, 39]):  # the type of a value does not depend on which row comes first
        values = {first: holes.__getitems__([first, second])[0], second: holes.__getitems__([first, second])[1]}
        assert digest(values[39]) == digest(holes[39])
    assert (holes[39]["holes"].dtype, holes[39]["pairs with holes"].dtype) == (np.float32, np.int64)

    class OfHoles(Toy):
        def datasets(self) -> lockstep.Datasets:
            return lockstep.Datasets(holes, super().datasets().val)

    with pytest.raises(DataError, match=r"'holes' .*\b45 .*\bNone\b.*0\.(parquet|feather)"):
        lockstep.plan(OfHoles())
    with pytest.raises(LockstepError, match=r"'holes' .*\b45 .*\bNone\b"):
        Reader(holes, default_collate, 1).batch(0, np.array([44, 45]), 0)


def test_wrong_parquet_files_are_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from lockstep.readers.columns import ParquetFiles

    write_parquet(tmp_path)
    pa.parquet.write_table(pa.table({"inputs": [1.0], "label": [1], "text": ["a"]}), tmp_path / "9.parquet")
    with pytest.raises(DataError, match=r"'inputs' .*\b9\.parquet"):
        ParquetFiles(tmp_path)
    (tmp_path / "9.parquet").unlink()
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    pa.parquet.write_table(twice, tmp_path / "twice.pq")
    with pytest.raises(DataError, match=r"twice\.pq .*\btwo\b"):
        ParquetFiles(tmp_path / "twice.pq")
    whole = (tmp_path / "1.parquet").read_bytes()
    (tmp_path / "1.parquet").write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"\b1\.parquet .*read"):
        ParquetFiles(tmp_path)
    pa.parquet.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="have no sample"):
        ParquetFiles(tmp_path / "none.parquet")


class Torn(Toy):
    """Lines of JSON, of which some are not."""

    def datasets(self) -> lockstep.Datasets:
        def sample(row: Any) -> Any:
            return np.array(row["x"], np.float32), row["y"]

        return lockstep.Datasets(JsonLines(os.environ["ROWS"], transform=sample), super().datasets().val)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_cannot_be_read_are_left_out_and_recorded(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, labels = arrays(200, 1)
    torn = {20, 21, 150}
    lines = [json.dumps({"x": x, "y": y}) for x, y in zip(inputs.tolist(), labels.tolist(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join("{" if n in torn else line for n, line in enumerate(lines)))
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.jsonl"))
    settings: dict[str, Any] = {"data": {"num_workers": workers}}
    with pytest.raises(LockstepError, match=r"record (21|22|151) of"):
        attempt(Torn, tmp_path / "stops", **settings)
    settings["data"]["on_bad_row"] = "skip"
    found, events = attempt(Torn, tmp_path / "skips", **settings)
    rows = read_jsonl(tmp_path / "skips" / "skipped-rank0.jsonl")
    assert {row["index"] for row in rows} == torn
    assert "record 21 of" in next(row["error"] for row in rows if row["index"] == 20)
    assert any(isinstance(event, Note) and event.key == "samples_skipped" and "3 " in event.text for event in events)
    assert all(torch.isfinite(value).all() for value in found.values())


def has_even_label(sample: Any) -> bool:
    return int(sample[1]) % 2 == 0


def from_row(row: Any) -> Any:
    return np.array(row["x"], np.float32), int(row["y"])


class OfCopies(Toy):
    """A mixture of selected JSON lines and of Parquet rows."""

    def datasets(self) -> lockstep.Datasets:
        lines = select(JsonLines(os.environ["ROWS"], transform=from_row), has_even_label)
        rows = ParquetFiles(os.environ["ROWS"], transform=lambda row: (row["inputs"], int(row["label"])))
        return lockstep.Datasets(Mixture({"lines": lines, "rows": rows}, {"lines": 0.5, "rows": 0.5}), rows)


@pytest.mark.slow
def test_copied_rows_train_alike_on_one_and_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the processes of ranks and loader workers."""
    data = tmp_path / "data"
    data.mkdir()
    write_parquet(data, 60)
    inputs, labels = arrays(40, 1)
    lines = [json.dumps({"x": x, "y": y}) for x, y in zip(inputs.tolist(), labels.tolist(), strict=True)]
    (data / "rows.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("ROWS", str(data))
    shared: dict[str, Any] = {"batch_size": 4, "lr": 0.01, "num_workers": 1, "runs_dir": tmp_path / "runs"}
    one = lockstep.train(OfCopies(), devices="cpu", global_batch_size=8, epochs=2, **shared)
    two = lockstep.train(OfCopies(), devices="cpu,cpu", global_batch_size=8, epochs=2, **shared)
    assert two.metrics["val_loss"] == pytest.approx(one.metrics["val_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_file_that_cannot_be_read_ends_the_command_with_its_name(tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / "rows.csv").write_text('a,b\n1,2\n"3,4\n')
    (tmp_path / "task.py").write_text(
        "import lockstep\nfrom torch import nn\n\n\nclass OfCsv(lockstep.Task):\n"
        "    def datasets(self):\n        return lockstep.Datasets(lockstep.data.CsvFiles('rows.csv'))\n\n"
        "    def model(self):\n        return nn.Linear(1, 1)\n\n"
        "    def loss(self, model, batch):\n        raise NotImplementedError\n"
    )
    result = run_cli("train", "task.py:OfCsv", "--devices", "cpu", env={"LOCKSTEP_CACHE": str(tmp_path / "cache")})
    assert result.code == 2
    assert "rows.csv" in result.err and "record 2" in result.err
    assert "Traceback" not in result.err + result.out


@pytest.mark.parametrize("reproducibility", ["fast", "exact"])
def test_one_readable_row_alone_is_left_out_under_batchnorm(
    reproducibility: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, labels = arrays(64, 1)
    lines = [json.dumps({"x": x, "y": y}) for x, y in zip(inputs.tolist(), labels.tolist(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join("{" if n % 2 else line for n, line in enumerate(lines)))
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.jsonl"))
    training = {"global_batch_size": 16, "batch_size": 2, "epochs": 1, "reproducibility": reproducibility}
    settings: dict[str, Any] = {"data": {"on_bad_row": "skip"}, "training": training, "task": {"batchnorm": True}}
    found, _ = attempt(Torn, tmp_path / "run", **settings)
    assert all(torch.isfinite(value).all() for value in found.values())
    rows = read_jsonl(tmp_path / "run" / "skipped-rank0.jsonl")
    alone = {row["index"] for row in rows if "BatchNorm" in row["error"]}
    assert alone and not any(index % 2 for index in alone)
    assert len(rows) == 32 + len(alone)


class TornStages(Torn):
    def stages(self, model: nn.Module) -> list[nn.Module]:
        return [*model.children()]


def skips(rank: int, size: int, folder: Path, config: dict[str, Any]) -> list[tuple[dict[str, Tensor], float]]:
    """Weights and loss of a run, and of one that cuts the model by the times of the first batch."""
    found = []
    strategies: list[Any] = ["auto"] if config["training"]["reproducibility"] == "exact" else ["auto", "pipeline"]
    for strategy in strategies:
        chosen = {"hardware": {"strategy": strategy if size > 1 else "auto"}}
        weights, _ = attempt(TornStages, folder / strategy, rank, size, **config, **chosen)
        loss = json.loads((folder / strategy / "metrics.json").read_text())["epochs"][-1]["train_loss"]
        found.append((weights, loss))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("reproducibility", ["fast", "exact"])
def test_a_micro_batch_without_a_readable_row_counts_nothing_on_any_ranks(
    reproducibility: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of five rows are torn, in micro-batches of two."""
    inputs, labels = arrays(60, 1)
    lines = [json.dumps({"x": x, "y": y}) for x, y in zip(inputs.tolist(), labels.tolist(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join("{" if n % 5 != 3 else line for n, line in enumerate(lines)))
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.jsonl"))
    training = {"global_batch_size": 8, "batch_size": 2, "epochs": 1, "reproducibility": reproducibility}
    config: dict[str, Any] = {"data": {"on_bad_row": "skip"}, "training": training}
    (whole, loss), *_ = skips(0, 1, tmp_path / "1", config)
    env = {"ROWS": os.environ["ROWS"]}
    for runs in run_ranks(skips, 2, tmp_path / "2", config, env=env):
        for found, other in runs:
            assert other == pytest.approx(loss)
            same = torch.equal if reproducibility == "exact" else torch.allclose
            assert all(same(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("make", [json_lines, csv_files, tar_shards, parquet], ids=lambda make: make.__name__)
def test_files_that_are_cut_short_while_in_use_are_read_from_their_copy(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    samples = make(tmp_path)
    last = samples[len(samples) - 1]
    os.truncate(samples.files[-1], 5)
    assert digest(pickle.loads(pickle.dumps(samples))[-1]) == digest(last)


def test_a_folder_is_searched_with_the_folders_in_it_and_the_plan_names_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    json_lines(tmp_path, 9)
    assert len(JsonLines(f"{tmp_path}/")) == 9
    for place in ("deep/er", ".hidden"):
        (tmp_path / place).mkdir(parents=True)
        json_lines(tmp_path / place, 9)
    assert len(JsonLines(tmp_path)) == 18
    lines = JsonLines(tmp_path)
    assert f" {lines.folder}" in lines.remark
    (tmp_path / "linked").symlink_to(tmp_path / "deep", target_is_directory=True)
    assert len(JsonLines(tmp_path)) == 27
    (tmp_path / "deep" / "loop").symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.setattr(files_module, "MOST_ENTRIES", 500)
    with pytest.raises(DataError, match=r"\b500 files"):
        JsonLines(tmp_path)


def test_a_byte_order_mark_empty_lines_and_a_stray_quote(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfa,b\r\n1,2\r\n\r\n3,"x\r\ny"\r\n')
    rows = CsvFiles(tmp_path / "a.csv")
    assert [rows[place] for place in range(len(rows))] == [{"a": "1", "b": "2"}, {"a": "3", "b": "x\r\ny"}]
    (tmp_path / "b.csv").write_text('a,b\n1,5" pipe\n2,3\n')
    assert [*CsvFiles(tmp_path / "b.csv")] == [{"a": "1", "b": '5" pipe'}, {"a": "2", "b": "3"}]


def test_csv_files_of_other_delimiters(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b\n1,5;x\n")
    with pytest.raises(DataError, match=r"a\.csv(.|\n)*delimiter=';'"):
        CsvFiles(tmp_path / "a.csv")
    assert [*CsvFiles(tmp_path / "a.csv", delimiter=";")] == [{"a": "1,5", "b": "x"}]


def test_an_array_in_a_file_of_json_lines_is_refused(tmp_path: Path) -> None:
    for content in ('[{"a": 1}, {"a": 2}]', '[\n{"a": 1},\n{"a": 2}\n]\n', '[{"a": 1},\n{"a": 2}]'):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(DataError, match=r"a\.jsonl .*\barray"):
            JsonLines(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("[1, 2]\n[3, 4]\n")
    assert [*JsonLines(tmp_path / "a.jsonl")] == [[1, 2], [3, 4]]


@given(
    rows=st.lists(
        st.dictionaries(
            st.sampled_from("abc"),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
                max_leaves=4,
            ),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
def test_values_are_those_of_json_and_csv(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Whatever they are: other types in other rows, dates, numbers of more than 64 bits, keys that some rows lack."""
    rows = [*rows, {"a": "2024-01-01 00:00:00", "b": 2**70, "c": "NA"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [*JsonLines(tmp_path / "a.jsonl")] == rows
    texts = [{name: repr(row.get(name, "")).replace("\0", "") for name in "abc"} for row in rows]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, "abc")
        writer.writeheader()
        writer.writerows(texts)
    assert [*CsvFiles(tmp_path / "a.csv")] == texts


@pytest.mark.parametrize("make", [json_lines, csv_files, tar_shards, parquet], ids=lambda make: make.__name__)
def test_files_are_streams_on_request(make: Callable[[Path], Any], tmp_path: Path) -> None:
    samples = make(tmp_path)
    files = type(samples)(tmp_path, streaming=True)
    items = iter(files)
    begun = [next(items) for _ in range(7)]
    again = type(samples)(tmp_path, streaming=True)
    again.load_state_dict(files.state_dict())
    assert [digest(sample) for sample in (*begun, *again)] == [digest(sample) for sample in samples]
    assert not hasattr(files, "__getitem__")


def test_linked_members_of_shards_have_their_content(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content, target in (
            ("1.txt", b"one", ""),
            ("1.cls", b"1", ""),
            ("2.cls", b"2", ""),
            ("2.txt", b"", "1.txt"),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.linkname = len(content), target
            member.type = tarfile.LNKTYPE if target else tarfile.REGTYPE
            tar.addfile(member, io.BytesIO(content))
    assert [sample["txt"] for sample in TarShards(tmp_path)] == ["one", "one"]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("1.txt")
        member.type, member.linkname = tarfile.SYMTYPE, "../elsewhere.txt"
        tar.addfile(member)
    with pytest.raises(DataError, match=r"1\.txt .*\.\./elsewhere\.txt"):
        TarShards(tmp_path)


def test_long_names_and_folders_in_shards(tmp_path: Path) -> None:
    name = "part/" + "n" * 150
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / f"{kind}.tar", "w", format=kind) as tar:
            for member in (tarfile.TarInfo("part"), tarfile.TarInfo(f"{name}.txt"), tarfile.TarInfo(f"{name}.cls")):
                member.type = tarfile.REGTYPE if "." in member.name else tarfile.DIRTYPE
                member.size = 1 if "." in member.name else 0
                tar.addfile(member, io.BytesIO(b"7"))
    assert list(TarShards(tmp_path)) == [{"__key__": name, "txt": "7", "cls": 7}] * 2


def shard(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


A, B = (("1.txt", b"a"), ("1.cls", b"3")), (("2.txt", b"b"), ("2.cls", b"4"))


def test_shards_that_would_give_a_part_of_their_samples_are_refused(tmp_path: Path) -> None:
    whole = shard(tmp_path / "whole.tar", *A, ("README", b""), ("._1.txt", b"of a Mac"), *B)
    assert [sample["__key__"] for sample in TarShards(whole)] == ["1", "2"]
    content = whole.read_bytes()
    for size, where in ((1024, 1024), (1300, 1024), (2048, 2048)):  # tarfile takes each for the end
        (tmp_path / "cut.tar").write_bytes(content[:size])
        with pytest.raises(DataError, match=rf"byte {where} "):
            TarShards(tmp_path / "cut.tar")
    for wrong in (content + content, content[:1024] + b"?" * 512 + content[1536:]):
        (tmp_path / "more.tar").write_bytes(wrong)
        with pytest.raises(DataError, match=r"more\.tar(.|\n)*byte \d+"):
            TarShards(tmp_path / "more.tar")
    with pytest.raises(DataError, match=r"\b1 .*tar --sort=name"):
        TarShards(shard(tmp_path / "apart.tar", A[0], B[0], A[1], B[1]))
    with pytest.raises(DataError, match=r"\b1\.txt .*twice"):
        TarShards(shard(tmp_path / "twice.tar", A[0], *A))
    again = TarShards(shard(tmp_path / "again.tar", *A, *B, *A))
    assert [sample["cls"] for sample in again] == [3, 4, 3], "a whole sample may come again"


def test_lines_of_spaces_long_fields_and_what_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'  \n {"a": 1} \r\n\t\n \r\n{"a": "\xe2\x80\xa8"}\n')
    assert list(JsonLines(tmp_path / "a.jsonl")) == [{"a": 1}, {"a": "\u2028"}]
    (tmp_path / "a.csv").write_text("a,b\n1," + "x" * 200_000 + "\n")
    assert len(CsvFiles(tmp_path / "a.csv")[0]["b"]) == 200_000
    (tmp_path / "b.csv").write_text('a,b\n1,2\n3,"4\n5,6\n')
    with pytest.raises(DataError, match=r"b\.csv(.|\n)*record 2: .*quote"):
        CsvFiles(tmp_path / "b.csv")
    (tmp_path / "c.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(DataError, match=r"c\.csv .*two .*'a'"):
        CsvFiles(tmp_path / "c.csv")


def test_what_are_no_tokens_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    (tmp_path / "odd.bin").write_bytes(b"x" * 101)
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "good.bin")
    for file, how, words in (
        ("a.npy", {"window": 4}, "NumPy file"),
        ("odd.bin", {"window": 4}, "50 and a part of one"),
        ("good.bin", {"window": 0}, "windows of 0 tokens"),
        ("good.bin", {"window": 4, "dtype": "float16"}, "tokens of dtype 'float16'"),
    ):
        with pytest.raises(DataError, match=words):
            TokenFile(tmp_path / file, **how)


def test_columns_that_are_not_there_are_named_and_streams_are_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = pa.table({"x": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(DataError, match=r"'y' .*\ba\.parquet"):
        ParquetFiles(tmp_path / "a.parquet", columns=["y"])
    assert [*ArrowFiles(tmp_path / "a.arrow")] == [{"x": 1}, {"x": 2}], "of a stream"
    (tmp_path / "b.arrow").write_bytes(b"neither")
    with pytest.raises(DataError, match=r"b\.arrow .*read"):
        ArrowFiles(tmp_path / "b.arrow")
    assert ParquetFiles(tmp_path / "a.parquet", columns="x")[1] == {"x": 2}


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("1\n")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "lockstep.readers.copies", raising=False)
    monkeypatch.delattr("lockstep.readers.copies", raising=False)
    with pytest.raises(DataError, match=r"pip install 'lockstep-train\[data\]'"):
        JsonLines(tmp_path / "a.jsonl")
