"""Another sample rate by a polyphase windowed-sinc filter."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Zero crossings of the sinc on each side of its centre.
ZERO_CROSSINGS = 40
#: Where the filter cuts off, as a share of the lower of the two Nyquist frequencies: room for its slope.
ROLLOFF = 0.95
#: Of the Kaiser window: about 80 dB of attenuation (Kaiser 1974).
KAISER_BETA = 8.0
#: Coefficients are multiples of this, so that sums over 16-bit samples are exact in 64-bit floats, in any order
#: and on any machine.
COEFFICIENT_STEP = 2.0**-26


def resampled_length(samples: int, rate: int, target: int) -> int:
    """Samples that :func:`resample` returns: the instants of the new grid within the recording."""
    return -(-samples * target // rate)


def resample(waveform: npt.NDArray[Any], rate: int, target: int) -> Floats:
    """``waveform`` (samples,) at ``rate`` Hz as it would have been recorded at ``target`` Hz.

    Output sample n stands at the time of input sample n·rate/target; beyond its ends the recording is silent.
    Method: Smith, "Digital Audio Resampling", section 'Theory of ideal bandlimited interpolation'.

    Returns:
        float64, shape [ceil(samples · target / rate)].
    """
    common = math.gcd(rate, target)
    up, down = target // common, rate // common
    wave = np.asarray(waveform, dtype=np.float64)
    if up == down:
        return wave
    filters = _filters(up, down)
    half = filters.shape[1] // 2
    length = resampled_length(len(wave), rate, target)
    padded = np.pad(wave, (half - 1, half + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, filters.shape[1])
    result = np.empty(length)
    for phase in range(min(up, length)):
        first = phase * down // up
        rows = len(range(phase, length, up))
        result[phase::up] = windows[first : first + (rows - 1) * down + 1 : down] @ filters[phase]
    return result


@lru_cache(maxsize=8)
def _filters(up: int, down: int) -> Floats:
    """One filter a phase, shape (up, taps): row p weighs the inputs around an output that lies p/up after an input."""
    cutoff = ROLLOFF * min(1.0, up / down)
    half = math.ceil(ZERO_CROSSINGS / cutoff)
    fractions = (np.arange(up) * down % up) / up
    times = np.arange(1 - half, half + 1) - fractions[:, None]
    window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (times / half) ** 2, 0, None))) / np.i0(KAISER_BETA)
    ideal = cutoff * np.sinc(cutoff * times) * window
    # A constant stays what it is, in every phase.
    ideal /= ideal.sum(axis=1, keepdims=True)
    return np.round(ideal / COEFFICIENT_STEP) * COEFFICIENT_STEP
