"""A user's ``LightningModule`` as a task of Lockstep's loop, for measurements and comparisons.

``lockstep verify`` and ``lockstep bench`` train it so. The loop calls ``training_step``, ``validation_step`` and
``configure_optimizers``; other hooks of the module and callbacks of the Trainer are not called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader, IterableDataset

from lockstep._compat.torch import ConvertedModule, tree_leaves
from lockstep.config import RunConfig
from lockstep.config.load import merge
from lockstep.engine.generators import seeded
from lockstep.engine.task import Datasets, Loss, Metrics, Scheduler, Task
from lockstep.engine.training_data import open_data
from lockstep.errors import TaskError, UnsupportedError
from lockstep.lightning.dataloaders import defines, orders
from lockstep.lightning.module_task import ModuleConfig, ModuleTask, PlannedTrainer, placement_of
from lockstep.telemetry.loggers import as_row


class _Output(NamedTuple):
    """``loss``: the mean over the batch, shape (); ``logged``: the numbers that the step logged."""

    loss: Tensor | None
    logged: dict[str, float]
    samples: int


class StepModule(ConvertedModule):
    """The module as a model whose forward pass is one of its steps, so that DDP sees every call."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def converted(self) -> None:
        device = next((p.device for p in self.module.parameters()), None)
        if device is not None and device.type != "meta":
            self.module.to(device)  # sets what `self.device` of a LightningModule returns

    def forward(self, step: str, batch: Any, index: int) -> _Output:
        from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

        module: Any = self.module
        logged: dict[str, Any] = {}
        shadows = {
            "log": lambda name, value, *_, **__: logged.update({name: value}),
            "log_dict": lambda values, *_, **__: logged.update(values),
        }
        vars(module).update(shadows)
        try:
            batch = module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)
            takes_index = is_param_in_hook_signature(getattr(module, step), "batch_idx", min_args=2)
            output = getattr(module, step)(*((batch, index) if takes_index else (batch,)))
        finally:
            for name in shadows:
                del vars(module)[name]
        loss = output
        if isinstance(output, Mapping):
            loss = output.get("loss", next(iter(output.values()), None) if step == "validation_step" else None)
        samples = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
        numbers = {}
        if step == "validation_step":  # in training, reading a tensor would wait for the GPU
            scalars = {name: v for name, v in logged.items() if isinstance(v, int | float | Tensor)}
            numbers = {name: float(v) for name, v in scalars.items() if torch.as_tensor(v).numel() == 1}
        return _Output(loss if isinstance(loss, Tensor) else None, numbers, samples)


class _Means:
    """The means over samples of what ``validation_step`` logs."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._sums = dict[str, float]()
        self._count = 0

    def update(self, *rows: Tensor) -> None:
        for name, row in zip(self._names, rows, strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + row.double().sum().item()
        self._count += len(rows[0]) if rows else 0

    def compute(self) -> Mapping[str, Any]:
        return {name: total / self._count for name, total in self._sums.items()}


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
        self._logged: list[str] = []
        self._view: PlannedTrainer | None = None
        self._made: tuple[Scheduler | None, Any] | None = None

    def prepare(self) -> None:
        self._source._lockstep_data = self._lockstep_data
        self._source.prepare(ranks=1)

    def datasets(self) -> Datasets:
        self._source._lockstep_data = self._lockstep_data
        with self._source.planning(1):
            loader = self._source.open_loader("train_dataloader")
            validates = defines(self._source.module, "validation_step")
            val: Any = self._source.open_loader("val_dataloader") if validates else None
        if not orders(loader, 1):
            raise UnsupportedError(
                f"{self._name} has a training loader that keeps its order",
                why="a comparison or measurement trains in Lockstep's order",
                fix="use one DataLoader of a map-style data set, with batch_size and without a sampler",
            )
        self._collate = loader.collate_fn
        # Several loaders, or batches made otherwise than in training, are not evaluated.
        is_map = isinstance(val, DataLoader) and not isinstance(val.dataset, IterableDataset)
        return Datasets(loader.dataset, val.dataset if is_map and val.collate_fn is self._collate else None)

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

    def _run(self, step: str, model: nn.Module, batch: Any) -> _Output:
        view = self._view
        context = self.context
        if view is not None:
            view.current_epoch = context.epoch
            view.global_step = context.step
            view.training = context.is_training
        output: _Output = model(step, batch, context.step)
        return output

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        output = self._run("training_step", model, batch)
        if output.loss is None:
            raise TaskError(
                f"{self._name}.training_step() returned no loss",
                why="Lightning would skip the batch, on this rank alone",
                fix="return a tensor of shape (), or a mapping with it as 'loss'",
            )
        return Loss(output.loss * output.samples, output.samples)

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Any, ...]]:
        loss, logged, samples = self._run("validation_step", model, batch)
        row = {name.removeprefix("val_"): value for name, value in as_row(logged).items()}
        if loss is None:
            loss = torch.tensor(row.get("loss", 0.0))
        row.pop("loss", None)
        self._logged[:] = row
        rows = tuple(torch.full((samples,), value, dtype=torch.float64) for value in row.values())
        return Loss(loss.detach() * samples, samples), rows

    def metrics(self) -> Metrics:
        return _Means(self._logged)

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
    steps = training.max_steps or -(-samples // per_step) * training.epochs
    sizes = {"batch_size": loader.batch_size, **({"tail": "drop"} if loader.drop_last else {})}
    return merge({"training": sizes}, merge(overrides, {"task": {"native_steps": steps}}))
