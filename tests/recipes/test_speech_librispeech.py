from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, DataError
from lockstep.recipes.speech.manifest import ARCHIVES, fetch_librispeech, find_librispeech, librispeech_rows, open_rows
from tests.data.web import Site, serve
from tests.disks import sha256
from tests.recipes.speech_files import make_librispeech


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_splits_are_found_in_the_folder_or_its_parent(tmp_path: Path) -> None:
    folder = make_librispeech(tmp_path, ["dev-clean", "train-clean-100"])
    expected = {"dev-clean": folder / "dev-clean", "train-clean-100": folder / "train-clean-100"}
    assert find_librispeech(folder) == find_librispeech(tmp_path) == expected
    assert find_librispeech(tmp_path / "none") == {}


def test_transcripts_and_recordings_come_together(tmp_path: Path) -> None:
    rows = librispeech_rows(make_librispeech(tmp_path) / "dev-clean")
    assert [row.name for row in rows[:3]] == ["174-50-0000", "174-50-0001", "174-51-0000"]
    utterances = open_rows(rows, "dev-clean")
    assert [utterance.text for utterance in utterances] == ["GO ON", "GO LEFT"] * 4
    assert [round(utterance.duration, 3) for utterance in utterances] == [0.5, 0.6] * 4


def test_a_recording_that_is_missing_is_named(tmp_path: Path) -> None:
    split = make_librispeech(tmp_path) / "dev-clean"
    (split / "84" / "122" / "84-122-0001.flac").unlink()
    with pytest.raises(DataError, match="1 of 8 lines") as caught:
        open_rows(librispeech_rows(split), "dev-clean")
    assert caught.value.why.startswith("84-122-0001: unreadable recording: there is no file")


def test_a_folder_without_transcripts_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no transcripts"):
        librispeech_rows(tmp_path)


def pack(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as content:
        content.add(folder, "LibriSpeech")
    return archive


def test_a_split_is_fetched_once_verified_and_unpacked(tmp_path: Path) -> None:
    original = make_librispeech(tmp_path / "original")
    packed = pack(original, tmp_path / "packed.tar.gz")
    target = tmp_path / "data"
    archives = {"dev-clean": sha256(packed)}
    with serve(Site(packed.read_bytes(), drops=[2000])) as site:
        for _ in range(2):
            fetch_librispeech(["dev-clean"], target, url=site.url.rpartition("/")[0], archives=archives)
        assert site.asked == ["", "bytes=2000-"], "it goes on where the line broke, and asks no more when it is there"
    found = librispeech_rows(find_librispeech(target)["dev-clean"])
    assert [(row.name, row.text) for row in found] == [
        (row.name, row.text) for row in librispeech_rows(original / "dev-clean")
    ]
    assert len(open_rows(found, "dev-clean")) == 8
    assert sorted(path.name for path in target.iterdir()) == [
        ".dev-clean.tar.gz.lock",
        "LibriSpeech",
        "dev-clean.tar.gz",
    ]


def test_an_archive_that_is_not_what_was_expected_is_refused(tmp_path: Path) -> None:
    packed = pack(make_librispeech(tmp_path / "original", ["dev-other"]), tmp_path / "packed.tar.gz")
    with serve(Site(packed.read_bytes())) as site:
        url = site.url.rpartition("/")[0]
        with pytest.raises(DataError, match="does not give the file that was expected"):
            fetch_librispeech(["dev-clean"], tmp_path / "a", url=url)
        with pytest.raises(DataError, match="does not hold dev-clean"):
            fetch_librispeech(["dev-clean"], tmp_path / "b", url=url, archives={"dev-clean": sha256(packed)})
    assert find_librispeech(tmp_path / "a") == find_librispeech(tmp_path / "b") == {}


def test_only_the_splits_that_exist_can_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no split dev-dirty") as caught:
        fetch_librispeech(["dev-clean", "dev-dirty"], tmp_path)
    assert all(name in caught.value.fix for name in ARCHIVES)
