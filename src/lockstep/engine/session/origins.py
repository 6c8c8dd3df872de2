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
#: The writer of elements that were computed from an earlier batch.
_UNKNOWN = 1 - 2**31
_NONE: _Origins = frozenset()


class _Kept(NamedTuple):
    """The origin of a value that was computed from a tensor made before this body."""

    key: int


class Carried(NamedTuple):
    """A tensor that a body has read and an earlier one has made: its name or its type and shape, and its storage."""

    description: str
    key: int


class Part(NamedTuple):
    """A run of the body: the number of its batch, and that of the first batch of its step.

    ``is_part``: the step may have several batches; ``is_last``: this is the last one.
    """

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


class _Writers:
    """By element of a storage, the number of the body that wrote it last, plus 1.

    Of a row that was selected by values of the batch it is positive: it belongs to the sample. Otherwise it is
    negative. 0: not written so far.
    """

    def __init__(self, tensor: Tensor, number: int) -> None:
        elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        self._itemsize = tensor.itemsize
        self._numbers = torch.full((elements,), number, dtype=torch.int32, device=tensor.device)
        self._reads: list[Tensor] = []

    def of(self, tensor: Tensor) -> Tensor:
        """Return the numbers of the elements of ``tensor``, in its shape."""
        if tensor.itemsize != self._itemsize:
            return torch.full_like(tensor, _UNKNOWN, dtype=torch.int32)
        return self._numbers.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def note_rows(self, tensor: Tensor, select: Callable[[Tensor], Tensor]) -> None:
        """Note a read of rows of ``tensor``, in which are elements that this body has not written so far."""
        places = torch.arange(len(self._numbers), device=tensor.device)
        rows = select(places.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()))
        self._reads.append(rows.flatten())

    def end_body(self, number: int) -> bool:
        """Return whether rows were read of other samples than those that the body ``number`` wrote."""
        rows = [self._numbers[places] for places in self._reads]
        self._reads.clear()
        return any(bool((row != number + 1).any()) for row in rows)


class LossOrigins(TorchFunctionMode):
    """While entered, follows values from the batches and weights to the loss.

    Buffers of prepared modules that have a rule in :class:`.Buffers` are left out.

    Args:
        check_call: called with each function of the body, its tensors and its keywords; may raise.
        keeps_rows: whether a sample is on this rank in every epoch.

    Attributes:
        carried: a tensor from an earlier batch on which a loss depends; ``None``: there is none so far.
    """

    def __init__(self, check_call: CheckCall | None = None, *, keeps_rows: bool = False) -> None:
        super().__init__()
        self._check_call = check_call
        self._keeps_rows = keeps_rows
        self._origins: dict[int, _Origins] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._weights: dict[int, str] = {}
        self._merged: set[int] = set()
        self._names: dict[int, str] = {}
        self._writers: dict[int, _Writers] = {}
        self._averages: set[int] = set()
        self._shapes: set[tuple[int, ...]] = set()
        self._moved: set[int] = set()
        self._part = Part(0, 0, is_part=False, is_last=True)
        self._is_paused = False
        self._is_averaged = False
        #: Weights that the body has written to, with their values before, in all parts of a step but the last.
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        self._are_weights_changed = False
        self._stepped: set[str] = set()
        self._reads: list[Carried] = []
        self._reads_others = False
        self._earlier: set[int] = set()
        self._saved: set[int] = set()
        self.carried: Carried | None = None

    def begin_body(self, batch: Any, tensors: LoopTensors, part: Part) -> None:
        """Follow the values of a body."""
        if part.number == self._part.number + 1:
            self._are_weights_changed |= any(not torch.equal(*values) for values in self._written.values())
        self._written.clear()
        ends = [writers.end_body(self._part.number) for writers in self._writers.values()]
        self._reads_others = any(ends)
        if part.number > self._part.number + 1:  # values written since are unknown
            for values in (self._origins, self._storages, self._moved, self._writers):
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
        """Note that the body has called the step of this optimizer."""
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
        rows = [origin for origin in origins if type(origin) is Carried]
        is_carried = self._reads_others or bool(_batches(origins) - {self._part.number})
        if is_carried or rows:
            reads = self._reads if is_carried else rows
            self.carried = next((read for read in reads if read.key not in self._saved), self.carried)
        if not self._part.is_part:
            return
        if self._are_weights_changed:
            raise UnsupportedError(
                "the body changes trained weights, apart from session.step()",
                why=f"{_WHY}. Each would change them once more, and the next ones would have other weights",
                fix="change them after the step, as in `if session.step(optimizer): clip(model)`, or restore them",
            )
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
            by_sample = any(self._part.number in self._of(index) for index in _tensors(args[1:]))
            selected = self._of_elements(args[0], lambda numbers: func(numbers, *args[1:]), by_sample=by_sample)
            origins = selected | self._read(args[1:])
        else:
            origins = self._read(() if name in _SHAPES else args[:1] if name in _FIRST else (args, kwargs))
        if name in DRAWS:
            origins |= {self._part.number}
        written = origins
        if name in _OVERWRITES and all(map(_is_whole, targets)):
            written = self._read((args[1:], kwargs))
            for key in keys:
                self._writers.pop(key, None)
        else:
            for target in filter(_has_memory, targets):
                self._note_writer(name, target, args, origins)
        if self._part.is_part and not self._part.is_last:
            for key, target in zip(keys, targets, strict=True):
                if key in self._weights and key not in self._written:
                    local = target.to_local() if hasattr(target, "to_local") else target
                    self._written[key] = local, local.detach().clone()
        result = func(*args, **kwargs)
        results = _tensors(result)
        self._note_average((args, kwargs), targets or results, written)
        for tensor in results:
            self._set(tensor, written if _key(tensor) in keys else origins)
        for target in targets:
            self._set(target, written)
        return result

    def _note_writer(self, name: str, target: Tensor, args: Sequence[Any], origins: _Origins) -> None:
        """Note which elements of ``target`` the function ``name`` writes."""
        key = _key(target)
        first_value = {"__setitem__": 2, "index_copy_": 3}.get(name, 1 if name in _OVERWRITES else None)
        values = None if first_value is None else args[first_value:]
        if key not in self._writers:
            if values is None or key in self._weights or key in self._merged:
                return
            batches = _batches(self._origins.get(key, _NONE))
            self._writers[key] = _Writers(target, self._number(batches) if batches else 0)
        numbers = self._writers[key].of(target)
        number = self._number(_batches(origins if values is None else self._read(values)))
        index = args[1 : (first_value or 1)]
        if number != _UNKNOWN and any(self._part.number in self._of(tensor) for tensor in _tensors(index)):
            number = -number
        if name == "__setitem__":
            numbers[args[1]] = number
        elif name == "index_copy_":
            numbers.index_fill_(args[1], args[2], number)
        else:
            numbers.fill_(number)

    def _number(self, batches: _Origins) -> int:
        """Return the writer of a value of these batches, see :class:`_Writers`."""
        return _UNKNOWN if batches - {self._part.number} else -1 - self._part.number

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

    def _of_elements(
        self, tensor: Tensor, select: Callable[[Tensor], Tensor] = lambda numbers: numbers, *, by_sample: bool = False
    ) -> _Origins:
        """Return the origins of the selected elements of ``tensor``; ``by_sample``: selected by values of a batch."""
        origins = self._of(tensor)
        key = _key(tensor)
        part = self._part
        earlier = _batches(origins) - {part.number}
        if not earlier:
            return origins
        shape = f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
        carried = Carried(f"the buffer {self._names[key]}" if key in self._names else shape, key)
        if key in self._writers:
            numbers = select(self._writers[key].of(tensor))
            is_new = numbers.abs() == part.number + 1
            if bool((is_new | (numbers == 0) & (not by_sample)).all()):
                return origins - earlier
            is_earlier = (numbers >= 0) & (numbers <= part.first)
            if by_sample and part.is_part and self._keeps_rows and bool((is_new | is_earlier).all()):
                self._writers[key].note_rows(tensor, select)
                return (origins - earlier) | {carried}
        if key in self._earlier:
            self._reads.append(carried)
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
        if key in self._writers:  # the other elements stay as they are
            origins |= self._origins.get(key, _NONE)
        self._origins[key] = origins
        if key not in self._storages:
            memory: Any = tensor if key == id(tensor) else tensor.untyped_storage()
            self._storages[key] = weakref.ref(memory, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._storages.pop(key, None)
        self._origins.pop(key, None)
        self._writers.pop(key, None)
        self._moved.discard(key)
        self._earlier.discard(key)


def _batches(origins: _Origins) -> _Origins:
    return frozenset(origin for origin in origins if type(origin) is int)


def _writes(name: str) -> bool:
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _has_memory(value: Any) -> bool:
    """Return whether ``value`` is a tensor with a storage."""
    return isinstance(value, Tensor) and _key(value) != id(value)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether ``tensor`` covers its storage."""
    return _key(tensor) == id(tensor) or tensor.nbytes == tensor.untyped_storage().nbytes()


def _batch_tensors(batch: Any, visited: set[int]) -> Iterator[Tensor]:
    """Yield the tensors of ``batch``, those in the attributes of its objects too."""
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
