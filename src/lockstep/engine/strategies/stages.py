"""A model in stages: what a task's ``stages(model)`` must be, how long each takes, and all of them in one process.

A staged model is called once by the task's loss, as ``model(…)``: the first stage gets what the task calls the model
with, every other one what the stage before it returned, and the task what the last one returned.
Between ranks, tensors of any shape and kind pass from one stage to the next.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.reader import Unreadable
from lockstep.data.requests import Request
from lockstep.engine.distributed.staging import finish, wire_device
from lockstep.engine.optim.precision import Precision
from lockstep.engine.strategies.base import Replica, SeededDraws, Strategy
from lockstep.engine.strategies.partition import Divided, Through, Undivided
from lockstep.engine.task import Task
from lockstep.engine.trained import refuse_modules
from lockstep.engine.training_data import training_source
from lockstep.errors import ConfigError, TaskError, many
from lockstep.hardware.world import World
from lockstep.planning import Plan

Inputs = tuple[Tensor, ...]
_FIX = "write stages(model) in the task: modules that, called one after the other, compute what model(…) does"


def stages_of(task: Task, model: nn.Module, devices: int) -> Sequence[nn.Module]:
    """The stages that ``task`` names, checked.

    Raises:
        TaskError: the task has none, or they are not the whole model and nothing else, or two share parameters.
        ConfigError: there are fewer than ``devices``.
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
    owners: dict[int, int] = {}
    whole = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for number, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise TaskError(f"stage {number} is a {type(stage).__name__} and no module", fix=_FIX)
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            if id(tensor) not in whole:
                raise TaskError(
                    f"stage {number} holds {name}, which is not the model's",
                    why="it would neither be trained nor saved",
                    fix="make stages of what the model that was passed holds",
                )
            if owners.setdefault(id(tensor), number) != number:
                raise TaskError(
                    f"the stages {owners[id(tensor)]} and {number} share {name}",
                    why="each stage is trained by a separate process",
                    fix="put what shares parameters into one stage",
                )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in owners:
            raise TaskError(
                f"no stage holds {name}", why="together the stages must be the whole model", fix="add it to a stage"
            )
    if len(stages) < devices:
        raise ConfigError(
            f"{devices} devices, but the model has {many(len(stages), 'stage')}",
            why="each device needs a stage",
            fix=f"select at most {many(len(stages), 'device')}, or cut the model into more stages",
        )
    return stages


def as_inputs(output: Any) -> Inputs:
    """What a stage returned, as what the next one is called with.

    Raises:
        TaskError: it is neither a tensor nor a tuple of tensors.
    """
    outputs = (output,) if isinstance(output, Tensor) else output
    if not isinstance(outputs, tuple) or not all(isinstance(item, Tensor) for item in outputs):
        raise TaskError(
            "a stage returned something else than a tensor or a tuple of tensors",
            why=f"it is a {type(output).__name__}",
            fix="return tensors from each stage",
        )
    return outputs


class _Called(Exception):
    """Carries what a task called its model with."""


class _Catch(nn.Module):
    def forward(self, *inputs: Any, **named: Any) -> Any:
        _refuse_names(named)
        raise _Called(inputs)


def _refuse_names(named: Mapping[str, Any]) -> None:
    if named:
        raise TaskError(
            f"the task calls its model with {', '.join(named)} by name",
            why="the first stage is called with the same tensors, in order",
            fix="call model(…) with positional tensors only",
        )


def ask(function: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
    """``function(model, batch)``, where ``model`` stands for the task's own and has nothing of it but its call.

    Raises:
        TaskError: the function wants something else of it.
    """
    try:
        return function(model, batch)
    except AttributeError as error:
        if error.obj is not model:
            raise
        raise TaskError(
            "the task calls a method of its model", why=str(error), fix=f"call model(…) only; {_FIX}"
        ) from None


def inputs_of(function: Callable[..., Any], batch: Any) -> Inputs:
    """What ``function(model, batch)`` calls the model with.

    Raises:
        TaskError: it does not call it, or with something else than tensors.
    """
    try:
        ask(function, _Catch(), batch)
    except _Called as call:
        return as_inputs(call.args[0])
    raise TaskError("the task's loss does not call its model", fix="call model(…) in loss and evaluate")


class Answer(nn.Module):
    """What a task calls on the last rank: the output of the stages for the one input that the first rank has seen.

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
            self._inputs, self._output = inputs, self._compute()
        elif self.training or not all(map(torch.equal, inputs, self._inputs)):
            raise TaskError(
                "the task calls its model twice for one batch",
                why="the stages before the last one have seen one call",
                fix="call model(…) once in loss, and with the same input in loss and evaluate",
            )
        return self._output


def shares(seconds: Sequence[float], devices: int) -> list[int]:
    """Where to cut a line of stages that take so long: the first stage of each device, and the number of stages.

    The slowest device is as fast as it can be; each has at least one stage.
    """
    number, sums = len(seconds), [0.0, *accumulate(seconds)]

    @cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The slowest of ``left`` devices that hold the stages from ``first`` on, and where they are cut."""
        if left == 1:
            return sums[number] - sums[first], (first, number)
        options = ((cut, *best(cut, left - 1)) for cut in range(first + 1, number - left + 2))
        return min((max(sums[cut] - sums[first], rest), (first, *cuts)) for cut, rest, cuts in options)

    return list(best(0, devices)[1])


def cut(stages: Sequence[nn.Module], devices: int, seconds: Sequence[float] | None) -> tuple[list[int], str]:
    """Where to cut (as :func:`shares`) and a remark for the user; without ``seconds`` each device gets one stage."""
    bounds = shares(seconds or [1.0] * len(stages), devices)
    parts = []
    for a, b in pairwise(bounds):
        name = f"{a}" if b == a + 1 else f"{a}-{b - 1}"
        parts.append(name + (f" ({sum(seconds[a:b]) * 1000:.3g} ms)" if seconds else ""))
    how = "balanced by a measured forward and backward" if seconds else "one each"
    return bounds, f"pipeline: stages {', '.join(parts)} on {devices} devices, {how}"


def measure(whole: Undivided, stages: Sequence[nn.Module]) -> list[float]:
    """Seconds of a forward and a backward of each stage with the first batch, on the device, one stage at a time.

    Weights, buffers and random numbers are as before afterwards, and there are no gradients.
    """
    plan, device = whole.plan, whole.device
    source, size = training_source(whole.task, whole.datasets, plan), min(plan.batch.batch_size, plan.batch.samples)
    batch = source.batch(Request(0, 0, 0, size, window=(0, size)))
    batch = batch.stand_in if isinstance(batch, Unreadable) else batch
    precision = Precision(plan.placement["precision"], device, plan.pre_scale)
    inputs, seconds = inputs_of(whole.task.loss, batch), []
    for stage in stages:
        kept = copy.deepcopy(stage.state_dict())
        stage.to(device)
        fastest = float("inf")
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for _ in range(3):
                started = _clock(device)
                leaves = [t.detach().to(device).requires_grad_(t.requires_grad) for t in inputs]
                with precision.autocast():
                    outputs = as_inputs(stage(*leaves))
                wanted = [output for output in outputs if output.requires_grad]
                if wanted:
                    torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])
                fastest = min(fastest, _clock(device) - started)
        seconds.append(fastest)
        inputs = outputs
        stage.zero_grad(set_to_none=True)
        stage.to("cpu").load_state_dict(kept)
    return seconds


def _clock(device: torch.device) -> float:
    finish(device)
    return time.perf_counter()


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Those that a forward pass on ``device`` may draw from."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]


def states_of(generators: Sequence[torch.Generator]) -> Inputs:
    """Where ``generators`` stand, as bytes on the host."""
    return tuple(generator.get_state() for generator in generators)


def set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state.cpu())


class _Chain(nn.Module):
    """Stages on their devices, as the one module that a task calls; the answer is on the first device.

    Each device continues the random numbers of the one before.
    """

    def __init__(self, stages: Sequence[nn.Module], places: Sequence[torch.device]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._places = places

    def forward(self, *inputs: Tensor, **named: Any) -> Any:
        _refuse_names(named)
        output: Any = inputs
        before = self._places[0]
        for stage, device in zip(self.stages, self._places, strict=True):
            if device != before:
                set_states(generators_of(device), states_of(generators_of(before)))
                before = device
            output = stage(*(tensor.to(device) for tensor in as_inputs(output)))
        home = tuple(tensor.to(self._places[0]) for tensor in as_inputs(output))
        return home[0] if isinstance(output, Tensor) else home


class PlacedModel(Divided):
    """The stages of a model on several devices of one process (model parallel)."""

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[nn.Module],
        bounds: Sequence[int],
        devices: Sequence[torch.device],
        remark: str,
    ) -> None:
        places = [device for device, (a, b) in zip(devices, pairwise(bounds), strict=True) for _ in range(a, b)]
        for stage, device in zip(stages, places, strict=True):
            stage.to(device)
        self.module, self._devices = module, devices
        self.remarks: tuple[str, ...] = (remark,)
        self._chain = _Chain(stages, places)

    def strategy(self, task: Task, precision: Precision, plan: Plan, world: World) -> Strategy:
        replica = Replica(task, self.module, precision, self._devices[0], plan.seed, forward=self._chain)
        return PlacedStrategy(replica, self._devices)


class PlacedStrategy(Strategy):
    """One process that holds several devices, each with some stages; they take turns."""

    def __init__(self, replica: Replica, devices: Sequence[torch.device]) -> None:
        super().__init__(replica)
        self.draws = SeededDraws(replica.seed, devices, everything=False)

    def evaluating(self, task: Task) -> Task:
        return Through(task, self._ask_through)

    def _ask_through(self, function: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
        self._model.train(model.training)
        return ask(function, self._model, batch)

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        loss: tuple[Tensor, Tensor | int] = ask(self._ask, self._model, batch)
        return loss


class Line:
    """Tensors to and from a neighbour, in one direction of the pipeline, described ahead of them. Collective.

    Sends do not wait: the two directions are two groups, so that none waits for the other either.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        self._device, self._wire = device, wire_device(device, self._group)
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensors: Inputs, to: int) -> None:
        """Begin to send ``tensors`` to rank ``to``."""
        kinds = pickle.dumps([(tensor.dtype, tensor.shape, tensor.requires_grad) for tensor in tensors])
        header = torch.frombuffer(bytearray(kinds), dtype=torch.uint8)
        for message in (torch.tensor([len(header)]), header, *(tensor.detach() for tensor in tensors)):
            if message.numel():
                packed = message.resolve_conj().resolve_neg().to(self._wire).contiguous().view(-1).view(torch.uint8)
                self._sent.append((dist.isend(packed, group_dst=to, group=self._group), packed))

    def receive(self, source: int) -> Inputs:
        """The tensors of the next message, as leaves that gather gradients where those are wanted."""
        length = self._one(torch.int64, (1,), source)
        header = self._one(torch.uint8, (int(length),), source)
        return tuple(
            self._one(dtype, shape, source).to(self._device).requires_grad_(wanted)
            for dtype, shape, wanted in pickle.loads(header.cpu().numpy().tobytes())
        )

    def _one(self, dtype: torch.dtype, shape: tuple[int, ...], source: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._wire)
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), group_src=source, group=self._group)
        return tensor

    def flush(self) -> None:
        """Wait until all that was sent has gone."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent = []
