from __future__ import annotations

import itertools
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.readers.files import cache_folder
from lockstep.recipes.speech import espeak, synthesis
from lockstep.recipes.speech.espeak import Line
from lockstep.recipes.speech.features import log_mel
from lockstep.recipes.speech.manifest import open_manifest
from lockstep.recipes.speech.synthesis import (
    ACCENTS,
    SPLITS,
    VOICES,
    Recipe,
    draw_sentence,
    split_of,
    synthesise,
    synthesised_folder,
)
from lockstep.recipes.speech.vocabulary import alignment_frames, encode, unknown
from tests.disks import sha256
from tests.gloo import ROOT, clean_environment

SMALL, TINY = Recipe(train=20, val=6, test=6), Recipe(train=1, val=1, test=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set, spoken by one process at a time."""
    return synthesise(SMALL, tmp_path_factory.mktemp("speech"), processes=1)


def audio(folder: Path) -> list[str]:
    return [sha256(folder / f"{split}.wav") for split in SPLITS]


# What is said, and by whom


def test_splits_share_no_sentence_and_no_voice_but_all_their_words() -> None:
    lines = {split: Recipe().lines(split) for split in SPLITS}
    assert [len(lines[split]) for split in SPLITS] == [4000, 400, 600]
    for one, other in itertools.combinations(SPLITS, 2):
        assert not {line.text for line in lines[one]} & {line.text for line in lines[other]}
        assert not {line.voice for line in lines[one]} & {line.voice for line in lines[other]}
    words = {split: {word for line in lines[split] for word in line.text.split()} for split in SPLITS}
    assert words["val"] | words["test"] <= words["train"]
    assert {line.voice for split in SPLITS for line in lines[split]} == {
        v for voices in VOICES.values() for v in voices
    }


@given(st.integers(0, 2**64), st.sampled_from(SPLITS))
def test_any_sentence_belongs_to_its_split_alone_and_can_be_written(seed: int, split: str) -> None:
    sentence = draw_sentence(random.Random(seed), split)
    assert split_of(sentence) == split
    assert unknown(sentence) == []


def test_every_voice_is_there_and_unlike_those_of_other_splits(tmp_path: Path) -> None:
    voices = [(split, voice, accent) for split in SPLITS for voice in VOICES[split] for accent in ACCENTS]
    lines = [Line("THREE SEVEN ONE NINE ZERO EIGHT", voice, accent, 170, 50, 50, 1) for _, voice, accent in voices]
    job = tmp_path / "job.json"
    job.write_text(json.dumps(lines))
    command = [sys.executable, "-m", "lockstep.recipes.speech.espeak", str(job)]
    environ = clean_environment(PYTHONPATH=str(ROOT / "src"))
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 0
    with np.load(tmp_path / "job.npz") as spoken:
        waves = np.split(spoken["samples"], np.cumsum(spoken["lengths"])[:-1])
    spectra = np.stack([mean_spectrum(wave) for wave in waves])
    for accent in range(len(ACCENTS)):
        found = spectra[accent :: len(ACCENTS)]
        splits = np.array([split for split, _, _ in voices[accent :: len(ACCENTS)]])
        between = np.sqrt(((found[:, None] - found[None]) ** 2).mean(axis=2))
        assert between[splits[:, None] != splits[None]].min() > 0.4


def mean_spectrum(wave: np.ndarray) -> np.ndarray:
    """Of the loud half of the frames, whatever the overall loudness."""
    features = log_mel(torch.from_numpy(wave.astype(np.float32) / 32_768))
    loud = features[features.mean(dim=1) > features.mean()].mean(dim=0)
    return (loud - loud.mean()).numpy()


# The set


def test_the_manifest_says_where_in_the_recording_each_utterance_is(folder: Path) -> None:
    for split in SPLITS:
        lines, utterances = SMALL.lines(split), open_manifest(folder / f"{split}.jsonl")
        assert [utterance.text for utterance in utterances] == [line.text for line in lines]
        starts = np.cumsum([0.0, *(utterance.duration for utterance in utterances)])
        np.testing.assert_allclose([utterance.offset for utterance in utterances], starts[:-1])
        with wave.open(str(folder / f"{split}.wav")) as file:
            assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16_000)
            assert file.getnframes() == round(starts[-1] * 16_000)
        for utterance in utterances:
            assert -(-utterance.frames // 4) >= alignment_frames(encode(utterance.text)), "down-sampled too"
        voices = [json.loads(line)["voice"] for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        assert set(voices) <= set(VOICES[split])


def test_the_samples_do_not_depend_on_how_many_processes_speak(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesis, "SHARD_LINES", 10)
    one, many = (synthesise(SMALL, tmp_path / str(n), processes=n) for n in (1, 3))
    assert one.name == many.name != folder.name, "another cut into processes is another set"
    assert audio(one) == audio(many)


@pytest.mark.skipif(
    (platform.system(), platform.machine(), metadata.version(espeak.PACKAGE)) != ("Linux", "x86_64", "0.2.4"),
    reason="the samples are known for this build of eSpeak NG only",
)
def test_the_samples_are_the_same_on_every_machine(folder: Path) -> None:
    assert [digest[:16] for digest in audio(folder)] == ["1d5f3d793e1e32bd", "3babc8e63fd9be58", "148fba5bb2149d25"]


def test_a_set_that_is_there_is_checked_and_not_made_again(folder: Path, tmp_path: Path) -> None:
    made = (folder / "train.wav").stat().st_mtime_ns
    assert synthesise(SMALL, folder.parent) == folder
    assert (folder / "train.wav").stat().st_mtime_ns == made
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


@pytest.mark.parametrize("damage", ["flipped", "missing", "no list"])
def test_a_set_that_was_changed_is_refused(damage: str, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / folder.name
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    if damage == "flipped":
        content = bytearray((copy / "val.wav").read_bytes())
        content[5000] ^= 1
        (copy / "val.wav").write_bytes(content)
    else:
        (copy / ("val.jsonl" if damage == "missing" else "set.json")).unlink()
    with pytest.raises(DataError) as caught:
        synthesise(SMALL, tmp_path)
    assert caught.value.fix


def test_who_comes_second_waits_and_takes_what_the_first_one_made(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: synthesise(TINY, tmp_path, processes=1), range(2)))
    assert found == [synthesised_folder(TINY, tmp_path)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{found[0].name}.lock", found[0].name]


MAKER = """
import sys
from pathlib import Path
from lockstep.recipes.speech.synthesis import Recipe, synthesise
synthesise(Recipe(train=2000), Path(sys.argv[1]), processes=2)
"""


def test_a_maker_that_is_killed_leaves_no_set_and_no_process(tmp_path: Path) -> None:
    environ = clean_environment(PYTHONPATH=str(ROOT / "src"))
    with subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path)], env=environ) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".speech-*/jobs/*.log")) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    (building,) = tmp_path.glob(".speech-*.tmp-*")
    assert not list(tmp_path.glob("speech-*"))
    # The next one that makes the set clears away what is left.
    left = building.rename(tmp_path / f".{synthesised_folder(TINY).name}.tmp-1-ab")
    assert synthesise(TINY, tmp_path).is_dir()
    assert not left.exists()


def test_without_the_engine_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(espeak, "PACKAGE", "espeakng-loader-of-another-name")
    with pytest.raises(DataError) as caught:
        synthesise(SMALL, tmp_path)
    assert "pip install 'lockstep-train[speech]'" in caught.value.fix


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError) as caught:
        synthesise(SMALL, tmp_path / "file")
    assert "--data-dir" in caught.value.fix


def test_what_the_engine_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VOICES, "train", ("nobody",))
    with pytest.raises(DataError, match="synthesised") as caught:
        synthesise(TINY, tmp_path, processes=1)
    assert re.search(r"\bvoice\b.*\ben\b", caught.value.why)
    assert not list(tmp_path.glob("*speech-*.tmp-*"))


def test_the_cache_is_where_the_user_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert synthesised_folder(SMALL).parent == cache_folder() == tmp_path / "lockstep"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_folder() == tmp_path / "home" / ".cache" / "lockstep"
