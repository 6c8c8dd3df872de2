"""Iterable data sets: read once on each node, in the order in which they come, and handed to its ranks.

One rank of a node reads; the others ask it, over a Unix socket in a folder of the user's. Item n of a run is the n-th
item of the data set; items are kept until no rank can request them again. When the data set ends, it is
read again. With ``state_dict`` and ``load_state_dict``, the state before every :data:`EVERY` items is kept until those
have been trained on: a checkpoint has one at or before its position, and a resume skips the items between the two.

An item that cannot be read keeps its number, and raises when it is asked for, on any number of ranks. A generator ends
with the error that it raises, and so does the run.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import isgenerator
from itertools import islice
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep._compat.datasets import has_shuffle_buffer, node_of
from lockstep.data.handing import short_path
from lockstep.data.order import check_slice
from lockstep.data.reader import StreamEnded, states_of_generators
from lockstep.errors import ConfigError, DataError, LockstepError, SampleError
from lockstep.hardware.world import World
from lockstep.planning.batch import DRAWS, OWN, SamplingFacts

#: Steps for which items are kept for a rank that has asked for none since, as one without samples does. Ranks that take
#: part in the same collectives are less apart.
LAG = 32
#: Items between two states of a data set that has a cursor.
EVERY = 64
#: Maximum time that a rank waits for the reader of its node, in seconds.
PATIENCE_S = 120.0
#: Samples of an epoch of unknown length: the run ends after ``training.max_steps``.
ENDLESS = 2**40


@dataclass
class StreamOrder:
    """Item numbers of the run."""

    samples: int
    seed: int
    repeats: bool = False

    def slice(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        check_slice(self.samples, epoch, start, stop)
        return np.arange(epoch * self.samples + start, epoch * self.samples + stop)


class Stream:
    """An iterable data set, by item number; numbers may be asked for in rising order, step by step.

    Args:
        samples: of an epoch.
    """

    def __init__(self, dataset: Any, samples: int) -> None:
        self.dataset = dataset
        self._samples = samples
        self._connection: Connection | None = None
        self._listener: Listener | None = None
        self._threads: list[threading.Thread] = []
        self._open = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._asked = [0]
        self._window = EVERY
        self._draws: bool | None = None  # whether the first items did, from the global generators
        self._begin_at(0)

    def _begin_at(self, position: int) -> None:
        self._iterator: Iterator[Any] | None = None
        self._first = position
        self._passes = 0
        self._given = 0
        #: Items from number ``_first`` on; in the place of one that could not be read, its error.
        self._kept: list[Any] = []
        #: What :meth:`state_dict` returns, by item.
        self._states: dict[int, dict[str, Any]] = {}
        self._ended: StreamEnded | None = None

    def __len__(self) -> int:
        return self._samples

    @property
    def _next(self) -> int:
        return self._first + len(self._kept)

    @property
    def has_cursor(self) -> bool:
        return all(callable(getattr(self.dataset, name, None)) for name in ("state_dict", "load_state_dict"))

    @property
    def remark(self) -> str:
        if not self.has_cursor:
            text = "without state_dict() and load_state_dict(): a resume would begin it again, repeat and lose samples."
        elif has_shuffle_buffer(self.dataset):
            text = "read once on each node. Hugging Face's state_dict() leaves out its shuffle buffer: a resume fills "
            text += "it again, and leaves out the samples that were in it."
        else:
            text = "read once on each node; a resume continues at its state_dict()."
        text = f"The training data are a stream, {text}"
        if reader := reads_rank(self.dataset):
            text += f" {reader} reads the rank: it must give all samples on every rank, since the ranks of a node "
            text += "share what one of them reads, and the other ranks' parts would be left out."
        return f"{text} Its {DRAWS}; {OWN}." if self._draws else text

    def fingerprint(self) -> str:
        return f"stream of {type(self.dataset).__name__}"

    def sampling(self) -> Stream:
        return self

    @property
    def facts(self) -> SamplingFacts:
        kind = "in the order of the stream"
        draws = bool(self._draws)
        return SamplingFacts(kind=kind, digest="stream", positions=self._samples, stream=True, draws=draws)

    def order(self, positions: int, seed: int) -> StreamOrder:
        return StreamOrder(positions, seed)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, item_numbers: Sequence[int]) -> list[Any]:
        numbers = [int(number) for number in item_numbers]
        if self._connection is None:
            return self._read(numbers, 0)
        self._connection.send(numbers)
        items = pickle.loads(self._connection.recv_bytes())
        if isinstance(items, Exception):
            raise items
        return list(items)

    def _read(self, numbers: list[int], rank: int) -> list[Any]:
        with self._lock:
            first = min(numbers)
            if first < self._first:
                raise DataError(
                    f"item {first} of the training stream was asked for after later ones",
                    why="a stream is read once, in order",
                    fix="use a map-style data set for what reads samples again",
                )
            self._fill(max(numbers) + 1)
            items = [self._kept[number - self._first] for number in numbers]
            for item in items:
                if isinstance(item, LockstepError):
                    raise item
            self._asked[rank] = max(self._asked[rank], first)
            # Items of one step, which may be two batches long, come in any order: a rank without any replays the first.
            before = max(min(self._asked) - 2 * self._window, max(self._asked) - LAG * self._window)
            if before > self._first:
                del self._kept[: before - self._first]
                self._first = before
                # A checkpoint may be some steps behind, as batches are fetched ahead; a step has one state at most.
                for number in sorted(number for number in self._states if number <= before)[:-4]:
                    del self._states[number]
            return items

    def _fill(self, stop: int) -> None:
        """Read until there is item ``stop - 1``."""
        states = states_of_generators() if self._draws is None else ()
        every = max(EVERY, self._window)
        while self._next < stop:
            if self._ended is not None:
                raise self._ended
            before = self._next
            ended = False
            end = min(stop, before - before % every + every)
            try:
                if self._iterator is None:
                    self._iterator = iter(self.dataset)
                if before % every == 0 and self.has_cursor and before not in self._states:
                    self._note()
                self._kept.extend(islice(self._iterator, end - before))
                ended = self._next < end
            except LockstepError as error:
                self._failed(error)
            except Exception as error:
                self._failed(
                    SampleError(
                        f"item {self._next} of {type(self.dataset).__name__} could not be read",
                        why=f"{type(error).__name__}: {error}",
                        fix="fix the data set",
                    )
                )
            self._given += self._next - before
            if ended:
                self._again()
        if self._draws is None:
            self._draws = states_of_generators() != states

    def _failed(self, error: LockstepError) -> None:
        if isgenerator(self._iterator):
            self._ended = StreamEnded(
                f"the training stream ended with an error: {error.what}",
                why=f"{error.why}; a generator gives no more items after it has raised",
                fix="catch the error in the data set, or give it an iterator whose __next__() can be called again",
            )
        self._kept.append(error)

    def _note(self) -> None:
        state = copy.deepcopy(self.dataset.state_dict())
        self._states[self._next] = {"item": self._next, "passes": self._passes, "given": self._given, "state": state}

    def _again(self) -> None:
        if not self._given:
            name = type(self.dataset).__name__
            if not self._passes:
                raise DataError(f"{name} gives no item", fix="check its files and filters")
            raise DataError(
                f"{name} gives no item when it is iterated over again",
                why="a generator can be iterated over once",
                fix="give an object whose __iter__() begins again, or train for the items that there are",
            )
        self._passes += 1
        self._given = 0
        self._iterator = None
        self._set_epoch()

    def _set_epoch(self) -> None:
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(self._passes)

    def begin(self, folder: Path, attempt: int, world: World, position: int, window: int, saved: Any) -> None:
        """Prepare an attempt: set its position, and connect the ranks of this node to the reader.

        Args:
            position: items of the run that have been trained on.
            window: items of a step.
            saved: :meth:`state_dict` of the checkpoint, if any.
        """
        name = hashlib.sha256(f"{Path(folder).resolve()} {attempt} {world.rank - world.local_rank}".encode())
        private = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
        private.mkdir(mode=0o700, exist_ok=True)
        if private.lstat().st_uid != os.getuid() or private.lstat().st_mode & 0o077:
            raise DataError(f"{private} is open to other users", fix="remove it, or set TMPDIR to a private folder")
        address = f"{self._open.enter_context(short_path(private))}/{name.hexdigest()[:16]}"
        key = name.digest()
        if world.local_rank:
            self._connection = _connected(address, key)
            self._connection.send(world.local_rank)
            return
        if saved is not None or self._first:
            self._begin_at(position)
        elif position:
            self._first = position
            self._states = {position + n: {**state, "item": position + n} for n, state in self._states.items()}
        # It is at its beginning, and items that the plan has read stay.
        self._asked = [position] * world.local_size
        self._window = window
        if saved is not None:
            self._first = saved["item"]
            self._passes = saved["passes"]
            self._given = saved["given"]
            self._set_epoch()
            self.dataset.load_state_dict(copy.deepcopy(saved["state"]))
            self._states[self._first] = saved
        if world.local_size > 1:
            with contextlib.suppress(FileNotFoundError):
                Path(address).unlink()
            self._listener = Listener(address, "AF_UNIX", authkey=key)
            for _ in range(world.local_size - 1):
                self._threads.append(threading.Thread(target=self._serve, name="lockstep-stream", daemon=True))
                self._threads[-1].start()

    def state_dict(self, position: int) -> dict[str, Any] | None:
        """Return the state after ``position`` items of the run; ``None``: no cursor, or another rank reads."""
        if self._connection is not None or not self.has_cursor:
            return None
        with self._lock:
            if self._next <= position and self._next not in self._states:
                self._note()
            return self._states.get(max((number for number in self._states if number <= position), default=-1))

    def _serve(self) -> None:
        """Answer one rank of this node until it ends."""
        assert self._listener is not None
        with contextlib.suppress(OSError, EOFError), self._listener.accept() as connection:
            rank = connection.recv()
            while True:
                numbers = connection.recv()
                try:
                    items: Any = self._read(numbers, rank)
                except LockstepError as error:
                    items = error
                # Not by send(), which shares the memory of tensors with processes of one family only.
                connection.send_bytes(pickle.dumps(items))

    def end(self) -> None:
        """Close the connections after the last step."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._listener is not None:
            address = str(self._listener.address)
            until = time.monotonic() + 5
            for thread in self._threads:
                while thread.is_alive() and time.monotonic() < until:
                    thread.join(0.05)
                    with contextlib.suppress(OSError, EOFError):
                        Client(address, "AF_UNIX").close()
            self._listener.close()
            self._listener = None
            self._threads = []
        self._open.close()


def _connected(address: str, key: bytes) -> Connection:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return Client(address, "AF_UNIX", authkey=key)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > until:
                raise DataError(f"no reader of the training stream within {PATIENCE_S:g} s", fix="see rank 0") from None
            time.sleep(0.02)


#: Names in code that reads the rank, or makes a stream one rank's part.
_RANK = {"get_rank", "get_world_size", "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "split_by_node"}


def reads_rank(dataset: Any) -> str:
    """Return the name of a function of ``dataset`` that reads the rank; empty: none was detected.

    Only names and texts are checked, in the code of its methods and of functions in its attributes.
    """
    functions: list[Any] = []
    for value in getattr(dataset, "__dict__", {}).values():  # generators and classes with __slots__ have none
        functions += value if type(value) in (list, tuple) else [value]
    for kind in type(dataset).__mro__:
        if kind.__module__.partition(".")[0] not in ("torch", "datasets"):
            functions += vars(kind).values()
    for function in functions:
        if isinstance(function, FunctionType):
            code = function.__code__
            texts = (constant for constant in code.co_consts if isinstance(constant, str))
            if _RANK & {function.__name__, *code.co_names, *texts}:
                return function.__qualname__
    return ""


def as_stream(dataset: Any, *, epoch_samples: int | None, max_steps: int | None) -> Stream:
    """Make a stream of ``dataset``. Raises :class:`ConfigError` if the end of the run is not defined."""
    part = node_of(dataset)
    if part is not None and part[1] > 1:
        raise DataError(
            f"the training stream is the part of rank {part[0]} of {part[1]} (split_dataset_by_node)",
            why="one process of each node reads the stream for its ranks, so the parts of others would be left out",
            fix="give the whole data set: Lockstep deals its samples to the ranks",
        )
    samples = epoch_samples
    if samples is None:
        with contextlib.suppress(TypeError, NotImplementedError):
            samples = len(dataset)
    if samples is None and max_steps is None:
        raise ConfigError(
            f"the length of {type(dataset).__name__} is not known",
            why="an iterable data set without __len__() may never end",
            fix="set training.max_steps, or data.epoch_samples: epochs of that many samples",
        )
    return Stream(dataset, ENDLESS if samples is None else samples)
