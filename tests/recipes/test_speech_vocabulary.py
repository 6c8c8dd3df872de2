from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.recipes.speech.vocabulary import BLANK, SYMBOLS, alignment_frames, decode, encode, normalise, unknown


def test_there_are_29_symbols_and_the_blank_is_one_of_them() -> None:
    assert len(SYMBOLS) == len(set(SYMBOLS)) == 29
    assert SYMBOLS[BLANK] == ""


@given(st.text(alphabet=SYMBOLS[1:]))
def test_any_text_of_the_vocabulary_comes_back(text: str) -> None:
    ids = encode(text)
    assert BLANK not in ids
    assert decode(ids) == text
    assert decode([BLANK, *ids, BLANK]) == text
    assert unknown(text) == []


def test_spaces_and_apostrophes_are_symbols_like_others() -> None:
    assert normalise("  don’t  go\n left ") == "DON'T GO LEFT"
    assert len(encode("DON'T GO")) == len("DON'T GO")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Press one — then the #-key!", "PRESS ONE THEN THE # KEY"),
        ("Zoë's café: more cats", "ZOE'S CAFE MORE CATS"),
        ("call 3 - 'now'…", "CALL 3 'NOW'"),
        ("...", ""),
    ],
)
def test_accents_and_punctuation_are_removed(written: str, read: str) -> None:
    assert normalise(written) == read
    assert normalise(read) == read


def test_what_the_vocabulary_lacks_is_named() -> None:
    assert unknown(normalise("$3 for the [beep] in Ελλάδα")) == sorted("$3[]ΕΛΑΔ")
    with pytest.raises(KeyError):
        encode("3")


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
