"""The experiment that compares trainers: it must tell a right trainer from a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import ROOT

SAMPLES, BATCH, ACCUMULATE = 19, 2, 4


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def mean_of_means(samples: int, kind: str = "accumulation") -> dict[str, Any]:
    """The usual loop: each micro-batch's mean over the number of micro-batches that a full window has."""
    from peers.probe import LR, Diary, subject

    (model, data), diary = subject(kind, samples), Diary()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches = list(torch.utils.data.DataLoader(data, batch_size=BATCH))
    for number, batch in enumerate(batches, start=1):
        (model(batch).mean() / ACCUMULATE).backward()
        if number % ACCUMULATE == 0 or number == len(batches):
            optimizer.step()
            optimizer.zero_grad()
            diary.note(number, 0, 0.0, model)
    return diary.result(model)


def test_the_mean_of_means_is_found_wrong() -> None:
    from peers import verdict

    found = verdict.accumulation(mean_of_means(SAMPLES))
    assert not found.right
    assert found.figures["window_sums"] == pytest.approx([1.0, 1.0, 0.5], abs=1e-4)
    # The last window holds three samples: two of weight 1/8 and one of 1/4, where each should have 1/3.
    assert found.figures["sample_weight"] == pytest.approx([3 / 8, 1.0], abs=1e-4)


def test_the_mean_of_means_of_tokens_is_found_wrong() -> None:
    """In windows that are full: the first has 8 + 1 + 3 + 1 + 7 + 2 + 2 + 1 tokens, of which the micro-batches have
    9, 4, 9 and 3, each with a fourth of the gradient."""
    from peers import verdict

    found = verdict.accumulation(mean_of_means(8, "tokens"), "token")
    assert not found.right
    assert found.figures["token_weight"] == pytest.approx([25 / 4 / 9, 25 / 4 / 3], abs=1e-3)
    assert found.figures["missed"] == 0


@pytest.mark.parametrize("kind", ["accumulation", "tokens"])
def test_lockstep_is_found_right(kind: str, tmp_path: Path) -> None:
    from peers import lockstep_side, verdict
    from peers.probe import Job

    job = Job("job", kind, "default", 1, SAMPLES, BATCH, ACCUMULATE, folder=str(tmp_path))
    assert verdict.accumulation(lockstep_side.run(job)).right


def steps_of(*batches: list[int], start: int = 1, ledger: list[float] | None = None) -> list[dict[str, Any]]:
    """What a trainer's diary says that takes these batches of four samples, eight in an epoch."""
    from peers.probe import LR

    ledger, steps = list(ledger or [0.0] * 8), []
    for step, batch in enumerate(batches, start=start):
        for index in batch:
            ledger[index] -= LR / len(batch)
        steps.append({"step": step, "epoch": (step - 1) // 2, "loss": 0.0, "ledger": list(ledger)})
    return steps


@pytest.mark.parametrize(
    ("rest", "repeated", "missed"),
    [([4, 5, 6, 7], 0, 0), ([0, 1, 2, 3], 4, 4), ([3, 4, 5, 6], 1, 1)],
)
def test_repeats_and_losses_of_a_resume_are_counted(rest: list[int], repeated: int, missed: int) -> None:
    from peers import verdict

    # The step after the stop was taken but not saved: it must not count.
    first = steps_of([7, 5, 3, 1], [0, 2, 4, 6], [0, 1, 2, 3], [1, 2, 3, 4])
    second = steps_of(rest, start=4, ledger=first[2]["ledger"])
    found = verdict.resume({"steps": first}, {"steps": second}, 3, 4)
    assert found.figures == {"repeated": repeated, "never_seen": missed, "samples": 8, "steps_of_epoch": 2}
    assert found.right == (repeated == missed == 0)
