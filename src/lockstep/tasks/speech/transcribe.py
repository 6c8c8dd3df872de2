"""Transcribing recordings with a trained recogniser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from lockstep.errors import DataError, UnsupportedError
from lockstep.models.recogniser import output_lengths
from lockstep.tasks.speech.audio import RATE_HZ, read_audio
from lockstep.tasks.speech.features import extract
from lockstep.tasks.speech.task import SpeechTask


class Transcript(NamedTuple):
    """``log_probability`` is natural, of the path (greedy) or of the text (beam); ``duration`` in seconds."""

    file: str
    text: str
    duration: float
    log_probability: float


def transcribe(task: object, model: nn.Module, files: Iterable[Path]) -> Iterator[Transcript]:
    """One transcript a file, in order.

    Args:
        task: the run's; a :class:`SpeechTask`.
        model: in evaluation mode, with its weights.

    Raises:
        UnsupportedError: another task. DataError: a file that cannot be read, or has no samples.
    """
    if not isinstance(task, SpeechTask):
        raise UnsupportedError(
            "this run recognises no speech", why=f"its task is {type(task).__name__}", fix="name a run of `speech`"
        )
    for file in files:
        wave = read_audio(file)
        if not len(wave):
            raise DataError(f"{file} has no samples", fix="check the recording")
        features = extract(torch.from_numpy(wave))
        lengths = torch.tensor([len(features)])
        with torch.inference_mode():
            log_probs = model(features[None], lengths)
            heard = task.decode(log_probs, output_lengths(lengths, task.downsample))
        yield Transcript(str(file), heard.texts(task.vocabulary)[0], len(wave) / RATE_HZ, float(heard.scores[0]))
