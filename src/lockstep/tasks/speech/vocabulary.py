"""The 29 symbols of a transcript: CTC's blank, A to Z, space and apostrophe."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from itertools import pairwise

#: The index of CTC's blank, in the loss and in decoding; also what pads rows of symbols.
BLANK = 0
#: Symbols by index; the blank has no text.
SYMBOLS = ("", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", " ", "'")
SIZE = len(SYMBOLS)

_INDEX = {symbol: index for index, symbol in enumerate(SYMBOLS) if index != BLANK}
_SIGNS = str.maketrans(
    {**dict.fromkeys("’‘ʼ", "'"), **dict.fromkeys('.,;:!?…"“”„«»()–—‑-_/', " "), "&": " AND ", "%": " PERCENT "}
)
_BELOW_20 = [
    *("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "TEN", "ELEVEN", "TWELVE"),
    *("THIRTEEN", "FOURTEEN", "FIFTEEN", "SIXTEEN", "SEVENTEEN", "EIGHTEEN", "NINETEEN"),
]
_TENS = ["TWENTY", "THIRTY", "FORTY", "FIFTY", "SIXTY", "SEVENTY", "EIGHTY", "NINETY"]
_ORDINALS = {"ONE": "FIRST", "TWO": "SECOND", "THREE": "THIRD", "FIVE": "FIFTH", "EIGHT": "EIGHTH", "NINE": "NINTH"}
_ORDINALS |= {"TWELVE": "TWELFTH"}
#: An integer, with commas between thousands or without, and what makes it a decimal or an ordinal number.
_NUMBER = re.compile(r"(\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d+)|(ST|ND|RD|TH)\b)?")


def normalise(text: str) -> str:
    """Upper-case words of letters and apostrophes, one space between them, as an English speaker reads ``text``.

    Numbers become words ("3.5": THREE POINT FIVE; "21st": TWENTY FIRST), punctuation and hyphens spaces, and letters
    lose their accents. Symbols that are read in no one way, such as $ and brackets, stay.
    """
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c)).upper()
    words = _NUMBER.sub(_number_words, plain).translate(_SIGNS).split()
    return " ".join(word for word in words if word.strip("'"))


def _number_words(found: re.Match[str]) -> str:
    whole, decimals, ordinal = found[1].replace(",", ""), found[2], found[3]
    digits = len(whole) > 9 or (len(whole) > 1 and whole[0] == "0")  # a telephone number, say
    words = [_BELOW_20[int(digit)] for digit in whole] if digits else _integer_words(int(whole))
    if decimals:
        words += ["POINT", *(_BELOW_20[int(digit)] for digit in decimals)]
    if ordinal:
        last = words[-1]
        words[-1] = _ORDINALS.get(last, f"{last[:-1]}IETH" if last.endswith("Y") else f"{last}TH")
    return f" {' '.join(words)} "


def _integer_words(number: int) -> list[str]:
    for size, name in ((1_000_000, "MILLION"), (1000, "THOUSAND"), (100, "HUNDRED")):
        if number >= size:
            rest = _integer_words(number % size) if number % size else []
            return [*_integer_words(number // size), name, *rest]
    if number < 20:
        return [_BELOW_20[number]]
    return [_TENS[number // 10 - 2], *([_BELOW_20[number % 10]] if number % 10 else [])]


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
