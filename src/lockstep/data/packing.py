"""Token sequences packed into windows of one length, before any sample is dealt to a rank.

Sequences are cut into pieces of at most a window, and each piece is put into the first open window that has room
(first-fit, with a bounded number of open windows). The windows depend on the lengths only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.arrays import resolve_index
from lockstep.data.sampling import check_shares
from lockstep.errors import DataError

Ints = NDArray[np.int64]
#: Windows that may wait for a piece that fits.
OPEN_WINDOWS = 64


class Packed:
    """Windows of token sequences; sample ``i`` is a dictionary of int64 tensors of shape ``[window]``.

    ``tokens``: the sequences, one after the other, then ``pad``. ``documents``: 1, 2, … for the tokens of each
    sequence in the window, 0 for padding. ``positions``: from 0 in each sequence.

    Args:
        dataset: sequences of token numbers: a map-style data set, or one whose samples have them as ``tokens(sample)``.
        window: tokens of a window.
        tokens: function that returns the sequence of a sample, or a field's name. ``None``: the sample is the sequence.
        lengths: tokens of each sample, if known; else the data set's ``lengths``, else every sample is read once.

    Raises:
        DataError: an empty data set, a sequence that is none, or lengths that are not those of the samples.
    """

    def __init__(
        self,
        dataset: Any,
        window: int,
        *,
        tokens: str | Callable[[Any], Any] | None = None,
        lengths: Sequence[int] | Ints | None = None,
        pad: int = 0,
    ) -> None:
        if window < 1 or pad % 1:
            raise DataError(
                f"windows of {window} tokens, padded with {pad!r}",
                why="a token is a whole number",
                fix="give a window from 1 and a whole number as padding",
            )
        check_shares(dataset, within="Packed")
        self.dataset = dataset
        self.window = window
        self.pad = pad
        self._take = tokens
        token_counts = getattr(dataset, "lengths", None) if lengths is None else lengths
        if token_counts is None:
            token_counts = [len(self._tokens(index)) for index in range(len(dataset))]
        numbers = np.asarray(token_counts)
        self._lengths = numbers.astype(np.int64)
        if numbers.shape != (len(dataset),) or (self._lengths < 0).any() or (self._lengths != numbers).any():
            raise DataError(
                f"lengths of shape {numbers.shape} and type {numbers.dtype} do not fit {len(dataset)} sequences",
                fix="give one whole number from 0 for each",
            )
        self._documents, self._starts, self._sizes, self._first = packed(self._lengths, window)
        if len(self):
            self._tokens(int(self._documents[0]))
        else:
            raise DataError(
                "there are no tokens to pack", why=f"{len(dataset)} sequences have none", fix="check the data"
            )

    def __len__(self) -> int:
        return len(self._first) - 1

    @property
    def waste(self) -> float:
        """The share of all positions that is padding."""
        return 1 - float(self._sizes.sum()) / (len(self) * self.window)

    @property
    def remark(self) -> str:
        """A note for the plan."""
        packed_into = f"{len(self._lengths)} sequences are packed into {len(self)} windows of {self.window} tokens"
        return f"{packed_into}; {self.waste:.2%} of them is padding."

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = resolve_index(index, len(self))
        tokens, documents, positions = np.zeros((3, self.window), np.int64)
        tokens[:] = self.pad
        offset = 0
        for number, piece in enumerate(range(self._first[index], self._first[index + 1]), start=1):
            start = int(self._starts[piece])
            size = int(self._sizes[piece])
            whole = self._tokens(int(self._documents[piece]))
            span = slice(offset, offset + size)
            tokens[span] = whole[start : start + size]
            documents[span] = number
            positions[span] = np.arange(size)
            offset += size
        columns = {"tokens": tokens, "documents": documents, "positions": positions}
        return {name: torch.from_numpy(column.copy()) for name, column in columns.items()}

    def _tokens(self, index: int) -> NDArray[Any]:
        sample = self.dataset[index]
        sequence = self._take(sample) if callable(self._take) else sample if self._take is None else sample[self._take]
        tokens = None if isinstance(sequence, str | dict) else as_tokens(sequence)
        if tokens is None:
            shape = f" of shape {list(sequence.shape)} and type {sequence.dtype}" if hasattr(sequence, "shape") else ""
            raise DataError(
                f"sample {index} is a {type(sequence).__name__}{shape}, not a sequence of whole numbers",
                why="a token is a whole number, and a sequence has one dimension",
                fix="give Packed(…, tokens=…) the function or field that returns them",
            )
        lengths = getattr(self, "_lengths", None)
        if lengths is not None and len(tokens) != lengths[index]:
            raise DataError(
                f"sequence {index} has {len(tokens)} tokens, not {lengths[index]}",
                why="the windows were packed for the other length",
                fix="give the right lengths",
            )
        return tokens


def as_tokens(sequence: Any) -> NDArray[Any] | None:
    """Convert ``sequence`` to a one-dimensional array of whole numbers; ``None``: it is none."""
    try:
        tokens = np.asarray(sequence)
    except (TypeError, ValueError):  # rows of different lengths, or a dtype that NumPy lacks
        return None
    is_whole = tokens.dtype.kind in "iu" or tokens.size == 0
    return tokens if is_whole and tokens.ndim == 1 else None


def packed(lengths: Ints, window: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the sequence, start and size of each piece, window by window, and the first piece of each window."""
    counts = (lengths + window - 1) // window
    documents = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = number * window
    sizes = np.minimum(lengths[documents] - starts, window)
    free = np.zeros(OPEN_WINDOWS, np.int64)
    names = np.zeros(OPEN_WINDOWS, np.int64)
    of_window = np.empty(len(sizes), np.int64)
    used = 0
    for piece, size in enumerate(sizes.tolist()):
        slot = int(np.argmax(free >= size))
        if free[slot] < size:
            slot = int(np.argmin(free))  # the fullest window is closed
            free[slot] = window
            names[slot] = used
            used = used + 1
        free[slot] -= size
        of_window[piece] = names[slot]
    order = np.argsort(of_window, kind="stable")
    first = np.searchsorted(of_window[order], np.arange(used + 1))
    return documents[order], starts[order], sizes[order], first


def document_mask(documents: Tensor) -> Tensor:
    """Make the attention mask within documents: shape ``[…, window]`` to ``[…, window, window]``.

    It has no causal part; padding attends to nothing.
    """
    same_document = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same_document & (documents > 0).unsqueeze(-1)


def causal_mask(documents: Tensor) -> Tensor:
    """Make the causal mask of models: shape ``[batch, window]`` to ``[batch, 1, window, window]``.

    Padding attends to padding: a position that attends to nothing has no finite result.
    """
    return document_mask(documents + 1).tril().unsqueeze(1)
