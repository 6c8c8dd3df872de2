"""Parameter groups of an optimizer: what a checkpoint keeps of them, and how it fits an optimizer made later."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from lockstep._compat.torch import has_scheduler
from lockstep.errors import TaskError, UnsupportedError

Names = list[list[str]]
Settings = list[dict[str, Any]]


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse, before the first step, an optimizer of the task's that could not train ``model``.

    Raises:
        TaskError: it is none, or has parameters that are not the model's, or a scheduler.
        UnsupportedError: its step needs a closure, or sparse gradients are not for it.
    """
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
    closure = signature(type(optimizer).step).parameters.get("closure")
    if (closure is not None and closure.default is Parameter.empty) or hasattr(optimizer, "second_step"):
        raise UnsupportedError(
            f"{kind} evaluates the loss several times in a step",
            why="a step here has one forward and one backward pass for each micro-batch",
            fix="use an optimizer whose step() needs no closure, such as torch.optim.AdamW, or your own loop with "
            "lockstep.Session (docs/own-loop.md)",
        )
    sparse = sparse_layers(model)
    if sparse and isinstance(optimizer, Adam):
        raise UnsupportedError(
            f"{kind} does not support the sparse gradients of {sparse[0]}",
            why="its moments are dense",
            fix="leave sparse=True out, or return torch.optim.SGD or SparseAdam from Task.optimizer()",
        )


def check_sparse(model: nn.Module, *, reduced: bool) -> None:
    """Refuse sparse gradients where they are to be ``reduced``: over ranks, or over lanes in exact mode.

    Raises:
        UnsupportedError: naming the layer.
    """
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


def untrained(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Names of parameters that require a gradient and are in no group."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]


def settings_of(optimizer: Optimizer) -> Settings:
    """Each group without its parameters."""
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def check_belongs(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that no rank would move, reduce or save.

    Raises:
        TaskError: naming their shapes and their groups.
    """
    known = set(map(id, named.values()))
    strange = [
        f"{tuple(parameter.shape)} in group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) not in known
    ]
    if strange:
        raise TaskError(
            f"the optimizer has {len(strange)} parameter(s) that are not the model's: {', '.join(strange[:5])}",
            why="they would be neither reduced over ranks nor saved",
            fix="return the modules that have them from Task.modules()",
        )


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

    Args:
        names: of the saved groups' parameters; ``None``: a checkpoint of an earlier version, whose optimizers had only
            the parameters that required a gradient at the start.
        named: the model's parameters.
    """
    if names is None:
        everything = [name for name, p in named.items() if p.is_floating_point() or p.is_complex()]
        trained = [name for name in everything if named[name].requires_grad]
        if names_of(optimizer, named) != [everything] or len(saved["param_groups"][0]["params"]) != len(trained):
            return saved
        names = [trained]
    own = names_of(optimizer, named)
    taken = {name for group in own for name in group}
    for added, group in list(zip(names, saved["param_groups"], strict=True))[len(own) :]:
        if not taken & set(added):
            optimizer.add_param_group({**group, "params": [named[name] for name in added]})
            own.append(added)
    if own == names or len(own) != len(names) or any(set(a) - set(b) for a, b in zip(names, own, strict=True)):
        return saved
    states = {
        name: saved["state"][number]
        for group, numbers in zip(names, saved["param_groups"], strict=True)
        for name, number in zip(group, numbers["params"], strict=True)
        if number in saved["state"]
    }
    numbers = {name: number for number, name in enumerate(name for group in own for name in group)}
    groups = [
        {**group, "params": [numbers[name] for name in ours]}
        for group, ours in zip(saved["param_groups"], own, strict=True)
    ]
    return {"state": {numbers[name]: state for name, state in states.items()}, "param_groups": groups}


def restore_changed(optimizer: Optimizer, now: Settings, then: Settings | None, *, keep: Sequence[str] = ()) -> None:
    """Put back settings that the configuration has changed since a loaded checkpoint was saved.

    Others stay as the checkpoint has them: some optimizers keep estimates in their groups (Prodigy, Schedule-Free).

    Args:
        now, then: the groups as they were made in this attempt, and in that of the checkpoint, where it says so.
        keep: settings that always stay as the checkpoint has them.
    """
    for number, (group, settings) in enumerate(zip(optimizer.param_groups, now, strict=False)):
        before = then[number] if then is not None and number < len(then) else {}
        changed = {k: v for k, v in settings.items() if k not in before or not _same(v, before[k])}
        group.update({k: v for k, v in changed.items() if k not in keep})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu())
    if isinstance(one, Sequence) and not isinstance(one, str):  # a tuple may come back as a list
        return isinstance(other, Sequence) and list(one) == list(other)
    return bool(one == other)
