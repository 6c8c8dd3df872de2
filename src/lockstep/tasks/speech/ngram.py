"""How probable each symbol is after the last few: an n-gram of symbols, counted from text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import DataError, RunFolderError
from lockstep.tasks.speech.manifest import read_rows
from lockstep.tasks.speech.vocabulary import BLANK, Vocabulary
from lockstep.telemetry.files import read_bytes

#: Symbols of the longest n-gram: the next one and a history of five.
ORDER = 6
#: A table row for each history takes memory: about 1 GB for a text of this size.
MAX_BYTES = 16 << 20


class Ngram(NamedTuple):
    """An automaton whose states are histories; :data:`START` is the state before the first symbol.

    ``scores`` float64 [states, symbols] are what each next symbol adds to the score of a text, the blank's what the end
    of the text adds; ``following`` int64 [states, symbols] are the states after each symbol.
    """

    scores: Tensor
    following: Tensor

    def weighted(self, weight: float, bonus: float) -> Ngram:
        """Of log-probabilities, the scores ``weight`` · log-probability + ``bonus``: longer texts would else lose."""
        return Ngram(weight * self.scores + bonus, self.following)

    def to(self, device: torch.device) -> Ngram:
        return Ngram(self.scores.to(device), self.following.to(device))


#: The first history that is counted: of nothing but the beginning.
START = 1


def indifferent(symbols: int) -> Ngram:
    """An n-gram that adds 0 to the score of any text."""
    return Ngram(torch.zeros(START + 1, symbols, dtype=torch.float64), torch.full((START + 1, symbols), START))


def count(texts: Iterable[Sequence[int]], symbols: int, order: int = ORDER) -> Ngram:
    """Natural log-probabilities by Witten and Bell's interpolation (Chen and Goodman 1998, section 2.5).

    A history h that occurs N times before T different symbols has P(c|h) = (n(hc) + T P(c|h')) / (N + T), where h' is h
    without its oldest symbol; below the shortest, empty one, all symbols are equally probable.

    Args:
        texts: the symbols of each; empty ones say nothing.
        symbols: the size of the vocabulary. The blank marks both ends of a text.
        order: symbols of the longest n-gram, at least 2.
    """
    stream = np.array([BLANK, *itertools.chain.from_iterable((*ids, BLANK) for ids in texts if len(ids))])
    places = np.arange(1, len(stream))  # of the symbols that have a history of the length in question
    states = np.zeros(len(stream), dtype=np.int64)  # of the history before each place
    probabilities = _interpolated(states[places], stream[places], np.full((1, symbols), 1 / symbols))
    following = np.zeros((1, symbols), dtype=np.int64)
    for length in range(1, order):
        # A history is one of a symbol less, at the place before, and the symbol there. None reaches over a text's end.
        if length > 1:
            places = np.intersect1d(places, places + 1)
            places = places[stream[places - 1] != BLANK]
        keys = states[places - 1] * symbols + stream[places - 1]
        histories, first, row = np.unique(keys, return_index=True, return_inverse=True)
        shorter, known = states[places[first]], len(following)
        following.reshape(-1)[histories] = known + np.arange(len(histories))
        following = np.concatenate([following, following[shorter]])
        probabilities = np.concatenate([probabilities, _interpolated(row, stream[places], probabilities[shorter])])
        states[places] = known + row
    return Ngram(torch.from_numpy(np.log(probabilities)), torch.from_numpy(following))


def read_texts(path: Path, vocabulary: Vocabulary) -> list[list[int]]:
    """The symbols of each line of a text, or of each transcript of a manifest (``.jsonl``).

    What the vocabulary lacks separates words.

    Raises:
        DataError: the file cannot be read, is too large, or has no symbol of the vocabulary.
    """
    try:
        lines = read_bytes(path, max_bytes=MAX_BYTES).decode("utf-8", errors="replace").splitlines()
    except RunFolderError as error:
        raise DataError(f"cannot read the text {path}", why=error.what, fix="check task.lm_text") from None
    if path.suffix == ".jsonl":
        lines = [row.text for row in read_rows(path)]
    found = []
    for line in lines:
        text = vocabulary.normalise(line)
        for symbol in vocabulary.unknown(text):
            text = text.replace(symbol, " ")
        if words := text.split():
            found.append(vocabulary.encode(" ".join(words)))
    if not found:
        raise DataError(
            f"{path} has no words to count", why="no line has a letter of task.alphabet", fix="check task.lm_text"
        )
    return found


def _interpolated(rows: np.ndarray, seen: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """P [histories, symbols]: symbol ``seen[i]`` follows history ``rows[i]``; ``shorter`` are those of h'."""
    counts = np.zeros(shorter.shape)
    np.add.at(counts, (rows, seen), 1)
    kinds = np.count_nonzero(counts, axis=1)[:, None]
    found: np.ndarray = (counts + kinds * shorter) / (counts.sum(axis=1)[:, None] + kinds)
    return found
