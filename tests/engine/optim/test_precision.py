"""``precision: bf16-true``: weights, gradients and optimizer in bfloat16, as in a loop written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.config.load import merge
from lockstep.errors import UnsupportedError
from lockstep.rundir.folder import RunDir
from tests.attempts import attempt
from tests.dist.runs import go_on, train
from tests.gloo import run_ranks
from tests.toys import CLASSES, FEATURES, Toy, arrays

SAME: dict[str, Any] = {
    "task": {"samples": 192},
    "training": {"epochs": 2, "global_batch_size": 16, "batch_size": 8, "max_grad_norm": None},
    "optimizer": {"lr": 0.01, "weight_decay": 0.0},
    "hardware": {"precision": "bf16-true"},
}


def plain_loop(order: list[list[int]]) -> dict[str, torch.Tensor]:
    """Two micro-batches of 8 a step, whose gradients torch adds."""
    torch.manual_seed(42)
    model = nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Identity(), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, CLASSES)
    ).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    inputs, labels = arrays(192, 1)
    for step in order:
        for rows in (step[:8], step[8:]):
            scores = model(inputs[rows].bfloat16()).float()
            (F.cross_entropy(scores, labels[rows], reduction="sum") / 16).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def order_of(run: RunDir) -> list[list[int]]:
    steps: dict[int, list[int]] = {}
    for line in (run.path / "samples-rank0.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], []).extend(row["indices"])
    return [indices for _, indices in sorted(steps.items())]


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    return dict(lockstep.Run(run.path).load_model("last").state_dict())


def on_ranks(rank: int, ranks: int, folder: Path) -> dict[str, torch.Tensor]:
    return attempt(Toy, folder, rank, ranks, **SAME, scheduler={"name": "constant", "warmup_steps": 0})[0]


@pytest.mark.slow
def test_one_rank_is_the_plain_loop_bit_for_bit_and_two_are_to_rounding(tmp_path: Path) -> None:
    one = train("tests.toys:Toy", tmp_path / "one", "cpu", merge(SAME, {"training": {"max_steps": 7}}))
    go_on(one, "cpu", {"training": {"max_steps": None}})
    judge, found = plain_loop(order_of(one)), weights(one)
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in judge.items()
    }
    again = lockstep.Run(one.path).evaluate(split="test", checkpoint="best")
    assert one.read().final_metrics.items() >= again.items()

    two = run_ranks(on_ranks, 2, tmp_path / "two")[0]
    assert RunDir(tmp_path / "two").plan()["decisions"]["one_message"]["value"] is False
    for name, value in two.items():
        torch.testing.assert_close(value.float(), judge[name].float(), rtol=2**-6, atol=2**-7)
    full = train("tests.toys:Toy", tmp_path / "full", "cpu", merge(SAME, {"hardware": {"precision": "32"}}))
    assert not torch.equal(weights(full)["0.weight"], found["0.weight"])


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.seen: set[tuple[torch.dtype, ...]] = set()

    def forward(self, batch: dict[str, torch.Tensor], *, scale: torch.Tensor) -> dict[str, Any]:
        self.seen.add((batch["x"].dtype, batch["place"].dtype, scale.dtype))
        return {"scores": self.linear(batch["x"]) * scale, "place": batch["place"]}


class OfNested(Toy):
    def model(self) -> nn.Module:
        self.net = Nested()
        self.returned: set[tuple[torch.dtype, ...]] = set()
        return self.net

    def scores(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        found = model({"x": inputs, "place": labels}, scale=torch.ones(1))
        self.returned.add((found["scores"].dtype, found["place"].dtype))
        return found["scores"]  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        return lockstep.Loss(F.cross_entropy(self.scores(model, batch), batch[1], reduction="sum"), len(batch[1]))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
        return self.scores(model, batch), batch[1]


def test_floats_of_nested_inputs_are_cast_and_outputs_are_float32(tmp_path: Path) -> None:
    task = OfNested()
    lockstep.train(task, merge(SAME, {"task": None, "save_dir": str(tmp_path / "run")}), devices="cpu", max_steps=1)
    assert task.net.seen == {(torch.bfloat16, torch.int64, torch.bfloat16)}
    assert task.returned == {(torch.float32, torch.int64)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"hardware": {"strategy": "pipeline"}}, "strategy pipeline"), ({"averaging": {"name": "ema"}}, "averaging.name")],
)
def test_what_it_is_not_for_is_refused(settings: dict[str, Any], words: str) -> None:
    devices = {"hardware": {"selected_devices": ["cpu", "cpu"], "precision": "bf16-true"}}
    with pytest.raises(UnsupportedError, match=f"bf16-true .*{words}"):
        lockstep.plan(Toy, merge(devices, settings))
