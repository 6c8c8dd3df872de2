"""Modules, optimizers and schedulers of a session by name, as given to ``prepare``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lockstep._compat.torch import (
    broadcast_module,
    check_shapes,
    compiled_in_place,
    differ,
    has_compiled,
    has_scaled,
    has_scheduler,
    note_step,
    tree_leaves,
    versions,
    within_wrapper,
)
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.evaluate import Evaluator
from lockstep.engine.optim.optimizers import refuse_closure
from lockstep.engine.optim.precision import Precision, autocast, cast
from lockstep.engine.optim.rates import Rates
from lockstep.engine.partition import blocks_of, checkpoint_activations
from lockstep.engine.rank_context import RankContext
from lockstep.engine.session.origins import LoopTensors
from lockstep.engine.task import Scheduler, Task
from lockstep.engine.trained import Trained, separate_elements
from lockstep.errors import TaskError, many
from lockstep.planning import LoaderPlan, Plan

if TYPE_CHECKING:
    from lockstep.engine.session.sharding import Shards


#: For evaluations before the plan is made.
_UNPLANNED_LOADER = LoaderPlan(num_workers=0, prefetch_factor=2, pin_memory=False)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class PreparedModels:
    """Modules, optimizers and schedulers by name: ``model``, ``optimizer``, ``scheduler``, the next ones ``model_2``.

    Modules are moved to ``device`` in place, so that optimizers keep their parameters, cast to ``precision``, and get
    the weights of rank 0 if there are ``several`` ranks.
    """

    def __init__(self, device: torch.device, precision: str, *, several: bool) -> None:
        self._device = device
        self._precision = precision
        self._several = several
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.schedulers: dict[str, LRScheduler] = {}
        self._container: nn.Module | None = None
        #: Parameters of modules that were chosen before, with the modules.
        self._chosen: dict[tuple[int, ...], tuple[list[nn.Module], list[nn.Parameter]]] = {}

    def add(self, thing: Any, name: str | None = None) -> None:
        """Take a module, an optimizer or a scheduler. Collective. Raises :class:`TaskError`: it cannot be trained."""
        kinds = {"model": nn.Module, "optimizer": Optimizer, "scheduler": LRScheduler}
        kind = next((kind for kind, of in kinds.items() if isinstance(thing, of)), None)
        if kind is None:
            raise _not_trained(thing)
        if kind == "model":
            thing = compiled_in_place(within_wrapper(thing))  # the loop itself calls the wrapper
            empty = next((n for n, p in thing.named_parameters() if is_lazy(p) or p.is_meta), None)
            if empty is not None:
                raise TaskError(
                    f"the parameter {empty} of {type(thing).__name__} has no values yet",
                    why="it is on the meta device, or of a lazy module",
                    fix="call the module once with a batch before prepare(), or use to_empty() and a checkpoint",
                )
        prepared: dict[str, Any] = getattr(self, f"{kind}s")
        if any(thing is module for module in prepared.values()):
            return
        name = name or (f"{kind}_{len(prepared) + 1}" if prepared else kind)
        if not name.isidentifier() or name in {*self.models, *self.optimizers, *self.schedulers}:
            raise TaskError(
                f"prepare() was given {name!r} as a name" + " twice" * name.isidentifier(),
                why="it is part of the names in checkpoints and logs, as in generator.0.weight",
                fix="use another keyword for each, of letters, digits and underscores, as in prepare(generator=model)",
            )
        if isinstance(thing, ReduceLROnPlateau):
            raise TaskError(
                f"{name} is a ReduceLROnPlateau, which steps by a metric",
                fix="step it in the loop, and give it to session.checkpoint(scheduler=...) instead of prepare()",
            )
        if kind == "model":
            separate_elements(thing)
            thing = cast(thing.to(self._device), self._precision)
            self._container = None
            if self._several:
                check_shapes(list(thing.parameters()))
                broadcast_module(thing)
        elif kind == "optimizer":
            refuse_closure(type(thing))
            note_step(thing)
        prepared[name] = thing

    def container(self) -> nn.Module:
        """Return the model, or all of them as one module."""
        if self._container is None:
            named = {f"{name}.": model for name, model in self.models.items()}
            self._container = next(iter(self.models.values())) if len(named) == 1 else Trained(named)
        return self._container

    @property
    def is_compiled(self) -> bool:
        """Whether a part of the models is compiled."""
        return has_compiled(self.container())

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass."""
        return autocast(self._precision, self._device)

    def evaluator(self, ranks: Collectives, plan: Plan | None, batch_size: int, *, seed: int, step: int) -> Evaluator:
        """Make the evaluator of these models, whose weights are those after ``step``; ``plan``: ``None`` before it."""
        return Evaluator(
            ranks,
            self._device,
            Precision(self._precision, self._device, 1.0),
            _UNPLANNED_LOADER if plan is None else plan.loader,
            batch_size=batch_size,
            seed=seed,
            step=step,
            ghosts=plan is not None and plan.sharded,
        )

    def divided(self, rank: RankContext) -> Shards | None:
        """Recompute activations, and divide the models among the ranks, where the plan asks for that. Collective."""
        if rank.config.training.activation_checkpointing:
            for model in self.models.values():
                checkpoint_activations(model, blocks_of(Task(), model))
        if not rank.plan.strategy.divides:
            return None
        from lockstep.engine.session.sharding import Shards

        return Shards(rank, self.container(), self.models.values(), self.optimizers.values())

    def loop_tensors(
        self, averages: Iterable[torch.Tensor], merged: Iterable[torch.Tensor], registered: Iterable[Any]
    ) -> LoopTensors:
        """Return the tensors that outlive a body, including those of objects ``registered`` for checkpoints."""
        module = self.container()
        states = [module.state_dict(), *(thing.state_dict() for thing in registered)]
        return LoopTensors(
            weights={name: parameters_of(optimizer) for name, optimizer in self.optimizers.items()},
            averages=chain(module.parameters(), averages),
            buffers=dict(module.named_buffers()),
            merged=merged,
            saved=[leaf for state in states for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)],
        )

    def check(self) -> None:
        """Raise :class:`TaskError` if an optimizer could not train its parameters."""
        if not self.models or not self.optimizers:
            raise TaskError(
                f"the session has no {'optimizer' if self.models else 'model'}",
                why="its weights must be equal on all ranks, and are saved",
                fix="call model, optimizer = session.prepare(model, optimizer) before the loop",
            )
        parameters = set(map(id, self.container().parameters()))
        for name, optimizer in self.optimizers.items():
            strange = [str(tuple(p.shape)) for p in parameters_of(optimizer) if id(p) not in parameters]
            if strange:
                raise TaskError(
                    f"{name} has {many(len(strange), 'parameter')} of no prepared model: shapes "
                    + ", ".join(strange[:3]),
                    why="they would be neither reduced over ranks nor saved",
                    fix="give prepare() the modules that have them too, and make the optimizer from their parameters "
                    "before or after, but not from a copy",
                )

    def sharing(self) -> dict[str, list[str]]:
        """Return the optimizers with parameters in common, and the names of the others that have them."""
        owned = {name: set(map(id, parameters_of(optimizer))) for name, optimizer in self.optimizers.items()}
        sharing = {
            name: [other for other, theirs in owned.items() if other != name and parameters & theirs]
            for name, parameters in owned.items()
        }
        return {name: names for name, names in sharing.items() if names}

    def scheduler_of(self, optimizer: Optimizer) -> LRScheduler | None:
        schedulers = [scheduler for scheduler in self.schedulers.values() if scheduler.optimizer is optimizer]
        return schedulers[-1] if schedulers else None

    def rates(self, optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> Rates:
        """Return the learning rates of ``optimizer``, with its prepared scheduler; ``named``: its parameters."""
        scheduler = self.scheduler_of(optimizer)
        return Rates(optimizer, None, named, scheduler=None if scheduler is None else Scheduler(scheduler, "step"))

    def schedule(self) -> str:
        """Describe the schedules of the learning rates."""
        kinds = ", ".join(sorted({type(scheduler).__name__ for scheduler in self.schedulers.values()}))
        return f"session.step() steps {kinds}, after every optimizer step" if kinds else "the loop's own"

    def unkept_schedules(self, registered: Iterable[Any]) -> list[str]:
        """Return the optimizers with a scheduler that is neither prepared nor ``registered``."""
        saved = {id(getattr(thing, "optimizer", None)) for thing in (*self.schedulers.values(), *registered)}
        scheduled = {name: optimizer for name, optimizer in self.optimizers.items() if has_scheduler(optimizer)}
        return [name for name, optimizer in scheduled.items() if id(optimizer) not in saved]

    def optimizer_name(self, optimizer: Any, call: str) -> str:
        """Return the name of ``optimizer``; raise :class:`TaskError` in ``call`` if it was not prepared."""
        for name, prepared in self.optimizers.items():
            if prepared is optimizer:
                return name
        raise TaskError(
            f"{call}() was given {type(optimizer).__name__}, which was not prepared",
            fix="call optimizer = session.prepare(optimizer) together with the models whose parameters it has",
        )

    def parameters(self, models: Iterable[nn.Module] | nn.Module) -> list[nn.Parameter]:
        """Return the trained parameters of ``models``. Raises :class:`TaskError`: they are of no prepared module."""
        chosen = [models] if isinstance(models, nn.Module) else list(models)
        key = tuple(map(id, chosen))
        if key not in self._chosen:
            prepared = set(map(id, self.container().parameters()))
            parameters = [p for model in chosen for p in model.parameters()]
            self._chosen[key] = chosen, parameters if all(id(p) in prepared for p in parameters) else []
        trained = [p for p in self._chosen[key][1] if p.requires_grad]
        if not trained:
            raise TaskError(
                "backward() was given models without prepared, trained parameters",
                why=f"of {', '.join(type(model).__name__ for model in chosen)}",
                fix="pass prepared models or parts of them, as models=[critic]",
            )
        return trained


def _not_trained(thing: Any) -> TaskError:
    inner = next((name for name, value in getattr(thing, "__dict__", {}).items() if isinstance(value, Optimizer)), None)
    fix = "give anything else with a state_dict to session.checkpoint(name=...)"
    if isinstance(thing, DataLoader):
        fix = "leave it out, and write `for batch in session.batches(loader.dataset, collate=loader.collate_fn)`"
    elif inner is not None:
        fix = f"give it the torch optimizer inside, its .{inner}, and call session.step() with that one"
    reason = "it takes modules, optimizers and schedulers of torch; the session makes the batches"
    return TaskError(f"prepare() was given a {type(thing).__name__}", why=reason, fix=fix)


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers that have versions."""
    return [t for t in chain(module.parameters(), module.buffers()) if not t.is_inference()]


class Beside:
    """Modules in a loop's variables that no checkpoint keeps, since they are neither prepared nor registered.

    ``frame``: of the loop; the variables of its callers count, too. ``saved``: modules, and objects that may have some.
    """

    def __init__(self, frame: FrameType | None, saved: Iterable[Any]) -> None:
        here: dict[str, Any] = {}
        while frame is not None:
            here = {**frame.f_globals, **frame.f_locals, **here}
            frame = frame.f_back
        here |= {f"self.{name}": value for name, value in getattr(here.get("self"), "__dict__", {}).items()}
        parts = [part for thing in saved for part in (thing, *getattr(thing, "__dict__", {}).values())]
        self._saved = [part for part in parts if isinstance(part, nn.Module)]
        names = {id(module): name for name, module in here.items() if isinstance(module, nn.Module)}
        self._modules: dict[str, nn.Module] = {name: here[name] for name in names.values()}
        self._scalers = [value for value in here.values() if isinstance(value, torch.amp.GradScaler)]
        self._before = self._state()

    def refuse_scaled(self) -> None:
        """Raise :class:`TaskError` where the loop has multiplied its loss."""
        if any(map(has_scaled, self._scalers)):
            raise TaskError(
                "the loop scales its loss by a GradScaler",
                why="the session does that itself in 16-mixed, and no one would divide the gradients by this factor",
                fix="remove the scaler, call session.backward(total, count) in `with session.autocast():`, and choose "
                "--precision 16-mixed",
            )

    def _state(self) -> dict[str, Any]:
        saved = {id(t) for module in self._saved for t in tensors_of(module)}
        return {name: versions([t for t in tensors_of(m) if id(t) not in saved]) for name, m in self._modules.items()}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers of the modules."""
        return chain.from_iterable(map(tensors_of, self._modules.values()))

    def changed(self) -> list[tuple[str, str]]:
        """Names and types of those whose parameters or buffers have been replaced or written to."""
        before = self._before
        now = self._state()
        changed = [(n, type(module).__name__) for n, module in self._modules.items() if differ(before[n], now[n])]
        # The loop may delete them.
        self._modules = {}
        self._before = {}
        self._saved = []
        return changed
