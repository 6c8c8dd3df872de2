"""A user's ``LightningModule`` as a task of Lockstep's loop, for measurements and comparisons.

``lockstep verify`` and ``lockstep bench`` train it so. The loop calls ``training_step`` and
``configure_optimizers``; other hooks of the module and callbacks of the Trainer are not called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR

from lockstep._compat.torch import ConvertedModule, tree_leaves
from lockstep.arithmetic import ceil_div
from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.generators import seeded
from lockstep.engine.task import Datasets, Loss, Scheduler, Task
from lockstep.engine.training_data import open_data
from lockstep.errors import TaskError, UnsupportedError
from lockstep.lightning.dataloaders import TrainingLoader
from lockstep.lightning.module_task import ModuleConfig, ModuleTask, PlannedTrainer, placement_of


class StepModule(ConvertedModule):
    """The module as a model whose forward pass is its training step, so that DDP sees every call."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def converted(self) -> None:
        device = next((p.device for p in self.module.parameters()), None)
        if device is not None and device.type != "meta":
            self.module.to(device)  # sets what `self.device` of a LightningModule returns

    def forward(self, batch: Any, index: int) -> tuple[Tensor | None, int]:
        """Return the mean loss of the batch, shape (), and its samples."""
        from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

        module: Any = self.module
        shadows = dict.fromkeys(("log", "log_dict"), lambda *_, **__: None)
        vars(module).update(shadows)
        try:
            batch = module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)
            takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
            output = module.training_step(*((batch, index) if takes_index else (batch,)))
        finally:
            for name in shadows:
                del vars(module)[name]
        loss = output.get("loss") if isinstance(output, Mapping) else output
        samples = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
        return loss if isinstance(loss, Tensor) else None, samples


class ModuleSteps(Task):
    """A ``LightningModule`` with automatic optimisation and one optimizer, trained by Lockstep's loop.

    The loss of a batch is the module's mean times the number of samples, so several devices compute what one does.
    ``config.native_steps`` is the number of steps that its schedules count with.
    """

    Config = ModuleConfig
    records_arguments = False
    defaults = ModuleTask.defaults

    def __init__(self, config: ModuleConfig, source: ModuleTask) -> None:
        super().__init__(config)
        self._source = source
        self._name = getattr(type(source).module_class, "__name__", "the module")
        self._collate: Any = None
        self._view: PlannedTrainer | None = None
        self._made: tuple[Scheduler | None, Any] | None = None

    def prepare(self) -> None:
        self._source._lockstep_data = self._lockstep_data
        self._source.prepare(ranks=1)

    def datasets(self) -> Datasets:
        self._source._lockstep_data = self._lockstep_data
        with self._source.planning(1):
            loader = self._source.open_loader("train_dataloader")
        if TrainingLoader(loader, ranks=1).keeps_order:
            raise UnsupportedError(
                f"{self._name} has a training loader that keeps its order",
                why="a comparison or measurement trains in Lockstep's order",
                fix="use one DataLoader of a map-style data set, with batch_size and without a sampler",
            )
        self._collate = loader.collate_fn
        return Datasets(loader.dataset)

    def collate(self, samples: Any) -> Any:
        return self._collate(list(samples))

    def model(self) -> nn.Module:
        module = self._source.fresh_module()
        if not module.automatic_optimization:
            raise UnsupportedError(
                f"{self._name} optimizes manually, so it has no step that verify and bench could drive",
                why="they call training_step and take the optimizer step themselves",
                fix="leave automatic_optimization on; or write a lockstep.Task",
            )
        self._view = PlannedTrainer(self._source.planned, 1, module, self._source.datamodule)
        vars(self._view)["estimated_stepping_batches"] = self.config.native_steps
        module.trainer = self._view
        with seeded(self.data.seed):
            module.setup("fit")
            module.configure_model()
        return StepModule(module)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [*model.module.children()]  # type: ignore[union-attr]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if self._view is not None:
            self._view.current_epoch = self.context.epoch
            self._view.global_step = self.context.step
        mean, samples = model(batch, self.context.step)
        if mean is None:
            raise TaskError(
                f"{self._name}.training_step() returned no loss",
                why="Lightning would skip the batch, on this rank alone",
                fix="return a tensor of shape (), or a mapping with it as 'loss'",
            )
        return Loss(mean * samples, samples)

    def optimizer(self, model: nn.Module) -> Optimizer:
        from lockstep._compat.lightning import optimizers_of

        optimizers, schedulers = optimizers_of(model.module.configure_optimizers())  # type: ignore[union-attr, operator]
        if len(optimizers) != 1 or len(schedulers) > 1 or any(each.frequency != 1 for each in schedulers):
            raise UnsupportedError(
                f"{self._name}.configure_optimizers() returned {len(optimizers)} optimizers and {len(schedulers)} "
                "schedulers, or a scheduler with a frequency",
                why="verify and bench take one optimizer step for each batch, and step at most one scheduler: after "
                "every step, every epoch or every evaluation",
                fix="return one optimizer; or write a lockstep.Task",
            )
        [optimizer] = optimizers
        made = [Scheduler(s.scheduler, "metric" if s.reduce_on_plateau else s.interval) for s in schedulers]
        # The scheduler is returned by scheduler(), and an optimizer is expected without the wrapper that it adds.
        self._made = (made[0] if made else None, vars(optimizer).pop("step", None))
        return optimizer

    def scheduler(self, optimizer: Optimizer) -> Scheduler:
        assert self._made is not None, "the optimizer is made first"
        scheduler, wrapped = self._made
        if wrapped is not None:
            vars(optimizer)["step"] = wrapped
        return scheduler or Scheduler(ConstantLR(optimizer, factor=1.0))


def native_settings(task: ModuleTask, overrides: Mapping[str, Any], config: RunConfig) -> Mapping[str, Any]:
    """Return ``overrides`` with the number of steps and, if they lack them, the sizes of the loader."""
    if task.module_class is None:
        raise UnsupportedError(
            "verify and bench cannot take a LightningModule that is an object",
            why="each of their runs makes a new one",
            fix="name its class, as FILE.py:MODULE",
        )
    samples = len(open_data(task, config).train)
    loader = task.loader_facts
    training = config.training
    per_step = loader.batch_size * placement_of(config).world_size * training.accumulate
    steps = training.max_steps or ceil_div(samples, per_step) * training.epochs
    sizes = {"batch_size": loader.batch_size, **({"tail": "drop"} if loader.drop_last else {})}
    return merge({"training": sizes}, merge(overrides, {"task": {"native_steps": steps}}))
