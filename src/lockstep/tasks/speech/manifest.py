"""Utterances that people bring: manifests, and LibriSpeech.

A manifest has JSON lines of ``audio_path`` (relative to its folder, or absolute), ``text`` and ``duration``, and
optionally ``offset`` and ``sample_rate``. With ``offset`` (seconds), an utterance is ``duration`` seconds of a longer
recording from there on; without it, the whole recording. Other keys are left alone.

LibriSpeech is as its archives unpack: ``<split>/<speaker>/<chapter>/*.flac`` and a ``.trans.txt`` a chapter. Panayotov,
Chen, Povey, Khudanpur, "Librispeech: an ASR corpus based on public domain audio books", ICASSP 2015;
https://www.openslr.org/12, CC BY 4.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.data.download import download, extract, put_unpacked
from lockstep.errors import ConfigError, DataError, RunFolderError
from lockstep.tasks.speech.audio import RATE_HZ
from lockstep.tasks.speech.features import feature_frames
from lockstep.telemetry.files import read_bytes, write_text

MAX_MANIFEST_BYTES = 2 << 30
#: No duration, offset or rate is above it.
MAX_NUMBER = 1e9

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


class Utterance(NamedTuple):
    """``duration`` seconds of a recording from ``offset`` seconds on, and what is said in normalised form."""

    audio_path: str
    text: str
    duration: float
    offset: float = 0.0

    @property
    def frames(self) -> int:
        """Feature frames."""
        return feature_frames(round(self.duration * RATE_HZ))


class Row(NamedTuple):
    """A line as somebody wrote it: ``where`` for people, such as ``line 3``, and what is wrong with it already."""

    where: str
    audio_path: str = ""
    text: str = ""
    duration: float | None = None
    offset: float | None = None
    rate: float | None = None
    faults: tuple[str, ...] = ()


def read_rows(manifest: Path) -> list[Row]:
    """Every line of ``manifest`` that is not blank. Raises :class:`DataError` when the file cannot be read."""
    lines = enumerate(_read(manifest).split(b"\n"), start=1)
    return [_row(f"line {number}", line, manifest.parent) for number, line in lines if line.strip()]


def _row(where: str, line: bytes, folder: Path) -> Row:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row(where, faults=(f"not JSON ({str(error)[:100]})",))
    if not isinstance(entry, dict):
        return Row(where, faults=("not a JSON object",))
    faults = [f"no text under {key!r}" for key in ("audio_path", "text") if not isinstance(entry.get(key), str)]
    duration, offset, rate = (_number(entry, key, faults) for key in ("duration", "offset", "sample_rate"))
    path = entry.get("audio_path")
    audio = str(folder / path) if isinstance(path, str) else ""
    return Row(where, audio, str(entry.get("text", "")), duration, offset, rate, tuple(faults))


def _number(entry: Mapping[str, Any], key: str, faults: list[str]) -> float | None:
    """A number that can be meant, or nothing."""
    value = entry.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER:
        return float(value)
    if value is not None:
        faults.append(f"{key!r} is not a number of at least 0")
    return None


def read_manifest(manifest: Path) -> list[Utterance]:
    """The utterances of a manifest that :func:`write_manifest` wrote, unchecked. Raises :class:`DataError`."""
    try:
        entries = [json.loads(line) for line in _read(manifest).splitlines()]
        return [
            Utterance(str(manifest.parent / e["audio_path"]), e["text"], e["duration"], e.get("offset", 0.0))
            for e in entries
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{manifest} is damaged", why=f"{type(error).__name__}: {error}", fix="remove it; it is made again"
        ) from None


def write_manifest(manifest: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Replace ``manifest`` by ``entries``, atomically. Raises :class:`lockstep.errors.StorageError`."""
    write_text(manifest, "".join(json.dumps(dict(entry), ensure_ascii=False) + "\n" for entry in entries))


def _read(manifest: Path) -> bytes:
    try:
        return read_bytes(manifest, max_bytes=MAX_MANIFEST_BYTES)
    except RunFolderError as error:
        raise DataError(f"cannot read the manifest {manifest}", why=error.what, fix="check the path") from None


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
        why = "looked for <speaker>/<chapter>/*.trans.txt in it"
        raise DataError(f"{split} holds no transcripts", why=why, fix="unpack the archive again")
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
