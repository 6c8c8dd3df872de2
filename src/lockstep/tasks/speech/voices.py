"""Voice variants of eSpeak NG, divided among the splits so that no two splits have a voice in common.

Variants that are one voice with small changes stand in the same split: between voices of different splits, the mean
log-mel spectra of a sentence differ by at least 0.4 (root mean square, natural units; the median of all pairs is 2).
The most extreme ones train: a recogniser cannot be judged by a voice unlike all that it heard. Left out are whispers,
echoing robots, and variants that rush or distort words.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from lockstep.tasks.speech.sentences import draw_sentence, pick

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
