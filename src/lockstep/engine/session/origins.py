"""Which batches and which weights a loss depends on: watched in the first steps of a loop, and in some later ones.

A step may consist of several micro-batches, which are parts of one batch. Then a body must not use what it has
computed from another part, nor weights that change in the last part only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep._compat.torch import storage_key, tree_leaves
from lockstep.engine.ablation import DRAWS
from lockstep.errors import UnsupportedError

#: The origin of a value that was computed from trained weights. Batches are numbers, optimizers names.
_WEIGHTS = "weights"
#: Functions that read no values, and those that read the values of the first argument alone.
_SHAPES = {f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")}
_SHAPES |= {f"new_{kind}" for kind in ("zeros", "ones", "empty", "full")}
_FIRST = {"to", "type_as", "view_as", "expand_as", "reshape_as"}
#: Functions that write all of their first argument.
_OVERWRITES = {"copy_", "zero_", "fill_"}
_WHY = (
    "a step has several micro-batches here, by accumulate, batch_size or reproducibility: exact: parts of one batch, "
    "whose number depends on the devices"
)
_ONE = "use reproducibility: fast, accumulate=1 and no batch_size"

CheckCall = Callable[[Any, list[Tensor], Mapping[str, Any]], None]
_Origins = frozenset[Any]
_NONE: _Origins = frozenset()


class _Kept(NamedTuple):
    """The origin of a value that was computed from a tensor made before this body."""

    key: int


class Carried(NamedTuple):
    """A tensor that a body has read and an earlier one has made: its type and shape, and its storage."""

    description: str
    key: int


class LossOrigins(TorchFunctionMode):
    """While entered, follows values from the batches and weights to the loss.

    Buffers of prepared modules are left out: :class:`.Buffers` has rules for them.

    Args:
        check_call: called with each function of the body, its tensors and its keywords; may raise.

    Attributes:
        carried: a tensor from an earlier batch on which a loss depends; ``None``: there is none so far.
    """

    def __init__(self, check_call: CheckCall | None = None) -> None:
        super().__init__()
        self._check_call = check_call
        self._origins: dict[int, _Origins] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._weights: dict[int, str] = {}
        self._buffers: set[int] = set()
        self._averages: set[int] = set()
        self._shapes: set[tuple[int, ...]] = set()
        self._moved: set[int] = set()
        self._body, self._is_part, self._is_last, self._is_paused = 0, False, True, False
        self._is_averaged = False
        self._stepped: set[str] = set()
        self._reads: list[Carried] = []
        self._earlier: set[int] = set()
        self._kept: set[int] = set()
        self.carried: Carried | None = None

    def begin_body(
        self,
        number: int,
        batch: Any,
        *,
        weights: Mapping[str, Iterable[Tensor]],
        buffers: Iterable[Tensor],
        averages: Iterable[Tensor],
        kept: Iterable[Tensor],
        is_part: bool,
        is_last: bool,
    ) -> None:
        """Follow the values of a body.

        Args:
            number: of the batch.
            weights: trained parameters, by optimizer.
            buffers: tensors that are not followed.
            averages: of modules, outside the optimizers.
            kept: tensors beside the modules that checkpoints keep.
            is_part: whether the batch may be one of several micro-batches of a step; ``is_last``: the last one.
        """
        if number > self._body + 1:  # what has been written since is not known
            self._origins.clear()
            self._storages.clear()
            self._moved.clear()
        self._body, self._is_part, self._is_last = number, is_part, is_last
        self._stepped.clear()
        self._reads.clear()
        self._earlier, self._kept = {*self._origins}, set(map(_key, kept))
        self._weights = {_key(p): name for name, parameters in weights.items() for p in parameters}
        self._shapes = {tuple(p.shape) for parameters in weights.values() for p in parameters if p.numel() > 1}
        self._buffers = set(map(_key, buffers))
        self._averages = set(map(_key, averages)) - self._buffers - self._weights.keys()
        for key in self._averages & self._origins.keys():
            if not _batches(self._origins[key]):
                del self._origins[key]  # what it was in this body's beginning is what the body may add to
        for tensor in _batch_tensors(batch, set()):
            self._set(tensor, frozenset((number,)))

    def step(self, name: str) -> None:
        """The body has called the step of this optimizer."""
        self._stepped.add(name)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls inside are not those of the loop."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def check(self, total: Any) -> None:
        """Raise :class:`UnsupportedError` where a loss of a part depends on others, or on weights of a later part."""
        origins = self._of(total) if isinstance(total, Tensor) else _NONE
        is_carried = bool(_batches(origins) - {self._body})
        if is_carried:
            self.carried = next((read for read in self._reads if read.key not in self._kept), self.carried)
        if not self._is_part:
            return
        if self._is_averaged:
            raise UnsupportedError(
                "an average of weights is updated in the body before the step",
                why=f"{_WHY}. It would be updated once for each of them, and not once for each step",
                fix="update it after the step: `if session.step(optimizer): average.update_parameters(model)`",
            )
        stepped = next((name for name in sorted(self._stepped) if name in origins), None)
        if stepped is not None:
            raise UnsupportedError(
                f"the loss depends on weights that step({stepped}) changes in the same body",
                why=f"{_WHY}. The step acts in the last one, so the others have a loss of the old weights",
                fix=f"take the second loss in a second pass, after the step: `if session.step({stepped}):`, then `for "
                "batch in session.again():` with its backward(), then its step (docs/own-loop.md, Several optimizers); "
                f"or {_ONE}",
            )
        if is_carried:
            raise UnsupportedError(
                f"the loss depends on a {self._reads[0].description if self._reads else 'tensor'} that the body "
                "has kept from an earlier batch",
                why=f"{_WHY}. Each would get the state of another part",
                fix=f"{_ONE} (docs/own-loop.md, State between batches)",
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or getattr(func, "__self__", None) is Tensor.grad:
            return func(*args, **kwargs)
        if self._check_call is not None:
            self._check_call(func, _tensors((args, kwargs)), kwargs)
        name = getattr(func, "__name__", "")
        replaces = getattr(func, "__self__", None) is Tensor.data and name == "__set__"
        targets = _tensors(args[:1]) if replaces or _writes(name) else []
        keys = [_key(target) for target in targets]
        origins = self._read(() if name in _SHAPES else args[:1] if name in _FIRST else (args, kwargs))
        if name in DRAWS:
            origins |= {self._body}
        written = origins
        if name in _OVERWRITES and all(map(_is_whole, targets)):
            written = self._read((args[1:], kwargs))
        result = func(*args, **kwargs)
        results = _tensors(result)
        self._note_average((args, kwargs), targets or results, written)
        for tensor in results:
            self._set(tensor, written if _key(tensor) in keys else origins)
        for target in targets:
            self._set(target, written)
        return result

    def _note_average(self, arguments: Any, results: Sequence[Tensor], origins: _Origins) -> None:
        """Note where a kept tensor moves towards weights in each part of a step; :meth:`check` refuses it.

        An error here would be one of ``load_state_dict()``, where the loop copies the average by it.
        """
        if not self._is_part or _WEIGHTS not in origins or _batches(origins):
            return
        moved = [_key(result) for result in results if _key(result) in self._averages or result.shape in self._shapes]
        if not moved:
            return
        self._is_averaged |= any(_key(tensor) in self._moved & self._earlier for tensor in _tensors(arguments))
        if not self._is_last and any(type(origin) is _Kept for origin in origins):
            self._is_averaged |= any(_Kept(key) in origins for key in moved)
            self._moved.update(moved)

    def _read(self, arguments: Any) -> _Origins:
        origins = _NONE
        for tensor in _tensors(arguments):
            read = self._of(tensor)
            if _key(tensor) in self._earlier and _batches(read) - {self._body}:
                description = f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
                self._reads.append(Carried(description, _key(tensor)))
            origins |= read
        return origins

    def _of(self, tensor: Tensor) -> _Origins:
        key = _key(tensor)
        if key in self._buffers:
            return _NONE
        owner = self._weights.get(key)
        if owner is not None:
            return frozenset((_WEIGHTS, owner)) if owner in self._stepped else frozenset((_WEIGHTS,))
        return self._origins.get(key, frozenset((_Kept(key),)))

    def _set(self, tensor: Tensor, origins: _Origins) -> None:
        key = _key(tensor)
        if key in self._weights or key in self._buffers:
            return
        self._origins[key] = origins
        if key not in self._storages:
            memory: Any = tensor if key == id(tensor) else tensor.untyped_storage()
            self._storages[key] = weakref.ref(memory, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._storages.pop(key, None)
        self._origins.pop(key, None)
        self._moved.discard(key)
        self._earlier.discard(key)


def _batches(origins: _Origins) -> _Origins:
    return frozenset(origin for origin in origins if type(origin) is int)


def _writes(name: str) -> bool:
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_whole(tensor: Tensor) -> bool:
    """Whether no other tensor has more of the memory of ``tensor``."""
    return _key(tensor) == id(tensor) or tensor.nbytes == tensor.untyped_storage().nbytes()


def _batch_tensors(batch: Any, visited: set[int]) -> Iterator[Tensor]:
    """The tensors of ``batch``, those in the attributes of its objects too."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type) and id(leaf) not in visited:
            visited.add(id(leaf))
            yield from _batch_tensors([*vars(leaf).values()], visited)


def _key(tensor: Tensor) -> int:
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # a wrapper without memory, as of torch.func
        return id(tensor)
