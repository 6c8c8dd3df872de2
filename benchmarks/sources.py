"""Samples per second of each kind of file: Lockstep in its shuffled order, against the library's own reader.

::

    pip install -c constraints.txt -e '.[data]' datasets webdataset
    python benchmarks/sources.py --out benchmarks/results

Both make batches of 32 with torch's ``default_collate``, without worker processes, and take turns, on one rank and on
two; ratios are between blocks of one round, medians over rounds. The other side reads in the order of the files
(pyarrow, webdataset, lines; of two ranks each has half of the files) or shuffled by torch's DataLoader (datasets, the
memory map; of two ranks each has half of the samples). Of two ranks the slower one counts. Sources whose package is
missing are left out.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from report import header, opening, publish, ratios, spread
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from lockstep.config.sections import DataConfig
from lockstep.data.requests import BatchRequest, Source
from lockstep.data.sampling import resolve_sampling
from lockstep.data.stream import Stream
from lockstep.hardware.world import World
from lockstep.readers.columns import ParquetFiles
from lockstep.readers.records import JsonLines, TarShards, TokenFile

BATCH, ROWS, FILES, WIDTH = 32, 20_000, 8, 64
Batches = Callable[[], Iterator[Any]]


class Place(NamedTuple):
    """Where the files are, and which rank this is."""

    folder: Path
    rank: int
    ranks: int

    def files(self, suffix: str) -> list[Path]:
        """This rank's part of the files, as libraries divide them."""
        return sorted(self.folder.glob(f"*.{suffix}"))[self.rank :: self.ranks]

    def loader(self, dataset: Any) -> Batches:
        sampler: Any = DistributedSampler(dataset, self.ranks, self.rank)
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
        return lambda: iter(loader)


def ours(dataset: Any, place: Place) -> Batches:
    sampling = resolve_sampling(dataset, None, DataConfig())
    assert sampling is not None
    source, epochs = Source(dataset, default_collate, 1, sampling.order(len(dataset), 1)), iter(range(10**6))

    def batches() -> Iterator[Any]:
        epoch = next(epochs)
        for start in range(place.rank * BATCH, len(dataset) - BATCH + 1, place.ranks * BATCH):
            yield source.batch(BatchRequest(epoch, 0, start, start + BATCH))

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


def of_parquet(place: Place) -> tuple[Batches, Batches]:
    import pyarrow.parquet as pq

    def rows() -> Iterator[Any]:
        for file in place.files("parquet"):
            for batch in pq.ParquetFile(file).iter_batches(batch_size=500):
                x = batch.column("x").flatten().to_numpy().reshape(-1, WIDTH)
                yield from ({"x": a, "y": b} for a, b in zip(x, batch.column("y").to_numpy(), strict=True))

    return ours(ParquetFiles(place.folder), place), collated(rows)


def of_lines(place: Place) -> tuple[Batches, Batches]:
    return ours(JsonLines(place.folder), place), collated(lambda: iter(Lines(place.files("jsonl"))))


def of_shards(place: Place) -> tuple[Batches, Batches]:
    import webdataset

    def sample(row: Any) -> Any:
        return np.frombuffer(row["npy"], np.float32), int(row["cls"])

    theirs = webdataset.WebDataset(list(map(str, place.files("tar"))), shardshuffle=False).map(sample)
    return ours(TarShards(place.folder, transform=sample), place), collated(lambda: iter(theirs))


class Mapped(Dataset[Any]):
    def __init__(self, file: Path) -> None:
        self.tokens = np.memmap(file, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // WIDTH

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index * WIDTH : index * WIDTH + WIDTH + 1].astype(np.int64)


def of_tokens(place: Place) -> tuple[Batches, Batches]:
    file = place.folder / "tokens.bin"
    return ours(TokenFile(file, WIDTH), place), place.loader(Mapped(file))


def of_hugging_face(place: Place) -> tuple[Batches, Batches]:
    from datasets import Dataset as HuggingFace

    files, cache = sorted(map(str, place.folder.glob("*.parquet"))), str(place.folder / f"cache{place.rank}")
    rows = HuggingFace.from_parquet(files, cache_dir=cache).with_format("torch")
    return ours(rows, place), place.loader(rows)


class Lines:
    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        for file in self.files:
            with file.open() as lines:
                yield from map(json.loads, lines)


def of_stream(place: Place) -> tuple[Batches, Batches]:
    stream = Stream(Lines(sorted(place.folder.glob("*.jsonl"))), ROWS)
    # Nothing keeps the ranks in step here, as gradients do: items are kept for as long as for steps of a whole epoch.
    stream.begin(place.folder, 1, World(place.rank, place.ranks, place.rank, place.ranks), 0, ROWS, None)
    return ours(stream, place), collated(lambda: iter(Lines(place.files("jsonl"))))


#: By name: the two sides, and the packages that they need.
SOURCES: dict[str, tuple[Callable[[Place], tuple[Batches, Batches]], tuple[str, ...]]] = {
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


def measured(place: Place, name: str, rounds: int, barrier: Any, results: Any) -> None:
    """Seconds a sample of each side's epochs, on one rank; an error in their place."""
    torch.set_num_threads(1)
    found: tuple[list[float], list[float]] = ([], [])
    try:
        sides = SOURCES[name][0](place)
        for turn in range(rounds + 1):
            for side in (0, 1) if turn % 2 else (1, 0):
                barrier.wait()
                started, samples = time.perf_counter(), 0
                for _ in sides[side]():
                    samples += BATCH
                found[side].append((time.perf_counter() - started) / samples)
        results.put(found)
        barrier.wait()
    except Exception as error:
        barrier.abort()
        results.put(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    options = parser.parse_args()
    report = {**header(), "command": " ".join(["python", *sys.argv]), "rows": []}
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for (name, (_, packages)), ranks in product(SOURCES.items(), (1, 2)):
            if not all(map(is_there, packages)):
                continue
            barrier, results = context.Barrier(ranks), context.Queue()
            places = [Place(Path(folder), rank, ranks) for rank in range(ranks)]
            given = (name, options.rounds, barrier, results)
            started = [context.Process(target=measured, args=(place, *given), daemon=True) for place in places]
            for process in started:
                process.start()
            of_ranks = [results.get(timeout=600) for _ in started]
            for process in started:
                process.join()
            failed = [error for error in of_ranks if isinstance(error, Exception)]
            if failed:
                raise failed[0]
            mine, theirs = ([max(of) for of in zip(*sides, strict=True)][1:] for sides in zip(*of_ranks, strict=True))
            row = {"source": name, "ranks": ranks}
            row |= {"us": round(median(mine) * 1e6, 2), "their_us": round(median(theirs) * 1e6, 2)}
            report["rows"].append(row | ratios(mine, theirs))
            print(json.dumps(report["rows"][-1]), file=sys.stderr)
    publish(report, "sources", table(report), options.out)


def table(report: dict[str, Any]) -> str:
    lines = [
        *opening("Sources", report),
        "µs a sample of a rank in batches of 32, of the slower rank; Lockstep's time in that of the library's reader: "
        "median of ratios (quartiles). Below 1 Lockstep is faster.",
        "",
        "| source | ranks | Lockstep, shuffled | the library's reader | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        lines.append(f"| {row['source']} | {row['ranks']} | {row['us']} | {row['their_us']} | {spread(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
