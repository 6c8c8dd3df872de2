from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.tasks.har.data import MIRRORED, HarData, Windows, by_subject, cut_windows, load_watch


@pytest.fixture(scope="module")
def data() -> HarData:
    return load_watch(val_subjects=None, test_subjects=None, mirror=True)


def test_the_package_carries_all_recordings_in_five_megabytes() -> None:
    resource = files("lockstep.tasks.har").joinpath("watch.npz")
    with resource.open("rb") as file:
        assert file.seek(0, 2) <= 5_000_000
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            assert arrays["signals"].shape == (6, 244_102)
            assert arrays["lengths"].shape == (140,)
            assert arrays["lengths"].sum() == 244_102
            recordings = set(
                zip(arrays["subject"].tolist(), arrays["side"].tolist(), arrays["label"].tolist(), strict=True)
            )
    assert recordings == {(subject, side, label) for subject in range(1, 11) for side in (0, 1) for label in range(7)}


def test_windows_are_two_seconds_at_half_overlap(data: HarData) -> None:
    assert data.shape == (6, 100)
    assert sum(len(part) for part in (data.train, data.val, data.test)) == 4_677
    first, second = data.train.samples[:2]
    np.testing.assert_array_equal(first[:, 50:], second[:, :50])


def test_every_split_has_every_class(data: HarData) -> None:
    assert len(data.class_names) == 7
    for part in (data.train, data.val, data.test):
        assert set(part.labels.tolist()) == set(range(7))
    same = load_watch(val_subjects=[7, 8], test_subjects=[9, 10], mirror=True)
    for part, other in ((data.val, same.val), (data.test, same.test)):
        np.testing.assert_array_equal(part.samples, other.samples)


def test_windows_are_divided_by_subject() -> None:
    windows = Windows(np.zeros((6, 1, 1), dtype=np.float32), np.arange(6))
    parts = by_subject(windows, np.array([4, 2, 3, 1, 2, 1]), val=[2], test=[3])
    assert [part.labels.tolist() for part in parts] == [[0, 3, 5], [1, 4], [2]]


def test_splits_share_no_window(data: HarData) -> None:
    seen = [{sample.tobytes() for sample in part.samples} for part in (data.train, data.val, data.test)]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]


def test_the_units_are_physical(data: HarData) -> None:
    """The typical length of the accelerometer's arrow is that of gravity, 1."""
    gravity = np.median(np.linalg.norm(data.train.samples[:, :3], axis=1))
    assert 0.9 < gravity < 1.15


def test_mirroring_makes_the_left_arm_like_the_right_one(data: HarData) -> None:
    plain = load_watch(val_subjects=None, test_subjects=None, mirror=False)
    flipped = (data.train.samples != plain.train.samples).any(axis=(0, 2))
    assert flipped.tolist() == [name in MIRRORED for name in ("ax", "ay", "az", "wx", "wy", "wz")]
    # Hanging down (PEN), the arm has gravity along ax: of opposite signs on the two sides unless mirrored.
    hanging = [part.train.samples[part.train.labels == 0][:, 0].mean(axis=1) for part in (data, plain)]
    assert np.abs(np.sign(hanging[0]).mean()) > 0.99
    assert np.abs(np.sign(hanging[1]).mean()) < 0.2


def test_subjects_can_be_chosen() -> None:
    chosen, all_but_one = (load_watch(val_subjects=[1], test_subjects=test, mirror=True) for test in ([2, 3], []))
    assert len(all_but_one.test) == 0
    assert len(chosen.val) == len(all_but_one.val)
    assert len(chosen.train) + len(chosen.test) == len(all_but_one.train)


@pytest.mark.parametrize(
    ("val", "test", "message"),
    [
        ([11], [1], r"\b11\b"),
        ([1, 2], [2], r"\b2 .*task\.val_subjects .*task\.test_subjects"),
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], "training"),
        ([], [1], "validation"),
    ],
)
def test_splits_that_cannot_be_are_refused(val: list[int], test: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_watch(val_subjects=val, test_subjects=test, mirror=True)
    assert caught.value.fix


@given(time=st.integers(0, 60), length=st.integers(1, 20), hop=st.integers(1, 20))
def test_windows_are_cut_at_every_hop_that_fits(time: int, length: int, hop: int) -> None:
    recording = np.arange(2 * time, dtype=np.float32).reshape(2, time)
    starts = range(0, time - length + 1, hop)
    cut = cut_windows(recording, length, hop)
    assert cut.shape == (len(starts), 2, length)
    for window, start in zip(cut, starts, strict=True):
        np.testing.assert_array_equal(window, recording[:, start : start + length])
