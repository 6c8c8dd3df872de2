"""The 29 symbols of a transcript: CTC's blank, A to Z, space and apostrophe."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from itertools import pairwise

#: The index of CTC's blank, in the loss and in decoding; also what pads rows of symbols.
BLANK = 0
#: Symbols by index; the blank has no text.
SYMBOLS = ("", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", " ", "'")

_INDEX = {symbol: index for index, symbol in enumerate(SYMBOLS) if index != BLANK}
_SIGNS = str.maketrans({**dict.fromkeys("’‘ʼ", "'"), **dict.fromkeys('.,;:!?…"“”„«»()–—‑-_/', " ")})


def normalise(text: str) -> str:
    """Return the words of ``text`` in capitals, separated by one space, without accents.

    Punctuation and hyphens become spaces. Other symbols and digits remain, since they can be read in several ways.
    """
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.upper()) if not unicodedata.combining(c))
    return " ".join(word for word in plain.translate(_SIGNS).split() if word.strip("'"))


def unknown(text: str) -> list[str]:
    """Return the characters of a normalised ``text`` that are no symbols, sorted."""
    return sorted(set(text) - _INDEX.keys())


def encode(text: str) -> list[int]:
    """Return the symbols of a normalised ``text``. Raises ``KeyError`` for a character that is none."""
    return [_INDEX[symbol] for symbol in text]


def decode(ids: Iterable[int]) -> str:
    """Return the text of symbols; blanks have none."""
    return "".join(SYMBOLS[index] for index in ids)


def alignment_frames(ids: list[int]) -> int:
    """Return the fewest frames that CTC can align ``ids`` to: one a symbol, and a blank between equal neighbours."""
    return len(ids) + sum(a == b for a, b in pairwise(ids))
