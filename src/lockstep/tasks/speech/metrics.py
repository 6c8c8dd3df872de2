"""Error rates of transcripts, as sums over all utterances."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.tasks.speech.decoding import texts
from lockstep.tasks.speech.vocabulary import ENGLISH, Vocabulary


class ErrorRates:
    """``wer`` of words, which are what stands between spaces; ``cer`` of symbols, spaces between words included.

    Each is (substitutions + deletions + insertions) / reference units, summed before dividing (Morris et al. 2004).
    The best alignment of each utterance is jiwer's. A rate is above 1 when most of what is heard is not there.
    """

    def __init__(self, vocabulary: Vocabulary = ENGLISH) -> None:
        self._vocabulary = vocabulary
        #: Errors and reference units of each rate.
        self._sums = {name: torch.zeros(2, dtype=torch.int64) for name in ("wer", "cer")}

    def update(self, ids: Tensor, lengths: Tensor, reference_ids: Tensor, reference_lengths: Tensor) -> None:
        """Take a row per utterance: symbols predicted [n, longest] and spoken [n, longest'], and their numbers [n]."""
        import jiwer

        said, heard = (texts(*row, self._vocabulary) for row in ((reference_ids, reference_lengths), (ids, lengths)))
        self._add("wer", jiwer.process_words(said, heard))
        self._add("cer", jiwer.process_characters(said, heard))

    def _add(self, name: str, found: Any) -> None:
        wrong = found.substitutions + found.deletions
        self._sums[name] += torch.tensor([wrong + found.insertions, wrong + found.hits])

    def compute(self) -> dict[str, Tensor]:
        """Shares, not per cent; NaN before the first reference."""
        return {name: errors / units for name, (errors, units) in self._sums.items()}
