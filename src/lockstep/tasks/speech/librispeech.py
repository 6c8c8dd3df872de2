"""LibriSpeech as its archives unpack: ``<split>/<speaker>/<chapter>/*.flac`` and a ``.trans.txt`` a chapter.

Panayotov, Chen, Povey, Khudanpur, "Librispeech: an ASR corpus based on public domain audio books", ICASSP 2015;
https://www.openslr.org/12, CC BY 4.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from lockstep.data.download import download, extract, put_unpacked
from lockstep.errors import ConfigError, DataError
from lockstep.tasks.speech.manifest import Row

FOLDER = "LibriSpeech"
URL = "https://www.openslr.org/resources/12"
#: SHA-256 of ``<split>.tar.gz``; the publisher gives MD5 sums, these are what several independent projects recorded.
ARCHIVES = {
    "dev-clean": "76f87d090650617fca0cac8f88b9416e0ebf80350acb97b343a85fa903728ab3",
    "dev-other": "12661c48e8c3fe1de2c1caa4c3e135193bfb1811584f11f569dd12645aa84365",
    "test-clean": "39fde525e59672dc6d1551919b1478f724438a95aa55f874b576be21967e6c23",
    "test-other": "d09c181bba5cf717b3dee7d4d592af11a3ee3a09e08ae025c5506f6ebe961c29",
    "train-clean-100": "d4ddd1d5a6ab303066f14971d768ee43278a5f2a0aa43dc716b0e64ecbbbf6e2",
    "train-clean-360": "146a56496217e96c14334a160df97fffedd6e0a04e66b9c5af0d40be3c792ecf",
    "train-other-500": "ddb22f27f96ec163645d53215559df6aa36515f26e01dd70798188350adcb6d2",
}
#: Of the largest split, unpacked, and some more.
MAX_UNPACKED_BYTES = 64 * 1024**3


def find_librispeech(folder: Path) -> dict[str, Path]:
    """The splits that lie in ``folder``, or in ``LibriSpeech`` within it, by their names."""
    places = [place / name for name in ARCHIVES for place in (folder, folder / FOLDER)]
    return {place.name: place for place in places if place.is_dir()}


def librispeech_rows(split: Path) -> list[Row]:
    """Every transcript of a split's folder, with the path of its recording. Raises :class:`DataError` without any."""
    rows = []
    for transcripts in sorted(split.glob("*/*/*.trans.txt")):
        try:
            lines = transcripts.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {transcripts}", why=str(error), fix="unpack the archive again") from None
        for line in filter(None, lines):
            name, _, text = line.partition(" ")
            rows.append(Row(name, str(transcripts.parent / f"{name}.flac"), text))
    if not rows:
        raise DataError(
            f"{split} holds no transcripts",
            why="looked for <speaker>/<chapter>/*.trans.txt in it",
            fix="unpack the archive again",
        )
    return rows


def fetch_librispeech(
    names: Iterable[str], folder: Path, *, url: str = URL, archives: Mapping[str, str] = ARCHIVES
) -> None:
    """Download and unpack the splits ``names`` into ``folder``, but for those that are there.

    Raises:
        ConfigError: no such split.
        DataError: one cannot be had, or is not what was expected.
    """
    wanted = list(names)
    unknown = sorted(set(wanted) - archives.keys())
    if unknown:
        raise ConfigError(
            f"LibriSpeech has no split {', '.join(unknown)}", fix=f"choose among {', '.join(sorted(archives))}"
        )
    for name in wanted:
        if name not in find_librispeech(folder):
            archive = download(f"{url}/{name}.tar.gz", folder / f"{name}.tar.gz", archives[name])
            put_unpacked(archive, folder / FOLDER / name, partial(_unpack, archive, name))


def _unpack(archive: Path, name: str, temporary: Path) -> Path:
    return extract(archive, temporary / "out", max_bytes=MAX_UNPACKED_BYTES) / FOLDER / name
