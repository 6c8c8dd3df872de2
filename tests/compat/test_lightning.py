"""Every private name of Lightning and torchmetrics that Lockstep uses, on the installed versions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torchmetrics import MeanMetric

from lockstep._compat import lightning as compat
from lockstep._compat import lightning_results, torchmetrics
from lockstep._compat.lightning_cli import OpenCLI

pytestmark = pytest.mark.filterwarnings("ignore")  # what these versions of the libraries say to each other
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Logging(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", 3.0)
        return super().training_step(batch, batch_idx)

    val_dataloader = None  # type: ignore[assignment]


def test_hooks_of_loops_and_names_of_what_is_logged() -> None:
    class Ending(Logging):
        ends = 0

        def on_train_epoch_end(self) -> None:
            self.ends += 1

    for allowed in (True, False):
        module, trainer = Ending(), Trainer(max_epochs=1, max_steps=1, accelerator="cpu", **QUIET)
        for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
            compat.call_before(loop, "on_advance_end", partial(bool, allowed))
        trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(2, 32), batch_size=2))
        assert module.ends == allowed
    assert compat.STEPPED in trainer.fit_loop.state_dict()["epoch_loop.state_dict"]
    lightning_results.agree_on_names(trainer)
    assert isinstance(trainer.validate_loop._results, lightning_results.AgreedResults)
    assert isinstance(trainer._logger_connector, lightning_results.AgreedConnector)
    assert lightning_results.evaluation_samplers(trainer) == []
    with torchmetrics.unequal_lists():
        assert MeanMetric._sync_dist is not sync
    assert MeanMetric._sync_dist is sync


sync = MeanMetric._sync_dist


def test_optimizers_in_any_form() -> None:
    made = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    settings = {"scheduler": torch.optim.lr_scheduler.StepLR(made, 1), "interval": "step"}
    for given in ({"optimizer": made, "lr_scheduler": settings}, ([made], [settings])):
        optimizers, [scheduler] = compat.optimizers_of(given)
        assert (optimizers, scheduler.scheduler) == ([made], settings["scheduler"])
        assert (scheduler.interval, scheduler.frequency, scheduler.reduce_on_plateau) == ("step", 1, False)


def test_ddp_without_a_launcher() -> None:
    strategy = compat.LaunchedDdp()
    strategy._configure_launcher()
    assert strategy.launcher is None


class Traced(OpenCLI):
    calls: tuple[str, ...] = ()

    def read_checkpoint_settings(self) -> None:
        self.calls += ("checkpoint",)
        super().read_checkpoint_settings()

    def run_subcommand(self, subcommand: str) -> None:
        self.calls += (subcommand,)


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program"])
    cli = Traced(
        BoringModel, args=["fit", "--trainer.max_steps=3"], save_config_callback=None, seed_everything_default=False
    )
    assert cli.calls == ("checkpoint", "fit")
    assert cli.setting("trainer.max_steps") == 3
    assert cli.setting("trainer", instantiated=True).max_steps == 3
    assert cli.parser_of("fit").get_default("trainer.devices") == "auto"


def test_metrics() -> None:
    metric = MeanMetric()
    metric.distributed_available_fn = lambda: True
    metric.update(1.0)
    with torchmetrics.without_sync():  # else compute() asks other ranks, of which there are none
        assert metric.compute() == 1.0
    torchmetrics.mark_updated(metric)
    metric.compute()  # without a warning
