"""The symbols of a transcript: CTC's blank, the letters of an alphabet, space and apostrophe."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from itertools import pairwise

#: The index of CTC's blank, in the loss and in decoding; also what pads rows of symbols.
BLANK = 0
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_SIGNS = {**dict.fromkeys("’‘ʼ", "'"), **dict.fromkeys('.,;:!?…"“”„«»()–—‑-_/', " ")}
_ENGLISH_SIGNS = _SIGNS | {"&": " AND ", "%": " PERCENT "}
_BELOW_20 = [
    *("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "TEN", "ELEVEN", "TWELVE"),
    *("THIRTEEN", "FOURTEEN", "FIFTEEN", "SIXTEEN", "SEVENTEEN", "EIGHTEEN", "NINETEEN"),
]
_TENS = ["TWENTY", "THIRTY", "FORTY", "FIFTY", "SIXTY", "SEVENTY", "EIGHTY", "NINETY"]
_ORDINALS = {"ONE": "FIRST", "TWO": "SECOND", "THREE": "THIRD", "FIVE": "FIFTH", "EIGHT": "EIGHTH", "NINE": "NINTH"}
_ORDINALS |= {"TWELVE": "TWELFTH"}
#: An integer, with commas between thousands or without, and what makes it a decimal or an ordinal number.
_NUMBER = re.compile(r"(\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d+)|(ST|ND|RD|TH)\b)?")


class Vocabulary:
    """Output symbols of a recogniser: ``symbols`` by index, of which the blank has no text.

    Each of ``letters`` comes once, in upper or in lower case, or in both if texts keep their case. Transcripts are
    folded to that case. Accents that no letter has are removed. Numbers and signs are written out for English only.
    """

    def __init__(self, letters: str = LETTERS) -> None:
        self.symbols = ("", *unicodedata.normalize("NFC", letters), " ", "'")
        self._index = {symbol: index for index, symbol in enumerate(self.symbols) if index != BLANK}
        self._is_english = letters == LETTERS
        signs = _ENGLISH_SIGNS if self._is_english else _SIGNS
        self._signs = str.maketrans({sign: text for sign, text in signs.items() if sign not in self._index})
        self._fold = next((fold for fold in (str.upper, str.lower) if fold(letters) == letters), str)

    def __len__(self) -> int:
        return len(self.symbols)

    def normalise(self, text: str) -> str:
        """Words of letters and apostrophes, separated by one space, as a speaker reads ``text``.

        In English, numbers become words ("3.5": THREE POINT FIVE; "21st": TWENTY FIRST). Punctuation and hyphens become
        spaces. Symbols that are not read in one way only, such as $ and brackets, remain.
        """
        composed = self._fold(unicodedata.normalize("NFC", text))
        plain = "".join(c if c in self._index else _without_accents(c) for c in composed)
        if self._is_english:
            plain = _NUMBER.sub(_number_words, plain)
        return " ".join(word for word in plain.translate(self._signs).split() if word.strip("'"))

    def unknown(self, text: str) -> list[str]:
        """The symbols of a normalised ``text`` that the vocabulary lacks, sorted."""
        return sorted(set(text) - self._index.keys())

    def encode(self, text: str) -> list[int]:
        """The symbols of a normalised ``text``. Raises ``KeyError`` for one that the vocabulary lacks."""
        return [self._index[symbol] for symbol in text]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of symbols; blanks have none."""
        return "".join(self.symbols[index] for index in ids)


def _without_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def _number_words(match: re.Match[str]) -> str:
    whole = match[1].replace(",", "")
    decimals = match[2]
    ordinal = match[3]
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


#: The vocabulary of the built-in data: 29 symbols.
ENGLISH = Vocabulary()


def alignment_frames(ids: list[int]) -> int:
    """The fewest frames that CTC can align ``ids`` to: one a symbol, and a blank between equal neighbours."""
    return len(ids) + sum(a == b for a, b in pairwise(ids))
