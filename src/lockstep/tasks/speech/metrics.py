"""Error rates of transcripts, as sums over all utterances."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lockstep.tasks.speech.decoding import texts


class _ErrorRate(Metric):
    """(substitutions + deletions + insertions) / reference units, summed before dividing (Morris et al. 2004).

    The best alignment of each utterance is jiwer's. The rate is above 1 when most of what is heard is not there.
    """

    full_state_update = False
    higher_is_better = False
    errors: Tensor
    units: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("errors", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("units", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, ids: Tensor, lengths: Tensor, reference_ids: Tensor, reference_lengths: Tensor) -> None:
        """Take a row an utterance: symbols heard [n, longest] and said [n, longest'], of which so many count [n]."""
        found = self._align(texts(reference_ids, reference_lengths), texts(ids, lengths))
        wrong = found.substitutions + found.deletions
        self.errors = self.errors + wrong + found.insertions
        self.units = self.units + wrong + found.hits

    def compute(self) -> Tensor:
        """A share, not per cent; not a number before any reference has come."""
        return self.errors / self.units

    def _align(self, said: list[str], heard: list[str]) -> Any:
        """What jiwer counts."""
        raise NotImplementedError


class WordErrorRate(_ErrorRate):
    """Of words, which are what stands between spaces."""

    def _align(self, said: list[str], heard: list[str]) -> Any:
        import jiwer

        return jiwer.process_words(said, heard)


class CharacterErrorRate(_ErrorRate):
    """Of symbols, spaces between words included."""

    def _align(self, said: list[str], heard: list[str]) -> Any:
        import jiwer

        return jiwer.process_characters(said, heard)
