"""Packing of token sequences: every token once, in order, within bounds; masks and positions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lockstep
from lockstep import Mixture, Packed, Task
from lockstep.data import document_mask
from lockstep.errors import DataError
from lockstep.readers.records import CsvFiles, JsonLines
from lockstep.rundir.folder import RunDir
from tests.attempts import attempt
from tests.gloo import run_ranks


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    window=st.integers(1, 20),
)
def test_every_token_is_in_one_window_with_its_position(lengths: list[int], window: int) -> None:
    sequences = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    packed = Packed(sequences, window, pad=-1)
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
    assert f"{packed.waste:.2%}" in packed.remark


def test_the_mask_keeps_documents_apart() -> None:
    packed = Packed([{"ids": [1, 2]}, {"ids": [3, 4, 5]}], 6, tokens="ids")
    sample = packed[0]
    assert sample["tokens"].tolist() == [1, 2, 3, 4, 5, 0]
    assert sample["positions"].tolist() == [0, 1, 0, 1, 2, 0]
    mask = document_mask(sample["documents"])
    assert mask.int().tolist() == torch.block_diag(torch.ones(2, 2), torch.ones(3, 3), torch.zeros(1, 1)).int().tolist()


class Texts(Task):
    """A language model of bytes, of two packed sources of text; attention stays within a document."""

    defaults: ClassVar[Any] = {"optimizer": {"lr": 0.05}, "scheduler": {"name": "constant", "warmup_steps": 0}}

    def datasets(self) -> lockstep.Datasets:
        folder = os.environ["TEXTS"]
        lines = JsonLines(f"{folder}/*.jsonl", transform=lambda row: list(row["text"].encode()))
        rows = CsvFiles(f"{folder}/*.csv", transform=lambda row: list(row["text"].encode()))
        parts = {"lines": Packed(lines, 32), "rows": Packed(rows, 32)}
        return lockstep.Datasets(Mixture(parts, {"lines": 0.75, "rows": 0.25}), None)

    def model(self) -> nn.Module:
        return nn.ModuleDict({"words": nn.Embedding(256, 8), "places": nn.Embedding(32, 8), "head": nn.Linear(8, 256)})

    def loss(self, model: Any, batch: Any) -> lockstep.Loss:
        tokens, documents = batch["tokens"], batch["documents"]
        x = model["words"](tokens) + model["places"](batch["positions"])
        mask = document_mask(documents) & torch.ones(32, 32, dtype=torch.bool).tril()
        x = nn.functional.scaled_dot_product_attention(x, x, x, mask | torch.eye(32, dtype=torch.bool))
        follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
        scores = model["head"](x[:, :-1])[follows]
        return lockstep.Loss(nn.functional.cross_entropy(scores, tokens[:, 1:][follows], reduction="sum"), len(tokens))


def texts(rank: int, size: int, folder: Path, mode: str) -> Any:
    training = {"max_steps": 12, "global_batch_size": 24, "reproducibility": mode}
    weights, _ = attempt(Texts, folder, rank, size, training=training, data={"epoch_samples": 96})
    return weights, [row["loss"] for row in RunDir(folder).steps()]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks"), [("fast", 3), ("exact", 2)])
def test_two_packed_sources_of_text_train_alike_on_one_rank_and_several(
    mode: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{'abc' * (n % 5)} {n} {'de ' * (n % 11)}" for n in range(150)]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words[:100]))
    (tmp_path / "1.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in words[100:]))
    monkeypatch.setenv("TEXTS", str(tmp_path))
    together, losses = run_ranks(texts, ranks, tmp_path / "together", mode, env={"TEXTS": str(tmp_path)})[0]
    alone, their_losses = texts(0, 1, tmp_path / "alone", mode)
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert np.allclose(losses, their_losses, rtol=1e-5) and (mode == "fast" or losses == their_losses)
    for name in alone:
        assert torch.allclose(alone[name], together[name], atol=1e-5), name
        assert mode == "fast" or torch.equal(alone[name], together[name])


@pytest.mark.parametrize(
    ("sequences", "given", "words"),
    [
        ([[]], {}, "tokens"),
        (["text"], {}, r"\bstr\b"),
        ([[1, 2]], {"lengths": [3, 3]}, "1 sequences"),
        ([[1, 2]], {"lengths": [2.5]}, "1 sequences"),
        ([[1.5, 2.0]], {}, "whole"),
        ([[1.5, 2.0]], {"lengths": [2]}, "whole"),
        ([np.zeros((2, 3), np.int64)], {}, r"\[2, 3\] .*int64"),
        ([torch.zeros(3)], {}, r"torch\.float32"),
        ([[[1], [2, 3]]], {}, "whole"),
        ([[1, 2]], {"pad": 0.5}, r"\b0\.5"),
    ],
)
def test_what_cannot_be_packed_is_refused(sequences: Any, given: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Packed(sequences, 4, **given)
    with pytest.raises(DataError, match=r"\b2 .*\b3\b"):
        Packed([[1, 2]], 4, lengths=[3])[0]
