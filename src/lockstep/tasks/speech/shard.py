"""A process that speaks a fixed part of the synthesised set: ``python -m lockstep.tasks.speech.shard JOB.json``.

It gets lines and writes their samples. A fresh process for each part makes the samples independent of how many of
them run at a time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.hardware.parent_death import watch_pipe
from lockstep.tasks.speech.audio import RATE_HZ
from lockstep.tasks.speech.espeak import Synthesiser
from lockstep.tasks.speech.resample import resample
from lockstep.tasks.speech.voices import Line


def speak(lines: list[Line], target: Path) -> None:
    """Write ``samples`` (int16, 16 kHz, one utterance after another) and ``lengths`` (samples of each) as ``.npz``."""
    synthesiser = Synthesiser()
    waves = [_as_16_bit(resample(synthesiser.say(line), synthesiser.rate, RATE_HZ)) for line in lines]
    np.savez(target, samples=np.concatenate(waves), lengths=np.array([len(wave) for wave in waves]))


def _as_16_bit(wave: npt.NDArray[np.float64]) -> npt.NDArray[np.int16]:
    limits = np.iinfo(np.int16)
    return np.clip(np.round(wave), limits.min, limits.max).astype(np.int16)


if __name__ == "__main__":
    watch_pipe(0)  # the parent has the other end; this process ends with it
    job = Path(sys.argv[1])
    speak([Line(*line) for line in json.loads(job.read_text(encoding="utf-8"))], job.with_suffix(".npz"))
