"""Input of a recogniser: log-mel spectra, normalised per utterance, masked at random in training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lockstep.recipes.speech.audio import RATE_HZ

#: Samples of the (Hann) window, between windows, and of the Fourier transform: 25 ms every 10 ms.
WINDOW = 400
HOP = 160
FFT = 512
MELS = 80
#: Power below which there is only silence; the rounding noise of 16-bit samples is below it.
FLOOR = 1e-6
#: Added to the standard deviation, so that a band without any change stays at zero.
EPSILON = 1e-5


def feature_frames(samples: int) -> int:
    """Count frames of :func:`log_mel` for ``samples`` samples: one around every 160th of them."""
    return 1 + samples // HOP


def log_mel(waveform: Tensor) -> Tensor:
    """Compute the log power in 80 mel bands. Frame t is centred on sample 160 t; beyond the ends is silence.

    float32 [samples] at 16 kHz, in [-1, 1] → [feature_frames(samples), 80].
    """
    window = torch.hann_window(WINDOW, dtype=torch.float64)
    # In 64 bits, for twice the time of 32, where the rounding of loud bins drowns quiet ones (2e-3 in the logarithm).
    spectrum = torch.stft(
        waveform.double(),
        FFT,
        HOP,
        WINDOW,
        window,
        center=True,
        pad_mode="constant",
        onesided=True,
        return_complex=True,
    )
    power = spectrum.real.square() + spectrum.imag.square()
    return (_mel_filters() @ power).clamp_min(FLOOR).log().T.to(waveform.dtype, memory_format=torch.contiguous_format)


def normalise(features: Tensor) -> Tensor:
    """Scale each band (column) of ``features`` [frames, bands] to mean 0 and standard deviation 1 over time."""
    deviation, mean = torch.std_mean(features, dim=0, correction=0)
    return (features - mean) / (deviation + EPSILON)


def extract(waveform: Tensor) -> Tensor:
    """Compute normalised log-mel features [frames, 80] of ``waveform`` [samples] at 16 kHz."""
    return normalise(log_mel(waveform))


@dataclass(frozen=True)
class SpecAugment:
    """Random masks over bands and frames (Park et al. 2019, "SpecAugment"), without its time warp.

    A mask's width is uniform from 0 to the largest allowed; its place is uniform too. Masked values become 0, the
    mean of normalised features. No time mask is wider than ``time_share`` of the utterance (p in the paper's section
    3), so that short ones keep most of their words.
    """

    frequency_masks: int = 2
    frequency_width: int = 20
    time_masks: int = 2
    time_width: int = 100
    time_share: float = 0.2

    def __call__(self, features: Tensor, rng: np.random.Generator) -> Tensor:
        """Mask a copy of ``features`` [frames, bands], with draws from ``rng`` alone."""
        frames, bands = features.shape
        masked = features.clone()
        for _ in range(self.frequency_masks):
            masked[:, _span(rng, bands, self.frequency_width)] = 0
        for _ in range(self.time_masks):
            masked[_span(rng, frames, min(self.time_width, int(self.time_share * frames)))] = 0
        return masked


def _span(rng: np.random.Generator, size: int, widest: int) -> slice:
    width = int(rng.integers(min(widest, size) + 1))
    start = int(rng.integers(size - width + 1))
    return slice(start, start + width)


@lru_cache(maxsize=1)
def _mel_filters() -> Tensor:
    """Make triangles of height 1 whose corners are evenly spaced in mel from 0 to 8 kHz: [80, 257].

    The scale is that of Slaney's Auditory Toolbox (1998): 3 mel are 200 Hz up to 1 kHz (15 mel); from there 27 mel are
    a factor of 6.4. Unlike on the formula 2595 log10(1 + f/700), its low bands are wide enough for every filter to
    cover a bin of 31 Hz.
    """
    step = np.log(6.4) / 27
    mel = np.linspace(0.0, 15.0 + np.log(RATE_HZ / 2 / 1000.0) / step, MELS + 2)
    corners = np.where(mel < 15.0, mel * (200 / 3), 1000.0 * np.exp((mel - 15.0) * step))
    frequencies = np.fft.rfftfreq(FFT, 1 / RATE_HZ)
    left = corners[:-2, None]
    centre = corners[1:-1, None]
    right = corners[2:, None]
    rising = (frequencies - left) / (centre - left)
    falling = (right - frequencies) / (right - centre)
    return torch.from_numpy(np.clip(np.minimum(rising, falling), 0, None))
