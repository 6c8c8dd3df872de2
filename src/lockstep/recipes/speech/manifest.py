"""Utterances that people bring: manifests and LibriSpeech, and one report of all lines that cannot be used.

A manifest has JSON lines of ``audio_path`` (relative to its folder, or absolute), ``text`` and ``duration``, and
optionally ``offset`` and ``sample_rate``. With ``offset`` (seconds), an utterance is ``duration`` seconds of a longer
recording from there on; without it, the whole recording. Other keys are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.data.download import download, extract, put_unpacked
from lockstep.errors import ConfigError, DataError, RunFolderError, StorageError
from lockstep.readers.files import cache_folder
from lockstep.recipes.speech.audio import RATE_HZ, read_info, resampled_length
from lockstep.recipes.speech.features import feature_frames
from lockstep.recipes.speech.recogniser import output_lengths
from lockstep.recipes.speech.vocabulary import ENGLISH, Vocabulary, alignment_frames
from lockstep.rundir.files import read_bytes, read_json, write_json, write_text

MAX_MANIFEST_BYTES = 2 << 30
#: No duration, offset or rate is above it.
MAX_NUMBER = 1e9
#: Below it, most of what distinguishes consonants is missing.
LOWEST_RATE_HZ = 8_000
#: How far a manifest's duration may be from the file's, in seconds and as a share: what people round away.
TOLERANCE_S, TOLERANCE_SHARE = 0.05, 0.01
#: Faults reported in full; of more, only the lines.
MOST_TOLD = 200
#: Raise it when the checks change, so that what older ones found is not taken for theirs.
VERSION = 4

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


class Row(NamedTuple):
    """A line as it was written. ``name`` is for people, such as ``line 3``; ``faults`` were seen while it was read."""

    name: str
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


def _row(name: str, line: bytes, folder: Path) -> Row:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row(name, faults=(f"not JSON ({str(error)[:100]})",))
    if not isinstance(entry, dict):
        return Row(name, faults=("not a JSON object",))
    faults = [f"no text under {key!r}" for key in ("audio_path", "text") if not isinstance(entry.get(key), str)]
    duration, offset, rate = (_number(entry, key, faults) for key in ("duration", "offset", "sample_rate"))
    path = entry.get("audio_path")
    audio = str(folder / path) if isinstance(path, str) else ""
    return Row(name, audio, str(entry.get("text", "")), duration, offset, rate, tuple(faults))


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


class Fault(NamedTuple):
    """A reason why a line cannot be used."""

    line: str
    reason: str


class Checked(NamedTuple):
    """Lines that can be used, and the faults of the others."""

    utterances: list[Utterance]
    faults: list[Fault]


def open_rows(
    rows: Sequence[Row],
    name: str,
    *,
    downsampling: int = 1,
    longest_s: float = math.inf,
    skip_bad: bool = False,
    recheck: bool = False,
    vocabulary: Vocabulary = ENGLISH,
) -> list[Utterance]:
    """The utterances of ``rows``: each file is there and whole, each transcript can be learnt from it.

    Results are kept in the user's cache, so that the ranks of a run need not open every file again.

    Args:
        name: of the rows, for people: the manifest's path.
        downsampling: by how much the recogniser shortens the features; CTC needs a frame for every symbol.
        skip_bad: leave out what cannot be used, with a warning that says how many.
        recheck: look again, whatever was found before (once per node: ``prepare()``).

    Raises:
        DataError: some lines cannot be used, each of them listed, or none is left.
    """
    content = json.dumps([VERSION, downsampling, longest_s, vocabulary.symbols, rows])
    cache = cache_folder() / "checked" / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"
    checked = None if recheck else _recall(cache)
    is_new = checked is None
    if checked is None:
        checked = check_rows(rows, downsampling, longest_s, vocabulary)
        with contextlib.suppress(OSError, StorageError):  # a cache that cannot be written costs time, not the run
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, checked._asdict(), durable=False)
    utterances, faults = checked
    if faults and not skip_bad:
        raise DataError(
            f"{name}: {len(faults)} of {len(rows)} lines cannot be used",
            why=_told(faults),
            fix="fix or remove these lines, or train without them: --set task.skip_bad=true",
        )
    if not utterances:
        raise DataError(
            f"{name} has no usable line", why=_told(faults) or "it is empty", fix="check that it is the right file"
        )
    if faults and is_new:  # reported once, not by every rank
        _log.warning("%s: %d of %d lines are left out\n%s", name, len(faults), len(rows), _told(faults))
    return utterances


def _recall(cache: Path) -> Checked | None:
    """Return the result of an earlier check, if there is one."""
    try:
        saved = read_json(cache, max_bytes=MAX_MANIFEST_BYTES)
        return Checked([Utterance(*u) for u in saved["utterances"]], [Fault(*f) for f in saved["faults"]])
    except (RunFolderError, KeyError, TypeError):
        return None


def report_repeats(splits: Mapping[str, Sequence[Utterance]]) -> None:
    """Warn about utterances that occur twice in a split, or in training and in another split too."""
    counts = {
        split: Counter((u.audio_path, u.offset, u.text) for u in utterances) for split, utterances in splits.items()
    }
    for split, utterances in counts.items():
        repeats = [audio_path for (audio_path, *_), count in utterances.items() if count > 1]
        if repeats:
            _log.warning("%s: %d utterances occur more than once, the first is %s", split, len(repeats), repeats[0])
        shared = utterances.keys() & counts["train"].keys() if split != "train" else set()
        if shared:
            share = "all" if len(shared) == len(utterances) else str(len(shared))
            _log.warning(
                "%s: %s of %d utterances are training data too, so its scores say little", split, share, len(utterances)
            )


def _told(faults: Sequence[Fault]) -> str:
    causes = Counter(fault.reason.partition(":")[0].partition(" (")[0] for fault in faults)
    lines = [", ".join(f"{count} × {cause}" for cause, count in causes.most_common())] if len(faults) > 1 else []
    lines += [f"{fault.line}: {fault.reason}" for fault in faults[:MOST_TOLD]]
    if len(faults) > MOST_TOLD:
        lines.append(f"and also: {', '.join(fault.line for fault in faults[MOST_TOLD:])}")
    return "\n".join(lines)


def check_rows(
    rows: Sequence[Row], downsampling: int = 1, longest_s: float = math.inf, vocabulary: Vocabulary = ENGLISH
) -> Checked:
    """Look at every row and, by its header, at every file."""
    checked = Checked([], [])
    for row in rows:
        faults = list(row.faults)
        text = vocabulary.normalise(row.text)
        unknown = vocabulary.unknown(text)
        if not faults and not text:
            faults.append("the text is empty")
        elif not faults and unknown:
            faults.append(f"symbols outside the vocabulary: {' '.join(map(repr, unknown))}")
        samples = _samples(row, faults) if row.audio_path else 0
        if not faults:
            ids = vocabulary.encode(text)
            frames = output_lengths(feature_frames(samples), downsampling)
            if (need := alignment_frames(ids)) > frames:
                faults.append(
                    f"too short for its text: {len(ids)} symbols need {need} frames, {row.audio_path} gives {frames}"
                )
            if samples > longest_s * RATE_HZ:
                faults.append(
                    f"too long: {row.audio_path} takes {samples / RATE_HZ:.1f} s, task.longest_s is {longest_s:g}"
                )
        if faults:
            # A path or a text may hold what no terminal can show.
            complaint = "; ".join(faults).encode("utf-8", "backslashreplace").decode()
            checked.faults.append(Fault(row.name, complaint))
        else:
            checked.utterances.append(Utterance(row.audio_path, text, samples / RATE_HZ, row.offset or 0.0))
    return checked


def _samples(row: Row, faults: list[str]) -> int:
    """Samples at 16 kHz of the row's utterance; adds to ``faults`` those of its audio."""
    try:
        info = read_info(row.audio_path)
    except DataError as error:
        faults.append(f"unreadable recording: {error.what}" + (f" ({error.why})" if error.why else ""))
        return 0
    if info.frames == 0:
        faults.append("the recording has no samples")
        return 0
    if info.rate < LOWEST_RATE_HZ:
        faults.append(f"low sample rate: recorded at {info.rate} Hz, speech needs {LOWEST_RATE_HZ}")
    if row.rate is not None and row.rate != info.rate:
        faults.append(f"wrong sample_rate: sample_rate says {row.rate:g} Hz, the file has {info.rate}")
    seconds = info.frames / info.rate
    if row.offset is None:
        if row.duration is not None and abs(row.duration - seconds) > max(TOLERANCE_S, TOLERANCE_SHARE * seconds):
            there = f"the file has {seconds:.3f} s at {info.rate} Hz"
            faults.append(f"wrong duration: duration says {row.duration:g} s, {there} (a part needs an offset)")
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


# LibriSpeech, as its archives unpack: <split>/<speaker>/<chapter>/*.flac and a .trans.txt a chapter. Panayotov, Chen,
# Povey, Khudanpur, "Librispeech: an ASR corpus based on public domain audio books", ICASSP 2015;
# https://www.openslr.org/12, CC BY 4.0.

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
    candidates = [parent / name for name in ARCHIVES for parent in (folder, folder / FOLDER)]
    return {split.name: split for split in candidates if split.is_dir()}


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
        DataError: one cannot be downloaded, or has another hash.
    """
    splits = list(names)
    unknown = sorted(set(splits) - archives.keys())
    if unknown:
        raise ConfigError(
            f"LibriSpeech has no split {', '.join(unknown)}", fix=f"choose among {', '.join(sorted(archives))}"
        )
    for name in splits:
        if name not in find_librispeech(folder):
            archive = download(f"{url}/{name}.tar.gz", folder / f"{name}.tar.gz", archives[name])
            put_unpacked(archive, folder / FOLDER / name, partial(_unpack, archive, name))


def _unpack(archive: Path, name: str, temporary: Path) -> Path:
    return extract(archive, temporary / "out", max_bytes=MAX_UNPACKED_BYTES) / FOLDER / name
