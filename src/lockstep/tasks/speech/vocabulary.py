"""The 29 symbols of a transcript: CTC's blank, A to Z, space and apostrophe."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

#: The index of CTC's blank, in the loss and in decoding; also what pads rows of symbols.
BLANK = 0
#: Symbols by index; the blank has no text.
SYMBOLS = ("", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", " ", "'")
SIZE = len(SYMBOLS)

_INDEX = {symbol: index for index, symbol in enumerate(SYMBOLS) if index != BLANK}
_APOSTROPHES = str.maketrans("’‘ʼ", "'''")


def normalise(text: str) -> str:
    """Upper case, one space between words and none around them, every apostrophe the same."""
    return " ".join(text.translate(_APOSTROPHES).upper().split())


def unknown_symbols(text: str) -> list[str]:
    """The symbols of a normalised ``text`` that the vocabulary lacks, sorted."""
    return sorted(set(text) - _INDEX.keys())


def encode(text: str) -> list[int]:
    """The symbols of a normalised ``text``. Raises ``KeyError`` for one that the vocabulary lacks."""
    return [_INDEX[symbol] for symbol in text]


def decode(ids: Iterable[int]) -> str:
    """The text of symbols; blanks have none."""
    return "".join(SYMBOLS[index] for index in ids)


def alignment_frames(ids: list[int]) -> int:
    """The fewest frames that CTC can align ``ids`` to: one a symbol, and a blank between equal neighbours."""
    return len(ids) + sum(a == b for a, b in pairwise(ids))
