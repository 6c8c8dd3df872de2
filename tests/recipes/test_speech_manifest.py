from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from lockstep.errors import DataError
from lockstep.recipes.speech.manifest import check_rows, open_manifest, read_rows, write_manifest
from tests.recipes.speech_files import sound, write_audio, write_lines

GOOD = {"audio_path": "good.wav", "text": "go left", "duration": 1.0}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recordings, good and bad; the cache is another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "speech"
    write_audio(place / "good.wav", sound(1.0))
    write_audio(place / "good.flac", sound(1.0, 44_100), 44_100)
    write_audio(place / "good.ogg", sound(1.0, 22_050), 22_050)
    write_audio(place / "telephone.wav", sound(1.0, 8_000), 8_000)
    write_audio(place / "slow.wav", sound(1.0, 4_000), 4_000)
    write_audio(place / "empty.wav", sound(0.0))
    whole = (place / "good.flac").read_bytes()
    (place / "cut.flac").write_bytes(whole[: len(whole) // 2])
    (place / "cut.wav").write_bytes((place / "good.wav").read_bytes()[:20_000])
    write_audio(place / "long.wav", sound(3.0))
    soundfile.write(place / "nan.wav", np.append(sound(0.5), np.nan), 16_000, subtype="FLOAT")
    (place / "text.wav").write_text("this is no sound")
    return place


def test_wav_flac_and_ogg_of_any_rate_are_taken(folder: Path) -> None:
    names = ("good.wav", "good.flac", "good.ogg", "telephone.wav")
    lines: list[dict[str, Any] | str] = [{**GOOD, "audio_path": name} for name in names]
    lines += ["", {"audio_path": str(folder / "good.wav"), "text": "Don’t  stop", "other": [1]}]
    found = open_manifest(write_lines(folder / "m.jsonl", lines))
    assert [utterance.audio_path for utterance in found] == [str(folder / name) for name in (*names, "good.wav")]
    assert [utterance.text for utterance in found] == ["GO LEFT"] * 4 + ["DON'T STOP"]
    assert {utterance.duration for utterance in found} == {1.0}
    assert {utterance.frames for utterance in found} == {101}


def test_a_part_of_a_longer_recording_has_an_offset(folder: Path) -> None:
    lines = [
        {**GOOD, "offset": 0.25, "duration": 0.5},
        {"audio_path": "good.wav", "text": "go", "offset": 0.9},
    ]
    found = open_manifest(write_lines(folder / "m.jsonl", lines))
    assert [(utterance.offset, utterance.duration) for utterance in found] == [(0.25, 0.5), (0.9, 0.1)]


BAD: list[tuple[dict[str, Any] | str, str]] = [
    ("{no json", "Invalid JSON"),
    ("[1, 2]", "should be an object"),
    ({"text": "go", "duration": 1.0}, "audio_path: "),
    ({**GOOD, "text": None}, "text: "),
    ({**GOOD, "duration": "long"}, "duration: "),
    ({**GOOD, "duration": -1}, "duration: "),
    ({**GOOD, "duration": 10**400}, "duration: "),
    ({**GOOD, "duration": True}, "duration: "),
    ('{"audio_path": "good.wav", "text": "go", "duration": NaN}', "duration: "),
    ({**GOOD, "text": "\ud800"}, "Invalid JSON"),
    ({**GOOD, "audio_path": "none.wav"}, "there is no file"),
    ({**GOOD, "audio_path": ""}, "there is no file"),
    ({**GOOD, "audio_path": "x" * 5000}, "there is no file"),
    ({**GOOD, "audio_path": "a\0b"}, "there is no file"),
    ({**GOOD, "audio_path": "text.wav"}, "cannot read .*text.wav"),
    ({**GOOD, "audio_path": "cut.flac"}, "cannot read .*cut.flac"),
    ({**GOOD, "audio_path": "cut.wav"}, "cannot read .*cut.wav .it ends before its header says"),
    ({**GOOD, "audio_path": "nan.wav"}, "cannot read .*nan.wav .it has samples that are NaN"),
    ({**GOOD, "audio_path": "long.wav", "duration": 3.0}, r"too long: .*long.wav takes 3.0 s, task.longest_s is 2"),
    ({**GOOD, "audio_path": "empty.wav"}, "no samples"),
    ({**GOOD, "audio_path": "slow.wav"}, "recorded at 4000 Hz"),
    ({**GOOD, "duration": 2.0}, r"duration says 2 s, the file has 1.000 s at 16000 Hz"),
    ({**GOOD, "offset": 0.7, "duration": 0.5}, r"ends at 1.200 s, the file at 1.000 s"),
    ({**GOOD, "offset": 3}, "ends at .* the file at 1.000 s"),
    ({**GOOD, "offset": 0.5, "duration": 0}, "the part has no samples"),
    ({**GOOD, "text": "  "}, "the text is empty"),
    ({**GOOD, "text": "turn <3> left!"}, "symbols outside the vocabulary: '3' '<' '>'"),
    ({**GOOD, "text": "A" * 51}, "51 symbols need 101 frames, .*good.wav gives 51"),
]


def test_every_bad_line_is_listed_with_what_is_wrong(folder: Path) -> None:
    lines: list[dict[str, Any] | str] = []
    for line, _ in BAD:
        lines += [GOOD, line]
    manifest = write_lines(folder / "m.jsonl", lines)
    utterances, _ = check_rows(read_rows(manifest), folder, downsampling=2, longest_s=2)
    assert len(utterances) == len(BAD)
    with pytest.raises(DataError, match=rf"m.jsonl: {len(BAD)} of {2 * len(BAD)} lines") as caught:
        open_manifest(manifest, downsampling=2, longest_s=2)
    told = caught.value.why.splitlines()
    assert len(told) == len(BAD)
    for place, (_, message) in enumerate(BAD):
        assert told[place].startswith(f"line {2 * place + 2}: ")
        assert re.search(message, told[place]), told[place]


def test_one_line_tells_all_that_is_wrong_with_it(folder: Path) -> None:
    rows = read_rows(write_lines(folder / "m.jsonl", [{"audio_path": "slow.wav", "text": "$"}]))
    _, faults = check_rows(rows, folder)
    assert [*faults] == ["line 1"]
    assert [faults["line 1"].count(part) for part in ("vocabulary", "recorded at")] == [1, 1]


def test_of_very_many_bad_lines_each_is_still_named(folder: Path) -> None:
    manifest = write_lines(folder / "m.jsonl", [{**GOOD, "text": ""}] * 250)
    with pytest.raises(DataError) as caught:
        open_manifest(manifest)
    assert caught.value.why.count(": the text is empty") == 200
    assert "line 201, line 202" in caught.value.why
    assert caught.value.why.endswith("line 250")


def test_a_transcript_fits_as_long_as_ctc_can_align_it(folder: Path) -> None:
    """101 frames, halved to 51: a frame a symbol, and one more between equal ones."""
    texts = ["AB" * 25 + "A", "AA" + "BA" * 24, "AB" * 26, "AA" + "BA" * 24 + "B"]
    rows = read_rows(write_lines(folder / "m.jsonl", [{**GOOD, "text": text} for text in texts]))
    utterances, faults = check_rows(rows, folder, downsampling=2)
    assert [utterance.text for utterance in utterances] == texts[:2]
    assert [*faults] == ["line 3", "line 4"]


def test_training_without_the_bad_lines_says_how_many(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = write_lines(folder / "m.jsonl", [GOOD, {**GOOD, "text": ""}, GOOD])
    with caplog.at_level(logging.WARNING):
        assert len(open_manifest(manifest, skip_bad=True)) == 2
    assert re.search(r"m\.jsonl: 1 of 3 .*\nline 2: ", caplog.text)
    for lines in ([{**GOOD, "text": ""}], []):
        with pytest.raises(DataError, match=manifest.name):
            open_manifest(write_lines(manifest, lines), skip_bad=True)


def test_files_are_looked_at_once_and_again_when_asked(folder: Path) -> None:
    manifest = write_lines(folder / "m.jsonl", [GOOD, {**GOOD, "audio_path": "good.flac"}])
    first = open_manifest(manifest)
    (folder / "good.flac").unlink()
    assert open_manifest(manifest) == first
    for recheck in (True, False):
        with pytest.raises(DataError, match="1 of 2 lines"):
            open_manifest(manifest, recheck=recheck)
    write_audio(folder / "good.flac", sound(1.0))
    assert open_manifest(manifest, recheck=True) == first


def test_a_cache_that_cannot_be_written_does_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "good.wav"))
    assert len(open_manifest(write_lines(folder / "m.jsonl", [GOOD]))) == 1


def test_a_manifest_that_was_written_comes_back(folder: Path) -> None:
    utterances = open_manifest(write_lines(folder / "m.jsonl", [GOOD, {**GOOD, "offset": 0.5, "duration": 0.3}]))
    write_manifest(folder / "again.jsonl", [utterance._asdict() for utterance in utterances])
    assert open_manifest(folder / "again.jsonl") == utterances


def test_a_missing_manifest_is_a_clear_error(folder: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl") as caught:
        read_rows(folder / "none.jsonl")
    assert caught.value.fix
