from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.recipes.speech.decoding import START, Ngram, count, decode_beam, read_texts
from lockstep.recipes.speech.vocabulary import BLANK, ENGLISH
from tests.recipes.speech_files import write_lines
from tests.recipes.test_speech_decoding import every_alignment, random_log_probs, row

SYMBOLS = 4
symbols = st.integers(1, SYMBOLS - 1)
written = st.lists(st.lists(symbols, max_size=8), min_size=1, max_size=6).filter(any)


def by_definition(texts: list[list[int]], history: tuple[int, ...], symbol: int, order: int) -> float:
    """Witten and Bell's probability as Chen and Goodman 1998 write it, from the n-grams of whole texts."""
    seen: Counter[int] = Counter()
    for text in filter(None, texts):
        ends = (BLANK, *text, BLANK)
        for at in range(1, len(ends)):
            if at >= len(history) and ends[at - len(history) : at] == history:
                seen[ends[at]] += 1
    shorter = by_definition(texts, history[1:], symbol, order) if history else 1 / SYMBOLS
    return (seen[symbol] + len(seen) * shorter) / (seen.total() + len(seen)) if seen else shorter


@given(written, st.lists(symbols, max_size=6), st.integers(2, 5))
@settings(max_examples=60)
def test_states_have_witten_and_bells_probabilities_after_any_symbols(
    texts: list[list[int]], said: list[int], order: int
) -> None:
    found, state = count(texts, SYMBOLS, order), START
    for length in range(len(said) + 1):
        history = (BLANK, *said[:length])[-(order - 1) :]
        for symbol in range(SYMBOLS):
            expected = by_definition(texts, history, symbol, order)
            assert math.exp(found.scores[state, symbol]) == pytest.approx(expected, rel=1e-9)
        if length < len(said):
            state = int(found.following[state, said[length]])


def added(ngram: Ngram, said: tuple[int, ...]) -> float:
    """What ``ngram`` adds to the score of a whole text."""
    state, total = START, 0.0
    for symbol in said:
        total += float(ngram.scores[state, symbol])
        state = int(ngram.following[state, symbol])
    return total + float(ngram.scores[state, BLANK])


@given(st.integers(0, 2**32), written, st.sampled_from([0.3, 1.0, 4.0]))
@settings(max_examples=40)
def test_a_wide_beam_finds_the_best_sum_of_sound_and_text(seed: int, texts: list[list[int]], weight: float) -> None:
    ngram = count(texts, SYMBOLS, 3).weighted(weight, 0.7)
    log_probs = random_log_probs(seed, 2, 4, SYMBOLS)
    lengths = torch.tensor([4, 2])
    found = decode_beam(log_probs, lengths, width=130, ngram=ngram)
    for index, length in enumerate(lengths.tolist()):
        sound = {said: math.log(p) for said, p in every_alignment(log_probs[index, :length]).items()}
        totals = {said: score + added(ngram, said) for said, score in sound.items()}
        best = row(found, index)
        assert totals[best] == pytest.approx(max(totals.values()), abs=1e-9)
        assert float(found.scores[index]) == pytest.approx(sound[best], abs=1e-9)


def test_a_text_decides_what_sounds_alike() -> None:
    log_probs = torch.full((1, 5, len(ENGLISH)), 1e-4)
    for frame, heard in enumerate(("P", "R", "EA", "S", "SZ")):
        log_probs[0, frame, ENGLISH.encode(heard)] = 1 / len(heard)
    log_probs = log_probs.log()
    texts = [ENGLISH.encode(word) for word in ("PRES", "PRESS", "PRESENT")]
    ngram = count(texts, len(ENGLISH)).weighted(0.5, 0.0)
    assert decode_beam(log_probs, torch.tensor([5]), 8, ngram).texts() == ["PRES"]


def test_texts_are_normalised_lines_of_a_file_or_transcripts_of_a_manifest(tmp_path: Path) -> None:
    plain = tmp_path / "text.txt"
    plain.write_text("Press 1,\n\n[now]\n***\n")
    said = ["PRESS ONE", "NOW"]
    assert [ENGLISH.decode(ids) for ids in read_texts(plain, ENGLISH)] == said
    manifest = write_lines(tmp_path / "all.jsonl", [{"audio_path": "x.wav", "text": text} for text in said])
    assert [ENGLISH.decode(ids) for ids in read_texts(manifest, ENGLISH)] == said


@pytest.mark.parametrize(("content", "what"), [(None, "cannot read the text"), ("12 …\n".encode()[3:], "no words")])
def test_a_text_that_cannot_be_counted_is_refused(tmp_path: Path, content: bytes | None, what: str) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=what):
        read_texts(file, ENGLISH)
