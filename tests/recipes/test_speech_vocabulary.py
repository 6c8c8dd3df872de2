from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.recipes.speech.vocabulary import BLANK, ENGLISH, Vocabulary, alignment_frames


def test_there_are_29_symbols_and_the_blank_is_one_of_them() -> None:
    assert len(ENGLISH) == len(set(ENGLISH.symbols)) == 29
    assert ENGLISH.symbols[BLANK] == ""


@given(st.text(alphabet=ENGLISH.symbols[1:]))
def test_any_text_of_the_vocabulary_comes_back(text: str) -> None:
    ids = ENGLISH.encode(text)
    assert BLANK not in ids
    assert ENGLISH.decode(ids) == text
    assert ENGLISH.decode([BLANK, *ids, BLANK]) == text
    assert ENGLISH.unknown(text) == []


def test_spaces_and_apostrophes_are_symbols_like_others() -> None:
    assert ENGLISH.normalise("  don’t  go\n left ") == "DON'T GO LEFT"
    assert len(ENGLISH.encode("DON'T GO")) == len("DON'T GO")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Press 1, 2 or 30 — then the #-key!", "PRESS ONE TWO OR THIRTY THEN THE # KEY"),
        ("Zoë's café: 1,234,567 cats & 50%", "ZOE'S CAFE ONE MILLION TWO HUNDRED THIRTY FOUR THOUSAND FIVE HUNDRED "
         "SIXTY SEVEN CATS AND FIFTY PERCENT"),
        ("the 1st, 12th, 20th and 103rd at 3.05.", "THE FIRST TWELFTH TWENTIETH AND ONE HUNDRED THIRD AT THREE POINT "
         "ZERO FIVE"),
        ("call 0123 - 'now'…", "CALL ZERO ONE TWO THREE 'NOW'"),
        ("...", ""),
    ],
)  # fmt: skip
def test_numbers_and_punctuation_are_read_aloud(written: str, read: str) -> None:
    assert ENGLISH.normalise(written) == read
    assert ENGLISH.normalise(read) == read


def test_what_the_vocabulary_lacks_is_named() -> None:
    assert ENGLISH.unknown(ENGLISH.normalise("$3 for the [beep] in Ελλάδα")) == sorted("$[]ΕΛΑΔ")
    with pytest.raises(KeyError):
        ENGLISH.encode("3")


@pytest.mark.parametrize(
    ("letters", "written", "read"),
    [
        ("abcdefghijklmnopqrstuvwxyzäöüß", "Zwölf Boxkämpfer, größer als É.", "zwölf boxkämpfer größer als e"),
        ("ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩ", "Καλημέρα — Ελλάδα!", "ΚΑΛΗΜΕΡΑ ΕΛΛΑΔΑ"),
        ("abcAÉ0123456789-", "Éa b-c 12", "Éa b-c 12"),
        ("abc", "a & b: 3", "a & b 3"),
    ],
)  # fmt: skip
def test_another_alphabet_keeps_its_letters_and_case(letters: str, written: str, read: str) -> None:
    vocabulary = Vocabulary(letters)
    assert vocabulary.normalise(written) == read
    known = "".join(c for c in read if c not in vocabulary.unknown(read))
    assert vocabulary.decode(vocabulary.encode(known)) == known


def test_a_decomposed_letter_is_one_symbol() -> None:
    assert Vocabulary("a\u0308b").encode("äb") == [1, 2]


def collapse(path: tuple[int, ...]) -> list[int]:
    return [symbol for symbol, _ in itertools.groupby(path) if symbol != BLANK]


@given(st.lists(st.integers(1, 2), max_size=3))
def test_the_fewest_frames_are_those_of_the_shortest_path(ids: list[int]) -> None:
    shortest = next(
        frames
        for frames in itertools.count()
        if any(collapse(path) == ids for path in itertools.product(range(3), repeat=frames))
    )
    assert alignment_frames(ids) == shortest
