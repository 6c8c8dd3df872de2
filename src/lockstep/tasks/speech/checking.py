"""Every line of a manifest looked at before training, and one report of all that cannot be used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.data.files import cache_folder
from lockstep.errors import DataError, RunFolderError, StorageError
from lockstep.models.recogniser import output_lengths
from lockstep.tasks.speech.audio import RATE_HZ, read_info, resampled_length
from lockstep.tasks.speech.features import feature_frames
from lockstep.tasks.speech.manifest import MAX_MANIFEST_BYTES, Row, Utterance
from lockstep.tasks.speech.vocabulary import ENGLISH, Vocabulary, alignment_frames
from lockstep.telemetry.files import read_json, write_json

#: Below it, most of what distinguishes consonants is missing.
LOWEST_RATE_HZ = 8_000
#: How far a manifest's duration may be from the file's, in seconds and as a share: what people round away.
TOLERANCE_S, TOLERANCE_SHARE = 0.05, 0.01
#: Faults reported in full; of more, only the lines.
MOST_TOLD = 200
#: Raise it when the checks change, so that what older ones found is not taken for theirs.
VERSION = 4

_log = logging.getLogger(__name__)


class Fault(NamedTuple):
    """What is wrong with one line."""

    where: str
    what: str


class Checked(NamedTuple):
    """Lines that can be used, and what is wrong with the others."""

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

    What a check found is kept in the user's cache, so that the ranks of a run need not look at every file again.

    Args:
        name: what the rows are, for people: the manifest's path.
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
        why, fix = _told(faults) or "it is empty", "check that it is the right file"
        raise DataError(f"{name} has no usable line", why=why, fix=fix)
    if faults and is_new:  # reported once, not by every rank
        _log.warning("%s: %d of %d lines are left out\n%s", name, len(faults), len(rows), _told(faults))
    return utterances


def _recall(cache: Path) -> Checked | None:
    """What an earlier check found."""
    try:
        found = read_json(cache, max_bytes=MAX_MANIFEST_BYTES)
        return Checked([Utterance(*u) for u in found["utterances"]], [Fault(*f) for f in found["faults"]])
    except (RunFolderError, KeyError, TypeError):
        return None


def report_repeats(splits: Mapping[str, Sequence[Utterance]]) -> None:
    """Warn about utterances that occur twice in a split, or in training and in another split too."""
    seen = {split: Counter((u.audio_path, u.offset, u.text) for u in found) for split, found in splits.items()}
    for split, found in seen.items():
        repeats = [place for (place, *_), count in found.items() if count > 1]
        if repeats:
            _log.warning("%s: %d utterances occur more than once, the first is %s", split, len(repeats), repeats[0])
        shared = found.keys() & seen["train"].keys() if split != "train" else set()
        if shared:
            share = "all" if len(shared) == len(found) else str(len(shared))
            _log.warning(
                "%s: %s of %d utterances are training data too, so its scores say little", split, share, len(found)
            )


def _told(faults: Sequence[Fault]) -> str:
    causes = Counter(fault.what.partition(":")[0].partition(" (")[0] for fault in faults)
    told = [", ".join(f"{count} × {cause}" for cause, count in causes.most_common())] if len(faults) > 1 else []
    told += [f"{fault.where}: {fault.what}" for fault in faults[:MOST_TOLD]]
    if len(faults) > MOST_TOLD:
        told.append(f"and also: {', '.join(fault.where for fault in faults[MOST_TOLD:])}")
    return "\n".join(told)


def check_rows(
    rows: Sequence[Row], downsampling: int = 1, longest_s: float = math.inf, vocabulary: Vocabulary = ENGLISH
) -> Checked:
    """Look at every row and, by its header, at every file."""
    checked = Checked([], [])
    for row in rows:
        faults, text = list(row.faults), vocabulary.normalise(row.text)
        unknown = vocabulary.unknown(text)
        if not faults and not text:
            faults.append("the text is empty")
        elif not faults and unknown:
            faults.append(f"symbols outside the vocabulary: {' '.join(map(repr, unknown))}")
        samples = _samples(row, faults) if row.audio_path else 0
        if not faults:
            ids, frames = vocabulary.encode(text), output_lengths(feature_frames(samples), downsampling)
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
            told = "; ".join(faults).encode("utf-8", "backslashreplace").decode()
            checked.faults.append(Fault(row.where, told))
        else:
            checked.utterances.append(Utterance(row.audio_path, text, samples / RATE_HZ, row.offset or 0.0))
    return checked


def _samples(row: Row, faults: list[str]) -> int:
    """Samples at 16 kHz of the row's utterance; adds to ``faults`` what is wrong with its audio."""
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
