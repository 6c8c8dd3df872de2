"""The speech that Lockstep makes itself: digits and commands, spoken by eSpeak NG, once per machine.

``<folder>/{train,val,test}.wav`` hold the utterances of a split one after another, ``….jsonl`` are their manifests, and
``set.json`` says how the set was made and what its files hash to. A sentence belongs to one split by a hash of its
text, and a voice to one by a table: no split says what another one says, or speaks with a voice of another.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lockstep.data.download import hash_file
from lockstep.errors import DataError, RunFolderError, StorageError
from lockstep.hardware.detect import usable_cores
from lockstep.readers.files import cache_folder
from lockstep.recipes.speech.audio import RATE_HZ
from lockstep.recipes.speech.espeak import PACKAGE, REINSTALL, Line, engine_version
from lockstep.recipes.speech.manifest import write_manifest
from lockstep.rundir.files import TEMPORARY, make_folder, read_json, write_json

T = TypeVar("T")

SPLITS = ("train", "val", "test")
SET_PREFIX = "speech-"
#: Lines that one process speaks; part of the set's identity, since eSpeak's samples depend on earlier lines.
SHARD_LINES = 250
#: Raise it when the same lines come to mean other samples.
VERSION = 1

#: Of a hundred hashes, how many are for test and for validation; the rest is for training.
TEST_PERCENT = 15
VAL_PERCENT = 15
#: Share of sentences that are strings of digits, and their lengths.
DIGITS_SHARE = 0.5
FEWEST_DIGITS = 2
MOST_DIGITS = 6

#: Commands; a name in braces stands for one of its words.
COMMANDS = (
    "TURN {SWITCH} THE {DEVICE}",
    "TURN {SWITCH} THE {DEVICE} IN THE {ROOM}",
    "TURN THE {ROOM} {DEVICE} {SWITCH}",
    "{OPEN} THE {COLOUR} {THING}",
    "{OPEN} THE {THING} IN THE {ROOM}",
    "DON'T {OPEN} THE {THING}",
    "GO {DIRECTION} {DIGIT} STEPS",
    "GO {DIRECTION} AND THEN {DIRECTION}",
    "SET THE ALARM IN {DIGIT} {UNIT}",
    "TURN {DIRECTION} IN {DIGIT} {UNIT}",
    "MAKE THE {ROOM} LIGHT {COLOUR}",
    "WHAT'S IN THE {COLOUR} {THING}",
)
_WORDS = {
    "SWITCH": ("ON", "OFF"),
    "OPEN": ("OPEN", "CLOSE", "LOCK"),
    "DEVICE": ("LIGHT", "RADIO", "FAN", "HEATER", "CAMERA", "ALARM"),
    "ROOM": ("KITCHEN", "BEDROOM", "GARAGE", "OFFICE"),
    "THING": ("DOOR", "WINDOW", "GATE", "BOX"),
    "DIRECTION": ("LEFT", "RIGHT", "UP", "DOWN", "FORWARD", "BACK"),
    "COLOUR": ("RED", "GREEN", "BLUE", "YELLOW"),
    "UNIT": ("SECONDS", "MINUTES", "HOURS"),
    "DIGIT": ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE"),
}

#: Variants of eSpeak NG, by split. Those that are one voice with small changes are in the same split: between voices of
#: different splits, the mean log-mel spectra of a sentence differ by at least 0.4 (root mean square, natural units; the
#: median of all pairs is 2). The most extreme ones train: a recogniser cannot be judged by a voice unlike all that it
#: heard. Left out are whispers, echoing robots, and variants that rush or distort words.
VOICES: dict[str, tuple[str, ...]] = {
    "train": (
        *("Alex", "Alicia", "Andy", "Denis", "Diogo", "Gene", "Gene2", "Henrique", "Jacky", "Lee", "Mario"),
        *("Michael", "Mike", "Mr serious", "Reed", "Storm", "Tweaky", "adam", "aunty", "benjamin", "croak"),
        *("ed", "edward2", "f1", "f3", "f4", "grandma", "grandpa", "gustave", "ian", "john", "klatt3"),
        *("klatt4", "klatt5", "klatt6", "m1", "m2", "m4", "m5", "m6", "m8", "max", "michel", "miguel"),
        *("mike2", "norbert", "pablo", "paul", "rob", "robert", "sandro", "shelby", "steph", "steph2"),
        *("steph3", "victor", "zac"),
    ),
    "val": ("Annie", "boris", "david", "f5", "iven", "iven2", "iven3", "iven4", "m7", "travis"),
    "test": ("Nguyen", "belinda", "edward", "f2", "linda", "m3", "marcelo", "quincy"),
}
#: American, and British as it is called by its file.
ACCENTS = ("en-us", "en")

#: Words a minute, and pitch and its range in eSpeak's hundredths (50 is the variant's default).
SLOWEST_WPM = 120
FASTEST_WPM = 165
LOWEST_PITCH = 30
HIGHEST_PITCH = 70

_log = logging.getLogger(__name__)


def split_of(sentence: str) -> str:
    """Return ``train``, ``val`` or ``test``: the only split that may say ``sentence``."""
    percentile = int.from_bytes(hashlib.blake2b(sentence.encode(), digest_size=8).digest(), "little") % 100
    if percentile < TEST_PERCENT:
        return "test"
    return "val" if percentile < TEST_PERCENT + VAL_PERCENT else "train"


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """Draw one of ``items``, alike in every Python, unlike ``rng.choice``: ``random()`` alone is promised."""
    return items[int(rng.random() * len(items))]


def draw_sentence(rng: random.Random, split: str) -> str:
    """Draw a random sentence of ``split``, in the symbols of the vocabulary."""
    while True:
        if rng.random() < DIGITS_SHARE:
            words = ["{DIGIT}"] * pick(rng, range(FEWEST_DIGITS, MOST_DIGITS + 1))
        else:
            words = pick(rng, COMMANDS).split()
        sentence = " ".join(pick(rng, _WORDS[word[1:-1]]) if word.startswith("{") else word for word in words)
        if split_of(sentence) == split:
            return sentence


def draw_line(rng: random.Random, split: str) -> Line:
    pitches = range(LOWEST_PITCH, HIGHEST_PITCH + 1)
    who = draw_sentence(rng, split), pick(rng, VOICES[split]), pick(rng, ACCENTS)
    speed = pick(rng, range(SLOWEST_WPM, FASTEST_WPM + 1))
    return Line(*who, speed, pick(rng, pitches), pick(rng, pitches), pick(rng, range(1, 2**31)))


@dataclass(frozen=True)
class Recipe:
    """The number of utterances, and the seed of their texts and voices."""

    train: int = 4000
    val: int = 400
    test: int = 600
    seed: int = 0

    def lines(self, split: str) -> list[Line]:
        """Return the lines of ``split``, the same on every machine."""
        rng = random.Random(f"{self.seed} {split}")
        return [draw_line(rng, split) for _ in range(getattr(self, split))]


def synthesised_folder(recipe: Recipe, root: Path | None = None) -> Path:
    """Return the folder of ``recipe``'s set, in ``root`` or the user's cache; its name hashes all that matters."""
    spoken = [recipe.lines(split) for split in SPLITS]
    identity = json.dumps([VERSION, SHARD_LINES, PACKAGE, engine_version(), spoken])
    name = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return (root if root is not None else cache_folder()) / f"{SET_PREFIX}{name}"


def synthesise(recipe: Recipe, root: Path | None = None, *, processes: int | None = None) -> Path:
    """Make the set of ``recipe`` unless it is there, check its hashes if it is, and return its folder.

    Whoever comes second while it is being made waits. A process that dies leaves no half set behind. The samples do not
    depend on ``processes``, which speak at a time; ``None``: one a core.

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


@contextlib.contextmanager
def _only_maker(folder: Path) -> Iterator[None]:
    with folder.with_name(f".{folder.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file, or dying, gives it back
        for leftover in folder.parent.glob(f".{folder.name}{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a maker that was killed
        yield


def _check(folder: Path) -> None:
    try:
        recorded = read_json(folder / "set.json")["files"]
        wrong = [name for name, digest in recorded.items() if hash_file(folder / name) != digest]
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
    lines = {split: recipe.lines(split) for split in SPLITS}
    shards: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for split, split_lines in lines.items():
        for first in range(0, len(split_lines), SHARD_LINES):
            shards[split].append(jobs / f"{split}-{first}.json")
            shards[split][-1].write_text(json.dumps(split_lines[first : first + SHARD_LINES]), encoding="utf-8")
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
    command = [sys.executable, "-m", "lockstep.recipes.speech.espeak"]
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
            fix=REINSTALL,
        )


def _assemble(folder: Path, split: str, lines: list[Line], jobs: list[Path]) -> None:
    """Join the shards of a split to one WAV file and its manifest."""
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
                part = {"audio_path": f"{split}.wav", "offset": start / RATE_HZ, "duration": length / RATE_HZ}
                entries.append({**part, "text": line.text, "voice": line.voice, "accent": line.accent})
                start += length
    write_manifest(folder / f"{split}.jsonl", entries)
