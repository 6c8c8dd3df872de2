from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.recipes.speech.decoding import Hypotheses, decode_beam, decode_greedy
from lockstep.recipes.speech.vocabulary import BLANK, encode

Prefix = tuple[int, ...]


def collapse(path: tuple[int, ...]) -> Prefix:
    return tuple(symbol for symbol, _ in itertools.groupby(path) if symbol != BLANK)


def random_log_probs(seed: int, rows: int, frames: int, symbols: int, sharpness: float = 1.0) -> Tensor:
    scores = np.random.default_rng(seed).standard_normal((rows, frames, symbols)) * sharpness
    return torch.from_numpy(scores).log_softmax(dim=2)


def row(found: Hypotheses, index: int) -> Prefix:
    length = int(found.lengths[index])
    assert found.ids[index, length:].eq(BLANK).all(), "padded with the blank"
    return tuple(found.ids[index, :length].tolist())


def every_alignment(log_probs: Tensor) -> dict[Prefix, float]:
    """The probability of each labelling: the sum over all paths that collapse to it."""
    frames, symbols = log_probs.shape
    sums: dict[Prefix, float] = defaultdict(float)
    for path in itertools.product(range(symbols), repeat=frames):
        sums[collapse(path)] += math.exp(sum(float(log_probs[t, s]) for t, s in enumerate(path)))
    return sums


cases = st.tuples(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 4), st.sampled_from([0.3, 1.0, 4.0]))


@given(cases)
@settings(max_examples=60)
def test_a_wide_beam_finds_the_most_probable_labelling_of_all_alignments(case: tuple[int, int, int, float]) -> None:
    seed, frames, symbols, sharpness = case
    log_probs = random_log_probs(seed, 3, frames, symbols, sharpness)
    lengths = torch.tensor([frames, max(1, frames - 1), 1])
    log_probs[1:, -1] = log_probs[1:, -1] if frames == 1 else math.nan  # padding: whatever stands there
    found = decode_beam(log_probs, lengths, width=130)
    for index, length in enumerate(lengths.tolist()):
        sums = every_alignment(log_probs[index, :length])
        best = max(sums, key=sums.__getitem__)
        assert row(found, index) == best
        assert math.exp(found.scores[index]) == pytest.approx(sums[best], rel=1e-9)


def by_dictionary(log_probs: Tensor, width: int) -> tuple[Prefix, float]:
    """The search as Hannun et al. 2014 write it, one prefix after another."""
    beams: dict[Prefix, tuple[float, float]] = {(): (1.0, 0.0)}
    for frame in log_probs.exp().tolist():
        after: dict[Prefix, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for prefix, (blank, symbol) in beams.items():
            after[prefix][0] += (blank + symbol) * frame[BLANK]
            for new in range(1, len(frame)):
                if prefix and new == prefix[-1]:
                    after[prefix][1] += symbol * frame[new]
                    after[(*prefix, new)][1] += blank * frame[new]
                else:
                    after[(*prefix, new)][1] += (blank + symbol) * frame[new]
        best = sorted(after.items(), key=lambda item: -sum(item[1]))[:width]
        beams = {prefix: (blank, symbol) for prefix, (blank, symbol) in best}
    prefix = max(beams, key=lambda key: sum(beams[key]))
    return prefix, math.log(sum(beams[prefix]))


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([1.0, 3.0]))
@settings(max_examples=40)
def test_a_narrow_beam_keeps_what_the_published_search_keeps(seed: int, width: int, sharpness: float) -> None:
    log_probs = random_log_probs(seed, 2, 12, 5, sharpness)
    found = decode_beam(log_probs, torch.tensor([12, 9]), width)
    for index, frames in enumerate((12, 9)):
        prefix, score = by_dictionary(log_probs[index, :frames], width)
        assert row(found, index) == prefix
        assert float(found.scores[index]) == pytest.approx(score, abs=1e-9)


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_best_path_decoding_collapses_the_best_path(seed: int, rows: int) -> None:
    log_probs = random_log_probs(seed, rows, 9, 4)
    lengths = torch.from_numpy(np.random.default_rng(seed).integers(1, 10, rows))
    for index, length in enumerate(lengths.tolist()):
        log_probs[index, length:] = math.nan
    found = decode_greedy(log_probs, lengths)
    for index, length in enumerate(lengths.tolist()):
        values, path = log_probs[index, :length].max(dim=1)
        assert row(found, index) == collapse(tuple(path.tolist()))
        assert float(found.scores[index]) == pytest.approx(float(values.sum()))


def test_paths_to_one_text_are_added_where_the_best_path_fails() -> None:
    # 'A' by three paths of 0.24, 0.24 and 0.16 beats the best path of 0.36, which is empty.
    log_probs = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]]).log()
    lengths = torch.tensor([2])
    assert decode_greedy(log_probs, lengths).texts() == [""]
    found = decode_beam(log_probs, lengths, width=2)
    assert found.texts() == ["A"]
    assert math.exp(found.scores[0]) == pytest.approx(0.64)


def test_impossible_symbols_and_wide_beams_give_no_ghosts() -> None:
    said = encode("TO OO")
    path = [BLANK, said[0], said[1], said[1], said[2], said[3], BLANK, said[4]]
    log_probs = torch.full((1, len(path), 29), -math.inf)
    log_probs[0, range(len(path)), path] = 0.0
    for found in (decode_greedy(log_probs, torch.tensor([8])), decode_beam(log_probs, torch.tensor([8]), width=40)):
        assert found.texts() == ["TO OO"]
        assert float(found.scores[0]) == 0.0


def test_an_utterance_is_heard_alike_in_any_company() -> None:
    log_probs = random_log_probs(3, 4, 30, 29, 2.0).float()
    lengths = torch.tensor([30, 7, 19, 1])
    together = decode_beam(log_probs, lengths, width=8)
    for index, length in enumerate(lengths.tolist()):
        alone = decode_beam(log_probs[index : index + 1, :length], lengths[index : index + 1], width=8)
        assert row(alone, 0) == row(together, index)
        assert alone.texts()[0] == together.texts()[index]
