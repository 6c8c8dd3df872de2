"""Communication between ranks for everything that is not a gradient, and the same calls on one process.

Objects and flags travel over gloo, so that they never wait for a GPU and never mix with the gradient traffic of
another backend. The engine uses :class:`Collectives`. A task's hooks use :func:`collectives`, whose calls also check
that every rank makes the same one, and name the rank that does not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep._compat.torch import default_store
from lockstep.data.arrays import as_bytes
from lockstep.errors import CollectiveError
from lockstep.hardware.world import World

T = TypeVar("T")
V = TypeVar("V", float, torch.Tensor)


class Collectives:
    """Rank, size and the collectives among all ranks of a run.

    All ranks call each method in the same order. Where one does not, the others fail after ``timeout_s``.
    """

    def __init__(self, world: World, *, timeout_s: float = 600.0) -> None:
        self.rank = world.rank
        self.size = world.size
        self.is_main = world.is_main
        self.local_rank = world.local_rank
        self.group: dist.ProcessGroup | None = None
        if self.size > 1:
            # A separate group: DDP's reducer issues collectives from the autograd thread.
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            with self._call("barrier"):
                dist.barrier(group=self.group)

    def broadcast(self, value: T, source: int = 0) -> T:
        """Send ``source``'s value to every rank. Any object that can be pickled; tensors should be on the CPU."""
        if self.group is None:
            return value
        self._refuse_gradient(value)
        with self._call(f"broadcast from {source}"):
            header, message = _packed(value) if self.rank == source else (torch.empty(2, dtype=torch.int64), Tensor())
            dist.broadcast(header, source, group=self.group)
            if self.rank != source:
                message = torch.empty(int(header[1]), dtype=torch.uint8)
            dist.broadcast(message, source, group=self.group)
        return value if self.rank == source else _unpacked(header, message)

    def all_gather(self, value: T) -> list[T]:
        """Gather every rank's value, by rank, on every rank."""
        if self.group is None:
            return [value]
        self._refuse_gradient(value)
        packed: list[Any] = [None] * self.size
        with self._call("all_gather"):
            dist.all_gather_object(packed, _packed(value), group=self.group)
        return [_unpacked(*message) for message in packed]

    def gather(self, value: T, target: int = 0) -> list[T] | None:
        """Gather every rank's value, by rank, on ``target``; ``None`` elsewhere. Tensors on the CPU are not pickled."""
        if self.group is None:
            return [value]
        self._refuse_gradient(value)
        with self._call(f"gather to {target}"):
            if self.rank != target:
                for part in _packed(value):
                    dist.send(part, target, group=self.group)
                return None
            return [value if rank == target else self._received(rank) for rank in range(self.size)]

    def _received(self, source: int) -> Any:
        header = torch.empty(2, dtype=torch.int64)
        dist.recv(header, source, group=self.group)
        message = torch.empty(int(header[1]), dtype=torch.uint8)
        dist.recv(message, source, group=self.group)
        return _unpacked(header, message)

    def sum(self, *values: V) -> tuple[V, ...]:
        """Sum over ranks element by element, in float64: numbers, or tensors whose shapes all ranks share."""
        return self._reduced("sum", values)

    def mean(self, *values: V) -> tuple[V, ...]:
        """Divide :meth:`sum` by the number of ranks; see :meth:`weighted_mean` for shares that differ."""
        return tuple(total / self.size for total in self._reduced("sum", values))

    def min(self, *values: V) -> tuple[V, ...]:
        """Return element-wise minima over ranks; see :meth:`sum`."""
        return self._reduced("min", values)

    def max(self, *values: V) -> tuple[V, ...]:
        """Return element-wise maxima over ranks; see :meth:`sum`."""
        return self._reduced("max", values)

    def weighted_mean(self, value: float, count: float) -> float:
        """Compute Σ value·count / Σ count over ranks: the mean over all items, for any share of each rank."""
        total, counts = self._reduced("sum", (value * count if count else 0.0, count), "weighted_mean")
        return total / counts if counts else float("nan")

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on some rank."""
        return self._reduced("sum", (float(flag),), "any")[0] > 0

    @contextmanager
    def main_first(self, *, per_node: bool = False) -> Iterator[None]:
        """Run the body on rank 0 (or each node's first rank) before the others; its failure fails all of them."""
        first = self.local_rank == 0 if per_node else self.is_main
        error: BaseException | None = None
        if first:
            try:
                yield
            except BaseException as caught:
                error = caught
        failed = self._reduced("sum", (float(error is not None),), "main_first")[0] > 0
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("the first rank failed in a section that the others wait for; see its log")
        if not first:
            yield

    def _reduced(self, operation: str, values: tuple[V, ...], call: str = "") -> tuple[V, ...]:
        for value in values:
            self._refuse_gradient(value)
        parts = [torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in values]
        shapes = "".join(f" {tuple(part.shape)}" for part in parts if part.dim())
        flat = torch.cat([part.reshape(-1) for part in parts])
        if self.group is not None:
            with self._call(call or f"{operation} of {len(parts)}{shapes}"):
                dist.all_reduce(flat, op=getattr(dist.ReduceOp, operation.upper()), group=self.group)
        return tuple(
            result.view_as(value).to(value) if isinstance(value, torch.Tensor) else result.item()
            for result, value in zip(flat.split([part.numel() for part in parts]), values, strict=True)
        )

    @staticmethod
    def _refuse_gradient(value: object) -> None:
        if isinstance(value, Tensor) and value.requires_grad:
            raise CollectiveError(
                "a tensor that requires a gradient was given to a collective call",
                why="it travels as a copy, so other ranks' gradients would be lost in silence",
                fix="detach() it; for a loss over the samples of all ranks use lockstep.Session, whose gather() has a "
                "gradient (docs/own-loop.md)",
            )

    def check(self, call: str) -> None:
        """Raise :class:`CollectiveError` where another rank makes another call, if that is checked. Collective."""
        if self.group is not None:
            with self._call(call):
                pass

    def _call(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Surround the communication of one call among several ranks."""
        return contextlib.nullcontext()


class _Packer(pickle.Pickler):
    """Leaves the bytes of tensors to ``buffer_callback``: pickle copies the whole storage of each several times."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.requires_grad or value.is_quantized:
            return NotImplemented
        if value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        content: Any = as_bytes(value).numpy()
        return _tensor, (pickle.PickleBuffer(content), value.dtype, value.shape)


def _tensor(content: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    copy: Tensor = content.clone()  # whoever keeps one tensor does not keep the message
    return copy.view(dtype).view(shape)


def _packed(value: object) -> tuple[Tensor, Tensor]:
    """Return the numbers of parts and bytes, and the bytes: sizes of the parts, ``value``'s tensors, a pickle."""
    file = io.BytesIO()
    buffers = list[pickle.PickleBuffer]()
    _Packer(file, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [torch.from_numpy(np.asarray(buffer)) for buffer in (*buffers, file.getbuffer())]
    message = torch.cat([torch.tensor([part.numel() for part in parts]).view(torch.uint8), *parts])
    return torch.tensor([len(parts), message.numel()]), message


def _unpacked(header: Tensor, message: Tensor) -> Any:
    """Restore the value from its parts."""
    sizes = 8 * int(header[0])
    *tensors, rest = message[sizes:].split(message[:sizes].view(torch.int64).tolist())
    return pickle.loads(rest.numpy().tobytes(), buffers=tensors)


class Call(NamedTuple):
    """One call of a rank: its number from 1, its name with what must agree between ranks, ``file:line``."""

    number: int
    name: str
    location: str

    def __str__(self) -> str:
        return f"{self.name} (call {self.number}, {self.location})"


class CheckedCollectives(Collectives):
    """Collectives for code that is not the engine's, which may call them on one rank alone, or in another order.

    Before each call a rank leaves a note of it in the process group's store, and all ranks compare a hash of its name.
    So a rank that does not come is named with its last call, and different calls are a :class:`CollectiveError` at
    once instead of a time-out without a reason.
    """

    def __init__(self, world: World, *, timeout_s: float = 600.0) -> None:
        self._timeout_s = timeout_s
        self._calls = 0
        self._pid = os.getpid()
        if world.size > 1:
            self._store = default_store()
            # Overwrites the note of an earlier start. All ranks have done so when the group exists.
            self._store.set(_note(world.rank), json.dumps(Call(0, "", "")))
        super().__init__(world, timeout_s=timeout_s)

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise CollectiveError(
                f"{name} was called in a process that is not a rank, but a child of one",
                why="a loader's workers share their rank's number, not its connections",
                fix="call it in a hook of the task",
            )
        self._calls += 1
        current = Call(self._calls, name, _place())
        self._store.set(_note(self.rank), json.dumps(current))
        started = time.monotonic()
        try:
            self._compare(current)
            yield
        except RuntimeError as error:  # gloo's: a time-out, or a lost connection
            absent = {rank: call for rank, call in self._noted().items() if call.number < current.number}
            if not absent:
                raise
            raise self._nobody_came(current, absent, time.monotonic() - started) from error

    def _compare(self, current: Call) -> None:
        """Check that every rank is in this call; raise an error on every rank otherwise."""
        digest = zlib.crc32(current.name.encode())
        extremes = torch.tensor([digest, -digest])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.group)
        if extremes[0] != -extremes[1]:
            calls: list[Any] = [None] * self.size
            dist.all_gather_object(calls, current, group=self.group)
            raise _different(enumerate(calls))

    def _noted(self) -> dict[int, Call]:
        """Return the last call of each rank that it has left a note of; none if the store is gone."""
        try:
            return {rank: Call(*json.loads(self._store.get(_note(rank)))) for rank in range(self.size)}
        except RuntimeError:
            return {}

    def _nobody_came(self, current: Call, absent: dict[int, Call], waited_s: float) -> CollectiveError:
        ranks = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        in_time = waited_s < 0.99 * self._timeout_s
        limit = "before the connection was lost" if in_time else f"within {self._timeout_s:g} s"
        last = [
            f"rank {rank} was last in {call}" if call.number else f"rank {rank} has made no call at all"
            for rank, call in absent.items()
        ]
        return CollectiveError(
            f"{ranks} did not reach {current} {limit}",
            why="; ".join(last),
            fix="make the call on every rank, under no condition that differs between ranks; if a rank is only slow, "
            "raise distributed.timeout_s",
        )


def _note(rank: int) -> str:
    return f"lockstep/call of rank {rank}"


def _different(calls: Iterable[tuple[int, Call]]) -> CollectiveError:
    return CollectiveError(
        "the ranks make different collective calls: " + "; ".join(f"rank {rank} {call}" for rank, call in calls),
        why="every rank must make the same calls in the same order",
        fix="take the calls out of conditions and loops that differ between ranks",
    )


def _place() -> str:
    """Return ``file:line`` of the code that called a method of this module, or one of a session that calls it."""
    frame = sys._getframe(1)
    package = Path(__file__).parents[2]
    packages = (str(package / part) for part in ("engine", "launch", "api"))
    inside = *packages, contextlib.__file__, str(Path(torch.__file__).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_of_the_run: ContextVar[CheckedCollectives | None] = ContextVar("collectives", default=None)


@contextmanager
def shared(world: World, timeout_s: float) -> Iterator[None]:
    """Let :func:`collectives` return those among the ranks of ``world``, inside. Collective."""
    token = _of_the_run.set(CheckedCollectives(world, timeout_s=timeout_s))
    try:
        yield
    finally:
        _of_the_run.reset(token)


def collectives() -> Collectives:
    """Return rank, size and collectives of the run that this code is a part of; else those of one process.

    For a task's hooks, which run on every rank after the same steps::

        def hooks(self):
            def spread(result, model):
                ranks = lockstep.collectives()
                seen = ranks.all_gather(self.seen)
                return {"spread": max(seen) - min(seen)}

            return [(spread, 100)]

    Attributes ``rank``, ``size``, ``is_main``; methods ``barrier``, ``broadcast``, ``gather``, ``all_gather``,
    ``sum``, ``mean``, ``min``, ``max``, ``weighted_mean``, ``any``, ``main_first``. Every rank must make the same
    calls in the same order: so not in ``metrics()``, which rank 0 alone may have, nor in ``evaluate``.

    Raises:
        CollectiveError: from the methods, when a rank has not come within ``distributed.timeout_s``, or is in
            another call; it names the rank, both calls and their lines.
    """
    return _of_the_run.get() or Collectives(World())
