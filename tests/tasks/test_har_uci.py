from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import ConfigError, DataError
from lockstep.tasks.har.data import CHANNELS, CLASSES, fetch_uci, find_uci, load_uci
from tests.data.web import Site, serve
from tests.disks import sha256
from tests.tasks.har_folders import make_uci, make_uci_archive


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_uci(tmp_path)


def test_the_folder_and_its_parent_are_both_found(folder: Path) -> None:
    assert find_uci(folder) == folder
    assert find_uci(folder.parent) == folder
    assert find_uci(folder / "train") is None


def test_channels_come_in_their_order_and_labels_from_zero(folder: Path) -> None:
    data = load_uci(folder, val_subjects=None)
    assert data.shape == (9, 128)
    assert data.class_names == CLASSES
    assert data.train.samples.mean(axis=(0, 2)).round(-1).tolist() == [10.0 * place for place in range(9)]
    assert data.test.labels.tolist()[:7] == [0, 1, 2, 3, 4, 5, 0]
    first = np.loadtxt(folder / "test" / "Inertial Signals" / "total_acc_z_test.txt", dtype=np.float32)
    np.testing.assert_array_equal(data.test.samples[:, 8], first)


def test_the_official_split_holds_and_validation_takes_the_last_fifth_of_the_training_subjects(folder: Path) -> None:
    data = load_uci(folder, val_subjects=None)
    assert [len(part) for part in (data.train, data.val, data.test)] == [48, 12, 24]
    np.testing.assert_array_equal(data.val.samples, load_uci(folder, val_subjects=[7]).val.samples)
    chosen = load_uci(folder, val_subjects=[1, 3])
    assert [len(part) for part in (chosen.train, chosen.val, chosen.test)] == [36, 24, 24]


def test_a_test_subject_cannot_validate(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"\b2\b"):
        load_uci(folder, val_subjects=[2])


def edit(file: str, change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / file
        path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")

    return damage


SIGNALS = f"train/Inertial Signals/{CHANNELS[4]}_train.txt"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / SIGNALS).unlink(), r"body_gyro_y_train\.txt .*missing"),
        (lambda folder: (folder / "train/y_train.txt").unlink(), r"y_train\.txt .*missing"),
        (lambda folder: (folder / SIGNALS).write_text(""), "empty"),
        (lambda folder: (folder / SIGNALS).write_bytes(b"\xff\xfe\x00"), r"read .*\.txt"),
        (edit(SIGNALS, lambda rows: rows[:-1]), r"\b59 .*y_train\.txt .*\b60"),
        (edit(SIGNALS, lambda rows: [*rows[:-1], rows[-1][:200]]), r"read .*\.txt"),
        (edit(SIGNALS, lambda rows: ["one two", *rows[1:]]), r"read .*\.txt"),
        (edit(SIGNALS, lambda rows: [row[:1600] for row in rows]), r"\b128\b"),
        (edit(SIGNALS, lambda rows: [rows[0].replace(rows[0].split()[3], "nan"), *rows[1:]]), "finite"),
        (edit("train/y_train.txt", lambda rows: ["7", *rows[1:]]), r"\b1 to 7\b"),
        (edit("train/y_train.txt", lambda rows: ["0", *rows[1:]]), r"\b0 to 6\b"),
        (edit("train/y_train.txt", lambda rows: ["1.5", *rows[1:]]), r"read .*\.txt"),
        (edit("train/subject_train.txt", lambda rows: rows[:-1]), r"\b59 .*\b60 labels"),
        (edit("test/y_test.txt", lambda rows: rows[:-1]), r"y_test\.txt .*\b23"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(damage: Callable[[Path], None], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(DataError, match=message) as caught:
        load_uci(folder, val_subjects=None)
    assert caught.value.fix


def test_it_is_fetched_once_verified_and_unpacked(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    packed = make_uci_archive(folder, tmp_path_factory.mktemp("web") / "uci.zip")
    target = tmp_path_factory.mktemp("data") / "sets"
    with serve(Site(packed.read_bytes())) as site:
        archive = {"url": site.url, "sha256": sha256(packed)}
        found = fetch_uci(target, **archive)
        assert fetch_uci(target, **archive) == found == target / "UCI HAR Dataset"
        assert len(site.asked) == 1
    np.testing.assert_array_equal(
        load_uci(found, val_subjects=None).train.samples, load_uci(folder, val_subjects=None).train.samples
    )
    assert sorted(path.name for path in target.iterdir()) == [".uci-har.zip.lock", "UCI HAR Dataset", "uci-har.zip"]


def test_an_archive_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    import zipfile

    with zipfile.ZipFile(tmp_path / "other.zip", "w") as content:
        content.writestr("readme.txt", b"something else")
    with (
        serve(Site((tmp_path / "other.zip").read_bytes())) as site,
        pytest.raises(DataError, match="UCI HAR Dataset"),
    ):
        fetch_uci(tmp_path / "data", url=site.url, sha256=sha256(tmp_path / "other.zip"))
    assert find_uci(tmp_path / "data") is None
