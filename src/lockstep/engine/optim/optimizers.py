"""The configured optimizer of a model: torch's, Lion, any class by its path, and Muon with AdamW beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from lockstep._compat.torch import has_scheduler, take_step
from lockstep.config import OptimizerConfig
from lockstep.config.sections import OPTIMIZERS
from lockstep.engine.partition import blocks_of
from lockstep.engine.task import Task
from lockstep.engine.trained import bare
from lockstep.errors import ConfigError, TaskError, UnsupportedError, many


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
        raise UnsupportedError(
            f"{kind} does not support the sparse gradients of {sparse[0]}",
            fix="leave sparse=True out, or return torch.optim.SGD or SparseAdam from Task.optimizer()",
        )


def refuse_closure(kind: type[Optimizer]) -> None:
    """Raise :class:`UnsupportedError` for an optimizer like L-BFGS, whose step itself calls the loss."""
    closure = signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise UnsupportedError(
            f"the step() of {kind.__name__} needs a closure, which evaluates the loss several times",
            fix="use an optimizer whose step() needs no closure, such as torch.optim.AdamW",
        )


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
    model_ids = set(map(id, named.values()))
    foreign = [
        f"{tuple(parameter.shape)} in group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) not in model_ids
    ]
    if foreign:
        raise TaskError(
            f"the optimizer has {many(len(foreign), 'parameter')} not of the model: {', '.join(foreign[:5])}",
            why="they would be neither reduced over ranks nor saved",
            fix="return the modules that have them from Task.modules()",
        )


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
    values = config.model_dump() | {"lr": lr, "fused": fused}
    make, names = _KINDS.get(config.name) or (_find(config.name), ())
    settings = {name: values[name] for name in ("lr", "weight_decay", *names)}
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
        raise ConfigError(
            f"the optimizer {config.name} cannot be made with these settings",
            why=f"{type(error).__name__}: {error}",
            fix="change optimizer.options, or the setting that it names",
        ) from None
    if config.name not in OPTIMIZERS:
        check_optimizer(made, model)
    return made


def _rates(decay: float, model: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, float]:
    """The factor of the learning rate of each parameter, by its ``id``: 1 at the output, ``decay`` one block before.

    Parameters before the first block are one block deeper than it, others outside are at the output.
    """
    block_depths = {id(p): depth for depth, block in enumerate(blocks, start=1) for p in block.parameters()}
    depths: dict[int, int] = {}
    for parameter in model.parameters():
        outside = len(blocks) + 1 if block_depths.keys() & depths.keys() else 0
        depths[id(parameter)] = block_depths.get(id(parameter), outside)
    last = max(depths.values(), default=0)
    if last == min(depths.values(), default=0):
        raise ConfigError(
            f"optimizer.layer_decay={decay:g} needs a model of several blocks",
            fix="return the blocks from Task.blocks(model), or remove the setting",
        )
    return {key: decay ** (last - depth) for key, depth in depths.items()}


def _grouped(config: OptimizerConfig, parameters: list[nn.Parameter], lr: float, rates: dict[int, float]) -> Any:
    """``parameters``, in groups by their rate and by whether they have weight decay; those of the output first."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        vector = config.weight_decay_on != "all" and parameter.dim() < 2
        groups.setdefault((rates.get(id(parameter), 1.0), vector), []).append(parameter)
    if len(groups) < 2 and not rates:
        return parameters
    param_groups = []
    for rate, vector in sorted(groups, key=lambda key: (-key[0], key[1])):
        overrides = ({"lr": lr * rate} if rates else {}) | ({"weight_decay": 0.0} if vector else {})
        param_groups.append({"params": groups[rate, vector], **overrides})
    return param_groups


def _find(path: str) -> type[Optimizer]:
    module, _, name = path.replace(":", ".").rpartition(".")
    fix = "name a subclass of torch.optim.Optimizer as package.module:Class, or install it"
    try:
        kind: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"there is no optimizer {path}", why=str(error), fix=fix) from None
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(f"{path} is not an optimizer", fix=fix)
    refuse_closure(kind)
    return kind


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
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum: Tensor = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(torch.lerp(parameter.grad, momentum, beta1).sign_(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)


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
            part.param_groups = self.param_groups[start:stop]
            part.state = self.state
            start = stop

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
    outer_groups = _grouped(config, [p for p in parameters if id(p) not in chosen], lr, rates)
    parts = list[Optimizer]()
    decay = config.weight_decay
    if hidden:
        settings = {"lr": lr, "weight_decay": decay, "momentum": config.momentum, "adjust_lr_fn": "match_rms_adamw"}
        parts.append(_made(config, torch.optim.Muon, _grouped(config, hidden, lr, rates), settings, model))
    if outer_groups:
        parts.append(AdamW(outer_groups, lr, config.betas, config.eps, decay, fused=fused))
    return parts[0] if len(parts) == 1 else Several(parts)
