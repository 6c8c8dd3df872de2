"""Causes have stable codes, each of which is explained; why samples differ follows from which runs differ."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from lockstep.verification.diagnose import Code, evidence, other_samples
from lockstep.verification.experiments import Variant
from lockstep.verification.trajectory import Trajectory
from tests.verification.test_trajectory import trajectory

PAGE = Path(__file__).parents[2] / "docs" / "same-result.md"
REPEATED, REVERSED = Variant("one", repeat=1), Variant("one", trace="reversed")


def test_every_cause_is_explained() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == list(get_args(Code))


def run(*digest: int) -> Trajectory:
    """Steps with these hashes of their samples."""
    return trajectory([1.0] * len(digest), digest=np.array(digest, dtype=np.uint64))


@pytest.mark.parametrize(
    ("runs", "cause"),
    [
        ({REPEATED: run(1, 9)}, "unseeded-data"),
        ({REPEATED: run(1, 2), REVERSED: run(1, 9)}, "stateful-data"),
        ({REPEATED: run(1, 2), REVERSED: run(1, 2)}, "order"),
    ],
)
def test_why_samples_differ_is_decided_by_repeating_one_device(runs: dict[Variant, Trajectory], cause: str) -> None:
    class Given:
        """A lab whose runs are made up."""

        plan = SimpleNamespace(task=SimpleNamespace(streams=False))

        def run(self, variant: Variant) -> Trajectory:
            return runs[variant]

    lab: Any = Given()
    found = other_samples(lab, run(1, 2), run(1, 3))
    assert found is not None
    assert found.code == cause
    lab.plan.task.streams = True
    of_stream = other_samples(lab, run(1, 2), run(1, 3))
    assert of_stream is not None
    assert ("that it seeds itself" in of_stream.fix) == (cause != "order")
    assert other_samples(lab, run(1, 2), run(1, 2)) is None


@pytest.mark.parametrize(
    ("one", "many", "differs"),
    [(92.3156, 92.3156 * (1 + 1e-7), False), (92.3156, 46.2, True), (1_000_000.0, 1_000_001.0, True)],
)
def test_a_sum_of_weights_that_is_rounded_is_no_other_denominator(one: float, many: float, differs: bool) -> None:
    of_one, of_many = (trajectory([1.0], count=np.array([count])) for count in (one, many))
    assert [cause.code for cause in evidence(of_one, of_many, 2)] == ["denominator"] * differs
