"""A followed file holds what the run folder says that it holds, whenever it is looked at."""

from __future__ import annotations

import json
import os
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.rundir.folder import surviving
from lockstep.studio.tailing import Columns, Tail, thin_out

STEP = st.integers(1, 12)


@given(
    rows=st.lists(st.tuples(st.integers(1, 3), STEP), max_size=25),
    resumed=st.dictionaries(st.integers(2, 3), st.integers(0, 12), max_size=2),
    looks=st.sets(st.integers(0, 25)),
    torn=st.booleans(),
)
def test_any_rows_in_any_portions(
    rows: list[tuple[int, int]], resumed: dict[int, int], looks: set[int], torn: bool
) -> None:
    made = [{"attempt": attempt, "step": step, "loss": n} for n, (attempt, step) in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.jsonl"
        tail = Tail(file, "step")
        tail.restart(resumed)
        with file.open("ab", buffering=0) as stream:
            for n, row in enumerate(made):
                line = json.dumps(row).encode()
                stream.write(line[: len(line) // 2])
                if n in looks:
                    tail.poll()
                stream.write(line[len(line) // 2 :] + b"\n")
            if torn:
                stream.write(b'{"attempt": 1, "st')
        tail.poll()
        expected = [row["loss"] for row in surviving(made, resumed)]
        assert (tail.columns["loss"].tolist() if expected else []) == expected
        assert tail.columns.rows == len(expected)


@given(content=st.binary(max_size=300), lines=st.integers(0, 3))
def test_any_bytes_are_no_harm(content: bytes, lines: int) -> None:
    good = b'{"attempt": 1, "step": 1000, "loss": 0.5}\n'
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.jsonl"
        file.write_bytes(good * lines + content + b"\n" + good)
        tail = Tail(file, "step")
        tail.poll()
        assert tail.columns["loss"].tolist()[-1:] == [0.5]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n')
    tail = Tail(file, "step")
    assert not tail.columns.rows
    tail.poll()
    assert tail.columns["step"].tolist() == [1, 2]
    generation = tail.columns.generation
    (tmp_path / "new").write_text('{"step": 7, "loss": 7}\n')
    (tmp_path / "new").replace(file)
    tail.poll()
    assert tail.columns["step"].tolist() == [7]
    assert tail.columns.generation > generation
    file.unlink()
    file.mkdir()
    generation = tail.columns.generation
    tail.poll()
    assert (tail.columns["step"].tolist(), tail.columns.generation) == ([7], generation), "no regular file"


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32) | st.just(float("nan")), min_size=1, max_size=400),
    points=st.integers(2, 50),
)
def test_thinning_keeps_extremes_and_order(values: list[float], points: int) -> None:
    columns = {"step": np.arange(1.0, len(values) + 1), "loss": np.array(values, dtype=np.float32)}
    thin = thin_out(columns, "step", points)
    assert len(thin["step"]) == len(thin["loss"])
    assert (np.diff(thin["step"]) > 0).all()
    if not np.isnan(columns["loss"]).all():
        assert np.nanmin(thin["loss"]) == np.nanmin(columns["loss"])
        assert np.nanmax(thin["loss"]) == np.nanmax(columns["loss"])


def test_a_long_file_has_a_coarse_picture_at_once(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    tail = Tail(file, "step")
    file.write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    assert tail.sample() is None, "short files are simply read"
    padding = "x" * 1000
    file.write_text("".join(json.dumps({"step": n, "loss": n, "note": padding}) + "\n" for n in range(1, 10_000)))
    picture = tail.sample()
    assert picture is not None
    assert 900 < picture.rows < 1100
    assert (np.diff(picture["step"]) > 0).all()
    assert picture["step"][-1] > 9900


def test_a_pipe_or_a_link_is_not_waited_for(tmp_path: Path) -> None:
    """Whoever may write into a runs folder must not bring the studio to a stop."""
    elsewhere, file = tmp_path / "elsewhere", tmp_path / "steps.jsonl"
    elsewhere.write_text('{"step": 1, "loss": 1}\n' * 500_000)
    os.mkfifo(file)
    tail = Tail(file, "step")
    assert tail.sample() is None
    tail.poll()
    assert not tail.columns.rows
    file.unlink()
    file.symlink_to(elsewhere)
    assert tail.sample() is None
    tail.poll()
    assert not tail.columns.rows


def test_time_that_goes_back_does_not_fold_a_curve(tmp_path: Path) -> None:
    file = tmp_path / "system-box.jsonl"
    file.write_text("".join(json.dumps({"time": time, "host": {"cpu": time}}) + "\n" for time in (1, 3, 2, 3, 4)))
    tail = Tail(file, "time")
    tail.poll()
    assert tail.columns["time"].tolist() == [1, 3, 4]


def test_columns_that_come_later_and_go(tmp_path: Path) -> None:
    columns = Columns("step")
    columns.append({"step": np.array([1.0, 2.0]), "a": np.array([1.0, 2.0])})
    columns.append({"step": np.array([3.0]), "b": np.array([3.0])})
    assert np.isnan(columns["a"]).tolist() == [False, False, True]
    assert np.isnan(columns["b"]).tolist() == [True, True, False]
    assert columns.between(2, None) == (1, 3)
    assert columns.between(None, 1) == (0, 1)


def test_a_sparse_file_of_20_gb_takes_little_memory_and_few_reads(tmp_path: Path) -> None:
    file, rows = tmp_path / "steps.jsonl", [b'{"attempt": 1, "step": %d, "loss": 0.5}\n' % step for step in (1, 2)]
    with file.open("wb") as stream:
        stream.write(rows[0])
        stream.seek(20 << 30)
        stream.write(b"\n" + rows[1])
    tail, polls = Tail(file, "step"), 1
    tracemalloc.start()
    try:
        assert tail.sample() is not None
        tail.poll()
        while tail.reader.behind:
            tail.poll()
            polls += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tail.columns["step"].tolist() == [1.0, 2.0]
    assert (polls < 20, peak < 64 << 20) == (True, True), (polls, peak)
