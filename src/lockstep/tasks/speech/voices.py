"""What the synthesised voices say, strings of digits and short commands, and whose voices they are.

A sentence belongs to one split by a hash of its text, and a voice to one by a table: no split ever says what another
one says, or speaks with a voice of another.

Variants that are one voice with small changes stand in the same split: between voices of different splits, the mean
log-mel spectra of a sentence differ by at least 0.4 (root mean square, natural units; the median of all pairs is 2).
The most extreme ones train: a recogniser cannot be judged by a voice unlike all that it heard. Left out are whispers,
echoing robots, and variants that rush or distort words.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

#: Of a hundred hashes, how many are for test and for validation; the rest is for training.
TEST_PERCENT, VAL_PERCENT = 15, 15
#: Share of sentences that are strings of digits, and how long these are.
DIGITS_SHARE, FEWEST_DIGITS, MOST_DIGITS = 0.5, 2, 6

DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
DEVICES = ("LIGHT", "RADIO", "FAN", "HEATER", "CAMERA", "ALARM")
ROOMS = ("KITCHEN", "BEDROOM", "GARAGE", "OFFICE")
THINGS = ("DOOR", "WINDOW", "GATE", "BOX")
DIRECTIONS = ("LEFT", "RIGHT", "UP", "DOWN", "FORWARD", "BACK")
COLOURS = ("RED", "GREEN", "BLUE", "YELLOW")
UNITS = ("SECONDS", "MINUTES", "HOURS")

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
    "DEVICE": DEVICES,
    "ROOM": ROOMS,
    "THING": THINGS,
    "DIRECTION": DIRECTIONS,
    "COLOUR": COLOURS,
    "UNIT": UNITS,
    "DIGIT": DIGITS,
}

#: Variants of eSpeak NG, by split.
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

#: Words a minute, and pitch and its range in eSpeak's hundredths (50 is the variant's own).
SLOWEST_WPM, FASTEST_WPM = 120, 165
LOWEST_PITCH, HIGHEST_PITCH = 30, 70


def split_of(sentence: str) -> str:
    """``train``, ``val`` or ``test``: the only split that may say ``sentence``."""
    place = int.from_bytes(hashlib.blake2b(sentence.encode(), digest_size=8).digest(), "little") % 100
    if place < TEST_PERCENT:
        return "test"
    return "val" if place < TEST_PERCENT + VAL_PERCENT else "train"


def draw_sentence(rng: random.Random, split: str) -> str:
    """A random sentence of ``split``, in the symbols of the vocabulary."""
    while True:
        sentence = _digits(rng) if rng.random() < DIGITS_SHARE else _command(rng)
        if split_of(sentence) == split:
            return sentence


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """One of ``items``. Unlike ``rng.choice``, it draws the same in every Python: ``random()`` is what is promised."""
    return items[int(rng.random() * len(items))]


def _digits(rng: random.Random) -> str:
    length = FEWEST_DIGITS + int(rng.random() * (MOST_DIGITS - FEWEST_DIGITS + 1))
    return " ".join(pick(rng, DIGITS) for _ in range(length))


def _command(rng: random.Random) -> str:
    parts = []
    for word in pick(rng, COMMANDS).split():
        parts.append(pick(rng, _WORDS[word[1:-1]]) if word.startswith("{") else word)
    return " ".join(parts)


class Line(NamedTuple):
    """One sentence and how it is said."""

    text: str
    voice: str
    accent: str
    words_per_minute: int
    pitch: int
    pitch_range: int
    seed: int


def draw_line(rng: random.Random, split: str) -> Line:
    """A random sentence of ``split`` by one of its voices."""
    return Line(
        draw_sentence(rng, split),
        pick(rng, VOICES[split]),
        pick(rng, ACCENTS),
        pick(rng, range(SLOWEST_WPM, FASTEST_WPM + 1)),
        pick(rng, range(LOWEST_PITCH, HIGHEST_PITCH + 1)),
        pick(rng, range(LOWEST_PITCH, HIGHEST_PITCH + 1)),
        pick(rng, range(1, 2**31)),
    )
