"""Memory and work of one device in a training step, counted without the device.

The task's model, loss and optimizer run for two steps on tensors without memory (torch's FakeTensorMode); a model
that asks for a value on the way runs on real ones. The second step is counted: then the optimizer has its state.
Scratch memory inside a kernel and memory of the driver are not included.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lockstep._compat.fake_tensors import (
    FakeTensorMode,
    TorchDispatchMode,
    is_mutable,
    overload_packet,
    replace_tensors,
    unset_fake_temporarily,
)
from lockstep._compat.torch import BatchNorm, storage_key, tree_leaves, tree_map
from lockstep.arithmetic import ceil_div
from lockstep.config import RunConfig
from lockstep.engine.blueprint import blueprint
from lockstep.engine.generators import seeded
from lockstep.engine.loss import check_loss
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision, cast
from lockstep.engine.partition import blocks_of, checkpoint_activations
from lockstep.engine.task import Task
from lockstep.engine.trained import bare, build_model
from lockstep.errors import LockstepError, TaskError, UnsupportedError, many
from lockstep.hardware.detect import usable_memory

Kind = Literal["parameters", "buffers", "gradients", "optimizer", "batch", "activations"]
_CPU = torch.device("cpu")


class Work(NamedTuple):
    """One operator: floating-point operations, bytes read and written, and whether it computes in 16 bits."""

    flops: float
    moved: float
    half: bool = False


class Ledger(TorchDispatchMode):
    """While entered, counts bytes by kind of every storage that operators return, and the work of each operator.

    ``block``: an allocator hands out whole blocks of this number of bytes (512 for torch's on GPUs; 1 counts exactly).
    ``live``: bytes by kind now; ``peak``: when their sum was largest since :meth:`reset`; ``work``: of operators since
    then.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block = block
        self._kind: Kind = "activations"
        self._alive: dict[int, tuple[Kind, int, weakref.ref[Any]]] = {}
        self.live: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self.reset()

    def reset(self) -> None:
        """Forget the peak and the work, but not live tensors."""
        self.peak: Mapping[Kind, int] = dict(self.live)
        self.work: list[Work] = []

    @contextmanager
    def counting(self, kind: Kind) -> Iterator[None]:
        """New storages inside are of ``kind``."""
        before = self._kind
        self._kind = kind
        try:
            yield
        finally:
            self._kind = before

    def add(self, tree: Any, kind: Kind) -> None:
        """Count the tensors of ``tree``, made before or otherwise, as ``kind``."""
        for tensor in _tensors(tree):
            self._note(tensor, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = [tensor for tensor in _tensors(result) if storage_key(tensor) not in self._alive]
        for tensor in fresh:
            self._note(tensor, self._kind)
        if any(tensor.untyped_storage().nbytes() for tensor in fresh) or is_mutable(func):
            packet = overload_packet(func)
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=result) if packet in flop_registry else 0
            used = _tensors((args, kwargs, result))
            half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in used)
            self.work.append(Work(float(flops), float(sum(tensor.nbytes for tensor in used)), half))
        return result

    def _note(self, tensor: Tensor, kind: Kind) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        size = ceil_div(storage.nbytes(), self._block) * self._block
        if key in self._alive:
            before, counted_bytes, reference = self._alive[key]
            self.live[before] -= counted_bytes
        else:
            reference = weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = kind, size, reference
        self.live[kind] += size
        if sum(self.live.values()) > sum(self.peak.values()):
            self.peak = dict(self.live)

    def _forget(self, key: int) -> None:
        kind, size, _ = self._alive.pop(key)
        self.live[kind] -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Footprint:
    """Bytes of one device at its fullest, by kind, with a batch of ``batch_size`` samples.

    Attributes:
        gradients: bytes of each gradient, in the order in which the backward finishes them.
        ready: of each gradient, how many operators of ``backward`` came before it was there.
        blocks: bytes of the parameters of each part that fsdp would shard separately; last, the rest (may be 0).
        on: ``fake`` or ``real`` tensors.
        forward, backward, optimizer: the work of each part of the step.
    """

    batch_size: int
    kinds: dict[str, int]
    gradients: tuple[int, ...]
    ready: Sequence[int]
    blocks: tuple[int, ...]
    on: str
    forward: Sequence[Work]
    backward: Sequence[Work]
    optimizer: Sequence[Work]

    def ready_by(self, cost: Callable[[Work], float]) -> tuple[float, ...]:
        """Return the time of each gradient, as a share of the cost of the backward."""
        passed = [0.0, *accumulate(map(cost, self.backward))]
        return tuple(passed[index] / passed[-1] for index in self.ready)


@dataclass(frozen=True)
class StepCounter:
    """Counts a training step of ``task``.

    Attributes:
        batch_size: samples of the step.
        keep_gradients: they have separate memory during the whole step, as in DDP's buckets and between micro-batches.
        block: of the allocator, as for :class:`Ledger`.
        recompute: activations inside of fsdp's blocks are computed again in the backward pass.
    """

    task: Task
    config: RunConfig
    batch_size: int
    keep_gradients: bool
    block: int = 1
    recompute: bool = False

    def count(self, batch: Any) -> Footprint:
        """Count a step on ``batch``.

        Raises:
            TaskError: the task cannot make a step. UnsupportedError: the step reads values, and is too large for real
                ones.
        """
        seed = self.config.training.seed
        # Tensors without memory like those of the batch; if that fails, the batch itself.
        try:
            with seeded(seed), FakeTensorMode() as fake:
                like = tree_map(lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)
                return self._count(like, fake)
        except LockstepError:
            raise
        except Exception as error:  # a shape rule that torch lacks, a value that the model reads: anything of the task
            # Parameters, gradients and two moments.
            state = 4 * sum(p.nbytes for p in blueprint(self.task).parameters())
            (_, free) = usable_memory()
            if state > free:
                raise UnsupportedError(
                    f"the step cannot be counted without memory, and needs {state / 1e9:.1f} GB for the model alone",
                    why=f"{free / 1e9:.1f} GB are free; on tensors without memory: {type(error).__name__}: {error}",
                    fix="keep what reads values (.item(), .tolist(), branches on them) out of the loss and the model",
                ) from None
        try:
            with seeded(seed):
                return self._count(batch, None)
        except LockstepError:
            raise
        except Exception as error:
            raise TaskError(
                f"the task {type(self.task).__name__} cannot make a step on {many(self.batch_size, 'sample')}",
                why=f"{type(error).__name__}: {error}",
                fix="see that it trains: `lockstep train … --fast-dev-run`",
            ) from error

    def _count(self, batch: Any, fake: FakeTensorMode | None) -> Footprint:
        """Count two steps of :attr:`task` on ``batch``, whose tensors are of ``fake``; the second is that of a run."""
        task = self.task
        config = self.config
        ledger = Ledger(self.block)
        arrived: list[tuple[int, int]] = []

        def keep_gradient(parameter: Tensor) -> None:
            ledger.add(parameter.grad, "gradients")
            arrived.append((parameter.nbytes, len(ledger.work)))

        with ledger:
            model = cast(_model_of(task, fake), config.hardware.precision)
            ledger.add(list(model.parameters()), "parameters")
            ledger.add(list(model.buffers()), "buffers")
            ledger.add(batch, "batch")
            if self.recompute:
                checkpoint_activations(model, blocks_of(task, bare(model)))
            with ledger.counting("optimizer"):
                optimizer = task.optimizer(bare(model)) or build_optimizer(config.optimizer, model, config.optimizer.lr)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(keep_gradient)
            precision = Precision(config.hardware.precision, _CPU, 1.0)
            for _ in range(2):
                arrived.clear()
                for parameter in trained:
                    if not self.keep_gradients:
                        parameter.grad = None
                    elif parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                        ledger.add(parameter.grad, "gradients")
                ledger.reset()
                with precision.autocast():
                    total = check_loss(task.loss(bare(model), batch)).total.float()
                forward = len(ledger.work)
                total.backward()
                del total
                backward = len(ledger.work)
                with ledger.counting("optimizer"):
                    optimizer.step()
        return Footprint(
            batch_size=self.batch_size,
            kinds={str(kind): size for kind, size in ledger.peak.items()},
            gradients=tuple(size for size, _ in arrived),
            ready=tuple(index - forward for _, index in arrived),
            blocks=tuple(_blocks(task, model)),
            on="real" if fake is None else "fake",
            forward=ledger.work[:forward],
            backward=ledger.work[forward:backward],
            optimizer=ledger.work[backward:],
        )


def _model_of(task: Task, fake: FakeTensorMode | None) -> nn.Module:
    """Build the model in training mode; with ``fake`` its tensors have shapes only."""
    if fake is None:
        return build_model(task).train()
    with unset_fake_temporarily():
        model = blueprint(task)
    replace_tensors(model, lambda tensor: torch.empty_like(fake.from_tensor(tensor), device="cpu"))
    return model.train()


def _blocks(task: Task, model: nn.Module) -> Iterator[int]:
    """Yield the bytes of the blocks that fsdp gathers one by one; last, of the rest. Shared parameters count once."""
    counted: set[nn.Parameter] = set()
    for part in (*blocks_of(task, bare(model)), model):
        fresh = set(part.parameters()) - counted
        yield sum(parameter.nbytes for parameter in fresh)
        counted |= fresh


def blocking_messages(task: Task, config: RunConfig) -> int:
    """Count messages in a forward and backward that wait for all ranks: two for each synchronised BatchNorm."""
    if config.distributed.sync_batchnorm == "off":
        return 0
    return 2 * sum(isinstance(module, BatchNorm) for module in blueprint(task).modules())
