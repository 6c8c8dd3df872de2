"""Recordings and manifests for tests of the speech task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile


def sound(seconds: float, rate: int = 16_000, *, seed: int = 0) -> np.ndarray:
    """Noise in [-0.5, 0.5]: float64, shape [samples]."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, round(seconds * rate))


def write_audio(path: Path, wave: np.ndarray, rate: int = 16_000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wave, rate)
    return path


def write_lines(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    """A manifest; text stands for a line as it is."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def make_recordings(folder: Path, number: int) -> Path:
    """``number`` short recordings of noise, each with a transcript of its own; returns their manifest."""
    texts = ("ON", "OFF", "GO UP", "STOP", "LIGHT", "FIVE SIX")
    lines = []
    for index in range(number):
        file = write_audio(folder / f"{index}.wav", sound(0.4 + 0.05 * (index % 9), seed=index))
        lines.append({"audio_path": file.name, "text": texts[index % len(texts)]})
    return write_lines(folder / "all.jsonl", lines)
