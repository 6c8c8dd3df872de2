"""Which batches and which weights a loss depends on: watched in the first steps of a loop, and in some later ones.

A step may consist of several micro-batches, which are parts of one batch. Then a body must not use values that
it computed from another part, nor weights that change in the last part only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
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
#: Functions that read the elements of the first argument that the others name.
_SELECTS = {"__getitem__", "index_select", "gather", "take_along_dim"}
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
    """A tensor that a body has read and an earlier one has made: its name or its type and shape, and its storage."""

    description: str
    key: int


class _Part(NamedTuple):
    """A run of the body: the number of its batch, and that of the first batch of its step."""

    number: int
    first: int
    is_part: bool
    is_last: bool


class LoopTensors(NamedTuple):
    """Tensors of a loop that outlive a body.

    ``weights``: trained parameters, by optimizer; ``averages``: of modules, outside the optimizers; ``buffers``: of
    prepared models, by name; ``merged``: those of them with a rule for parts and ranks, which are not followed;
    ``saved``: tensors in checkpoints.
    """

    weights: Mapping[str, Iterable[Tensor]]
    averages: Iterable[Tensor]
    buffers: Mapping[str, Tensor]
    merged: Iterable[Tensor]
    saved: Iterable[Tensor]


class LossOrigins(TorchFunctionMode):
    """While entered, follows values from the batches and weights to the loss.

    Buffers of prepared modules that have a rule in :class:`.Buffers` are left out.

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
        self._merged: set[int] = set()
        self._names: dict[int, str] = {}
        #: By storage with values of earlier batches: which elements this body has written, without use of those.
        self._renewed: dict[int, Tensor] = {}
        self._averages: set[int] = set()
        self._shapes: set[tuple[int, ...]] = set()
        self._moved: set[int] = set()
        self._part = _Part(0, 0, is_part=False, is_last=True)
        self._is_paused = False
        self._is_averaged = False
        self._stepped: set[str] = set()
        self._reads: list[Carried] = []
        self._earlier: set[int] = set()
        self._saved: set[int] = set()
        self.carried: Carried | None = None

    def begin_body(
        self, batch: Any, tensors: LoopTensors, *, number: int, first: int, is_part: bool, is_last: bool
    ) -> None:
        """Follow the values of a body.

        Args:
            number: of the batch; ``first``: of the first batch of its step.
            is_part: whether the step may have several batches; ``is_last``: this is the last one.
        """
        part = _Part(number, first, is_part, is_last)
        self._renewed.clear()
        if part.number > self._part.number + 1:  # values written since are unknown
            for values in (self._origins, self._storages, self._moved):
                values.clear()
        self._part = part
        self._stepped.clear()
        self._reads.clear()
        self._earlier = {*self._origins}
        self._saved = set(map(_key, tensors.saved))
        self._weights = {_key(p): name for name, parameters in tensors.weights.items() for p in parameters}
        self._shapes = {tuple(p.shape) for parameters in tensors.weights.values() for p in parameters if p.numel() > 1}
        self._merged = set(map(_key, tensors.merged))
        self._names = {_key(buffer): name for name, buffer in tensors.buffers.items()}
        self._averages = {_key(tensor) for tensor in (*tensors.averages, *tensors.buffers.values())}
        self._averages -= self._merged | self._weights.keys()
        for key in self._averages & self._origins.keys():
            if not _batches(self._origins[key]):
                del self._origins[key]  # the body may add to its first value
        for tensor in _batch_tensors(batch, set()):
            self._set(tensor, frozenset((part.number,)))

    def step(self, name: str) -> None:
        """The body has called the step of this optimizer."""
        self._stepped.add(name)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls inside are not those of the loop."""
        before = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before

    def check(self, total: Any) -> None:
        """Raise :class:`UnsupportedError` where a loss of a part depends on others, or on weights of a later part."""
        origins = self._of(total) if isinstance(total, Tensor) else _NONE
        is_carried = bool(self._earlier_batches(origins))
        if is_carried:
            self.carried = next((read for read in self._reads if read.key not in self._saved), self.carried)
        if not self._part.is_part:
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
            read = self._reads[0] if self._reads else Carried("a tensor", 0)
            name = self._names.get(read.key, "").rpartition(".")[2]
            declaration = f"; or declare a statistic in its module: buffer_reduction = {{{name!r}: 'mean'}}"
            raise UnsupportedError(
                f"the loss depends on {read.description} that the body has kept from an earlier batch",
                why=f"{_WHY}. Each would get the state of another part",
                fix=f"{_ONE} (docs/own-loop.md, State between batches){declaration if name else ''}",
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
        if name in _SELECTS and not kwargs and _has_memory(args[0]):
            selected = self._of_elements(args[0], lambda elements: func(elements, *args[1:]))
            origins = selected | self._read(args[1:])
        else:
            origins = self._read(() if name in _SHAPES else args[:1] if name in _FIRST else (args, kwargs))
        if name in DRAWS:
            origins |= {self._part.number}
        written = origins
        if name in _OVERWRITES and all(map(_is_whole, targets)):
            written = self._read((args[1:], kwargs))
            for key in keys:
                self._renewed.pop(key, None)
        else:
            for target in filter(_has_memory, targets):
                self._note_renewed(name, target, args, origins)
        result = func(*args, **kwargs)
        results = _tensors(result)
        self._note_average((args, kwargs), targets or results, written)
        for tensor in results:
            self._set(tensor, written if _key(tensor) in keys else origins)
        for target in targets:
            self._set(target, written)
        return result

    def _note_renewed(self, name: str, target: Tensor, args: Sequence[Any], origins: _Origins) -> None:
        """Note which elements of a ``target`` with values of earlier batches the function ``name`` writes."""
        key = _key(target)
        first_value = {"__setitem__": 2, "index_copy_": 3}.get(name, 1 if name in _OVERWRITES else None)
        if key not in self._renewed:
            if first_value is None or not self._earlier_batches(self._origins.get(key, _NONE)):
                return
            elements = target.untyped_storage().nbytes() // target.itemsize
            self._renewed[key] = torch.zeros(elements, dtype=torch.bool, device=target.device)
        renewed = self._elements_of(target)
        values = origins if first_value is None else self._read(args[first_value:])
        is_new = not self._earlier_batches(values)
        if name == "__setitem__":
            renewed[args[1]] = is_new
        elif name == "index_copy_":
            renewed.index_fill_(args[1], args[2], is_new)
        else:
            renewed.fill_(is_new)

    def _elements_of(self, tensor: Tensor) -> Tensor:
        """The part of ``_renewed`` for the elements of ``tensor``, in its shape; false for another size of element."""
        renewed = self._renewed[_key(tensor)]
        if tensor.untyped_storage().nbytes() // tensor.itemsize != len(renewed):
            return torch.zeros_like(tensor, dtype=torch.bool)
        return renewed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _earlier_batches(self, origins: _Origins) -> _Origins:
        return _batches(origins) - {self._part.number}

    def _note_average(self, arguments: Any, results: Sequence[Tensor], origins: _Origins) -> None:
        """Note where a kept tensor moves towards weights in each part of a step; :meth:`check` refuses it.

        An error here would be one of ``load_state_dict()``, where the loop copies the average by it.
        """
        if not self._part.is_part or _WEIGHTS not in origins or _batches(origins):
            return
        moved = [_key(result) for result in results if _key(result) in self._averages or result.shape in self._shapes]
        if not moved:
            return
        self._is_averaged |= any(_key(tensor) in self._moved & self._earlier for tensor in _tensors(arguments))
        if not self._part.is_last and any(type(origin) is _Kept for origin in origins):
            self._is_averaged |= any(_Kept(key) in origins for key in moved)
            self._moved.update(moved)

    def _read(self, arguments: Any) -> _Origins:
        return _NONE.union(*map(self._of_elements, _tensors(arguments)))

    def _of_elements(self, tensor: Tensor, select: Callable[[Tensor], Tensor] = lambda elements: elements) -> _Origins:
        """The origins of the elements of ``tensor`` that ``select`` takes."""
        origins = self._of(tensor)
        key = _key(tensor)
        earlier = self._earlier_batches(origins)
        if earlier and key in self._renewed and bool(select(self._elements_of(tensor)).all()):
            return origins - earlier
        if earlier and key in self._earlier:
            shape = f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
            self._reads.append(Carried(f"the buffer {self._names[key]}" if key in self._names else shape, key))
        return origins

    def _of(self, tensor: Tensor) -> _Origins:
        key = _key(tensor)
        if key in self._merged:
            return _NONE
        owner = self._weights.get(key)
        if owner is not None:
            return frozenset((_WEIGHTS, owner)) if owner in self._stepped else frozenset((_WEIGHTS,))
        return self._origins.get(key, frozenset((_Kept(key),)))

    def _set(self, tensor: Tensor, origins: _Origins) -> None:
        key = _key(tensor)
        if key in self._weights or key in self._merged:
            return
        if key in self._renewed:  # the other elements stay as they are
            origins |= self._origins.get(key, _NONE)
        self._origins[key] = origins
        if key not in self._storages:
            memory: Any = tensor if key == id(tensor) else tensor.untyped_storage()
            self._storages[key] = weakref.ref(memory, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._storages.pop(key, None)
        self._origins.pop(key, None)
        self._renewed.pop(key, None)
        self._moved.discard(key)
        self._earlier.discard(key)


def _batches(origins: _Origins) -> _Origins:
    return frozenset(origin for origin in origins if type(origin) is int)


def _writes(name: str) -> bool:
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _has_memory(value: Any) -> bool:
    """Whether it is a tensor with a storage."""
    return isinstance(value, Tensor) and _key(value) != id(value)


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
