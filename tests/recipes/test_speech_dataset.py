from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.recipes.speech.audio import read_audio, read_info
from lockstep.recipes.speech.dataset import AugmentedRecordings, Recordings, Sample, SpeechBatch, collate
from lockstep.recipes.speech.features import SpecAugment, extract
from lockstep.recipes.speech.manifest import Utterance, open_manifest
from lockstep.recipes.speech.vocabulary import encode
from tests.recipes.speech_files import sound, write_audio, write_lines


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """Three formats and rates, and two parts of a recording, one of which reaches to its end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, rate in (("a.wav", 16_000), ("b.flac", 44_100), ("c.ogg", 22_050), ("d.wav", 11_025)):
        write_audio(tmp_path / "speech" / name, sound(0.7321, rate), rate)
    lines = [{"audio_path": name, "text": "GO ON"} for name in ("a.wav", "b.flac", "c.ogg", "d.wav")]
    parts = [
        {"audio_path": name, "text": "GO", "offset": offset, "duration": duration}
        for name in ("a.wav", "b.flac", "d.wav")
        for offset, duration in ((0.1, 0.3333), (0.3, 0.4321))
    ]
    manifest = write_lines(tmp_path / "speech" / "m.jsonl", [*lines, *parts])
    return Recordings(open_manifest(manifest))


def test_lengths_are_known_without_the_audio(recordings: Recordings, tmp_path: Path) -> None:
    made = [len(recordings[index].features) for index in range(len(recordings))]
    for path in (tmp_path / "speech").iterdir():
        path.unlink()
    assert recordings.lengths().tolist() == made
    assert AugmentedRecordings(recordings.utterances, SpecAugment()).lengths().tolist() == made


def test_a_part_is_that_part_of_the_recording(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", sound(1.0))
    whole = read_audio(path)
    np.testing.assert_array_equal(read_audio(path, 0.25, 0.5), whole[4000:12_000])
    part = Recordings([Utterance(str(path), "GO", 0.5, 0.25)])[0]
    assert torch.equal(part.features, extract(torch.from_numpy(whole[4000:12_000])))
    assert part.symbols.tolist() == encode("GO")


def test_channels_are_averaged_and_rates_are_matched(tmp_path: Path) -> None:
    left, right = sound(0.5, seed=1), sound(0.5, seed=2)
    stereo = read_audio(write_audio(tmp_path / "a.wav", np.stack([left, right], axis=1)))
    np.testing.assert_allclose(stereo, (left + right) / 2, atol=1e-4)
    for rate in (8_000, 44_100):
        tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
        found = read_audio(write_audio(tmp_path / "b.flac", tone, rate))
        assert found.dtype == np.float32
        expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
        np.testing.assert_allclose(found[500:-500], expected[500:-500], atol=1e-3)


@pytest.mark.parametrize("kind", ["WAV", "WAVEX", "RF64", "W64", "AIFF", "AU"])
def test_recordings_that_were_cut_short_are_refused(kind: str, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    file = tmp_path / f"a.{kind.lower()}"
    soundfile.write(file, np.zeros(1001, np.float32), 16_000, format=kind, subtype="PCM_16")
    if kind in ("WAV", "WAVEX"):
        assert read_info(file).frames == 1001
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=rf"a\.{kind.lower()}"):
        read_info(file)


def test_a_recording_that_is_gone_or_cut_since_the_check_is_named(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", sound(0.5))
    with pytest.raises(DataError, match=r"\bread .*a\.wav") as caught:
        Recordings([Utterance(str(path), "GO", 0.6)])[0]
    assert re.search(r"0\.500 s .*0\.600 s", caught.value.why)
    path.unlink()
    with pytest.raises(DataError, match=r"\bfile .*a\.wav"):
        Recordings([Utterance(str(path), "GO", 0.5)])[0]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=6))
def test_a_batch_holds_every_sample_and_nothing_else(sizes: list[tuple[int, int]]) -> None:
    samples = [Sample(torch.randn(frames, 80), torch.randint(1, 29, (symbols,))) for frames, symbols in sizes]
    batch = collate(samples)
    assert [tuple(part.shape) for part in batch] == [
        (len(sizes), max(frames for frames, _ in sizes), 80),
        (len(sizes),),
        (len(sizes), max(symbols for _, symbols in sizes)),
        (len(sizes),),
    ]
    assert list(zip(batch.lengths.tolist(), batch.target_lengths.tolist(), strict=True)) == sizes
    for row, sample in enumerate(samples):
        frames, symbols = sizes[row]
        assert torch.equal(batch.features[row, :frames], sample.features)
        assert torch.equal(batch.targets[row, :symbols], sample.symbols)
        assert not batch.features[row, frames:].any()
        assert not batch.targets[row, symbols:].any()


def test_masks_are_the_same_in_any_batch_and_new_in_each_epoch(recordings: Recordings) -> None:
    training = AugmentedRecordings(recordings.utterances, SpecAugment())

    def batch(epoch: int, *indices: int) -> SpeechBatch:
        return collate([training.sample(i, np.random.default_rng((42, epoch, i))) for i in indices])

    alone, among = batch(0, 2), batch(0, 0, 2)
    frames = int(alone.lengths[0])
    assert torch.equal(alone.features[0], among.features[1, :frames])
    assert not torch.equal(alone.features, batch(1, 2).features)
    assert not torch.equal(alone.features[0], recordings[2].features)
    assert torch.equal(alone.targets, batch(1, 2).targets)


def test_the_fingerprint_knows_the_content_and_not_the_place(recordings: Recordings) -> None:
    moved = [utterance._replace(audio_path=f"/elsewhere/{i}.wav") for i, utterance in enumerate(recordings.utterances)]
    assert Recordings(moved).fingerprint() == recordings.fingerprint()
    assert AugmentedRecordings(recordings.utterances, SpecAugment()).fingerprint() == recordings.fingerprint()
    for change in ({"text": "GO OFF"}, {"duration": 0.5}):
        changed = [recordings.utterances[0]._replace(**change), *recordings.utterances[1:]]
        assert Recordings(changed).fingerprint() != recordings.fingerprint()
