"""A user's ``LightningModule`` and ``LightningDataModule`` as a task; :mod:`.module_fit` trains them.

Nothing here imports Lightning: only hooks that the classes define are called.
"""

from __future__ import annotations

import os
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from pydantic import Field, field_validator
from torch import nn

from lockstep.config import RunConfig
from lockstep.engine.generators import seeded
from lockstep.engine.task import Datasets, Task, TaskConfig
from lockstep.errors import ConfigError, TaskError, UnsupportedError
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.resolve import Placement, resolve_placement
from lockstep.hardware.world import read_world
from lockstep.lightning.dataloaders import TrainingLoader, defines
from lockstep.lightning.module_plan import LoaderFacts
from lockstep.lightning.settings import DECIDED, as_list, refuse_arguments
from lockstep.tasks.registry import find_class

#: How often a training loader that epochs make again is made to plan a run.
_TRIED_RELOADS = 10
#: Callbacks that would change the batches under the plan, by the names of their classes.
_CHANGE_BATCHES = {"GradientAccumulationScheduler": "training.accumulate", "BatchSizeFinder": "the DataLoader"}


class ModuleConfig(TaskConfig):
    """``task.<setting>`` of a module that is named by its class."""

    model: dict[str, Any] = Field(default_factory=dict, description="arguments of the LightningModule")
    datamodule: str | None = Field(
        None, description="the LightningDataModule, as path/to/file.py:Class; unset: the module has loaders itself"
    )
    data: dict[str, Any] = Field(default_factory=dict, description="arguments of the LightningDataModule")
    trainer: dict[str, Any] = Field(default_factory=dict, description="more arguments of Lightning's Trainer")
    cli: dict[str, Any] | None = Field(
        None, description="set by `lockstep lightning fit`: sections of LightningCLI, which make all of these"
    )
    native_steps: int | None = Field(
        default=None, description="set by verify and bench: the optimizer steps that Lockstep's loop takes"
    )

    @field_validator("datamodule")
    @classmethod
    def _found_from_any_folder(cls, value: str | None) -> str | None:
        file, colon, attribute = (value or "").rpartition(":")
        return f"{Path(file).resolve()}{colon}{attribute}" if file.endswith(".py") else value


class _NotPlanned(TaskError, AttributeError):
    """Of ``self.trainer`` before there is a Trainer."""


class PlannedTrainer:
    """What ``self.trainer`` is in ``prepare_data``, ``setup`` and ``train_dataloader`` while a run is planned."""

    def __init__(self, config: RunConfig, ranks: int, module: Any, datamodule: Any) -> None:
        from lockstep.lightning.cluster import planned_strategy

        training = config.training
        self.strategy = planned_strategy(placement_of(config).devices, ranks)
        self.world_size = self.num_devices = ranks
        self.num_nodes = 1
        self.precision = config.hardware.precision
        self.global_rank = self.local_rank = self.node_rank = self.current_epoch = self.global_step = 0
        self.is_global_zero = self.training = True
        self.max_epochs = training.epochs
        self.max_steps = training.max_steps or -1
        self.accumulate_grad_batches = training.accumulate
        self.gradient_clip_val = training.max_grad_norm
        self.model = self.lightning_module = module
        self.datamodule = datamodule

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotPlanned(
            f"self.trainer.{name} is not known in setup() and train_dataloader() while the run is planned",
            why=f"there is no Trainer yet, only {', '.join(sorted(vars(self)))}",
            fix="read it in configure_optimizers(), on_fit_start() or a later hook; where setup() must ask, "
            f"getattr(self.trainer, {name!r}, None) is None there",
        )


class ModuleTask(Task):
    """A ``LightningModule`` with its data. It trains on Lightning's Trainer; its losses are the means that it computes.

    Module and data are given, or made from classes (:func:`module_task`) with ``config``.

    Args:
        trainer: more arguments of the ``Trainer``.
        cli: for ``config.cli``, further arguments of :func:`.make_parts`.
    """

    Config = ModuleConfig
    records_arguments = False
    _lockstep_runner = "lockstep.lightning.runner:ModuleRunner"
    _lockstep_samples_itself = True
    #: Defaults of the Trainer that differ from the general ones.
    defaults: ClassVar[Any] = {"training": {"max_grad_norm": None, "early_stopping_patience": 0}}
    #: Who calls ``set_epoch()`` of training data.
    epoch_caller: ClassVar[str] = "Lightning's Trainer does not call it; call it in on_train_epoch_start()"
    module_class: ClassVar[type | None] = None
    #: Facts about the training loader, after :meth:`datasets` has opened it.
    loader_facts: LoaderFacts

    def __init__(
        self,
        config: ModuleConfig | None = None,
        *,
        module: Any = None,
        datamodule: Any = None,
        trainer: dict[str, Any] | None = None,
        cli: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(config)
        self._module = module
        self._datamodule = datamodule
        self._cli = cli
        self.planned = RunConfig()
        self.trainer_arguments = _checked({**self.config.trainer, **(trainer or {})})

    def check_config(self, config: RunConfig) -> None:
        """Raise :class:`ConfigError` when the run and the Trainer's arguments both say when to validate."""
        self.planned = config
        intervals = sorted({"val_check_interval", "check_val_every_n_epoch"} & self.trainer_arguments.keys())
        if intervals and config.validation.every_steps is not None:
            raise ConfigError(
                f"validation.every_steps and the Trainer's {intervals[0]} are both given",
                why="both say when to validate",
                fix=f"leave {intervals[0]} out: validation.every_epochs says how often at the end of epochs",
            )

    @property
    def module(self) -> Any:
        """The ``LightningModule``, made when it is first asked for."""
        if self._module is None:
            self._module = self._build()
        return self._module

    @property
    def datamodule(self) -> Any:
        """The ``LightningDataModule``, if there is one."""
        if self.config.cli is not None:
            self.module  # noqa: B018  # made with it
        elif self._datamodule is None and self.config.datamodule is not None:
            self._datamodule = _make(find_class(self.config.datamodule), self.config.data, "task.data")
        return self._datamodule

    def renew(self) -> None:
        """Forget objects that were made from classes for the plan; training makes them from the seed of the run."""
        if self.module_class is not None:
            self._module = self._datamodule = None

    def _build(self) -> Any:
        if self.module_class is None:
            raise TaskError(
                "this run's LightningModule was an object of a program, and only that can make it again",
                why="lockstep.lightning.fit() was given the module itself; the run folder has its weights alone",
                fix="to resume the run, call fit(…, resume=True) there, with the same save_dir; to evaluate or "
                "export it, use the module there: after fit() it has the trained weights. Runs of "
                "`lockstep train FILE.py:MODULE` know how to make theirs",
            )
        with seeded(self.data.seed):
            if self.config.cli is not None:
                return self._configured(self.config.cli)
            return _make(self.module_class, self.config.model, "task.model")

    def _configured(self, sections: dict[str, Any]) -> Any:
        """Make a module as LightningCLI does, with data module and arguments of the Trainer."""
        from lockstep.lightning.cluster import quiet_trainer
        from lockstep.lightning.parts import make_parts

        options = self._cli
        if options is None:  # classes whose arguments are the section itself are not named in it
            options = {} if "class_path" in sections.get("model", {}) else {"model_class": self.module_class}
            if self.config.datamodule is not None:
                options["datamodule_class"] = find_class(self.config.datamodule)
            options["parser_kwargs"] = {"exit_on_error": False}
        try:
            with quiet_trainer():
                module, self._datamodule, trainer = make_parts(sections, options)
        except ArgumentError as error:
            raise TaskError(
                "this run's sections of LightningCLI do not make its module and data",
                why=str(error)[:500],
                fix="if a program with another LightningCLI or classes started the run, resume it there: "
                "PROGRAM fit … --ckpt_path RUN; else give the class these arguments again",
            ) from None
        self.trainer_arguments = _checked({name: value for name, value in trainer.items() if name not in DECIDED})
        return module

    def prepare(self, ranks: int | None = None) -> None:
        with self.planning(ranks):
            for owner in self._owners:
                owner.prepare_data()

    def datasets(self) -> Datasets:
        """Open the training set; hooks of the module see the others. Indices for a loader that keeps its order."""
        with self.planning() as ranks:
            loader = TrainingLoader(self.open_loader("train_dataloader"), ranks, self._max_batches)
            self._check_reloads(loader.length, ranks)
            self.loader_facts = loader.facts(whole_steps=not self.module.automatic_optimization)
            return loader.datasets()

    @property
    def _max_batches(self) -> int | None:
        """How many batches are read of a training loader that does not say its length."""
        training = self.planned.training
        return training.max_steps and training.max_steps * training.accumulate

    def _check_reloads(self, length: int, ranks: int) -> None:
        """Raise :class:`DataError` where a loader that is made again in later epochs has another length."""
        every = self.trainer_arguments.get("reload_dataloaders_every_n_epochs") or self.planned.training.epochs
        owner = next(owner for owner in self._owners if defines(owner, "train_dataloader"))
        attributes = dict(vars(owner))
        view = owner.trainer
        try:
            for epoch in range(every, min(self.planned.training.epochs, _TRIED_RELOADS * every + 1), every):
                view.current_epoch = epoch
                with seeded(self.data.seed):
                    TrainingLoader(owner.train_dataloader(), ranks, self._max_batches).check_length(length, epoch)
        finally:
            vars(owner).clear()
            vars(owner).update(attributes)
            view.current_epoch = 0

    def open_loader(self, hook: str) -> Any:
        """Call a loader hook with the run's seed; return ``None`` for an evaluation hook that is not defined."""
        owner = next((owner for owner in self._owners if defines(owner, hook)), None)
        if owner is None and hook == "train_dataloader":
            raise TaskError(
                f"{type(self.module).__name__} has no training data",
                why="neither it nor a LightningDataModule defines train_dataloader()",
                fix="give a data module: --set task.datamodule=my_file.py:MyData, or fit(module, train_loader)",
            )
        if owner is None:
            return None
        with seeded(self.data.seed):
            owner.setup("fit")
        with seeded(self.data.seed):
            return getattr(owner, hook)()

    @contextmanager
    def planning(self, ranks: int | None = None) -> Iterator[int]:
        """Set ``self.trainer`` of module and data module to a :class:`PlannedTrainer`; yield the number of ranks."""
        from lockstep.lightning.cluster import quiet_trainer

        config = self.planned
        if ranks is None:
            ranks = placement_of(config).world_size
        owners = self._owners
        view = PlannedTrainer(config, ranks, self.module, self.datamodule)
        try:
            for owner in owners:
                owner.trainer = view
            with quiet_trainer():
                yield ranks
        finally:
            for owner in owners:
                owner.trainer = None

    @property
    def _owners(self) -> list[Any]:
        """The data module, if there is one, and the module: a Trainer asks them in this order."""
        return [owner for owner in (self.datamodule, self.module) if owner is not None]

    def model(self) -> nn.Module:
        module: nn.Module = self._module if self._module is not None else self._build()
        return module

    def fresh_module(self) -> Any:
        """Return the module that was given, or a new one of its class."""
        return self._build() if self.module_class is not None else self.module

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedError(
            f"{type(self.module).__name__} is a LightningModule without loss(), evaluate() and metrics()",
            why="its steps log whatever they compute",
            fix="use `lockstep lightning validate` or `test`, or write a lockstep.Task",
        )

    loss = evaluate = metrics = _refuse  # type: ignore[assignment]


def module_task(kind: type) -> type[ModuleTask]:
    """Return the class of tasks that train LightningModules of class ``kind``."""
    return type(f"{kind.__name__}Task", (ModuleTask,), {"module_class": kind})


def placement_of(config: RunConfig) -> Placement:
    return resolve_placement(config.hardware, config.distributed, read_world(os.environ), detect_devices())


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of the Trainer, with callbacks and plugins as lists.

    Raises:
        ConfigError: an argument or a callback that the run decides.
    """
    refuse_arguments(arguments.keys())
    lists: dict[str, Any] = {name: as_list(arguments[name]) for name in ("callbacks", "plugins") if name in arguments}
    for callback in lists.get("callbacks", ()):
        for base in _CHANGE_BATCHES.keys() & {kind.__name__ for kind in type(callback).__mro__}:
            raise ConfigError(
                f"the callback {type(callback).__name__} cannot be used",
                why=f"it changes the batches, which the plan has from {_CHANGE_BATCHES[base]}",
                fix="leave it out",
            )
    return {**arguments, **lists}


def _make(kind: type, arguments: dict[str, Any], section: str) -> Any:
    """Raise :class:`ConfigError` when ``kind`` does not take ``arguments``."""
    try:
        signature(kind).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{kind.__name__} does not take these arguments",
            why=str(error),
            fix=f"set them as {section}.<argument>: {kind.__name__}{signature(kind)}",
        ) from None
    return kind(**arguments)
