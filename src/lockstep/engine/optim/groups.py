"""The groups and the state of an optimizer in a checkpoint, fitted to an optimizer made later."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep._compat.torch import compiler_not_imported, plain_name
from lockstep.engine.partition import Divided

Names = list[list[str]]


class StoredOptimizer:
    """An optimizer in the checkpoints of its run.

    Args:
        named: parameters that its groups may have.
        divided: the model, of which this process or its devices have parts.
    """

    def __init__(self, optimizer: Optimizer, named: Mapping[str, nn.Parameter], divided: Divided | None) -> None:
        self._optimizer = optimizer
        self._named = named
        self._divided = divided
        self._settings = [
            copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            for group in optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        with compiler_not_imported():
            optimizer = self._optimizer.state_dict()
        names = None if self._divided is not None else names_of(self._optimizer, self._named)
        return {"optimizer": optimizer, "names": names, "settings": self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise :class:`ValueError` where the state cannot be one of this optimizer."""
        optimizer = self._optimizer
        with compiler_not_imported():
            if self._divided is not None:
                saved = self._divided.divided_state(state["optimizer"], optimizer)
            else:
                saved = fitted(state["optimizer"], state.get("names"), optimizer, self._named)
            optimizer.load_state_dict(saved)
        check_restored(optimizer)
        match_layouts(optimizer)

    def restore_changed(self, state: Mapping[str, Any], *, keep: Sequence[str]) -> None:
        """Put back settings, but those to ``keep``, that the configuration has changed since ``state`` was saved.

        Others stay as the checkpoint has them: some optimizers keep estimates in their groups (Prodigy, Schedule-Free).
        """
        saved = state.get("settings") or []
        for number, (group, settings) in enumerate(zip(self._optimizer.param_groups, self._settings, strict=False)):
            before = saved[number] if number < len(saved) else {}
            for name, value in settings.items():
                if name not in keep and (name not in before or not _same(value, before[name])):
                    group[name] = value


def names_of(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> Names:
    """Return each group's parameters by their names in the model."""
    name_of = {id(parameter): name for name, parameter in named.items()}
    return [[name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def fitted(
    saved: dict[str, Any], names: Names | None, optimizer: Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Renumber the parameters of ``saved``, an optimizer's state dict, as in ``optimizer``.

    Groups that a hook added in an earlier attempt are added to ``optimizer``. A state that does not fit is returned
    unchanged, for ``optimizer`` to refuse; so is one without ``names``, saved from a divided model.
    """
    if names is None:
        return saved
    new_names = names_of(optimizer, named)
    names = [[plain_name(name) for name in group] for group in names]
    taken = set(chain.from_iterable(new_names))
    for added, group in list(zip(names, saved["param_groups"], strict=True))[len(new_names) :]:
        if taken.isdisjoint(added):
            optimizer.add_param_group({**group, "params": [named[name] for name in added]})
            new_names.append(added)
    if new_names == names or len(new_names) != len(names):
        return saved
    if any(set(old) - set(new) for old, new in zip(names, new_names, strict=True)):
        return saved
    numbers = {name: number for number, name in enumerate(chain.from_iterable(new_names))}
    before = chain.from_iterable(group["params"] for group in saved["param_groups"])
    moved = {old: numbers[name] for old, name in zip(before, chain.from_iterable(names), strict=True)}
    groups = zip(saved["param_groups"], new_names, strict=True)
    return {
        "state": {moved[old]: state for old, state in saved["state"].items() if old in moved},
        "param_groups": [{**group, "params": [numbers[name] for name in ours]} for group, ours in groups],
    }


def _same(value: Any, saved: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(saved, Tensor):
        return torch.equal(torch.as_tensor(value).cpu(), torch.as_tensor(saved).cpu())
    if isinstance(value, Sequence) and not isinstance(value, str):  # a tuple may come back as a list
        return isinstance(saved, Sequence) and list(value) == list(saved)
    return bool(value == saved)


def match_layouts(optimizer: Optimizer) -> None:
    """Lay out restored states in memory as their parameters are.

    A checkpoint keeps values, row by row. A fused optimizer reads a parameter and its moments in the order
    of memory, so with weights of another layout (``channels_last``) it would mix up their elements.
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue  # some optimizers keep more than torch's
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def check_restored(optimizer: Optimizer) -> None:
    """Raise :class:`ValueError` where a restored state cannot be one of torch's Adam, AdamW or SGD.

    Their ``load_state_dict`` takes anything; the first step would fail, in native code perhaps.
    """
    adam = {"step", "exp_avg", "exp_avg_sq"}
    expected = {Adam: adam, AdamW: adam, SGD: set[str]()}.get(type(optimizer))
    if expected is None:
        return
    defaults = {**optimizer.defaults, "initial_lr": 0.0}
    for group, (name, default) in product(optimizer.param_groups, defaults.items()):
        if not _is_like(group.get(name), default):
            raise ValueError(f"the optimizer's {name} is {str(group.get(name))[:80]}")
    for parameter, state in optimizer.state.items():
        missing = expected - state.keys()
        if missing:
            raise ValueError(f"the optimizer's state lacks {', '.join(sorted(missing))}")
        for name, value in state.items():
            fits = value is None if not isinstance(value, Tensor) else value.shape in (parameter.shape, torch.Size())
            if not fits or (name == "step" and value.dim()):
                raise ValueError(f"the optimizer's {name} does not fit a parameter of shape {tuple(parameter.shape)}")


def _is_like(value: Any, default: Any) -> bool:
    """Return whether ``value`` may be the setting of an optimizer whose default is ``default``."""
    if isinstance(default, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(default) and all(map(_is_like, value, default))
    if default is None or isinstance(default, bool):
        return value is None or isinstance(value, bool)
    return isinstance(value, (int, float, Tensor))
