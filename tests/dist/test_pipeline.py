"""``strategy: pipeline``: stages on several ranks, or several devices of one, compute what one device computes."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep import Datasets
from lockstep.config.load import merge
from lockstep.engine.strategies.pipeline import Line, schedule
from lockstep.engine.strategies.stages import as_inputs, inputs_of, shares, stages_of
from lockstep.errors import LockstepError
from lockstep.readers.records import JsonLines
from lockstep.recipes.autoencoder import AutoencoderTask
from lockstep.recipes.speech.task import SpeechTask
from lockstep.rundir.folder import RunDir
from lockstep.tasks.har.task import HarTask
from lockstep.verification import verify
from tests.attempts import attempt
from tests.dist.runs import assert_equal_runs, go_on, train, used
from tests.dist.staged import Staged
from tests.e2e.test_train import finish, start
from tests.gloo import ROOT, run_ranks
from tests.toys import arrays

TASK = f"{ROOT / 'tests' / 'dist' / 'staged.py'}:Staged"
#: Three micro-batches a step, of which the last one of an epoch has fewer samples.
SAME = {
    "training": {"global_batch_size": 30, "batch_size": 10},
    "task": {"batchnorm": True, "dropout": 0.3},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
}
PIPELINE = {"hardware": {"strategy": "pipeline"}}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(TASK, tmp_path_factory.mktemp("alone") / "run", "cpu", SAME)


@pytest.mark.slow
def test_three_stages_on_two_ranks_compute_what_one_device_does_and_go_on_there(alone: RunDir, tmp_path: Path) -> None:
    """Stopped in mid-epoch, on with the other schedule, then on one device; each sample is used once."""
    run = train(TASK, tmp_path / "run", "cpu,cpu", merge(SAME, merge(PIPELINE, {"training": {"max_steps": 3}})))
    assert run.plan()["placement"]["strategy"] == "pipeline"
    go_on(run, "cpu,cpu", {"pipeline": {"schedule": "gpipe"}, "training": {"max_steps": 9}})
    go_on(run, "cpu", {"hardware": {"strategy": "auto"}, "training": {"max_steps": None}})
    assert used(run) == {1: list(range(200)), 2: list(range(200))}
    assert_equal_runs(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    ["bf16-mixed", pytest.param("32", marks=pytest.mark.drill), pytest.param("16-mixed", marks=pytest.mark.drill)],
)
def test_verify_finds_har_with_dropout_equal_in_any_precision(tmp_path: Path, precision: str) -> None:
    settings = {
        "runs_dir": str(tmp_path),
        "hardware": {"selected_devices": "cpu,cpu", "strategy": "pipeline", "precision": precision},
        "task": {"source": "synthetic", "synthetic_samples": 200, "synthetic_shape": (3, 32)},
        "training": {"batch_size": 16, "accumulate": 3},
    }
    report = verify("har", settings, steps=4, eval_batches=2)
    assert "dropout" in report.comparison.one.draws
    assert (report.outcome, report.causes) in {("identical", ()), ("equal", ())}
    # Losses that are reported are summed in another precision; the norm that clips, in the order of one device.
    assert report.as_configured["loss"].max() < 1e-6
    assert report.as_configured["weights"].max() == 0


class Torn(Staged):
    """Rows of JSON, of which four in five are none."""

    def datasets(self) -> Datasets:
        def sample(row: Any) -> tuple[Tensor, int]:
            return torch.tensor(row["x"]), row["y"]

        return Datasets(JsonLines(os.environ["ROWS"], transform=sample), super().datasets().val)


def weights_without_torn_rows(rank: int, ranks: int, folder: Path) -> dict[str, Tensor]:
    config: dict[str, Any] = {
        "data": {"on_bad_row": "skip"},
        "training": {"global_batch_size": 8, "batch_size": 2, "epochs": 1},
        **(PIPELINE if ranks > 1 else {}),
    }
    return attempt(Torn, folder, rank, ranks, **config)[0]


def test_a_micro_batch_without_a_readable_row_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = arrays(60, 1)
    rows = [json.dumps({"x": x, "y": y}) for x, y in zip(inputs.tolist(), labels.tolist(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join("{" if n % 5 != 3 else row for n, row in enumerate(rows)))
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.jsonl"))
    alone = weights_without_torn_rows(0, 1, tmp_path / "alone")
    found = run_ranks(weights_without_torn_rows, 2, tmp_path / "two", env={"ROWS": os.environ["ROWS"]})[0]
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_a_stage_on_each_of_three_ranks_computes_the_same(alone: RunDir, tmp_path: Path, kind: str) -> None:
    run = train(TASK, tmp_path / "run", "cpu,cpu,cpu", merge(SAME, merge(PIPELINE, {"pipeline": {"schedule": kind}})))
    assert_equal_runs(run, alone)


@pytest.mark.parametrize(
    ("task", "devices", "words"),
    [
        ("Incomplete", "cpu,cpu", r"last\.weight"),
        ("Enlarged", "cpu,cpu", r"stage 2 .*\b1\.weight"),
        ("Unstaged", "cpu,cpu", "cannot be trained in stages"),
        ("CallsMethod", "cpu,cpu", "calls a method of its model"),
        ("CallsMethod", "cpu,cpu,cpu", "calls a method of its model"),
        ("CallsByName", "cpu,cpu,cpu", "inputs"),
        ("Staged", "cpu,cpu,cpu,cpu", r"\b4 devices.*\b3 stage"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_one_clear_error(tmp_path: Path, task: str, devices: str, words: str) -> None:
    settings = merge(SAME, PIPELINE)
    with pytest.raises(LockstepError, match=words):
        train(TASK.replace("Staged", task), tmp_path / "run", devices, settings)


@pytest.mark.drill
def test_a_task_that_calls_its_model_twice_is_told_so(tmp_path: Path) -> None:
    command = ("train", TASK.replace("Staged", "CallsTwice"), "--strategy", "pipeline", "--devices", "cpu,cpu")
    output = finish(start(*command, cwd=tmp_path), 2, timeout_s=300)
    assert re.search(r"^error: .*CallsTwice", output, re.MULTILINE)
    assert "Traceback" not in output


def test_a_mistake_of_the_task_is_not_taken_for_a_call_of_its_model() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch.images)
        return output

    with pytest.raises(AttributeError, match="images"):
        inputs_of(loss, torch.zeros(3))


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """A line whose messages come back: what is sent is received in this order."""
    sent = deque[Tensor]()
    monkeypatch.setattr(dist, "isend", lambda tensor, **_: sent.append(tensor))
    monkeypatch.setattr(dist, "recv", lambda tensor, **_: tensor.copy_(sent.popleft()))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield Line(torch.device("cpu"), 60.0)
    finally:
        dist.destroy_process_group()


def test_tensors_of_any_kind_and_shape_reach_the_next_rank(line: Line) -> None:
    messages = [
        (torch.arange(6.0).view(2, 3).T.requires_grad_(), torch.zeros((1,) * 10), torch.ones(0, 2), torch.tensor(True)),
        (torch.full((2,), 7, dtype=torch.uint16), torch.tensor([1 + 2j]).conj(), torch.ones(3).to(torch.float8_e5m2)),
    ]
    for message in messages:
        line.send(message, 1)
    for message in messages:
        for sent, received in zip(message, line.receive(1), strict=True):
            assert (received.dtype, received.requires_grad) == (sent.dtype, sent.requires_grad)
            assert (received.shape, received.tolist()) == (sent.shape, sent.tolist())
            assert received.is_leaf


def test_the_stages_of_built_in_tasks_are_their_models() -> None:
    lengths = torch.tensor([40, 33])
    small = {"source": "synthetic", "synthetic_samples": 8}
    windows = (torch.randn(3, 9, 128),)
    cases: list[tuple[Any, tuple[Tensor, ...]]] = [
        (AutoencoderTask(), (torch.rand(3, 1, 8, 8),)),
        (SpeechTask(), (torch.randn(2, 40, 80), lengths)),
        (HarTask(HarTask.Config(model="cnn", **small)), windows),
        (HarTask(HarTask.Config(model="mlp", hidden=(32, 16), dropout=0.1, **small)), windows),
    ]
    for task, inputs in cases:
        model = task.model().eval()
        output: Any = inputs
        stages = stages_of(task, model, 3 if isinstance(task, HarTask) else 2)
        for stage in stages:
            output = stage(*as_inputs(output))
        torch.testing.assert_close(output, model(*inputs), rtol=0, atol=0)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 9))
def test_any_schedule_ends_and_does_each_micro_batch_once(kind: str, ranks: int, micro_batches: int) -> None:
    """Played out on all ranks: nobody waits for ever, and 1f1b holds no more activations than ranks follow."""
    todo = [list(schedule(kind, rank, ranks, micro_batches)) for rank in range(ranks)]
    done: list[list[tuple[bool, int]]] = [[] for _ in range(ranks)]
    while any(todo):
        before = sum(map(len, todo))
        for rank in range(ranks):
            while todo[rank]:
                forward, place = todo[rank][0]
                if forward and rank and (True, place) not in done[rank - 1]:
                    break
                if not forward and rank < ranks - 1 and (False, place) not in done[rank + 1]:
                    break
                done[rank].append(todo[rank].pop(0))
        assert sum(map(len, todo)) < before, "all ranks wait"
    for rank, actions in enumerate(done):
        assert sorted(actions) == [(kind, place) for kind in (False, True) for place in range(micro_batches)]
        assert all(actions.index((True, place)) < actions.index((False, place)) for place in range(micro_batches))
        held = [sum(1 if forward else -1 for forward, _ in actions[: end + 1]) for end in range(len(actions))]
        if kind == "1f1b":
            assert max(held) <= ranks - rank


def test_each_device_has_as_many_stages_as_the_others_or_one_more() -> None:
    assert [shares(stages, 3) for stages in (3, 4, 5, 8)] == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 3, 5], [0, 2, 5, 8]]
