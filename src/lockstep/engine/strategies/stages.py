"""A model in stages: checks of a task's ``stages(model)``, calls of stages, and the cuts between ranks.

A staged model is called once by the task's loss, as ``model(…)``: the first stage gets the arguments of
that call, every other one the output of the stage before, and the task the output of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engine.task import Task
from lockstep.engine.trained import refuse_modules
from lockstep.errors import ConfigError, TaskError, many

Inputs = tuple[Tensor, ...]
_FIX = "write stages(model) in the task: modules that, called one after the other, compute what model(…) does"


def stages_of(task: Task, model: nn.Module, devices: int) -> Sequence[nn.Module]:
    """Return the stages that ``task`` names: the whole model, each tensor in one of them, at least one a device.

    Raises :class:`TaskError`, or :class:`ConfigError` for fewer than ``devices``.
    """
    refuse_modules(model, "pipeline")
    named = task.stages(model)
    if named is None:
        raise TaskError(
            f"the task {type(task).__name__} cannot be trained in stages",
            why="it does not say where its model can be cut",
            fix=_FIX,
        )
    stages = list(named)
    for mistake in _mistakes(model, stages):
        raise mistake
    if len(stages) < devices:
        raise ConfigError(
            f"{devices} devices, but the model has {many(len(stages), 'stage')}",
            why="each device needs a stage",
            fix=f"select at most {many(len(stages), 'device')}, or cut the model into more stages",
        )
    return stages


def _mistakes(model: nn.Module, stages: Sequence[nn.Module]) -> Iterator[TaskError]:
    """Yield reasons why ``stages`` are not the whole model, each tensor in one of them."""
    owners: dict[int, int] = {}
    whole = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for number, stage in enumerate(stages):
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            owner = owners.setdefault(id(tensor), number)
            if id(tensor) not in whole:
                yield TaskError(
                    f"stage {number} holds {name}, which is not the model's",
                    why="it would neither be trained nor saved",
                    fix="make stages of modules of the given model",
                )
            if owner != number:
                yield TaskError(
                    f"the stages {owner} and {number} share {name}",
                    why="each is trained by a separate process",
                    fix="put modules that share parameters into one stage",
                )
    for name in (name for key, name in whole.items() if key not in owners):
        yield TaskError(
            f"no stage holds {name}", why="together the stages must be the whole model", fix="add it to a stage"
        )


def as_inputs(output: Any) -> Inputs:
    """Convert the output of a stage to the arguments of the next one."""
    outputs = (output,) if isinstance(output, Tensor) else output
    if not isinstance(outputs, tuple) or not all(isinstance(item, Tensor) for item in outputs):
        raise TaskError(
            "a stage returned something else than a tensor or a tuple of tensors",
            why=f"it is a {type(output).__name__}",
            fix="return tensors from each stage",
        )
    return outputs


class _Called(Exception):
    """Carries the arguments with which a task called its model."""


class _Catch(nn.Module):
    def forward(self, *inputs: Any, **named: Any) -> Any:
        refuse_names(named)
        raise _Called(inputs)


def refuse_names(named: Mapping[str, Any]) -> None:
    if named:
        raise TaskError(
            f"the task calls its model with {', '.join(named)} by name",
            why="the first stage is called with the same tensors, in order",
            fix="call model(…) with positional tensors only",
        )


def ask(function: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
    """Call ``function(model, batch)``, where ``model`` replaces the task's model and offers its call alone."""
    try:
        return function(model, batch)
    except AttributeError as error:
        if error.obj is not model:
            raise
        raise TaskError(
            "the task calls a method of its model", why=str(error), fix=f"call model(…) only; {_FIX}"
        ) from None


def inputs_of(function: Callable[..., Any], batch: Any) -> Inputs:
    """Return the arguments with which ``function(model, batch)`` calls the model."""
    try:
        ask(function, _Catch(), batch)
    except _Called as call:
        return as_inputs(call.args[0])
    raise TaskError("the task's loss does not call its model", fix="call model(…) in loss and evaluate")


class Answer(nn.Module):
    """The model of a task on the last rank: the output of the stages for the one input of the first rank.

    Evaluation may call it again with the same input, as ``loss`` and ``evaluate`` do one after the other.
    """

    def __init__(self, output: Callable[[], Any], training: bool) -> None:
        super().__init__()
        self.train(training)
        self._compute = output
        self._inputs: Inputs | None = None
        self._output: Any = None

    def forward(self, *inputs: Any) -> Any:
        if self._inputs is None:
            self._output = self._compute()
            self._inputs = inputs
        elif self.training or not all(map(torch.equal, inputs, self._inputs)):
            raise TaskError(
                "the task calls its model twice for one batch",
                why="the stages before the last one have seen one call",
                fix="call model(…) once in loss, and with the same input in loss and evaluate",
            )
        return self._output


def shares(stages: int, devices: int) -> list[int]:
    """Return the first stage of each device, and the number of stages: equally many for each, or one more."""
    return [stages * device // devices for device in range(devices + 1)]
