"""Every storage that torch makes while something runs: how much is alive, of which kind, and the most there was.

The count is of what operators return. Scratch memory inside a kernel and what a driver takes for itself are not in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lockstep._compat.fake_tensors import TorchDispatchMode, is_mutable, overload_packet, storage_key
from lockstep._compat.torch import tree_leaves

Kind = Literal["parameters", "buffers", "gradients", "optimizer", "batch", "activations"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Work(NamedTuple):
    """One operator: floating-point operations, bytes read and written, and whether it computes in 16 bits."""

    flops: float
    moved: float
    half: bool = False


class Ledger(TorchDispatchMode):
    """While entered, counts bytes by kind, and the work of each operator.

    Args:
        block: an allocator hands out whole blocks of this number of bytes (512 for torch's on GPUs; 1 counts exactly).

    Attributes:
        peak: bytes by kind at the moment when their sum was largest since :meth:`reset`.
        work: floating-point operations and bytes moved, of each operator since :meth:`reset`.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block = block
        self._kind: Kind = "activations"
        self._alive: dict[int, tuple[Kind, int, weakref.ref[Any]]] = {}
        self._live = dict.fromkeys(KINDS, 0)
        self.reset()

    @property
    def live(self) -> Mapping[Kind, int]:
        """Bytes by kind now."""
        return dict(self._live)

    def reset(self) -> None:
        """Forget the peak and the work; what is alive stays so."""
        self.peak: Mapping[Kind, int] = dict(self._live)
        self._most = sum(self._live.values())
        self.work: list[Work] = []

    @contextmanager
    def counting(self, kind: Kind) -> Iterator[None]:
        """New storages inside are of ``kind``."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def add(self, tree: Any, kind: Kind) -> None:
        """Count the tensors of ``tree``, made before or otherwise, as ``kind``."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._note(leaf, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and storage_key(leaf) not in self._alive:
                fresh += self._note(leaf, self._kind)
        if fresh or is_mutable(func):
            self.work.append(_work_of(func, args, kwargs or {}, result))
        return result

    def _note(self, tensor: Tensor, kind: Kind) -> int:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        known = self._alive.get(key)
        size = -(-storage.nbytes() // self._block) * self._block
        if known is not None:
            self._live[known[0]] -= known[1]
        reference = known[2] if known is not None else weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = kind, size, reference
        self._live[kind] += size
        total = sum(self._live.values())
        if total > self._most:
            self._most, self.peak = total, dict(self._live)
        return size

    def _forget(self, key: int) -> None:
        kind, size, _ = self._alive.pop(key)
        self._live[kind] -= size


def _work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """What an operator computes (as torch.utils.flop_counter counts it) and moves: its inputs and outputs, once."""
    packet = overload_packet(func)
    flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
    tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
    moved = sum(tensor.nbytes for tensor in tensors)
    half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    return Work(float(flops), float(moved), half)
