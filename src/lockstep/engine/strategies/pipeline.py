"""``strategy: pipeline``: the model's stages in order over the ranks, micro-batches following one another through them.

All ranks see the same micro-batches, so a step is that of one device which accumulates them; the state of the random
number generators goes from stage to stage with the activations, so dropout draws the same numbers. Each rank
trains the stages that it holds. What travels between ranks is of any shape and may differ from one micro-batch to the
next (padded sequences, short last batches), which fixed receive buffers, as of ``torch.distributed.pipelining``, do
not allow: so the two schedules are written out here.

GPipe: Huang et al. 2019, https://arxiv.org/abs/1811.06965. 1F1B: Narayanan et al. 2019, "PipeDream" (SOSP), and
section 2.2.1 of Narayanan et al. 2021, https://arxiv.org/abs/2104.04473.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep._compat.torch import foreach_norm
from lockstep.checkpoint.content import by_file
from lockstep.data.arrays import as_bytes
from lockstep.data.requests import Window
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import all_reduce, to_host, wire_device
from lockstep.engine.optim.precision import Precision
from lockstep.engine.partition import Divided, Through, Undivided, blocks_of, checkpoint_activations, pick
from lockstep.engine.strategies.base import Replica, Strategy
from lockstep.engine.strategies.reducers import Flags, Reduced, Reducer, step_sums
from lockstep.engine.strategies.stages import Answer, Inputs, as_inputs, ask, inputs_of, shares, stages_of
from lockstep.engine.task import Task


def divide(whole: Undivided) -> Divided:
    """Cut the model into a part for each rank. Collective."""
    world = whole.rank.world
    if whole.rank.config.training.activation_checkpointing:
        checkpoint_activations(whole.model, blocks_of(whole.task, whole.model))
    stages = stages_of(whole.task, whole.model, world.size)
    bounds = shares(len(stages), world.size)
    parts = [f"{first}" if stop == first + 1 else f"{first}-{stop - 1}" for first, stop in pairwise(bounds)]
    remark = f"pipeline: stages {', '.join(parts)} on {world.size} devices"
    return PipelineModel(whole, stages[bounds[world.rank] : bounds[world.rank + 1]], remark)


def schedule(kind: str, rank: int, ranks: int, micro_batches: int) -> list[tuple[bool, int]]:
    """List the actions of ``rank`` in a step, in order: forward (true) or backward, and the micro-batch.

    ``gpipe``: all forwards, then all backwards. ``1f1b``: as soon as the last rank has a micro-batch, each rank
    turns from one forward to one backward, so that it holds the activations of at most ``ranks - rank`` of them.
    """
    ahead = micro_batches if kind == "gpipe" else min(micro_batches, ranks - rank - 1)
    actions = [(True, index) for index in range(ahead)]
    for index in range(micro_batches - ahead):
        actions += [(True, ahead + index), (False, index)]
    return actions + [(False, index) for index in range(micro_batches - ahead, micro_batches)]


class PipelineModel(Divided):
    """The stages that this rank holds of a model, on its device; the others stay as they are, on the host."""

    def __init__(self, whole: Undivided, stages: Sequence[nn.Module], remark: str) -> None:
        super().__init__(whole)
        self.remarks = (remark,)
        self._optimizer: Optimizer | None = None
        self.stages = nn.ModuleList(stages).to(self.device)
        names: dict[int, list[str]] = {}
        for name, tensor in by_file(self.module.state_dict(keep_vars=True))[0].items():
            names.setdefault(id(tensor), []).append(name)
        tensors = (*self.stages.parameters(), *self.stages.buffers())
        self._names = [names[id(tensor)][0] for tensor in tensors if id(tensor) in names]
        layers = set(self.stages.modules())
        self._names += [f"{name}._extra_state" for name, layer in self.module.named_modules() if layer in layers]
        #: Further names of tied weights, with their first.
        self._aliases = {other: first for first, *aliases in names.values() for other in aliases}
        world = self.rank.world
        self.is_first = world.rank == 0
        self.is_last = world.rank == world.size - 1

    def strategy(self, task: Task, precision: Precision) -> PipelineStrategy:
        return PipelineStrategy(self.replica(task, precision), self)

    def adopt(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def parameters(self) -> list[nn.Parameter]:
        return list(self.stages.parameters())

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Compute the norm from those of all parameters in the order of the model: rounded as on one device."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.module.parameters())}
        columns = [numbers[id(parameter)] for parameter in self.stages.parameters() if parameter.grad is not None]
        table = torch.zeros(2, len(numbers), dtype=torch.float64, device=self.device)
        if gradients:
            table[0, columns] = torch.stack(foreach_norm(gradients, 2.0)).double()
            table[1, columns] = 1.0
        norms, is_known = all_reduce(table, None)
        norm: Tensor = torch.linalg.vector_norm(norms[is_known > 0].to(next(self.module.parameters()).dtype))
        return norm

    def pick(self, parameters: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
        local_ids = {id(tensor) for tensor in (*self.stages.parameters(), *self.stages.buffers())}
        tensors = [p if id(p) in local_ids else torch.zeros(()).expand(p.numel()) for p in parameters]
        return all_reduce(pick(tensors, places).to(self.device), None).cpu()

    def divided_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state dict without that of other ranks' parameters."""
        numbers = self._numbers(optimizer)
        return {**state, "state": {number: values for number, values in state["state"].items() if number in numbers}}

    def _numbers(self, optimizer: Optimizer) -> set[int]:
        """Return the numbers, as in the optimizer's state dict, of the parameters of this rank."""
        local_ids = {id(parameter) for parameter in self.stages.parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {number for number, parameter in enumerate(parameters) if id(parameter) in local_ids}

    def whole(self, state: dict[str, Any], collectives: Collectives, *, keep: bool) -> dict[str, Any]:
        # One rank's part at a time is on the way.
        assert self._optimizer is not None, "an optimizer is adopted before anything is saved"
        update = state["trainer"]["update"]
        numbers = self._numbers(self._optimizer)
        moments = {number: values for number, values in update["optimizer"]["state"].items() if number in numbers}
        weights = {name: state["model"][name] for name in self._names if name in state["model"]}
        local_part = to_host(weights), to_host(moments)
        model = dict(state["model"])
        merged = dict[int, Any]()
        for source in range(collectives.size):
            names, values = collectives.broadcast(local_part, source)
            if keep:
                model |= names
                merged |= values
        model |= {name: model[first] for name, first in self._aliases.items()}
        optimizer = {**update["optimizer"], "state": dict(sorted(merged.items()))}
        trainer = {**state["trainer"], "update": {**update, "optimizer": optimizer}}
        return {"model": model, "trainer": trainer}


class PipelineStrategy(Strategy):
    """One process a rank, each with some stages.

    Every rank gets every micro-batch: the first takes its input, the last what its loss compares with.
    """

    divided_by = "pipeline"

    def __init__(self, replica: Replica, model: PipelineModel) -> None:
        super().__init__(replica)
        config = model.rank.config
        self._world = model.rank.world
        self._pipeline = model
        self._kind = config.pipeline.schedule
        self._down, self._up = (Line(replica.device, config.distributed.timeout_s) for _ in range(2))
        self._generators = _generators(replica.device)
        if not (model.is_first or model.is_last):  # which do not look at the batch
            self.passes.arrive = lambda batch: batch

    def _make_reducer(self) -> Reducer:
        return step_sums(self._device)

    def _reduced_gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        self._reducer.begin(flags)
        running: dict[int, tuple[Inputs, Any]] = {}
        for is_forward, index in schedule(self._kind, self._world.rank, self._world.size, len(window.requests)):
            if is_forward:
                running[index] = self._forward(next(batches), step, index)
            else:
                self._backward_of(*running.pop(index))
        self._down.flush()
        self._up.flush()
        return self._reducer.reduced(step)

    def evaluating(self, task: Task) -> Task:
        return Through(task, self._through_stages)

    def _through_stages(self, function: Callable[..., Any], _: nn.Module, batch: Any) -> Any:
        """Evaluate ``function(model, batch)`` in all stages; the last rank returns its result, the others ``None``."""
        result = self.through(function, batch)[1]
        self._down.flush()
        return result if self._pipeline.is_last else None

    def through(self, function: Callable[..., Any], batch: Any) -> tuple[Inputs, Any]:
        """Compute this rank's part of ``function(model, batch)``: its inputs and its result."""
        model = self._pipeline
        rank = self._world.rank
        model.stages.train(self.module.training)
        if model.is_first:
            inputs = inputs_of(function, batch)
        else:
            received = self._down.receive(rank - 1)
            states = received[: len(self._generators)]
            inputs = received[len(self._generators) :]

        def run() -> Any:
            if not model.is_first:
                _set_states(self._generators, states)
            output: Any = inputs
            for stage in model.stages:
                output = stage(*as_inputs(output))
            return output

        if model.is_last:
            return inputs, ask(function, Answer(run, self.module.training), batch)
        with self.watching():
            output = as_inputs(run())
        self._down.send((*_states(self._generators), *output), rank + 1)
        return inputs, output

    def _forward(self, batch: Any, step: int, index: int) -> tuple[Inputs, Any]:
        """Compute this rank's inputs of a micro-batch, and the tensor that its backward begins with."""
        total, count = self._forward_pass(batch, step, index << 16)
        self._reducer.add(total, count, is_last=False)
        inputs, output = self._passed
        del self._passed  # the activations are kept until their backward, and no longer
        return inputs, total if self._pipeline.is_last else output

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        self._passed = self.through(self._ask, batch)
        return self._passed[1] if self._pipeline.is_last else (torch.zeros(()), 0)

    def _backward_of(self, inputs: Inputs, output: Any) -> None:
        if self._pipeline.is_last:
            self._backward(output)
        else:
            leaves = tuple(tensor for tensor in output if tensor.requires_grad)
            gradients = self._up.receive(self._world.rank + 1)
            if leaves:
                torch.autograd.backward(leaves, gradients)
        if not self._pipeline.is_first:
            leaves = tuple(tensor for tensor in inputs if tensor.requires_grad)
            gradients = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)
            self._up.send(gradients, self._world.rank - 1)


class Line:
    """Tensors to and from a neighbour, in one direction of the pipeline, described ahead of them. Collective.

    Sends do not wait: the two directions are two groups, so that none waits for the other either.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        self._device = device
        self._wire = wire_device(device, self._group)
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensors: Inputs, to: int) -> None:
        """Begin to send ``tensors`` to rank ``to``."""
        kinds = pickle.dumps([(tensor.dtype, tensor.shape, tensor.requires_grad) for tensor in tensors])
        header = torch.frombuffer(bytearray(kinds), dtype=torch.uint8)
        for message in (torch.tensor([len(header)]), header, *(tensor.detach() for tensor in tensors)):
            if message.numel():
                packed = as_bytes(message.to(self._wire))
                self._sent.append((dist.isend(packed, group_dst=to, group=self._group), packed))

    def receive(self, source: int) -> Inputs:
        """Receive the tensors of the next message, as leaves that collect gradients if the sender's required them."""
        length = self._one(torch.int64, (1,), source)
        header = self._one(torch.uint8, (int(length),), source)
        return tuple(
            self._one(dtype, shape, source).to(self._device).requires_grad_(requires_grad)
            for dtype, shape, requires_grad in pickle.loads(header.cpu().numpy().tobytes())
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


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that a forward pass on ``device`` may draw from."""
    on_gpu = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *on_gpu]


def _states(generators: Sequence[torch.Generator]) -> Inputs:
    return tuple(generator.get_state() for generator in generators)


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state.cpu())
