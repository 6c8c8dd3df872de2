"""Manifests of utterances, and one report of all lines that cannot be used.

A manifest has JSON lines of ``audio_path`` (relative to its folder, or absolute), ``text`` and ``duration``, and
optionally ``offset``. With ``offset`` (seconds), an utterance is ``duration`` seconds of a longer recording from there
on; without it, the whole recording. Other keys are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.errors import DataError, RunFolderError, StorageError
from lockstep.readers.files import cache_folder
from lockstep.recipes.speech.audio import RATE_HZ, read_info, resampled_length
from lockstep.recipes.speech.features import feature_frames
from lockstep.recipes.speech.recogniser import output_lengths
from lockstep.recipes.speech.vocabulary import alignment_frames, encode, normalise, unknown
from lockstep.rundir.files import read_bytes, read_json, write_json, write_text

MAX_MANIFEST_BYTES = 2 << 30
#: Below it, most of what distinguishes consonants is missing.
LOWEST_RATE_HZ = 8_000
#: How far a manifest's duration may be from the file's, in seconds and as a share: what people round away.
TOLERANCE_S = 0.05
TOLERANCE_SHARE = 0.01
#: Faults reported in full; of more, only the lines.
MOST_FAULTS = 200
#: Raise it when the checks change, so that cached results of older ones are not used.
VERSION = 5

_log = logging.getLogger(__name__)


class Utterance(NamedTuple):
    """``duration`` seconds of a recording from ``offset`` seconds on, and its normalised transcript."""

    audio_path: str
    text: str
    duration: float
    offset: float = 0.0

    @property
    def frames(self) -> int:
        return feature_frames(round(self.duration * RATE_HZ))


class Row(BaseModel):
    """A line of a manifest, as it was written."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    audio_path: str
    text: str
    duration: float | None = Field(default=None, ge=0)
    offset: float | None = Field(default=None, ge=0)


def read_rows(manifest: Path) -> dict[str, Row | str]:
    """Return the row of every line that is not blank, or its fault, by names such as ``line 3``.

    Raises :class:`DataError`: the file cannot be read.
    """
    try:
        lines = read_bytes(manifest, max_bytes=MAX_MANIFEST_BYTES).split(b"\n")
    except RunFolderError as error:
        raise DataError(f"cannot read the manifest {manifest}", why=error.what, fix="check the path") from None
    return {f"line {number}": _row(line) for number, line in enumerate(lines, start=1) if line.strip()}


def _row(line: bytes) -> Row | str:
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        faults = ("".join(f"{key}: " for key in item["loc"]) + item["msg"] for item in error.errors())
        return "; ".join(faults)


def write_manifest(manifest: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Replace ``manifest`` by ``entries``, atomically. Raises :class:`lockstep.errors.StorageError`."""
    write_text(manifest, "".join(json.dumps(dict(entry), ensure_ascii=False) + "\n" for entry in entries))


def open_manifest(
    manifest: Path,
    *,
    downsampling: int = 1,
    longest_s: float = math.inf,
    skip_bad: bool = False,
    recheck: bool = False,
) -> list[Utterance]:
    """Return the utterances of a manifest: each file is there and whole, each transcript can be learnt from it.

    They are kept in the user's cache, so that the ranks of a run need not open every file again.

    Args:
        downsampling: by how much the recogniser shortens the features; CTC needs a frame for every symbol.
        longest_s: duration of the longest utterance in seconds.
        skip_bad: leave out lines that cannot be used, with a warning that lists them.
        recheck: ignore the cache (once per node, in ``prepare()``).

    Raises:
        DataError: some lines cannot be used, each of them listed, or none is left.
    """
    rows = read_rows(manifest)
    content = repr([VERSION, str(manifest.parent), downsampling, longest_s, skip_bad, rows])
    cache = (
        cache_folder()
        / "checked"
        / f"{hashlib.sha256(content.encode('utf-8', 'backslashreplace')).hexdigest()[:16]}.json"
    )
    if not recheck and cache.is_file():
        with contextlib.suppress(RunFolderError, KeyError, TypeError):
            saved = read_json(cache, max_bytes=MAX_MANIFEST_BYTES)
            return [Utterance(*fields) for fields in saved["utterances"]]
    with contextlib.suppress(OSError):
        cache.unlink()
    utterances, faults = check_rows(rows, manifest.parent, downsampling, longest_s)
    if faults and not skip_bad:
        raise DataError(
            f"{manifest}: {len(faults)} of {len(rows)} lines cannot be used",
            why=_listed(faults),
            fix="fix or remove these lines, or train without them: --set task.skip_bad=true",
        )
    if not utterances:
        raise DataError(
            f"{manifest} has no usable line",
            why=_listed(faults) or "it is empty",
            fix="check that it is the right file",
        )
    if faults:
        _log.warning("%s: %d of %d lines are left out\n%s", manifest, len(faults), len(rows), _listed(faults))
    with contextlib.suppress(OSError, StorageError):  # a cache that cannot be written costs time, not the run
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache, {"utterances": utterances}, durable=False)
    return utterances


def _listed(faults: Mapping[str, str]) -> str:
    lines = [f"{line}: {reason}" for line, reason in faults.items()]
    if len(faults) > MOST_FAULTS:
        lines[MOST_FAULTS:] = [f"and also: {', '.join([*faults][MOST_FAULTS:])}"]
    return "\n".join(lines)


def check_rows(
    rows: Mapping[str, Row | str], folder: Path, downsampling: int = 1, longest_s: float = math.inf
) -> tuple[list[Utterance], dict[str, str]]:
    """Check every row and, by its header, every file. Return the usable utterances, and the faults by line.

    Args:
        folder: base of relative paths.
        downsampling, longest_s: as for :func:`open_manifest`.
    """
    utterances: list[Utterance] = []
    faults_by_line: dict[str, str] = {}
    for line, row in rows.items():
        if isinstance(row, str):
            faults_by_line[line] = row
            continue
        faults: list[str] = []
        path = str(folder / row.audio_path)
        text = normalise(row.text)
        if not text:
            faults.append("the text is empty")
        if foreign := unknown(text):
            faults.append(f"symbols outside the vocabulary: {' '.join(map(repr, foreign))}")
        samples = _samples(row, path, faults)
        if not faults:
            frames = output_lengths(feature_frames(samples), downsampling)
            if (needed := alignment_frames(encode(text))) > frames:
                faults.append(
                    f"too short for its text: {len(text)} symbols need {needed} frames, {path} gives {frames}"
                )
            if samples > longest_s * RATE_HZ:
                faults.append(f"too long: {path} takes {samples / RATE_HZ:.1f} s, task.longest_s is {longest_s:g}")
        if faults:
            faults_by_line[line] = "; ".join(faults)
        else:
            utterances.append(Utterance(path, text, samples / RATE_HZ, row.offset or 0.0))
    return utterances, faults_by_line


def _samples(row: Row, path: str, faults: list[str]) -> int:
    """Return the samples at 16 kHz of the row's utterance; add to ``faults`` those of its audio."""
    try:
        info = read_info(path)
    except DataError as error:
        faults.append(f"unreadable recording: {error.what}" + (f" ({error.why})" if error.why else ""))
        return 0
    if info.frames == 0:
        faults.append("the recording has no samples")
        return 0
    if info.rate < LOWEST_RATE_HZ:
        faults.append(f"low sample rate: recorded at {info.rate} Hz, speech needs {LOWEST_RATE_HZ}")
    seconds = info.frames / info.rate
    if row.offset is None:
        if row.duration is not None and abs(row.duration - seconds) > max(TOLERANCE_S, TOLERANCE_SHARE * seconds):
            actual = f"the file has {seconds:.3f} s at {info.rate} Hz"
            faults.append(f"wrong duration: duration says {row.duration:g} s, {actual} (a part needs an offset)")
        return info.samples
    duration = seconds - row.offset if row.duration is None else row.duration
    end = row.offset + duration
    if row.offset >= seconds or end > seconds + TOLERANCE_S:
        ends = f"ends at {max(row.offset, end):.3f} s, the file at {seconds:.3f} s"
        faults.append(f"outside the recording: {ends}")
        return 0
    present = resampled_length(info.frames - round(row.offset * info.rate), info.rate, RATE_HZ)
    samples = min(round(duration * RATE_HZ), present)
    if samples == 0:
        faults.append("the part has no samples")
    return samples
