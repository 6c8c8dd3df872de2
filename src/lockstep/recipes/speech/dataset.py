"""Utterances as samples and batches of features and symbols."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lockstep.recipes.speech.audio import Waveform, read_audio
from lockstep.recipes.speech.features import HOP, SpecAugment, extract
from lockstep.recipes.speech.manifest import Utterance
from lockstep.recipes.speech.vocabulary import BLANK, ENGLISH, Vocabulary, alignment_frames


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

    def __init__(self, utterances: Sequence[Utterance], vocabulary: Vocabulary = ENGLISH) -> None:
        self.utterances = utterances
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> Sample:
        """Raises :class:`lockstep.errors.DataError` when the file cannot be read."""
        return Sample(extract(torch.from_numpy(self.waveform(index))), torch.tensor(self.symbols(index)))

    def symbols(self, index: int) -> list[int]:
        return self.vocabulary.encode(self.utterances[index].text)

    def waveform(self, index: int) -> Waveform:
        utterance = self.utterances[index]
        return read_audio(utterance.audio_path, utterance.offset, utterance.duration)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Feature frames of each utterance, shape [utterances]; opens no audio."""
        return np.array([utterance.frames for utterance in self.utterances], dtype=np.int64)

    def fingerprint(self) -> str:
        """Hash transcripts and durations: the same for any folder and any machine."""
        transcripts = "".join(
            f"{utterance.text}\t{utterance.duration}\t{utterance.offset}\n" for utterance in self.utterances
        )
        return hashlib.sha256(transcripts.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Perturbation:
    """Random changes of a training waveform: speed, noise, and the band of a telephone.

    Speed (and with it pitch) as in Ko et al. 2015, "Audio Augmentation for Speech Recognition"; white noise; and half
    of the time nothing above 4 kHz, as on a telephone line.
    """

    speeds: tuple[float, ...] = (0.9, 0.95, 1.0, 1.05, 1.1)
    noise_db: tuple[float, float] = (15.0, 50.0)
    band_share: float = 0.5

    def __call__(self, wave: Waveform, rng: np.random.Generator, shortest: int) -> Waveform:
        """A changed copy, not faster where less than ``shortest`` samples would remain; draws are from ``rng``."""
        speed = float(rng.choice(self.speeds))
        if len(wave) / speed >= shortest:
            wave = np.interp(np.arange(0, len(wave) - 1, speed), np.arange(len(wave)), wave).astype(np.float32)
        loudness = float(np.sqrt(np.square(wave).mean()))
        noise = rng.standard_normal(len(wave), dtype=np.float32)
        wave = wave + noise * np.float32(loudness * 10 ** (-rng.uniform(*self.noise_db) / 20))
        if rng.random() >= self.band_share:
            return wave
        spectrum = torch.fft.rfft(torch.from_numpy(wave))
        spectrum[len(spectrum) // 2 :] = 0
        limited: Waveform = torch.fft.irfft(spectrum, len(wave)).numpy()
        return limited


class AugmentedRecordings(Recordings):
    """Utterances for training, changed in a new way in each epoch: draws depend on seed, epoch and sample alone.

    ``downsampling`` is by how much the recogniser shortens the features: CTC needs a frame for every symbol.
    """

    def __init__(
        self,
        recordings: Recordings,
        mask: SpecAugment | None,
        perturb: Perturbation | None = None,
        downsampling: int = 1,
    ) -> None:
        super().__init__(recordings.utterances, recordings.vocabulary)
        self._mask = mask
        self._perturb = perturb
        self._downsampling = downsampling

    def sample(self, index: int, rng: np.random.Generator) -> Sample:
        """Utterance ``index``, changed by draws from ``rng``."""
        wave = self.waveform(index)
        symbols = self.symbols(index)
        if self._perturb is not None:
            wave = self._perturb(wave, rng, alignment_frames(symbols) * self._downsampling * HOP)
        features = extract(torch.from_numpy(wave))
        return Sample(features if self._mask is None else self._mask(features, rng), torch.tensor(symbols))
