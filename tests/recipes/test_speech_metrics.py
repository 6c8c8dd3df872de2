from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.recipes.speech.decoding import ErrorRates
from lockstep.recipes.speech.vocabulary import encode


def rows(texts: list[str], width: int) -> tuple[Tensor, Tensor]:
    """Padded with a symbol that would count if it were looked at."""
    ids = [encode(text) for text in texts]
    return torch.tensor([row + [5] * (width - len(row)) for row in ids]).long(), torch.tensor([len(row) for row in ids])


def distance(heard: list[str], said: list[str]) -> int:
    """Levenshtein 1965, by the recurrence."""
    previous = list(range(len(said) + 1))
    for row, a in enumerate(heard, start=1):
        current = [row]
        for column, b in enumerate(said, start=1):
            current.append(min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (a != b)))
        previous = current
    return previous[-1]


words = st.lists(st.sampled_from(["ONE", "ON", "TWO", "O'CLOCK", "A"]), min_size=0, max_size=6).map(" ".join)
pairs = st.lists(st.tuples(words, words.filter(bool)), min_size=1, max_size=8)


@given(pairs, st.integers(1, 8))
@settings(max_examples=50)
def test_rates_are_sums_over_all_utterances_however_they_come(found: list[tuple[str, str]], step: int) -> None:
    metric = ErrorRates()
    for start in range(0, len(found), step):
        heard, said = (list(texts) for texts in zip(*found[start : start + step], strict=True))
        # Chunks are padded each to a width of its own.
        metric.update(*rows(heard, 60 + start), *rows(said, 70))
    word_errors = sum(distance(heard.split(), said.split()) for heard, said in found)
    symbol_errors = sum(distance(list(heard), list(said)) for heard, said in found)
    rates = metric.compute()
    assert rates["wer"].item() == pytest.approx(word_errors / sum(len(said.split()) for _, said in found))
    assert rates["cer"].item() == pytest.approx(symbol_errors / sum(len(said) for _, said in found))


def test_a_mean_of_rates_would_be_another_number() -> None:
    metric = ErrorRates()
    metric.update(*rows(["ONE", "ONE TWO THREE"], 20), *rows(["TWO", "ONE TWO THREE"], 20))
    assert metric.compute()["wer"] == 0.25


def test_silence_counts_every_word_and_no_symbols_at_all_is_a_row_too() -> None:
    metric = ErrorRates()
    metric.update(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), *rows(["ONE TWO", "SIX"], 9))
    assert metric.compute()["wer"] == 1.0


def test_the_order_of_rows_changes_nothing() -> None:
    said, heard = ["ONE TWO", "THREE", "FOUR"], ["ONE", "TREE", "FOUR FOUR"]
    values = set()
    for order in itertools.permutations(range(3)):
        metric = ErrorRates()
        metric.update(*rows([heard[i] for i in order], 12), *rows([said[i] for i in order], 12))
        values.add(tuple(rate.item() for rate in metric.compute().values()))
    assert len(values) == 1
