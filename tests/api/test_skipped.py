"""Steps without a finite gradient are skipped; too many of them end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lockstep
from lockstep import Loss
from lockstep.errors import NonFiniteError
from tests.toys import Toy


class MostlyNaN(Toy):
    """Has a NaN loss in three of four steps."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total * float("nan") if model.training and self.calls % 4 else total, count)


@pytest.mark.parametrize(("max_skipped_share", "is_failure"), [(0.8, False), (0.7, True)])
def test_max_skipped_share_ends_the_run(tmp_path: Path, max_skipped_share: float, is_failure: bool) -> None:
    settings: dict[str, Any] = {"training.max_steps": 8, "training.max_skipped_share": max_skipped_share}
    settings |= {"devices": "cpu", "log_interval": 8, "save_dir": tmp_path / "run"}
    if is_failure:
        with pytest.raises(NonFiniteError):
            lockstep.train(MostlyNaN(), **settings)
        return
    run = lockstep.train(MostlyNaN(), **settings)
    assert run.steps[-1]["skipped_steps"] == 6
