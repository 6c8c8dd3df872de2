"""The speech that Lockstep makes itself: digits and commands, spoken by eSpeak NG, once per machine.

``<folder>/{train,val,test}.wav`` hold the utterances of a split one after another, ``….jsonl`` are their manifests, and
``set.json`` says how the set was made and what its files hash to. Splits share no voice and no sentence.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import wave
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.download import hash_file
from lockstep.data.files import cache_folder
from lockstep.errors import DataError, RunFolderError, StorageError
from lockstep.hardware.host import usable_cores
from lockstep.tasks.speech.audio import RATE_HZ
from lockstep.tasks.speech.espeak import PACKAGE, engine_version
from lockstep.tasks.speech.manifest import Utterance, read_manifest, write_manifest
from lockstep.tasks.speech.voices import Line, draw_line
from lockstep.telemetry.files import TEMPORARY, make_folder, read_json, write_json

SPLITS = ("train", "val", "test")
SET_PREFIX = "speech-"
#: Lines that one process speaks; part of the set's identity, since what eSpeak says depends on what it said before.
SHARD_LINES = 250
#: Raise it when the same lines come to mean other samples.
VERSION = 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How many utterances to make, and the seed of what is said and by whom."""

    train: int = 4000
    val: int = 400
    test: int = 600
    seed: int = 0

    def lines(self, split: str) -> list[Line]:
        """What is said in ``split``, the same on every machine."""
        rng = random.Random(f"{self.seed} {split}")
        return [draw_line(rng, split) for _ in range(getattr(self, split))]


def synthesised_folder(recipe: Recipe, root: Path | None = None) -> Path:
    """Where the set of ``recipe`` belongs: in ``root`` or the user's cache, by a name that hashes all that matters."""
    spoken = [recipe.lines(split) for split in SPLITS]
    identity = json.dumps([VERSION, SHARD_LINES, PACKAGE, engine_version(), spoken])
    name = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return (root if root is not None else cache_folder()) / f"{SET_PREFIX}{name}"


def synthesise(recipe: Recipe, root: Path | None = None, *, processes: int | None = None) -> Path:
    """Make the set of ``recipe`` unless it is there, check its hashes if it is, and return its folder.

    Whoever comes second while it is being made waits. A process that dies leaves no half set behind.

    Args:
        processes: how many speak at a time; ``None``: one a core. The samples do not depend on it.

    Raises:
        DataError: eSpeak NG is not installed, the folder cannot be written, or the set was changed.
    """
    folder = synthesised_folder(recipe, root)
    if folder.is_dir():
        _check(folder)
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_maker(folder):
            if not folder.is_dir():
                _log.info("synthesising speech into %s", folder)
                make_folder(folder, lambda building: _fill(building, recipe, processes or usable_cores()))
    except (OSError, StorageError) as error:
        raise DataError(
            f"cannot write {folder}",
            why=error.why if isinstance(error, StorageError) else str(error),
            fix="free some space, or choose another place with --data-dir or XDG_CACHE_HOME",
        ) from error
    return folder


def synthesised(folder: Path, split: str) -> list[Utterance]:
    """The utterances of ``split`` in a folder of :func:`synthesise`."""
    return read_manifest(folder / f"{split}.jsonl")


@contextlib.contextmanager
def _only_maker(folder: Path) -> Iterator[None]:
    with folder.with_name(f".{folder.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file, or dying, gives it back
        for leftover in folder.parent.glob(f".{folder.name}{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a maker that was killed
        yield


def _check(folder: Path) -> None:
    try:
        known = read_json(folder / "set.json")["files"]
        wrong = [name for name, digest in known.items() if hash_file(folder / name) != digest]
    except (RunFolderError, OSError, KeyError, TypeError) as error:
        wrong = [str(error)]
    if wrong:
        raise DataError(
            f"the synthesised speech in {folder} is not as it was made",
            why=f"damaged: {', '.join(wrong)}",
            fix="remove the folder; it is made again",
        )


def _fill(folder: Path, recipe: Recipe, processes: int) -> None:
    jobs = folder / "jobs"
    jobs.mkdir()
    shards: dict[str, list[Path]] = {}
    lines = {split: recipe.lines(split) for split in SPLITS}
    for split in SPLITS:
        shards[split] = []
        for first in range(0, len(lines[split]), SHARD_LINES):
            shards[split].append(jobs / f"{split}-{first}.json")
            shards[split][-1].write_text(json.dumps(lines[split][first : first + SHARD_LINES]), encoding="utf-8")
    _speak([job for split in SPLITS for job in shards[split]], processes)
    for split in SPLITS:
        _assemble(folder, split, lines[split], shards[split])
    shutil.rmtree(jobs)
    files = {path.name: hash_file(path) for path in sorted(folder.iterdir())}
    write_json(folder / "set.json", {"recipe": asdict(recipe), PACKAGE: engine_version(), "files": files})


def _speak(jobs: list[Path], processes: int) -> None:
    """Run every job, at most ``processes`` at a time; none is left running whatever happens."""
    path = os.pathsep.join(os.path.abspath(entry or os.curdir) for entry in sys.path)
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lockstep.tasks.speech.espeak"]
    running: deque[tuple[Path, subprocess.Popen[bytes]]] = deque()
    try:
        for job in jobs:
            if len(running) == processes:
                _finish(*running.popleft())
            with job.with_suffix(".log").open("wb") as log:
                process = subprocess.Popen([*command, job], env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log)
            running.append((job, process))
        while running:
            _finish(*running.popleft())
    finally:
        for _, process in running:
            with process:
                process.kill()


def _finish(job: Path, process: subprocess.Popen[bytes]) -> None:
    with process:
        status = process.wait()
    if status != 0:
        log = job.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
        raise DataError(
            f"speech could not be synthesised: a process ended with status {status}",
            why=" ".join(log.splitlines()[-3:]),
            fix=f"reinstall {PACKAGE}: pip install --force-reinstall {PACKAGE}",
        )


def _assemble(folder: Path, split: str, lines: list[Line], jobs: list[Path]) -> None:
    """One WAV file and its manifest from the shards of a split."""
    entries: list[dict[str, Any]] = []
    start = 0
    with wave.open(str(folder / f"{split}.wav"), "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        for job in jobs:
            with np.load(job.with_suffix(".npz")) as spoken:
                file.writeframes(spoken["samples"].astype("<i2").tobytes())
                lengths = spoken["lengths"].tolist()
            for length in lengths:
                line = lines[len(entries)]
                place = {"audio_path": f"{split}.wav", "offset": start / RATE_HZ, "duration": length / RATE_HZ}
                entries.append({**place, "text": line.text, "voice": line.voice, "accent": line.accent})
                start += length
    write_manifest(folder / f"{split}.jsonl", entries)
