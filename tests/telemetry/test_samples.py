"""The record of samples: what superseded steps used does not count, and the audit finds what is wrong."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import RunFolderError
from lockstep.rundir.files import JsonLines
from lockstep.rundir.folder import RunDir
from tests.rundir.runs import ON_TMP_PATH, make_run
from tests.samples import EpochSamples, audit_samples, used_samples

SAMPLES, PER_STEP, STEPS = 10, 4, 6  # three steps an epoch, the last of two samples


def begin(run: RunDir, resumed_from: int) -> int:
    return run.begin_attempt({"task": {"train_samples": SAMPLES}}, {}, resumed_from)


def train(run: RunDir, ranks: int, first: int, last: int, torn: bool = False) -> None:
    """One attempt over steps ``first`` + 1 … ``last``; ``torn``: it was killed while it wrote the next row."""
    attempt = begin(run, first)
    for rank in range(ranks):
        file = JsonLines(run.samples_file(rank))
        for step in range(first + 1, last + 1):
            start = (step - 1) % 3 * PER_STEP
            indices = list(range(SAMPLES))[start : start + PER_STEP][rank::ranks]
            file.append({"attempt": attempt, "step": step, "epoch": 1 + (step - 1) // 3, "indices": indices})
        if torn:
            with run.samples_file(rank).open("a") as text:
                text.write('{"attempt":1,"step":')


def fresh(tmp_path: Path) -> RunDir:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    return make_run(tmp_path / "run")


CLEAN = [EpochSamples(epoch, SAMPLES, (), ()) for epoch in (1, 2)]


@settings(ON_TMP_PATH, max_examples=15)
@given(
    killed=st.lists(st.tuples(st.integers(1, 4), st.integers(0, STEPS), st.integers(0, STEPS)), max_size=4),
    ranks=st.integers(1, 4),
)
@pytest.mark.slow
def test_any_series_of_kills_and_resumes_counts_each_sample_once(
    tmp_path: Path, killed: list[tuple[int, int, int]], ranks: int
) -> None:
    run, at = fresh(tmp_path), 0
    for ranks_then, last, saved in killed:
        last = max(last, at)
        train(run, ranks_then, at, last, torn=True)
        at = max(at, min(saved, last))
    train(run, ranks, at, STEPS)
    assert audit_samples(run) == CLEAN


def test_what_was_used_twice_or_not_at_all_is_found(tmp_path: Path) -> None:
    run = fresh(tmp_path)
    train(run, 1, 0, 5)
    begin(run, 5)
    JsonLines(run.samples_file(0)).append({"attempt": 2, "step": 6, "epoch": 2, "indices": [8, 0, 0]})
    assert audit_samples(run) == [CLEAN[0], EpochSamples(2, 11, (0,), (9,))]
    assert used_samples(run)[2] == Counter({0: 3, **dict.fromkeys(range(1, 9), 1)})


def test_a_run_without_a_record_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError) as caught:
        audit_samples(fresh(tmp_path))
    assert "telemetry.record_samples=true" in caught.value.fix
