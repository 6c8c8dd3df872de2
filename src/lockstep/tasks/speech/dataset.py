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

from lockstep.tasks.speech.audio import read_audio
from lockstep.tasks.speech.features import SpecAugment, extract
from lockstep.tasks.speech.manifest import Utterance
from lockstep.tasks.speech.vocabulary import BLANK, encode


class Sample(NamedTuple):
    """``features`` float32 [frames, 80] and the symbols of the transcript, int64 [symbols]."""

    features: Tensor
    symbols: Tensor


class SpeechBatch(NamedTuple):
    """Utterances side by side.

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
        """Raises :class:`lockstep.errors.DataError` when the file cannot be read."""
        utterance = self.utterances[index]
        wave = read_audio(utterance.audio_path, utterance.offset, utterance.duration)
        return Sample(extract(torch.from_numpy(wave)), torch.tensor(encode(utterance.text)))

    def lengths(self) -> npt.NDArray[np.int64]:
        """Feature frames of each utterance, shape [utterances]; opens no audio."""
        return np.array([utterance.frames for utterance in self.utterances], dtype=np.int64)

    def fingerprint(self) -> str:
        """A hash of what is said and for how long: the same wherever the files lie and whatever machine reads them."""
        digest = hashlib.sha256()
        for utterance in self.utterances:
            digest.update(f"{utterance.text}\t{utterance.duration}\t{utterance.offset}\n".encode())
        return digest.hexdigest()[:16]


class AugmentedRecordings:
    """Utterances for training, masked in a new way in each epoch.

    Every draw comes from the generator of (seed, epoch, sample), so ranks and workers do not matter.
    """

    def __init__(self, recordings: Recordings, augment: SpecAugment) -> None:
        self._recordings, self._augment = recordings, augment

    def __len__(self) -> int:
        return len(self._recordings)

    def sample(self, index: int, rng: np.random.Generator) -> Sample:
        """Utterance ``index`` with masks drawn from ``rng``."""
        features, symbols = self._recordings[index]
        return Sample(self._augment(features, rng), symbols)

    def lengths(self) -> npt.NDArray[np.int64]:
        return self._recordings.lengths()

    def fingerprint(self) -> str:
        return self._recordings.fingerprint()
