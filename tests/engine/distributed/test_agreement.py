"""Ranks that should have the same weights are compared, and the first difference is named."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lockstep.errors import RanksDifferError, UnsupportedError
from tests.attempts import attempt
from tests.e2e.test_train import finish, start
from tests.gloo import run_ranks
from tests.toys import CLASSES, FEATURES, Toy


class Cached(nn.Linear):
    buffer_reduction: ClassVar[dict[str, str]] = {"cache": "local", "phase": "same"}

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("cache", torch.zeros(3))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))


class Differing(Toy):
    """After the last step the tensor ``part`` of rank 1 is another one, by a hook."""

    part = "nothing"

    def model(self) -> nn.Module:
        model = Cached()
        if self.part == "start" and os.environ.get("RANK") == "1":
            nn.init.ones_(model.bias)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.made = torch.optim.Adam(model.parameters())
        return self.made

    def hooks(self) -> Any:
        def change(result: Any, model: Any) -> None:
            if result.step != 3 or os.environ.get("RANK") != "1" or self.part == "start":
                return
            is_moment = self.part == "moment"
            tensor = self.made.state[model.weight]["exp_avg"] if is_moment else getattr(model, self.part)
            with torch.no_grad():
                tensor.view(-1)[1] += 1e-5

        return [(change, 1)]


#: What differs, and the words of the error; the first may.
PARTS = {
    "cache": "",
    "phase": "the buffer phase is declared the same on all ranks, and is not",
    "bias": "bias of rank 1 ",
    "moment": "exp_avg of parameter 0 of rank 1 ",
    "start": "begin with different weights: bias",
}


def differing(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """The error of each part."""
    errors = {}
    for part in PARTS:
        task = type("Of", (Differing,), {"part": part, "__module__": __name__})
        mode = "exact" if part == "start" else "fast"
        training = {"max_steps": 3, "global_batch_size": 12, "reproducibility": mode}
        errors[part] = ""
        try:
            attempt(task, folder / part, rank, ranks, training=training)
        except (RanksDifferError, UnsupportedError) as error:
            errors[part] = str(error)
    return errors


@pytest.mark.slow
def test_the_first_tensor_that_differs_is_named(tmp_path: Path) -> None:
    for errors in run_ranks(differing, 2, tmp_path):
        assert errors.keys() == PARTS.keys()
        for part, words in PARTS.items():
            assert words in errors[part] and bool(words) == bool(errors[part]), part


class Apart(Toy):
    """Ranks begin with different weights, and a hook changes them on one rank only."""

    def model(self) -> nn.Module:
        model = super().model()
        nn.init.constant_(model[0].bias, float(os.environ.get("RANK", "0")))
        return model

    def hooks(self) -> Any:
        def noise(result: Any, model: nn.Module) -> None:
            if os.environ.get("RANK", "0") == "1":
                model[4].weight.data += 1e-3

        return [(noise, 5)]


@pytest.mark.slow
def test_ranks_that_part_end_the_run_at_the_next_checkpoint(tmp_path: Path) -> None:
    task = f"{__file__}:Apart"
    output = finish(start("train", task, "--save-dir", "run", "--devices", "cpu,cpu", cwd=tmp_path), code=1)
    assert re.search(r"\bbegan\b.*0\.bias of rank 1\b", output)
    assert re.search(r"^error: .*4\.weight of rank 1\b.* rank 0\b", output, re.MULTILINE)
