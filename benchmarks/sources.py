"""Samples per second of each kind of file: Lockstep in its shuffled order, against the library's own reader.

::

    pip install -c constraints.txt -e '.[data]' datasets webdataset
    python benchmarks/sources.py --out benchmarks/results

Both make batches of 32 with torch's ``default_collate``, in one process without workers, and take turns; ratios are
between blocks of one round, medians over rounds. The other side reads in the order of the files (pyarrow, webdataset,
lines) or shuffled by torch's DataLoader (datasets, the memory map). Sources whose package is missing are left out.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from report import header, ratios, write_json
from torch.utils.data import DataLoader, Dataset, default_collate

from lockstep.config.sections import DataConfig
from lockstep.data.columns import ParquetFiles
from lockstep.data.records import JsonLines, TarShards, TokenFile
from lockstep.data.requests import Request, Source
from lockstep.data.sampling import resolve_sampling
from lockstep.data.stream import Stream

BATCH, ROWS, FILES, WIDTH = 32, 20_000, 8, 64
Batches = Callable[[], Iterator[Any]]


def ours(dataset: Any) -> Batches:
    sampling = resolve_sampling(dataset, None, DataConfig())
    assert sampling is not None
    source, epochs = Source(dataset, default_collate, 1, sampling.order(len(dataset), 1)), iter(range(10**6))

    def batches() -> Iterator[Any]:
        epoch = next(epochs)
        for start in range(0, len(dataset) - BATCH + 1, BATCH):
            yield source.batch(Request(epoch, 0, start, start + BATCH))

    return batches


def collated(rows: Callable[[], Iterator[Any]]) -> Batches:
    def batches() -> Iterator[Any]:
        found = rows()
        while group := list(islice(found, BATCH)):
            yield default_collate(group)

    return batches


def write(folder: Path) -> None:
    numbers = np.random.default_rng(0).random((ROWS, WIDTH), dtype=np.float32)
    (numbers[:, 0] * 60_000).astype(np.uint16).repeat(WIDTH).tofile(folder / "tokens.bin")
    for number, part in enumerate(np.array_split(np.arange(ROWS), FILES)):
        lines = [json.dumps({"x": numbers[row, :16].round(4).tolist(), "y": int(row) % 10}) + "\n" for row in part]
        (folder / f"{number}.jsonl").write_text("".join(lines))
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for row in part.tolist():
                for extension, content in (("npy", numbers[row].tobytes()), ("cls", str(row % 10).encode())):
                    member = tarfile.TarInfo(f"{row:06d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            continue
        x = pa.FixedSizeListArray.from_arrays(pa.array(numbers[part].reshape(-1)), WIDTH)
        pq.write_table(pa.table({"x": x, "y": pa.array(part % 10)}), folder / f"{number}.parquet", row_group_size=500)


def of_parquet(folder: Path) -> tuple[Batches, Batches]:
    import pyarrow.parquet as pq

    def rows() -> Iterator[Any]:
        for file in sorted(folder.glob("*.parquet")):
            for batch in pq.ParquetFile(file).iter_batches(batch_size=500):
                x = batch.column("x").flatten().to_numpy().reshape(-1, WIDTH)
                yield from ({"x": a, "y": b} for a, b in zip(x, batch.column("y").to_numpy(), strict=True))

    return ours(ParquetFiles(folder)), collated(rows)


def of_lines(folder: Path) -> tuple[Batches, Batches]:
    def rows() -> Iterator[Any]:
        for file in sorted(folder.glob("*.jsonl")):
            with file.open() as lines:
                yield from map(json.loads, lines)

    return ours(JsonLines(folder)), collated(rows)


def of_shards(folder: Path) -> tuple[Batches, Batches]:
    import webdataset

    def sample(row: Any) -> Any:
        return np.frombuffer(row["npy"], np.float32), int(row["cls"])

    files = sorted(map(str, folder.glob("*.tar")))
    theirs = webdataset.WebDataset(files, shardshuffle=False).map(sample)
    return ours(TarShards(folder, transform=sample)), collated(lambda: iter(theirs))


class Mapped(Dataset[Any]):
    def __init__(self, file: Path) -> None:
        self.tokens = np.memmap(file, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // WIDTH

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index * WIDTH : index * WIDTH + WIDTH + 1].astype(np.int64)


def of_tokens(folder: Path) -> tuple[Batches, Batches]:
    theirs = DataLoader(Mapped(folder / "tokens.bin"), batch_size=BATCH, shuffle=True)
    return ours(TokenFile(folder / "tokens.bin", WIDTH)), lambda: iter(theirs)


def of_hugging_face(folder: Path) -> tuple[Batches, Batches]:
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != here]  # where there is another datasets.py
    from datasets import Dataset as HuggingFace

    rows = HuggingFace.from_parquet(sorted(map(str, folder.glob("*.parquet"))), cache_dir=str(folder / "cache"))
    theirs = DataLoader(rows.with_format("torch"), batch_size=BATCH, shuffle=True)
    return ours(rows.with_format("torch")), lambda: iter(theirs)


class Lines:
    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.jsonl"))

    def __iter__(self) -> Iterator[Any]:
        for file in self.files:
            with file.open() as lines:
                yield from map(json.loads, lines)


def of_stream(folder: Path) -> tuple[Batches, Batches]:
    return ours(Stream(Lines(folder), ROWS)), collated(lambda: iter(Lines(folder)))


#: By name: the two sides, and the packages that they need.
SOURCES: dict[str, tuple[Callable[[Path], tuple[Batches, Batches]], tuple[str, ...]]] = {
    "parquet": (of_parquet, ("pyarrow",)),
    "json lines": (of_lines, ()),
    "tar shards": (of_shards, ("webdataset",)),
    "tokens": (of_tokens, ()),
    "hugging face": (of_hugging_face, ("datasets", "pyarrow")),
    "stream": (of_stream, ()),
}


def is_there(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def seconds(batches: Batches) -> float:
    """Per sample, of one epoch."""
    started, samples = time.perf_counter(), 0
    for _ in batches():
        samples += BATCH
    return (time.perf_counter() - started) / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    options = parser.parse_args()
    report = {**header(), "command": " ".join(["python", *sys.argv]), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for name, (open_both, packages) in SOURCES.items():
            if not all(map(is_there, packages)):
                continue
            sides = open_both(Path(folder))
            found: list[list[float]] = [[], []]
            for turn in range(options.rounds + 1):
                for side in (0, 1) if turn % 2 else (1, 0):
                    found[side].append(seconds(sides[side]))
            mine, theirs = found[0][1:], found[1][1:]
            row = {"source": name, "us": round(median(mine) * 1e6, 2), "their_us": round(median(theirs) * 1e6, 2)}
            report["rows"].append(row | ratios(mine, theirs))
            print(json.dumps(report["rows"][-1]), file=sys.stderr)
    print(text := table(report))
    if options.out:
        write_json(options.out / f"{report['date']}-sources.json", report)
        (options.out / f"{report['date']}-sources.md").write_text(text, encoding="utf-8")


def table(report: dict[str, Any]) -> str:
    lines = [
        f"# Sources, {report['date']}",
        "",
        f"{report['machine']}, torch {report['torch']}, load {report['load_before']} before. `{report['command']}`",
        "",
        "µs a sample in batches of 32, one process; Lockstep's time in that of the library's reader: median of ratios "
        "(quartiles). Below 1 Lockstep is faster.",
        "",
        "| source | Lockstep, shuffled | the library's reader | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        low, high = row["ratio_quartiles"]
        lines.append(f"| {row['source']} | {row['us']} | {row['their_us']} | {row['ratio']} ({low}–{high}) |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
