"""eSpeak NG, a formant synthesiser, through its C library (``speak_lib.h``, ``espeak_ng.h``).

The library is loaded from the package espeakng-loader. It is licensed under the GPL, so it is an extra that the user
installs, and nothing of it is part of Lockstep.

``python -m lockstep.recipes.speech.espeak JOB.json`` speaks a part of the synthesised set: it gets lines and writes
their samples. A fresh process for each part makes the samples independent of how many of them run at a time.
"""

from __future__ import annotations

import ctypes
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.hardware.parent_death import watch_pipe
from lockstep.recipes.speech.audio import RATE_HZ, resample

PACKAGE = "espeakng-loader"
REINSTALL = f"reinstall {PACKAGE}: pip install --force-reinstall {PACKAGE}"

_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: no thread, no sound card
_DONT_EXIT = 0x8000  # espeakINITIALIZE_DONT_EXIT
#: Values of espeak_PARAMETER.
_RATE = 1
_PITCH = 3
_RANGE = 4
_CHARACTERS = 1  # POS_CHARACTER
_UTF8 = 1  # espeakCHARS_UTF8
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Line(NamedTuple):
    """One sentence and how it is said: by a variant of eSpeak NG, with its pitch and range in hundredths."""

    text: str
    voice: str
    accent: str
    words_per_minute: int
    pitch: int
    pitch_range: int
    seed: int


def engine_version() -> str:
    """Return the installed package's version. Raises :class:`DataError`: it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise DataError(
            f"the speech that comes with Lockstep is made on this machine, by the package {PACKAGE}",
            why="it is not installed",
            fix="pip install 'lockstep-train[speech]', or bring recordings with task.train_manifest=FILE",
        ) from None


class Synthesiser:
    """The library, set up; at most one in a process. Raises :class:`DataError`: it is not installed, or does not start.

    Its samples depend on earlier lines: the same lines in the same order, first thing in a process, give the same
    samples.
    """

    def __init__(self) -> None:
        engine_version()
        import espeakng_loader

        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        data: str = espeakng_loader.get_data_path()
        self._variants = Path(data) / "voices" / "!v"
        self.rate: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data.encode(), _DONT_EXIT)
        if self.rate <= 0:
            raise DataError(
                "eSpeak NG does not start", why=f"espeak_Initialize returns {self.rate} for {data}", fix=REINSTALL
            )
        self._library.espeak_Synth.argtypes = (
            *(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint, ctypes.c_uint),
            *(ctypes.c_void_p, ctypes.c_void_p),
        )
        self._pieces: list[npt.NDArray[np.int16]] = []
        self._callback = _Callback(self._take)  # must live as long as the library may call it
        self._library.espeak_SetSynthCallback(self._callback)

    def say(self, line: Line) -> npt.NDArray[np.int16]:
        """Speak ``line``: samples at :attr:`rate` Hz. Raises :class:`DataError` when the library refuses it."""
        voice = f"{line.accent}+{line.voice}"
        status = self._library.espeak_SetVoiceByName(voice.encode())
        # A variant that it does not know, it leaves out without a word.
        self._check(status if (self._variants / line.voice).is_file() else -1, f"has no voice {voice}")
        for parameter, value in ((_RATE, line.words_per_minute), (_PITCH, line.pitch), (_RANGE, line.pitch_range)):
            self._check(self._library.espeak_SetParameter(parameter, value, 0), f"takes no {value} for {parameter}")
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(line.seed))  # its breath and flutter are random
        self._pieces.clear()
        text = line.text.lower().encode()  # capitals may be spelled out
        status = self._library.espeak_Synth(text, len(text) + 1, 0, _CHARACTERS, 0, _UTF8, None, None)
        self._check(status, f"does not say {line.text!r}")
        return np.concatenate(self._pieces)

    def _take(self, samples: Any, count: int, events: int | None) -> int:
        if samples and count > 0:
            self._pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def _check(self, status: int, complaint: str) -> None:
        if status != 0:
            raise DataError(f"eSpeak NG {complaint}", why=f"it returns {status}", fix=REINSTALL)


def speak(lines: list[Line], target: Path) -> None:
    """Write ``samples`` (int16, 16 kHz, one utterance after another) and ``lengths`` (samples of each) as ``.npz``."""
    synthesiser = Synthesiser()
    limits = np.iinfo(np.int16)
    sounds = [resample(synthesiser.say(line), synthesiser.rate, RATE_HZ) for line in lines]
    waves = [np.clip(np.round(sound), limits.min, limits.max).astype(np.int16) for sound in sounds]
    np.savez(target, samples=np.concatenate(waves), lengths=np.array([len(wave) for wave in waves]))


if __name__ == "__main__":
    watch_pipe(0)  # the parent has the other end; this process ends with it
    job = Path(sys.argv[1])
    speak([Line(*line) for line in json.loads(job.read_text(encoding="utf-8"))], job.with_suffix(".npz"))
