"""Parameter groups of an optimizer: what a checkpoint keeps of them, and how it fits an optimizer made later."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import TaskError

Names = list[list[str]]
Settings = list[dict[str, Any]]


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


def restore_changed(optimizer: Optimizer, now: Settings, then: Settings | None) -> None:
    """Put back settings that the configuration has changed since a loaded checkpoint was saved.

    Others stay as the checkpoint has them: some optimizers keep estimates in their groups (Prodigy, Schedule-Free).

    Args:
        now, then: the groups as they were made in this attempt, and in that of the checkpoint, where it says so.
    """
    for number, (group, settings) in enumerate(zip(optimizer.param_groups, now, strict=False)):
        before = then[number] if then is not None and number < len(then) else {}
        group.update({k: v for k, v in settings.items() if k not in before or not _same(v, before[k])})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu())
    if isinstance(one, Sequence) and not isinstance(one, str):  # a tuple may come back as a list
        return isinstance(other, Sequence) and list(one) == list(other)
    return bool(one == other)
