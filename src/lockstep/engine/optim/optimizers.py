"""The configured optimizer of a model: torch's, Lion, any class by its path, and Muon with AdamW beside it.

And its parameter groups: what a checkpoint keeps of them, and how it fits an optimizer made later.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep._compat.torch import has_scheduler, note_step, plain_name, take_step
from lockstep.config import OptimizerConfig
from lockstep.config.sections import OPTIMIZERS
from lockstep.engine.partition import blocks_of
from lockstep.engine.task import Scheduler, Task
from lockstep.engine.trained import bare
from lockstep.errors import ConfigError, TaskError, UnsupportedError, many
from lockstep.planning import Schedule

Names = list[list[str]]
Settings = list[dict[str, Any]]


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse, before the first step, an optimizer of the task's that could not train ``model``."""
    kind = type(optimizer).__name__
    if not hasattr(optimizer, "param_groups"):
        raise TaskError(
            "the task's optimizer() did not return an optimizer",
            why=f"it returned a {kind}",
            fix="return one optimizer, with a parameter group for each learning rate: "
            "torch.optim.AdamW([{'params': …, 'lr': …}, …]); return a scheduler from Task.scheduler(optimizer). "
            "For several optimizers write the loop yourself, with lockstep.Session (docs/own-loop.md)",
        )
    check_belongs(optimizer, dict(model.named_parameters()))
    if has_scheduler(optimizer):
        raise TaskError(
            f"the task's optimizer() made a scheduler for its {kind}",
            why="the run's schedule would overwrite the learning rates that it sets, and its state would not be saved",
            fix="return it from Task.scheduler(optimizer)",
        )
    refuse_closure(type(optimizer))
    if hasattr(optimizer, "second_step"):
        raise UnsupportedError(
            f"{kind} evaluates the loss several times in a step, and a task has one pass for each micro-batch",
            fix="use an optimizer with one step(), or the reduce() and again() of lockstep.Session (docs/own-loop.md)",
        )
    sparse = sparse_layers(model)
    if sparse and isinstance(optimizer, Adam):
        fix = "leave sparse=True out, or return torch.optim.SGD or SparseAdam from Task.optimizer()"
        raise UnsupportedError(f"{kind} does not support the sparse gradients of {sparse[0]}", fix=fix)


def refuse_closure(kind: type[Optimizer]) -> None:
    """Raise :class:`UnsupportedError` for an optimizer like L-BFGS, whose step itself calls the loss."""
    closure = signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        what = f"the step() of {kind.__name__} needs a closure, which evaluates the loss several times"
        raise UnsupportedError(what, fix="use an optimizer whose step() needs no closure, such as torch.optim.AdamW")


def check_sparse(model: nn.Module, *, reduced: bool) -> None:
    """Raise :class:`UnsupportedError` for sparse gradients that are ``reduced`` over ranks, or lanes in exact mode."""
    sparse = sparse_layers(model)
    if sparse and reduced:
        raise UnsupportedError(
            f"the sparse gradients of {sparse[0]} are supported on one device in fast mode only",
            why="gradients are summed over ranks and lanes as dense tensors",
            fix="leave sparse=True out, or train on one device with reproducibility: fast",
        )


def sparse_layers(model: nn.Module) -> list[str]:
    """Names of embeddings whose gradients are sparse."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module.sparse]


def check_belongs(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Raise :class:`TaskError` for parameters that are not among ``named``: no rank would move, reduce or save them."""
    known = set(map(id, named.values()))
    strange = [
        f"{tuple(parameter.shape)} in group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) not in known
    ]
    if strange:
        raise TaskError(
            f"the optimizer has {many(len(strange), 'parameter')} not of the model: {', '.join(strange[:5])}",
            why="they would be neither reduced over ranks nor saved",
            fix="return the modules that have them from Task.modules()",
        )


# What a checkpoint keeps of the groups.


def settings_of(optimizer: Optimizer) -> Settings:
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def names_of(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> Names:
    """Each group's parameters by their names in the model."""
    name_of = {id(parameter): name for name, parameter in named.items()}
    return [[name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def fitted(
    saved: dict[str, Any], names: Names | None, optimizer: Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """``saved``, an optimizer's state dict, with parameters numbered as in ``optimizer``.

    Groups that a hook added in an earlier attempt are added to ``optimizer``. What does not fit is left as it is, for
    ``optimizer`` to refuse.
    """
    if names is None:
        everything = [name for name, p in named.items() if p.is_floating_point() or p.is_complex()]
        names = [[name for name in everything if named[name].requires_grad]]
        if names_of(optimizer, named) != [everything] or len(saved["param_groups"][0]["params"]) != len(names[0]):
            return saved
    own, names = names_of(optimizer, named), [[plain_name(name) for name in group] for group in names]
    taken = set(chain.from_iterable(own))
    for added, group in list(zip(names, saved["param_groups"], strict=True))[len(own) :]:
        if taken.isdisjoint(added):
            optimizer.add_param_group({**group, "params": [named[name] for name in added]})
            own.append(added)
    if own == names or len(own) != len(names) or any(set(a) - set(b) for a, b in zip(names, own, strict=True)):
        return saved
    numbers = {name: number for number, name in enumerate(chain.from_iterable(own))}
    before = chain.from_iterable(group["params"] for group in saved["param_groups"])
    moved = {old: numbers[name] for old, name in zip(before, chain.from_iterable(names), strict=True)}
    groups = zip(saved["param_groups"], own, strict=True)
    return {
        "state": {moved[old]: state for old, state in saved["state"].items() if old in moved},
        "param_groups": [{**group, "params": [numbers[name] for name in ours]} for group, ours in groups],
    }


def restore_changed(optimizer: Optimizer, now: Settings, then: Settings | None, *, keep: Sequence[str] = ()) -> None:
    """Put back settings that the configuration has changed since a loaded checkpoint was saved.

    Others stay as the checkpoint has them: some optimizers keep estimates in their groups (Prodigy, Schedule-Free).
    """
    for number, (group, settings) in enumerate(zip(optimizer.param_groups, now, strict=False)):
        before = then[number] if then is not None and number < len(then) else {}
        for name, value in settings.items():
            if name not in keep and (name not in before or not _same(value, before[name])):
                group[name] = value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu())
    if isinstance(one, Sequence) and not isinstance(one, str):  # a tuple may come back as a list
        return isinstance(other, Sequence) and list(one) == list(other)
    return bool(one == other)


# The configured optimizer.


def build_optimizer(config: OptimizerConfig, model: nn.Module, lr: float, task: Task | None = None) -> Optimizer:
    """The configured optimizer over all parameters, fused where torch has a fused kernel.

    Frozen ones have no gradient, and are left alone until they are unfrozen.
    """
    parameters = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    fused = all(p.device.type in {"cpu", "cuda"} and p.is_floating_point() for p in parameters)
    fused = fused and not sparse_layers(model)
    rates: dict[int, float] = {}
    if task is not None and config.layer_decay < 1:
        rates = _rates(config.layer_decay, model, blocks_of(task, bare(model)))
    if config.name == "muon":
        return _muon(config, model, parameters, lr, rates, fused=fused)
    if config.name == "sgd":
        # A parameter that is divided among ranks is a DTensor, for which torch has no such kernel.
        fused = fused and not any(hasattr(p, "device_mesh") for p in parameters)
    known = config.model_dump() | {"lr": lr, "fused": fused}
    make, names = _KINDS.get(config.name) or (_find(config.name), ())
    settings = {name: known[name] for name in ("lr", "weight_decay", *names)}
    if not names:
        taken = signature(make).parameters
        settings = {name: value for name, value in settings.items() if name in taken or "kwargs" in taken}
    return _made(config, make, _grouped(config, parameters, lr, rates), settings, model)


def _made(
    config: OptimizerConfig, make: Callable[..., Optimizer], groups: Any, settings: dict[str, Any], model: nn.Module
) -> Optimizer:
    try:
        made = make(groups, **{**settings, **config.options})
    except (TypeError, ValueError) as error:
        what, why = (
            f"the optimizer {config.name} cannot be made with these settings",
            f"{type(error).__name__}: {error}",
        )
        raise ConfigError(what, why=why, fix="change optimizer.options, or the setting that it names") from None
    if config.name not in OPTIMIZERS:
        check_optimizer(made, model)
    return made


def _rates(decay: float, model: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, float]:
    """The factor of the learning rate of each parameter, by its ``id``: 1 at the output, ``decay`` one block before.

    Parameters before the first block are one block deeper than it, others outside are at the output.
    """
    places = {id(p): place for place, block in enumerate(blocks, start=1) for p in block.parameters()}
    depths: dict[int, int] = {}
    for parameter in model.parameters():
        outside = len(blocks) + 1 if places.keys() & depths.keys() else 0
        depths[id(parameter)] = places.get(id(parameter), outside)
    last = max(depths.values(), default=0)
    if last == min(depths.values(), default=0):
        fix = "return the blocks from Task.blocks(model), or remove the setting"
        raise ConfigError(f"optimizer.layer_decay={decay:g} needs a model of several blocks", fix=fix)
    return {key: decay ** (last - depth) for key, depth in depths.items()}


def _grouped(config: OptimizerConfig, parameters: list[nn.Parameter], lr: float, rates: dict[int, float]) -> Any:
    """``parameters``, in groups by their rate and by whether they have weight decay; those of the output first."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        vector = config.weight_decay_on != "all" and parameter.dim() < 2
        groups.setdefault((rates.get(id(parameter), 1.0), vector), []).append(parameter)
    if len(groups) < 2 and not rates:
        return parameters
    found = []
    for rate, vector in sorted(groups, key=lambda key: (-key[0], key[1])):
        own = ({"lr": lr * rate} if rates else {}) | ({"weight_decay": 0.0} if vector else {})
        found.append({"params": groups[rate, vector], **own})
    return found


def _find(path: str) -> type[Optimizer]:
    place, _, name = path.replace(":", ".").rpartition(".")
    fix = "name a subclass of torch.optim.Optimizer as package.module:Class, or install it"
    try:
        found: Any = getattr(import_module(place), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"there is no optimizer {path}", why=str(error), fix=fix) from None
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"{path} is not an optimizer", fix=fix)
    refuse_closure(found)
    return found


class Lion(Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay.

    Algorithm 2 of Chen et al. 2023, https://arxiv.org/abs/2302.06675. Its rate is 3 to 10 times lower than AdamW's.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            one, two = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum: Tensor = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(torch.lerp(parameter.grad, momentum, one).sign_(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - two)


class Several(Optimizer):
    """Optimizers for different parameters as one: its groups and its state are theirs."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts: Sequence[Optimizer] = ()
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        self._share()

    def _share(self) -> None:
        start = 0
        for part in self._parts:
            stop = start + len(part.param_groups)
            part.param_groups, part.state, start = self.param_groups[start:stop], self.state, stop

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one that is added later is the last optimizer's."""
        if self._parts:
            self._parts[-1].add_param_group(param_group)
        super().add_param_group(param_group)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            take_step(part)


#: Optimizers by name, and the settings that each takes besides the learning rate and the weight decay.
_KINDS: dict[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "adamw": (AdamW, ("betas", "eps", "fused")),
    "adam": (Adam, ("betas", "eps", "fused")),
    "sgd": (SGD, ("momentum", "nesterov", "fused")),
    "lion": (Lion, ("betas",)),
    "adafactor": (Adafactor, ()),
}


def _muon(
    config: OptimizerConfig,
    model: nn.Module,
    parameters: list[nn.Parameter],
    lr: float,
    rates: dict[int, float],
    *,
    fused: bool,
) -> Optimizer:
    """Torch's Muon for the matrices of hidden layers, AdamW for embeddings, the output layer, norms and biases.

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; its updates are scaled to those of AdamW (Liu et al.
    2025, https://arxiv.org/abs/2502.16982), so that one rate serves both.
    """
    layers = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.Linear))]
    outer = {id(m.weight) for m in layers if isinstance(m, nn.Embedding) or m is layers[-1]}
    hidden = [p for p in parameters if p.dim() == 2 and id(p) not in outer]
    chosen = set(map(id, hidden))
    others = _grouped(config, [p for p in parameters if id(p) not in chosen], lr, rates)
    same: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay}
    parts: list[Optimizer] = []
    if hidden:
        settings = {**same, "momentum": config.momentum, "adjust_lr_fn": "match_rms_adamw"}
        parts.append(_made(config, torch.optim.Muon, _grouped(config, hidden, lr, rates), settings, model))
    if others:
        parts.append(AdamW(others, betas=config.betas, eps=config.eps, fused=fused, **same))
    return parts[0] if len(parts) == 1 else Several(parts)


def scheduler_of(task: Task, optimizer: Optimizer) -> Scheduler | None:
    """The task's own scheduler of ``optimizer``."""
    made = task.scheduler(optimizer)
    if made is None:
        return None
    by_metric = isinstance(made, ReduceLROnPlateau)
    found = made if isinstance(made, Scheduler) else Scheduler(made, "metric" if by_metric else "step")
    kind = type(found.scheduler).__name__
    if not isinstance(found.scheduler, LRScheduler) or found.interval not in ("step", "epoch", "metric"):
        raise TaskError(
            "the task's scheduler() did not return a scheduler",
            why=f"it returned {type(made).__name__}, of {kind} and {found.interval!r}",
            fix="return one of torch.optim.lr_scheduler, or lockstep.Scheduler(one, 'step', 'epoch' or 'metric')",
        )
    if isinstance(found.scheduler, ReduceLROnPlateau) != (found.interval == "metric"):
        raise TaskError(
            f"the task's scheduler() returned a {kind} that steps by {found.interval}",
            why="ReduceLROnPlateau steps by a metric, and no other scheduler does",
            fix="return it without lockstep.Scheduler" if found.interval != "metric" else "use 'step' or 'epoch'",
        )
    note_step(optimizer)
    return found


def check_steps(scheduler: Scheduler, schedule: Schedule) -> None:
    """Raise :class:`TaskError` where a scheduler made for a number of steps, as ``OneCycleLR``, is for too few."""
    limit = getattr(scheduler.scheduler, "total_steps", None)
    epochs = math.ceil(schedule.total_steps / schedule.steps_per_epoch)
    steps = {"step": schedule.total_steps, "epoch": epochs}.get(scheduler.interval, 0)
    if isinstance(limit, int) and steps > limit:
        unit = "optimizer step" if scheduler.interval == "step" else "epoch"
        raise TaskError(
            f"the scheduler {type(scheduler.scheduler).__name__} is made for {many(limit, unit)}, the run has {steps}",
            why="it raises an error when it is stepped more often",
            fix=f"make it in Task.scheduler() with total_steps={steps}, or train for fewer steps (training.max_steps, "
            "training.epochs); a resumed run has the number of its checkpoint",
        )


def advance(scheduler: Scheduler, *value: float) -> None:
    """Step a scheduler. Raises :class:`TaskError` where it cannot, as one that has no steps left."""
    try:
        cast(Any, scheduler.scheduler).step(*value)
    except Exception as error:
        raise TaskError(
            f"the scheduler {type(scheduler.scheduler).__name__} failed in its step {scheduler.scheduler.last_epoch}",
            why=f"{type(error).__name__}: {error}",
            fix=f"make it for all steps of the run; it steps by {scheduler.interval}",
        ) from error
