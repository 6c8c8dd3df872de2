"""The text and the images task on two ranks, in one start of them, against one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep import Task
from lockstep.recipes.text.task import TextConfig, TextTask
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.recipes.test_images import SmallImages, folders
from tests.recipes.test_text import TEXT, written


class SmallConfig(TextConfig):
    context: int = 16
    width: int = 16
    depth: int = 1
    heads: int = 2


class SmallText(TextTask):
    Config = SmallConfig


class PackedConfig(SmallConfig):
    pack: bool = True


class PackedText(TextTask):
    Config = PackedConfig


#: Windows of a text, packed documents, and images; by the name of their data.
RUNS: dict[str, tuple[type[Task], dict[str, Any]]] = {
    "corpus.txt": (SmallText, {"training": {"epochs": 1}}),
    "corpus.jsonl": (PackedText, {"training": {"epochs": 1}}),
    "images": (SmallImages, {"training": {"epochs": 2}, "optimizer": {"lr": 5e-3}}),
}
Losses = dict[str, list[float]]


def trained(rank: int, size: int, folder: Path) -> Losses:
    found = {}
    for name, (task, settings) in RUNS.items():
        training = {"global_batch_size": 7, "early_stopping_patience": 0, **settings["training"]}
        sections = {**settings, "training": training, "data": {"data_dir": str(folder / name)}}
        _, events = attempt(task, folder / f"{name}-{size}", rank, size, **sections)
        found[name] = [event.loss for event in events if type(event).__name__ == "StepLogged"]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Losses, Losses]:
    folder = tmp_path_factory.mktemp("runs")
    written(folder)
    written(folder, "corpus.jsonl", "".join(json.dumps({"text": TEXT[: 5 + n % 40]}) + "\n" for n in range(80)))
    folders(folder / "images", number=20)
    return folder, trained(0, 1, folder), run_ranks(trained, 2, folder)[0]


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_have_the_losses_of_one_with_ragged_batches(runs: tuple[Path, Losses, Losses], name: str) -> None:
    _, one, two = runs
    np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-6)
    assert len(one[name]) > 5
    if name != "images":
        assert one[name][-1] < one[name][0]


def test_a_trained_run_generates_and_exports(runs: tuple[Path, Losses, Losses], tmp_path: Path) -> None:
    run = lockstep.Run(runs[0] / "corpus.txt-1")
    made = SmallText(SmallConfig())
    model = run.load_model(task=made)
    assert made.generate(model, "How ", 12, seed=1) == made.generate(model, "How ", 12, seed=1)
    shown = made.generate(model, "", 200, temperature=100.0)  # about any bytes
    assert all(c.isprintable() or c in "\n\t" for c in shown) and "�" in shown
    assert len(made.remarks(model)) == 1 and made.remarks() == []
    run.export(tmp_path / "out", program=False, task=made)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "bytes"
