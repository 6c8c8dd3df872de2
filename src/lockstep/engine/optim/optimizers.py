"""The configured optimizer of a model: one of torch's, or any class by its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from lockstep._compat.torch import has_scheduler
from lockstep.config import OptimizerConfig
from lockstep.config.sections import OPTIMIZERS
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


def check_embeddings(model: nn.Module, *, reduced: bool) -> None:
    """Raise :class:`UnsupportedError` for embeddings that cannot be ``reduced`` over ranks, or lanes in exact mode."""
    limited = [name for name, module in _embeddings(model) if module.max_norm is not None]
    if limited and reduced:
        raise UnsupportedError(
            f"the max_norm of the embedding {limited[0]} is supported on one device in fast mode only",
            why="each forward pass shortens the rows that it looks up, so the weights of ranks and lanes would differ",
            fix="leave max_norm out, and shorten the rows after each step, in Task.hooks() or where session.step() has "
            "returned True; or train on one device with reproducibility: fast",
        )
    sparse = sparse_layers(model)
    if sparse and reduced:
        raise UnsupportedError(
            f"the sparse gradients of {sparse[0]} are supported on one device in fast mode only",
            why="gradients are summed over ranks and lanes as dense tensors",
            fix="leave sparse=True out, or train on one device with reproducibility: fast",
        )


def sparse_layers(model: nn.Module) -> list[str]:
    """Return names of embeddings whose gradients are sparse."""
    return [name for name, module in _embeddings(model) if module.sparse]


def _embeddings(model: nn.Module) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


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


def build_optimizer(config: OptimizerConfig, model: nn.Module, lr: float) -> Optimizer:
    """Build the configured optimizer over all parameters, fused where torch has a fused kernel.

    Frozen ones have no gradient, and are left alone until they are unfrozen.
    """
    parameters = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    fused = all(p.device.type in {"cpu", "cuda"} and p.is_floating_point() for p in parameters)
    fused = fused and not sparse_layers(model)
    if config.name == "sgd":
        # A parameter that is divided among ranks is a DTensor, for which torch has no such kernel. That for CPUs leaves
        # weights of 16 bits as they are (torch 2.13).
        fused = fused and not any(hasattr(p, "device_mesh") for p in parameters)
        fused = fused and not any(p.device.type == "cpu" and p.element_size() < 4 for p in parameters)
    values = config.model_dump() | {"lr": lr, "fused": fused}
    make, names = _KINDS.get(config.name) or (_find(config.name), ())
    settings = {name: values[name] for name in ("lr", "weight_decay", *names)}
    if not names:
        taken = signature(make).parameters
        settings = {name: value for name, value in settings.items() if name in taken or "kwargs" in taken}
    try:
        made = make(_grouped(config, parameters), **{**settings, **config.options})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the optimizer {config.name} cannot be made with these settings",
            why=f"{type(error).__name__}: {error}",
            fix="change optimizer.options, or the setting that it names",
        ) from None
    if config.name not in OPTIMIZERS:
        check_optimizer(made, model)
    return made


def _grouped(config: OptimizerConfig, parameters: list[nn.Parameter]) -> Any:
    """Divide ``parameters`` into two groups where only matrices have weight decay."""
    vectors = [] if config.weight_decay_on == "all" else [p for p in parameters if p.dim() < 2]
    matrices = [p for p in parameters if config.weight_decay_on == "all" or p.dim() >= 2]
    if not vectors or not matrices:
        return parameters
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


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


#: Optimizers by name, and the settings that each takes besides the learning rate and the weight decay.
_KINDS: dict[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "adamw": (AdamW, ("betas", "eps", "fused")),
    "adam": (Adam, ("betas", "eps", "fused")),
    "sgd": (SGD, ("momentum", "nesterov", "fused")),
    "adafactor": (Adafactor, ()),
}
