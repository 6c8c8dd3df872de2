"""``strategy: pipeline``: the model's stages in order over the ranks, micro-batches following one another through them.

All ranks see the same micro-batches, so a step is that of one device which accumulates them. Each rank trains the
stages that it holds. What travels between ranks is of any shape and may differ from one micro-batch to the next
(padded sequences, short last batches), which fixed receive buffers, as of ``torch.distributed.pipelining``, do not
allow: so the two schedules are written out here.

GPipe: Huang et al. 2019, https://arxiv.org/abs/1811.06965. 1F1B: Narayanan et al. 2019, "PipeDream" (SOSP), and
section 2.2.1 of Narayanan et al. 2021, https://arxiv.org/abs/2104.04473.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.loader import Window
from lockstep.engine.collectives import Collectives
from lockstep.engine.placed import Inputs, as_inputs, inputs_of
from lockstep.engine.precision import Precision
from lockstep.engine.strategy import FLAG_INTERVAL, Flags, Reduced, SingleStrategy, to_device
from lockstep.engine.task import Loss, Task
from lockstep.engine.wire import all_reduce, wire_device
from lockstep.errors import TaskError
from lockstep.hardware.world import World
from lockstep.plan import Plan

_KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool)
#: Room for the description of one tensor: kind, whether a gradient is wanted, dimensions, and up to so many sizes.
_HEADER = 12


class Action(NamedTuple):
    """One thing that a rank does: the forward or the backward of a micro-batch."""

    forward: bool
    micro_batch: int


def schedule(kind: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """What rank ``rank`` of ``ranks`` does in a step, in order.

    ``gpipe``: all forwards, then all backwards. ``1f1b``: as soon as the last rank has a micro-batch, each rank
    turns from one forward to one backward, so that it holds the activations of at most ``ranks - rank`` of them.
    """
    ahead = micro_batches if kind == "gpipe" else min(micro_batches, ranks - rank - 1)
    actions = [Action(True, index) for index in range(ahead)]
    for index in range(micro_batches - ahead):
        actions += [Action(True, ahead + index), Action(False, index)]
    return actions + [Action(False, index) for index in range(micro_batches - ahead, micro_batches)]


class _Line:
    """Tensors to and from a neighbour, in one direction of the pipeline; sizes travel ahead of them.

    Sends do not wait: the two directions are two groups, so that none waits for the other either.
    """

    def __init__(self, device: torch.device) -> None:
        self._group = dist.new_group()
        self._device, self._wire = device, wire_device(device, self._group)
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensors: Inputs, to: int) -> None:
        header = torch.zeros(1 + len(tensors) * _HEADER, dtype=torch.int64)
        header[0] = len(tensors)
        for place, tensor in enumerate(tensors):
            row = [_KINDS.index(tensor.dtype), int(tensor.requires_grad), tensor.dim(), *tensor.shape]
            start = 1 + place * _HEADER
            header[start : start + len(row)] = torch.tensor(row)
        for message in (header[:1], header[1:], *(tensor.detach() for tensor in tensors)):
            packed = message.to(self._wire).contiguous()
            if packed.numel():
                self._sent.append((dist.isend(packed, group_dst=to, group=self._group), packed))

    def receive(self, source: int) -> Inputs:
        """The tensors of the next message, as leaves that gather gradients where those are wanted."""
        number = int(self._one(torch.int64, (1,), source))
        rows = self._one(torch.int64, (number, _HEADER), source).tolist()
        tensors = []
        for kind, wanted, dims, *sizes in rows:
            tensor = self._one(_KINDS[kind], tuple(sizes[:dims]), source).to(self._device)
            tensors.append(tensor.requires_grad_(bool(wanted)))
        return tuple(tensors)

    def _one(self, kind: torch.dtype, shape: tuple[int, ...], source: int) -> Tensor:
        tensor = torch.empty(shape, dtype=kind, device=self._wire)
        if tensor.numel():
            dist.recv(tensor, group_src=source, group=self._group)
        return tensor

    def flush(self) -> None:
        """Wait until all that was sent has gone."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent = []


class PipelineModel:
    """The stages that this rank holds of a model, on its device; the others stay as they are, on the host.

    Args:
        bounds: the first stage of each rank, and behind the last one the number of stages.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[nn.Module],
        bounds: Sequence[int],
        device: torch.device,
        world: World,
        schedule: str,
        remark: str,
    ) -> None:
        self.module = module
        self.remarks: tuple[str, ...] = (remark,)
        self._device, self._schedule = device, schedule
        self.mine = nn.ModuleList(stages[bounds[world.rank] : bounds[world.rank + 1]]).to(device)
        names = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items()}
        held = (*self.mine.parameters(), *self.mine.buffers())
        self._names = [names[id(tensor)] for tensor in held if id(tensor) in names]
        self.is_first, self.is_last = world.rank == 0, world.rank == world.size - 1

    def run(self, inputs: Inputs) -> Any:
        """What this rank's stages make of ``inputs``."""
        output: Any = inputs
        for stage in self.mine:
            output = stage(*as_inputs(output))
        return output

    def strategy(self, task: Task, precision: Precision, plan: Plan, world: World) -> PipelineStrategy:
        return PipelineStrategy(task, self, precision, self._device, seed=plan.seed, world=world, kind=self._schedule)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.mine.parameters())

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors

    def total_norm(self, norm: Tensor) -> Tensor:
        return all_reduce(norm.detach().double().square(), None).sqrt().to(norm)

    def agree(self, flag: Tensor) -> None:
        flag.copy_(all_reduce(flag, None, dist.ReduceOp.MAX))

    def divided_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An optimizer's whole state dict without that of other ranks' parameters."""
        mine = self._numbers(optimizer)
        return {**state, "state": {number: values for number, values in state["state"].items() if number in mine}}

    def _numbers(self, optimizer: torch.optim.Optimizer) -> set[int]:
        own = {id(parameter) for parameter in self.mine.parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {number for number, parameter in enumerate(parameters) if id(parameter) in own}

    def whole(self, state: dict[str, Any], collectives: Collectives) -> dict[str, Any]:
        """A checkpoint's content from the parts that ranks hold. Collective."""
        model = {name: state["model"][name].cpu() for name in self._names}
        moments = _on_host(state["trainer"]["update"]["optimizer"]["state"])
        parts = collectives.all_gather((model, moments))
        gathered = dict(state["model"])
        for names, _ in parts:
            gathered |= names
        update = state["trainer"]["update"]
        merged = {number: values for _, own in parts for number, values in own.items()}
        optimizer = {**update["optimizer"], "state": dict(sorted(merged.items()))}
        trainer = {**state["trainer"], "update": {**update, "optimizer": optimizer}}
        return {"model": gathered, "trainer": trainer}


def _on_host(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    return state.cpu() if isinstance(state, Tensor) else state


class PipelineStrategy(SingleStrategy):
    """One process a rank, each with some stages.

    Every rank gets every micro-batch: the first takes its input, the last what its loss compares with.
    """

    is_sharded = True

    def __init__(
        self,
        task: Task,
        model: PipelineModel,
        precision: Precision,
        device: torch.device,
        *,
        seed: int,
        world: World,
        kind: str,
    ) -> None:
        super().__init__(task, model.module, precision, device, seed=seed)
        self._pipeline, self._world, self._kind = model, world, kind
        self._down, self._up = _Line(device), _Line(device)
        self._sums = torch.zeros(2 + len(Flags._fields), dtype=torch.float64, device=device)

    def gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        self._clear()
        self._sums.zero_()
        self._sums[2:] = torch.tensor(flags, dtype=torch.float64)
        waiting = [to_device(next(batches), self._device) for _ in window.requests]
        running: dict[int, tuple[Inputs, Any]] = {}
        for action in schedule(self._kind, self._world.rank, self._world.size, len(waiting)):
            place = action.micro_batch
            if action.forward:
                running[place] = self._forward(waiting[place], step, place)
            else:
                self._backward_of(*running.pop(place))
        self._down.flush()
        self._up.flush()
        sums = all_reduce(self._sums, None)
        read = self._device.type == "cpu" or step % FLAG_INTERVAL == 0
        return Reduced(sums[0].clone(), sums[1].clone(), 1.0, Flags(*sums[2:].tolist()) if read else None)

    def whole(self, state: dict[str, Any], collectives: Collectives, *, keep: bool) -> dict[str, Any]:
        return self._pipeline.whole(state, collectives)

    def evaluating(self, task: Task) -> Task:
        return _ThroughStages(task, self)

    def through(self, function: Callable[..., Any], batch: Any) -> tuple[Inputs, Any]:
        """This rank's part of ``function(model, batch)``: what it got, and what came of it."""
        model, rank = self._pipeline, self._world.rank
        model.mine.train(self.module.training)
        inputs = inputs_of(function, batch) if model.is_first else self._down.receive(rank - 1)
        if not model.is_last:
            output = as_inputs(model.run(inputs))
            self._down.send(output, rank + 1)
            return inputs, output
        return inputs, function(_Answer(lambda: model.run(inputs), self.module.training), batch)

    @property
    def is_last(self) -> bool:
        return self._pipeline.is_last

    def flush(self) -> None:
        """Wait until the next rank has what :meth:`through` sent."""
        self._down.flush()

    def _forward(self, batch: Any, step: int, place: int) -> tuple[Inputs, Any]:
        self._draw(step, place << 16)
        with self._precision.autocast():
            inputs, output = self.through(self._task.loss, batch)
        if self._pipeline.is_last:
            total, count = output
            self._sums[0] += total.detach()
            self._sums[1] += count
            output = total.float() if not self._precision.is_full else total
        return inputs, output

    def _backward_of(self, inputs: Inputs, output: Any) -> None:
        if self._pipeline.is_last:
            self._backward(output)
        else:
            wanted = tuple(tensor for tensor in output if tensor.requires_grad)
            gradients = self._up.receive(self._world.rank + 1)
            if wanted:
                torch.autograd.backward(wanted, gradients)
        if not self._pipeline.is_first:
            wanted = tuple(tensor for tensor in inputs if tensor.requires_grad)
            gradients = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in wanted)
            self._up.send(gradients, self._world.rank - 1)


class _Answer(nn.Module):
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


class _ThroughStages(Task):
    """What evaluation asks of a task: the last rank alone has rows."""

    def __init__(self, task: Task, strategy: PipelineStrategy) -> None:
        super().__init__(task.config)
        self._task, self._strategy = task, strategy

    def collate(self, samples: Sequence[Any]) -> Any:
        return self._task.collate(samples)

    def metrics(self) -> Any:
        return self._task.metrics()

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Tensor, ...]] | None:  # type: ignore[override]
        _, result = self._strategy.through(self._task.validate, batch)
        self._strategy.flush()
        return result if self._strategy.is_last else None
