"""Recordings on disk (WAV, FLAC, OGG, MP3) as 16 kHz mono; and other sample rates."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.arithmetic import ceil_div
from lockstep.errors import DataError

#: Samples a second of everything behind this module.
RATE_HZ = 16_000

Waveform = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

#: Of the resampling filter: zero crossings of the sinc on each side of its centre; its cut-off, as a share of the
#: lower of the two Nyquist frequencies (room for its slope); and the Kaiser window's (1974), for about 80 dB.
ZERO_CROSSINGS = 40
ROLLOFF = 0.95
KAISER_BETA = 8.0
#: Coefficients are multiples of this, so that sums over 16-bit samples are exact in 64-bit floats, in any order
#: and on any machine.
COEFFICIENT_STEP = 2.0**-26


class AudioInfo(NamedTuple):
    """The header of a file."""

    frames: int
    rate: int

    @property
    def samples(self) -> int:
        """Its length at 16 kHz."""
        return resampled_length(self.frames, self.rate, RATE_HZ)


def read_info(path: Path | str) -> AudioInfo:
    """Read length and rate from the header of a file that is whole.

    It also seeks the last frame, which a file that was cut lacks, and reads samples that are floating-point numbers.

    Raises:
        DataError: no file, or none that can be read to its end; a sample is not finite.
    """
    with _opened(path) as file:
        info = AudioInfo(file.frames, file.samplerate)
        if info.frames and file.subtype in ("FLOAT", "DOUBLE") and not np.isfinite(file.read(always_2d=True)).all():
            raise ValueError("it has samples that are NaN or infinite")
        file.seek(max(0, info.frames - 1))
        if (info.frames and len(file.read(1)) != 1) or _is_cut(Path(path)):
            raise ValueError("it ends before its header says")
        return info


def read_audio(path: Path | str, offset: float = 0.0, duration: float | None = None) -> Waveform:
    """Read a recording, or ``duration`` seconds of it from ``offset`` seconds on, as 16 kHz mono (channels averaged).

    Returns:
        Samples in [-1, 1], shape [samples]; exactly round(duration · 16000) of them when ``duration`` is given.

    Raises:
        DataError: the file cannot be read, or is shorter than that.
    """
    with _opened(path) as file:
        rate = file.samplerate
        file.seek(round(offset * rate))
        # One frame more than enough: rounding must not make a resampled piece a sample short.
        frames = -1 if duration is None else round(duration * rate) + 1
        sound = file.read(frames, dtype="float32", always_2d=True)
        mono = sound[:, 0] if sound.shape[1] == 1 else sound.mean(axis=1)
        wave: Waveform = resample(mono, rate, RATE_HZ).astype(np.float32)
        samples = len(wave) if duration is None else round(duration * RATE_HZ)
        if len(wave) < samples:
            raise ValueError(f"it has {len(wave) / RATE_HZ:.3f} s of the {duration:.3f} s from {offset:.3f} s on")
        return wave[:samples]


@contextlib.contextmanager
def _opened(path: Path | str) -> Iterator[Any]:
    """Open ``path`` in libsndfile; what cannot be read in the body is a :class:`DataError`."""
    try:
        import soundfile
    except ImportError as error:
        raise DataError(
            "reading recordings needs the package soundfile", why=str(error), fix="pip install 'lockstep-train[speech]'"
        ) from None
    # A named pipe would be waited for, a device read for ever. (Path.is_file raises where a path is too long.)
    if not os.path.isfile(path):  # noqa: PTH113
        raise DataError(f"there is no file {path}", fix="check the path")
    try:
        with soundfile.SoundFile(path) as file:
            if file.format not in _FORMATS:
                raise ValueError(f"its format is {file.format}, not one of {', '.join(_FORMATS)}")
            yield file
    except (OSError, RuntimeError, ValueError) as error:  # libsndfile's errors are RuntimeErrors
        raise DataError(
            f"cannot read {path}", why=str(error), fix="restore the file, or convert it to WAV or FLAC"
        ) from None


#: By libsndfile's names. Of other formats with a header, it does not report that their samples end too early.
_FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")


def _is_cut(path: Path) -> bool:
    """Return whether a WAV file ends before its header says, which libsndfile does not report."""
    with path.open("rb") as file:
        is_wav = file.read(4) == b"RIFF"
        size = int.from_bytes(file.read(4), "little")
    # Streams of unknown length say 0 or nearly 2 GiB or more. The last chunk may lack the byte that makes it even.
    return is_wav and 0 < size < 2**31 - 2**16 and size + 8 > path.stat().st_size + 1


def resampled_length(samples: int, rate: int, target: int) -> int:
    """Count samples that :func:`resample` returns: the instants of the new grid within the recording."""
    return ceil_div(samples * target, rate)


def resample(waveform: npt.NDArray[Any], rate: int, target: int) -> Floats:
    """Convert ``waveform`` (samples,) at ``rate`` Hz to its recording at ``target`` Hz.

    Output sample n stands at the time of input sample n·rate/target; beyond its ends the recording is silent. A
    polyphase windowed-sinc filter: Smith, "Digital Audio Resampling", 'Theory of ideal bandlimited interpolation'.

    Returns:
        float64, shape [ceil(samples · target / rate)].
    """
    common = math.gcd(rate, target)
    up = target // common
    down = rate // common
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
    """Make one filter a phase, shape (up, taps): row p weighs the inputs around an output p/up after an input."""
    cutoff = ROLLOFF * min(1.0, up / down)
    half = math.ceil(ZERO_CROSSINGS / cutoff)
    fractions = (np.arange(up) * down % up) / up
    times = np.arange(1 - half, half + 1) - fractions[:, None]
    window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (times / half) ** 2, 0, None))) / np.i0(KAISER_BETA)
    ideal = cutoff * np.sinc(cutoff * times) * window
    ideal /= ideal.sum(axis=1, keepdims=True)  # a constant stays unchanged in every phase
    return np.round(ideal / COEFFICIENT_STEP) * COEFFICIENT_STEP
