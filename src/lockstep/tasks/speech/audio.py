"""Recordings on disk: WAV, FLAC, OGG and whatever else libsndfile reads, as 16 kHz mono."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.tasks.speech.resample import resample, resampled_length

#: Samples a second of everything behind this module.
RATE_HZ = 16_000

Waveform = npt.NDArray[np.float32]

#: What libsndfile raises (its errors are RuntimeErrors), and what paths that are none do.
_UNREADABLE = (OSError, RuntimeError, ValueError)


class AudioInfo(NamedTuple):
    """What a file's header says."""

    frames: int
    rate: int

    @property
    def samples(self) -> int:
        """Its length at 16 kHz."""
        return resampled_length(self.frames, self.rate, RATE_HZ)


def soundfile() -> Any:
    """The library. Raises :class:`DataError` where it is not installed."""
    try:
        import soundfile
    except ImportError as error:
        raise DataError(
            "reading recordings needs the package soundfile", why=str(error), fix="pip install 'lockstep-train[speech]'"
        ) from None
    return soundfile


def read_info(path: Path | str) -> AudioInfo:
    """Length and rate from the header of a file that is whole.

    It also seeks the last frame, which a file that was cut lacks, and reads samples that are floating-point numbers.

    Raises:
        DataError: no file, or none that can be read to its end; a sample is not finite.
    """
    library = soundfile()
    _refuse_others(path)
    try:
        with library.SoundFile(path) as file:
            info = AudioInfo(file.frames, file.samplerate)
            if info.frames and file.subtype in ("FLOAT", "DOUBLE") and not np.isfinite(file.read(always_2d=True)).all():
                raise _unreadable(path, "it has samples that are NaN or infinite")
            if file.format == "WAV" and _is_cut(Path(path)):
                raise _unreadable(path, "it ends before its header says")
            if info.frames:
                file.seek(info.frames - 1)
                if len(file.read(1)) != 1:
                    raise _unreadable(path, "it ends before its header says")
            return info
    except _UNREADABLE as error:
        raise _unreadable(path, error) from None


def read_audio(path: Path | str, offset: float = 0.0, duration: float | None = None) -> Waveform:
    """A recording, or ``duration`` seconds of it from ``offset`` seconds on, as 16 kHz mono (channels averaged).

    Returns:
        Samples in [-1, 1], shape [samples]; exactly round(duration · 16000) of them when ``duration`` is given.

    Raises:
        DataError: the file cannot be read, or is shorter than that.
    """
    library = soundfile()
    _refuse_others(path)
    try:
        with library.SoundFile(path) as file:
            rate = file.samplerate
            file.seek(round(offset * rate))
            # One frame more than enough: rounding must not make a resampled piece a sample short.
            frames = -1 if duration is None else round(duration * rate) + 1
            sound = file.read(frames, dtype="float32", always_2d=True)
    except _UNREADABLE as error:
        raise _unreadable(path, error) from None
    mono = sound[:, 0] if sound.shape[1] == 1 else sound.mean(axis=1)
    wave: Waveform = resample(mono, rate, RATE_HZ).astype(np.float32)
    if duration is None:
        return wave
    wanted = round(duration * RATE_HZ)
    if len(wave) < wanted:
        raise _unreadable(path, f"it has {len(wave) / RATE_HZ:.3f} s of the {duration:.3f} s from {offset:.3f} s on")
    return wave[:wanted]


def _is_cut(wav: Path) -> bool:
    """Whether the samples of a WAV file end before its header says, which libsndfile does not report."""
    size = wav.stat().st_size
    with wav.open("rb") as file:
        file.seek(12)
        while len(head := file.read(8)) == 8:
            name, length = head[:4], int.from_bytes(head[4:], "little")
            if name == b"data":  # streams that do not know their length say 0 or the largest number
                return length < 2**31 - 1 and file.tell() + length > size
            file.seek(length + length % 2, os.SEEK_CUR)
    return False


def _refuse_others(path: Path | str) -> None:
    """A named pipe would be waited for, a device read for ever."""
    if not os.path.isfile(path):  # noqa: PTH113 (Path.is_file raises where a path is too long)
        raise DataError(f"there is no file {path}", fix="check the path")


def _unreadable(path: Path | str, why: object) -> DataError:
    return DataError(f"cannot read {path}", why=str(why), fix="restore the file, or convert it to WAV or FLAC")
