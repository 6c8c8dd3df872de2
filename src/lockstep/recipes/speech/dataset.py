"""Utterances as samples and batches of features and symbols."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lockstep.recipes.speech.audio import Waveform, read_audio
from lockstep.recipes.speech.features import SpecAugment, extract
from lockstep.recipes.speech.manifest import Utterance
from lockstep.recipes.speech.vocabulary import BLANK, encode


class Sample(NamedTuple):
    """``features`` float32 [frames, 80] and the symbols of the transcript, int64 [symbols]."""

    features: Tensor
    symbols: Tensor


class SpeechBatch(NamedTuple):
    """Utterances of one batch, padded to the longest.

    ``features`` float32 [n, frames of the longest, 80], padded with 0 after ``lengths`` [n] frames; ``targets`` int64
    [n, symbols of the longest], padded with the blank after ``target_lengths`` [n] symbols.
    """

    features: Tensor
    lengths: Tensor
    targets: Tensor
    target_lengths: Tensor


def collate(samples: Sequence[Sample]) -> SpeechBatch:
    """Pad at the end; nothing of a sample changes."""
    return SpeechBatch(
        pad_sequence([sample.features for sample in samples], batch_first=True),
        torch.tensor([len(sample.features) for sample in samples]),
        pad_sequence([sample.symbols for sample in samples], batch_first=True, padding_value=BLANK),
        torch.tensor([len(sample.symbols) for sample in samples]),
    )


class Recordings:
    """Utterances as they are: ``dataset[i]`` reads the audio and makes the features."""

    def __init__(self, utterances: Sequence[Utterance]) -> None:
        self.utterances = utterances

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> Sample:
        """Raise :class:`lockstep.errors.DataError` when the file cannot be read."""
        return Sample(extract(torch.from_numpy(self.waveform(index))), torch.tensor(self.symbols(index)))

    def symbols(self, index: int) -> list[int]:
        return encode(self.utterances[index].text)

    def waveform(self, index: int) -> Waveform:
        utterance = self.utterances[index]
        return read_audio(utterance.audio_path, utterance.offset, utterance.duration)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Count feature frames of each utterance, shape [utterances]; opens no audio."""
        return np.array([utterance.frames for utterance in self.utterances], dtype=np.int64)

    def fingerprint(self) -> str:
        """Hash transcripts and durations: the same for any folder and any machine."""
        transcripts = "".join(
            f"{utterance.text}\t{utterance.duration}\t{utterance.offset}\n" for utterance in self.utterances
        )
        return hashlib.sha256(transcripts.encode()).hexdigest()[:16]


class AugmentedRecordings(Recordings):
    """Utterances for training, masked in a new way in each epoch: draws depend on seed, epoch and sample alone."""

    def __init__(self, utterances: Sequence[Utterance], mask: SpecAugment) -> None:
        super().__init__(utterances)
        self._mask = mask

    def sample(self, index: int, rng: np.random.Generator) -> Sample:
        """Return utterance ``index``, masked by draws from ``rng``."""
        features, symbols = self[index]
        return Sample(self._mask(features, rng), symbols)
