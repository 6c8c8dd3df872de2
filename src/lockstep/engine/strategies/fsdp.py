"""``strategy: fsdp``: parameters, gradients and optimizer state divided among the ranks, gathered block by block.

torch's FSDP2 (``fully_shard``; Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277) does the dividing:
a parameter is a ``DTensor``, this rank's rows of it. This module adds the guarantees of a run: the micro-batches and
denominators of DDP, norm and finiteness of the *whole* gradient, ranks without samples, checkpoints of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep._compat.torch import SENT_TYPES, NormBase, foreach_norm, fsdp_reduce_scatter
from lockstep.config import FsdpConfig
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.dtensor_state import gathered, restored
from lockstep.engine.distributed.staging import all_reduce
from lockstep.engine.optim.precision import Precision, autocast_type
from lockstep.engine.partition import (
    Divided,
    Through,
    Undivided,
    blocks_of,
    checkpoint_activations,
    compiled,
    pick,
)
from lockstep.engine.strategies.base import Asked, RanksStrategy, Replica
from lockstep.engine.strategies.reducers import Reducer, step_sums
from lockstep.engine.task import Task
from lockstep.errors import TaskError, UnsupportedError, many
from lockstep.hardware.world import World


def divide(whole: Undivided) -> Divided:
    """Shard the model's parameters among the ranks. Collective."""
    return ShardedModel(whole)


class _ReduceScatter:
    """FSDP's reduce-scatter, in which a rank may contribute zeros in place of its gradients."""

    def __init__(self) -> None:
        self.nothing = False
        self._own = fsdp_reduce_scatter()
        self.allocate = self._own.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work:
        if self.nothing:
            input_tensor.zero_()
        return cast(dist.Work, self._own(output_tensor, input_tensor, group, op, async_op))


class ShardedModel(Divided):
    """A model whose parameters have been divided among the ranks of a run, for good. Collective.

    On the host it is moved to the device block by block. What gathers a block's parameters is not compiled.
    """

    def __init__(self, whole: Undivided) -> None:
        super().__init__(whole)
        model = whole.model
        config = whole.rank.config
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0 or not parameter.is_contiguous():
                raise UnsupportedError(
                    f"strategy fsdp cannot divide the parameter {name}, of shape {tuple(parameter.shape)}",
                    why="parameters are divided by rows: a scalar has none, and those of a channels_last weight or a "
                    "transposed view do not lie one behind the other",
                    fix="give a scalar the shape (1,), leave others contiguous in model(), or use --strategy ddp",
                )
            if parameter.dtype not in SENT_TYPES and (self.device.type == "cpu" or not parameter.is_floating_point()):
                raise UnsupportedError(
                    f"strategy fsdp cannot divide the parameter {name}, of {parameter.dtype}",
                    why="ranks do not send numbers of this type",
                    fix="register it as a buffer, or use --strategy ddp",
                )
        _refuse_views(model)
        mesh = _mesh(config.fsdp, self.device, whole.rank.world)
        self.group = mesh.get_group("shard")
        blocks = blocks_of(whole.task, model)
        self.remarks = (f"fsdp: {many(len(blocks), 'block')} of the model, gathered one at a time",)
        for block in blocks if config.training.compile else []:
            block.forward = compiled(block.forward, config.training.compile_mode)
        if config.recomputes_activations("fsdp"):
            checkpoint_activations(model, blocks)
        self.root = Asked(model)
        self.reduce_scatter = _ReduceScatter()
        offload = (
            CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if config.fsdp.cpu_offload else OffloadPolicy()
        )
        for module in (*blocks, self.root):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=True,
                mp_policy=_policy(module, blocks, whole.rank.plan.placement["precision"]),
                offload_policy=offload,
            )
            cast(FSDPModule, module).set_custom_reduce_scatter(cast(Any, self.reduce_scatter))

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        norm = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients, 2.0))) if gradients else torch.zeros(())
        squares = all_reduce(norm.double().square().to(self.device), self.group)
        return squares.sqrt().to(norm)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Let a backward in the body contribute zeros to the reduction."""
        self.reduce_scatter.nothing = True
        try:
            yield
        finally:
            self.reduce_scatter.nothing = False

    def whole(self, state: dict[str, Any], collectives: Collectives, *, keep: bool) -> dict[str, Any]:
        return cast(dict[str, Any], gathered(state, keep=keep))

    def strategy(self, task: Task, precision: Precision) -> FsdpStrategy:
        return FsdpStrategy(self.replica(task, precision), self)

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    def pick(self, parameters: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
        return pick((gathered(parameter, keep=True) for parameter in parameters), places)

    def divided_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        divided = dict(state["state"])
        for number, parameter in zip(numbers, parameters, strict=False):  # the optimizer reports a mismatch
            if number in divided:
                divided[number] = {name: restored(value, parameter) for name, value in divided[number].items()}
        return {**state, "state": divided}


class FsdpStrategy(RanksStrategy):
    """One process a rank. Every micro-batch is reduced, so that no rank ever holds a whole gradient.

    A rank with fewer micro-batches than another replays samples of the same step: its buffers are as before
    afterwards, and it contributes zeros to the reduction.
    """

    divided_by = "fsdp"

    def __init__(self, replica: Replica, sharded: ShardedModel) -> None:
        super().__init__(replica)
        self._sharded = sharded

    def _make_reducer(self) -> Reducer:
        return step_sums(self._device, float(dist.get_world_size()))

    def _ghost(self, batch: Any) -> None:
        with self._sharded.silent(), self.passes.uncounted():  # no trace, here or in the reduction
            total, _ = self._forward_pass(batch, 0, 0)
            self._backward(total)

    def evaluating(self, task: Task) -> Task:
        return Through(task, lambda function, _, batch: through(self._sharded.root, function, batch))

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        loss: tuple[Tensor, Tensor | int] = through(self._sharded.root, self._ask, batch)
        return loss

    def _backward(self, total: Tensor) -> None:
        with self.watching():  # activation checkpointing makes parts of the forward pass again
            super()._backward(total)


def through(root: nn.Module, function: Callable[..., Any], batch: Any) -> Any:
    """Call ``function(model, batch)``, with the parameters gathered that are in no block. Collective."""
    try:
        return root(function, batch)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise TaskError(
            "parameters of a block are used without calling the block",
            why="strategy fsdp gathers a block's parameters when the block is called, and frees them afterwards",
            fix="name other blocks in the task's blocks(model), none of which is used in parts",
        ) from error


def _mesh(config: FsdpConfig, device: torch.device, world: World) -> DeviceMesh:
    if config.sharding == "full":
        return init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    if world.local_size == 1 or world.local_size * world.nodes != world.size:
        raise UnsupportedError(
            "fsdp.sharding hybrid needs several ranks on each node, and as many as on the others",
            why="the ranks of each node divide the whole model among them",
            fix="use fsdp.sharding full, or --strategy ddp where the model fits one device",
        )
    shape = (world.nodes, world.local_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _refuse_views(model: nn.Module) -> None:
    """Raise :class:`UnsupportedError` where two parameters share memory: divided, they would be two of them."""
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in model.named_parameters() if p.numel())
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            raise UnsupportedError(
                f"strategy fsdp cannot divide the parameters {first} and {second}, which are views of one storage",
                why="each rank would have rows of two copies of it, which are trained apart",
                fix="register one parameter and take views of it in forward(), or use --strategy ddp",
            )


def _policy(module: nn.Module, blocks: Sequence[nn.Module], precision: str) -> MixedPrecisionPolicy:
    """Return the precision of parameters in transit, which is autocast's; sums are made in single precision.

    Normalisation layers with statistics keep theirs in single precision, and so does their block.
    """
    parts_of_others = {id(part) for block in blocks if block is not module for part in block.modules()}
    keeps = any(isinstance(part, NormBase) for part in module.modules() if id(part) not in parts_of_others)
    half = None if keeps else autocast_type(precision)
    return MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=None if half is None else torch.float32, cast_forward_inputs=False
    )
