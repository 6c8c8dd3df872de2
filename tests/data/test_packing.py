"""Packing of token sequences: every token once, in order, within bounds; masks and positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.mixture import Mixture
from lockstep.data.packing import Packed, document_mask
from lockstep.data.requests import Request, Source, windows
from lockstep.errors import DataError
from tests.data.test_sampling import batch_of


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    window=st.integers(1, 20),
    open_windows=st.integers(1, 5),
)
def test_every_token_is_in_one_window_with_its_position(lengths: list[int], window: int, open_windows: int) -> None:
    sequences = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    packed = Packed(sequences, window, open_windows=open_windows, pad=-1)
    found: list[int] = []
    for index in range(len(packed)):
        sample = packed[index]
        tokens, documents, positions = (sample[name] for name in ("tokens", "documents", "positions"))
        assert torch.equal(tokens < 0, documents == 0)
        for document in range(1, int(documents.max()) + 1):
            mine = tokens[documents == document]
            assert torch.equal(positions[documents == document], torch.arange(len(mine)))
            assert torch.equal(mine - mine[0], torch.arange(len(mine))), "a piece of one sequence"
            assert int(mine[0]) % 1000 % window == 0
        found += tokens[tokens >= 0].tolist()
    assert sorted(found) == sorted(token for sequence in sequences for token in sequence)
    assert packed.waste == pytest.approx(1 - sum(lengths) / (len(packed) * window))


def test_short_sequences_leave_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(5, 120, 3000)
    packed = Packed([range(length) for length in lengths], 256)
    assert packed.waste < 0.05
    assert "is padding" in packed.remark


def test_the_mask_keeps_documents_apart() -> None:
    packed = Packed([{"ids": [1, 2]}, {"ids": [3, 4, 5]}], 6, tokens="ids")
    sample = packed[0]
    assert sample["tokens"].tolist() == [1, 2, 3, 4, 5, 0]
    assert sample["positions"].tolist() == [0, 1, 0, 1, 2, 0]
    mask = document_mask(sample["documents"])
    assert mask.int().tolist() == torch.block_diag(torch.ones(2, 2), torch.ones(3, 3), torch.zeros(1, 1)).int().tolist()


def test_a_mixture_of_packed_sequences_is_the_same_on_any_number_of_ranks() -> None:
    parts = {
        name: Packed([range(start, start + n) for n in range(1, 60)], 64) for name, start in (("a", 0), ("b", 100))
    }
    mixture = Mixture(parts, {"a": 0.7, "b": 0.3})
    order = mixture.sampling().order(24, 3)
    steps = []
    for ranks in (1, 3):
        plan = batch_of(24, ranks, 6)
        sources = [Source(mixture.joined, torch.utils.data.default_collate, 3, order) for _ in range(ranks)]
        walks = [windows(plan, rank=rank, epoch=0, position=0, epochs=1, ghosts=False) for rank in range(ranks)]
        steps.append(
            [
                torch.cat(
                    [source.batch(r)["tokens"] for source, w in zip(sources, step, strict=True) for r in w.requests]
                )
                for step in zip(*walks, strict=True)
            ]
        )
    assert len(steps[0]) == 4
    assert all(torch.equal(one, three) for one, three in zip(*steps, strict=True))
    assert sources[0].batch(Request(0, 0, 0, 5))["documents"].shape == (5, 64)


@pytest.mark.parametrize(
    ("sequences", "given", "words"),
    [
        ([[]], {}, "no tokens to pack"),
        (["text"], {}, "not a sequence of tokens but str"),
        ([[1, 2]], {"lengths": [3, 3]}, "do not fit 1 sequences"),
    ],
)
def test_what_cannot_be_packed_is_refused(sequences: Any, given: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Packed(sequences, 4, **given)
    with pytest.raises(DataError, match="2 tokens, not 3"):
        Packed([[1, 2]], 4, lengths=[3])[0]
