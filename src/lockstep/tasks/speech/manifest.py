"""Manifests: JSON lines of ``audio_path``, ``text`` and ``duration``, and optionally ``offset``, ``sample_rate``.

``audio_path`` is relative to the manifest's folder, or absolute. With ``offset`` (seconds), an utterance is
``duration`` seconds of a longer recording from there on; without it, the whole recording. Other keys are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import DataError, RunFolderError
from lockstep.tasks.speech.audio import RATE_HZ
from lockstep.tasks.speech.features import feature_frames
from lockstep.telemetry.files import read_bytes, write_text

MAX_MANIFEST_BYTES = 2 << 30
#: No duration, offset or rate is above it.
MAX_NUMBER = 1e9


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
    """A line as somebody wrote it, with as much as could be made of it.

    Args:
        where: for people, such as ``line 3``.
        faults: what is wrong with it already.
    """

    where: str
    audio_path: str = ""
    text: str = ""
    duration: float | None = None
    offset: float | None = None
    rate: float | None = None
    faults: tuple[str, ...] = ()


def read_rows(manifest: Path) -> list[Row]:
    """Every line of ``manifest`` that is not blank. Raises :class:`DataError` when the file cannot be read."""
    rows = []
    for number, line in enumerate(_read(manifest).split(b"\n"), start=1):
        if line.strip():
            rows.append(_row(f"line {number}", line, manifest.parent))
    return rows


def _row(where: str, line: bytes, folder: Path) -> Row:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row(where, faults=(f"not JSON ({str(error)[:100]})",))
    if not isinstance(entry, dict):
        return Row(where, faults=("not a JSON object",))
    faults = [f"no text under {key!r}" for key in ("audio_path", "text") if not isinstance(entry.get(key), str)]
    numbers = {key: _number(entry, key, faults) for key in ("duration", "offset", "sample_rate")}
    path = entry.get("audio_path")
    return Row(
        where,
        str(folder / path) if isinstance(path, str) else "",
        str(entry.get("text", "")),
        numbers["duration"],
        numbers["offset"],
        numbers["sample_rate"],
        tuple(faults),
    )


def _number(entry: Mapping[str, Any], key: str, faults: list[str]) -> float | None:
    """A number that can be meant, or nothing."""
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER:
        return float(value)
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
