"""Common code of models that are divided among ranks, or among the devices of one process."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lockstep._compat.torch import NormBase, watch_compiler
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import Group, all_reduce
from lockstep.engine.optim.precision import Precision
from lockstep.engine.rank_context import RankContext
from lockstep.engine.strategies.base import Replica, Strategy
from lockstep.engine.task import Datasets, Loss, Task
from lockstep.errors import TaskError, UnsupportedError
from lockstep.rundir.heartbeat import Activity, pulse


class Undivided(NamedTuple):
    """A model that is to be divided, the same on every rank and on the host."""

    task: Task
    model: nn.Module
    datasets: Datasets
    rank: RankContext


class Divided:
    """A model of which this process, or each of its devices, has a part; here as where one process has all of it.

    ``module`` is the model that the task made; ``remarks``: how it was divided, for the user.
    """

    remarks: tuple[str, ...]
    #: The ranks that have the whole model together; ``None``: all.
    group: Group = None

    def __init__(self, whole: Undivided) -> None:
        self.module = whole.model
        self.device = whole.rank.device
        self.rank = whole.rank

    def strategy(self, task: Task, precision: Precision) -> Strategy:
        raise NotImplementedError

    def replica(self, task: Task, precision: Precision) -> Replica:
        return Replica(task, self.module, precision, self.device, self.rank.plan.seed, self.rank.world.rank)

    def adopt(self, optimizer: Optimizer) -> None:
        """Learn which optimizer trains the model."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this process trains."""
        return list(self.module.parameters())

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return this process's parts of ``tensors``, sharing their memory."""
        return tensors

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Compute the norm of the whole gradient from this process's parts ``gradients``; shape (). Collective."""
        return torch.nn.utils.get_total_norm(gradients)

    def agree(self, flag: Tensor) -> None:
        """Make a flag, shape (), the highest of all ranks'. Collective."""
        flag.copy_(all_reduce(flag.to(self.device), self.group, dist.ReduceOp.MAX))

    def pick(self, parameters: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
        """Pick as :func:`pick` does, of whole parameters, on every rank. Collective."""
        return pick(parameters, places)

    def whole(self, state: dict[str, Any], collectives: Collectives, *, keep: bool) -> dict[str, Any]:
        """Merge the ranks' parts of a checkpoint's content, on ranks that ``keep`` it. Collective."""
        return state

    def divided_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state dict, as that of ``optimizer``."""
        return state


def pick(tensors: Iterable[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Return the elements ``places`` of each flattened tensor, one after the other; float32 on the host."""
    chosen = (t.detach().reshape(-1)[at.to(t.device)] for t, at in zip(tensors, places, strict=True))
    # Of a complex number, the sum of its parts.
    real = (torch.view_as_real(values).sum(-1) if values.is_complex() else values for values in chosen)
    return torch.cat([torch.empty(0, dtype=torch.float32), *(values.float().cpu() for values in real)])


class Through(Task):
    """``task`` for evaluation, where its model is called in another way: by ``ask(task.validate, model, batch)``."""

    def __init__(self, task: Task, ask: Callable[[Callable[..., Any], nn.Module, Any], Any]) -> None:
        super().__init__(task.config)
        self._task = task
        self._ask = ask
        self.collate = task.collate  # type: ignore[method-assign]
        self.metrics = task.metrics  # type: ignore[method-assign]
        self.merge = task.merge  # type: ignore[method-assign]

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Any, ...]]:
        result: tuple[Loss, tuple[Any, ...]] = self._ask(self._task.validate, model, batch)
        return result


def blocks_of(task: Task, model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of ``model``, in order: the task's ``blocks``, or those found; none in another."""
    named = task.blocks(model)
    if named is not None:
        modules = set(model.modules())
        other = next((block for block in named if block not in modules), None)
        if other is not None:
            raise TaskError(
                f"blocks(model) returns a {type(other).__name__} that is not a part of the model",
                fix="return modules of the model that was passed",
            )
        return list(named)
    repeated = [
        child
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1 and len(module) > 1
        for child in module
    ]
    inner = {id(part) for block in repeated for part in block.modules() if part is not block}
    candidates = [block for block in repeated if id(block) not in inner] or list(model.children())
    uses = [_uses(block) for block in candidates]
    everywhere = _uses(model)
    # Those that have parameters, and share none with the rest of the model (tied weights).
    return [b for b, counts in zip(candidates, uses, strict=True) if counts and counts.items() <= everywhere.items()]


def _uses(module: nn.Module) -> Counter[int]:
    """Count, by parameter, the modules within ``module`` that have it."""
    return Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))


def compiled(called: Any, mode: str) -> Any:
    """Compile a module or a function at its first call, and at calls with other shapes."""
    _watch_compiler()
    return torch.compile(called, mode=mode)


@functools.cache
def _watch_compiler() -> None:
    """Count the compilations of this process as progress, from the first call on."""
    watch_compiler(lambda _: pulse.at(Activity.COMPILING), lambda _: pulse.at(Activity.STEP))


def checkpoint_activations(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Keep only the inputs of each block, and compute its activations again in the backward pass.

    A second call changes nothing.
    """
    for name, module in model.named_modules():
        if isinstance(module, NormBase) and module.track_running_stats:
            raise UnsupportedError(
                f"activation_checkpointing is incompatible with the {type(module).__name__} {name!r}",
                why="computing it again in the backward pass would count each batch twice in its running statistics",
                fix="set activation_checkpointing to false, or use a normalisation without running statistics",
            )
        settings: Any = getattr(module, "config", None)
        if getattr(settings, "use_cache", False):  # transformers: keys would be added to the cache a second time
            settings.use_cache = False
    for block in blocks:
        if getattr(block.forward, "func", None) is not checkpoint:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
