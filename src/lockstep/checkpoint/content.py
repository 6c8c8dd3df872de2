"""The files of a checkpoint that hold tensors: ``model.safetensors`` and ``trainer.pt``, or the shards of them.

``model.safetensors`` is laid out here, since the library's ``save_file`` cannot hash as it writes, and reports a full
disk without an error number. A shard has some rows (of the first dimension) of divided tensors, and whole ones: a
tensor is the concatenation of its parts in all shards, however it was divided.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.manifest import MODEL, TRAINER, Digest, Manifest, is_frozen, shard
from lockstep.data.arrays import as_bytes
from lockstep.errors import CheckpointError

#: Keys and indices from the top of a state to a part of it.
Place = tuple[Any, ...]

#: The key in ``trainer.pt`` of values of a model's state that are not tensors.
EXTRA = "extra_state"
#: The only key of the placeholder in ``trainer.pt`` for a tensor of the shards; its value is the tensor's name there.
_MARK = "lockstep.in_shards"
#: https://github.com/huggingface/safetensors#format
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# NumPy's numbers and arrays too are read without running code: best values, RNG states, statistics of the data.
_NUMPY: list[Any] = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}]
_NUMPY += [bytes, *(value.__reduce__()[0] for value in (np.float64(0), np.empty(0)))]  # bytes: of an empty array
torch.serialization.add_safe_globals(_NUMPY)


class Hashing:
    """A file that only keeps size and hash of the written content."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._size += len(view)
        return len(view)

    @property
    def digest(self) -> Digest:
        return Digest(size=self._size, sha256=self._hash.hexdigest())


class HashingFile(Hashing):
    """A new file that hashes the written content.

    ``error`` keeps the system's refusal, since torch's archive writer raises one without an error number.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("xb", buffering=0)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            done = 0
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            self.error = error
            raise
        return super().write(view)

    def flush(self) -> None:
        pass

    def sync(self) -> Digest:
        """Make the content durable; returns its size and hash."""
        os.fsync(self._file.fileno())
        return self.digest

    def close(self) -> None:
        self._file.close()


# Weights.


def write_model(file: Hashing, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write CPU tensors in the safetensors format; returns names that are the same tensor as another.

    Tensors that are the same memory (tied weights) are written once: the result maps each of the
    other names to the one written. Views that merely overlap are written separately.

    Raises:
        OSError: the file cannot be written.
        CheckpointError: a tensor that the format has no form for.
    """
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        _check_model_tensor(name, tensor)
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        if first.setdefault(memory if tensor.numel() else (name,), name) != name:
            aliases[name] = first[memory]
    # Wide types first, as the library does, so that every tensor is aligned to its item size.
    order = sorted(tensors.keys() - aliases.keys(), key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(as_bytes(tensors[name]).numpy())
    return aliases


def _check_model_tensor(name: str, tensor: Tensor, devices: Collection[str] = ("cpu",)) -> None:
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.device.type not in devices:
        raise CheckpointError(
            f"cannot save the model's {name}",
            why=f"safetensors has no form for a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device}",
            fix="register it as a buffer that is not persistent, or keep it in another dtype",
        )


class Pieces:
    """A tensor of ``shape`` and ``dtype`` in the shards of a checkpoint, read on demand.

    The results are on the host, in separate memory.
    """

    def __init__(self, name: str, parts: Sequence[tuple[Path, Any]]) -> None:
        self._name = name
        self._parts = [(path, file, tuple(file.get_slice(name).get_shape())) for path, file in parts]
        _, first, shape = self._parts[0]
        if len(self._parts) > 1:
            shape = (sum(part[0] for _, _, part in self._parts), *shape[1:])
        self.shape = torch.Size(shape)
        stored = first.get_slice(name).get_dtype()
        self.dtype = next(dtype for dtype, kind in DTYPES.items() if kind == stored)

    def whole(self) -> Tensor:
        """Read the whole tensor. Raises :class:`CheckpointError`."""
        if len(self._parts) > 1:
            return self.rows(0, self.shape[0])
        path, file, _ = self._parts[0]
        with _reading(path):
            tensor: Tensor = file.get_tensor(self._name).clone()
        return tensor

    def rows(self, start: int, stop: int) -> Tensor:
        """Read the rows [start, stop). Raises :class:`CheckpointError`."""
        result = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        first = 0
        for path, file, (count, *_) in self._parts:
            a = max(start, first)
            b = min(stop, first + count)
            if a < b:
                with _reading(path):
                    result[a - start : b - start] = file.get_slice(self._name)[a - first : b - first]
            first += count
        return result


def open_pieces(paths: Sequence[Path], aliases: Mapping[str, str]) -> dict[str, Pieces]:
    """Open the tensors in ``paths``, in the order of their parts, by name. Raises :class:`CheckpointError`."""
    from safetensors import safe_open

    parts: dict[str, list[tuple[Path, Any]]] = {}
    for path in paths:
        with _reading(path), _opened(path) as opened:
            file: Any = safe_open(opened, framework="pt")
            for name in file.keys():  # noqa: SIM118  # it cannot be iterated over
                parts.setdefault(name, []).append((path, file))
    with _reading(paths[0]):
        pieces = {name: Pieces(name, tensor_parts) for name, tensor_parts in parts.items()}
        return pieces | {name: pieces[other] for name, other in aliases.items()}


def read_content(folder: Path, manifest: Manifest, in_pieces: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read model and training state of a checkpoint; ``in_pieces``: the tensors of shards are :class:`Pieces`.

    Raises:
        CheckpointError: they cannot be read.
    """
    count = manifest.shards

    def read(names: Sequence[str], aliases: Mapping[str, str]) -> dict[str, Any]:
        pieces = open_pieces([folder / name for name in names], aliases)
        tensors = {id(piece): piece if in_pieces and count else piece.whole() for piece in pieces.values()}
        return {name: tensors[id(piece)] for name, piece in pieces.items()}  # tied weights stay one tensor

    trainer = read_trainer(folder / TRAINER)
    extra_state = trainer.pop(EXTRA, {})
    parts = [shard("model", number, count) for number in range(count)] or [MODEL]
    model = read([*parts, *sorted(filter(is_frozen, manifest.files))], manifest.aliases)
    if count:
        trainer = put_back(trainer, read([shard("trainer", number, count) for number in range(count)], {}))
    return model | extra_state, trainer


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, StopIteration) as error:
        raise unreadable(path, error) from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[str]:
    """Yield a name of the file for torch and safetensors, which take none with bytes that are not UTF-8."""
    with path.open("rb") as file:
        yield f"/proc/self/fd/{file.fileno()}"


# The training state.


def by_file(model: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a model's state into tensors, and values of ``get_extra_state()`` for ``trainer.pt``."""
    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    extra_state = {name: value for name, value in model.items() if name not in tensors}
    return tensors, {EXTRA: extra_state} if extra_state else {}


def walked(value: Any, leaf: Callable[[Any, Place], Any], path: Place = ()) -> Any:
    """Replace each leaf by ``leaf(value, path)``. Mappings become dicts, lists and tuples keep their type."""
    if isinstance(value, Mapping):
        return {key: walked(item, leaf, (*path, key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(walked(item, leaf, (*path, index)) for index, item in enumerate(value))
    return leaf(value, path)


def mark(name: str) -> dict[str, str]:
    """Return the placeholder in a training state for the tensor ``name`` of its shards."""
    return {_MARK: name}


def put_back(state: Any, tensors: Mapping[str, Any]) -> Any:
    """Replace the marks in ``state`` by ``tensors``. Raises :class:`KeyError`."""
    if isinstance(state, dict):
        if state.keys() == {_MARK}:
            return tensors[state[_MARK]]
        return {key: put_back(value, tensors) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(put_back(value, tensors) for value in state)
    return state


def write_trainer(file: HashingFile, state: dict[str, Any]) -> None:
    """Write a state with :func:`torch.save`. Raises :class:`OSError`."""
    try:
        torch.save(state, cast(IO[bytes], file))
    except Exception:
        if file.error is not None:
            raise file.error from None
        raise


def check_trainer(path: Path, state: Mapping[str, Any]) -> None:
    """Make sure that ``state``, just written, can be read without running code. Raises :class:`CheckpointError`."""
    try:
        read_trainer(path, mmap=True)
    except CheckpointError:
        check_saveable({}, state)
        raise


def read_trainer(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read the state of :func:`write_trainer`; runs no code of the file. Raises :class:`CheckpointError`."""
    try:
        with _opened(path) as name:
            return {**torch.load(name, map_location="cpu", weights_only=True, mmap=mmap)}
    except Exception as error:  # torch.load raises whatever its layers raise: pickle, zip, C++
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {str(error)[:300]}"
    return CheckpointError(f"cannot read {path}", why=reason, fix="resume from an older checkpoint")


def check_saveable(model: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
    """Check that a state can be saved and read again; copies no tensor and writes nothing.

    Raises:
        CheckpointError: names the path and type of a value that cannot be saved.
    """
    tensors, extra_state = by_file(model)
    for name, tensor in tensors.items():
        _check_model_tensor(name, tensor, ("cpu", "cuda"))

    def check(leaf: Any, path: Place) -> None:
        if not _is_read_again(leaf):
            raise _not_saveable(f"the training state at {' → '.join(map(repr, path))}", leaf)

    trainer = {**trainer, **extra_state}
    if not _is_read_again(trainer):
        walked(trainer, check)
        raise _not_saveable("the training state", trainer)


def saveable(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Drop the entries of ``state`` that cannot be read again; returns also their names and classes."""
    readable = {key: value for key, value in state.items() if _is_read_again({key: value})}
    return readable, [f"{key} ({_class_of(value)})" for key, value in state.items() if key not in readable]


def _not_saveable(location: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"cannot save {location}",
        why=f"it is a {_class_of(value)}, which torch.load(weights_only=True) does not read again",
        fix="keep tensors, NumPy arrays, numbers, text, lists and dicts in state_dict() and get_extra_state()",
    )


def _class_of(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_dense(value: Any) -> bool:
    """Return whether ``value`` is a strided tensor with values."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"


def _without_values(leaf: Any, _: Place) -> Any:
    """Copy a leaf as :class:`lockstep.checkpoint.writer.HostBuffers` does, with empty tensors."""
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    if not is_dense(leaf):
        raise TypeError(f"a tensor of {leaf.layout} on {leaf.device}")
    return torch.empty(0, dtype=leaf.dtype)


def _is_read_again(state: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(walked(state, _without_values), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # pickling by the user's classes may raise anything
        return False
    return True
