"""Answers to the core about a ``LightningModule``, which Lightning's Trainer trains. Lightning is imported late."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.checkpoint.store import Snapshot
from lockstep.config import RunConfig
from lockstep.engine.inspection import inspect_task
from lockstep.engine.model_inputs import Inputs
from lockstep.engine.rank_context import RankContext
from lockstep.engine.reopened import Evaluation, Reopened
from lockstep.engine.runner import TaskRunner
from lockstep.engine.task import Datasets, Task
from lockstep.errors import DataError, UnsupportedError
from lockstep.lightning.module_task import ModuleTask
from lockstep.planning import Plan, TaskFacts

if TYPE_CHECKING:
    from lockstep.lightning.module_fit import ModuleFit


class ModuleRunner(TaskRunner):
    """Runs a :class:`.ModuleTask`."""

    can_divide = False
    predicted_split = "predict"
    task: ModuleTask

    @classmethod
    def make(cls, kind: type[Task], arguments: Mapping[str, Any]) -> Task:
        """Make a module's task, or one of Lockstep's loop if verify and bench have set the number of steps."""
        task = kind(**arguments)
        assert isinstance(task, ModuleTask)
        if task.config.native_steps is None:
            return task
        from lockstep.lightning.module_steps import ModuleSteps

        return ModuleSteps(task.config, task)

    def complete(self, overrides: Mapping[str, Any], config: RunConfig) -> RunConfig:
        """Check ``config`` and leave it as it is: the training loader has the size of a micro-batch."""
        if importlib.util.find_spec("lightning") is None:
            raise UnsupportedError(
                "Lightning, which trains a LightningModule, is not installed",
                fix="pip install 'lockstep-train[lightning]'",
            )
        self.task.check_config(config)
        return config

    def native_settings(self, overrides: Mapping[str, Any], config: RunConfig) -> Mapping[str, Any]:
        """Return ``overrides`` with the number of steps and, if they lack them, the sizes of the loader."""
        from lockstep.lightning.module_steps import native_settings

        return native_settings(self.task, overrides, config)

    def inspect(self, datasets: Datasets, config: RunConfig) -> TaskFacts:
        """Return the facts of the module and of its training loader; the module makes its optimizers."""
        facts = inspect_task(self.task, datasets, config.task.name)
        answers = dict.fromkeys(("sets_batch_size", "even_steps", "validates_itself"), True)
        return facts.model_copy(update={**answers, "keeps_batches": self.task.loader_facts.batches is not None})

    def sized(self, config: RunConfig, *, global_batch_size: int | None, devices: int) -> RunConfig:
        """Return ``config`` with the sizes of the training loader; raise for settings of Lockstep's loop."""
        return self.task.loader_facts.sized(config, global_batch_size=global_batch_size, devices=devices)

    def revised(self, plan: Plan, config: RunConfig) -> Plan:
        """Return ``plan`` with the decisions of the module; raise where Lightning's Trainer cannot follow it."""
        return self.task.loader_facts.revised(plan, config)

    def fitting(self, rank: RankContext, datasets: Datasets | None, ending: ExitStack) -> ModuleFit:
        """Build what trains on a rank. Lightning's Trainer opens the data. Collective."""
        from lockstep.lightning.module_fit import ModuleFit

        return ModuleFit(rank, self.task)

    def check_evaluation(self, devices: Sequence[str]) -> None:
        raise UnsupportedError(
            f"a LightningModule is evaluated on one device, not on {', '.join(devices)}",
            why="it logs means over its batches, which several ranks would divide differently",
            fix=f"name one: --devices {devices[0]}",
        )

    def evaluate(self, reopened: Reopened) -> dict[str, Any]:
        """Return the values that the module logs over a split; data of a file are refused."""
        if reopened.datasets is None:
            return super().evaluate(reopened)
        from lockstep.lightning.module_evaluation import evaluate_checkpoint

        return evaluate_checkpoint(self.task, reopened)

    def check_prediction(self, request: Evaluation) -> None:
        if request.data is not None or request.with_loss:
            reason = "its loss" if request.with_loss else "data that its loaders do not have"
            raise UnsupportedError(
                f"the predictions of a LightningModule cannot have {reason}",
                why="its predict_step() gets the batches of its loaders and returns any columns",
                fix="name predict, test, val or train, without --loss (loss=True); predict_step() may return the loss",
            )

    def predictions(self, reopened: Reopened) -> Iterator[list[list[dict[str, Any]]]]:
        """Yield the results of the module's ``predict_step`` as rows. Collective."""
        from lockstep.lightning.module_evaluation import predict_checkpoint

        return predict_checkpoint(self.task, reopened)

    def model_inputs(self, model: nn.Module, config: RunConfig, *, required: bool) -> Inputs | None:
        """Return the module's ``example_input_array``."""
        example = getattr(model, "example_input_array", None)
        if example is None and required:
            raise DataError(
                "the inputs of the module's forward() are not known",
                why="it has no example_input_array",
                fix="set self.example_input_array in its __init__, or export the weights alone (--no-program)",
            )
        if example is None:
            return None
        if isinstance(example, dict):
            return (), example
        return (tuple(example) if isinstance(example, (list, tuple)) else (example,)), {}

    def export(self, model: nn.Module, snapshot: Snapshot, folder: Path) -> None:
        """Write ``module.ckpt``, which ``load_from_checkpoint`` of the module reads."""
        from lockstep.lightning.ckpt_file import as_file

        torch.save(as_file(snapshot), folder / "module.ckpt")
