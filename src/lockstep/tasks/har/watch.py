"""The data in the package: seven shoulder exercises of ten subjects with a smart watch (see ``watch.txt``)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from lockstep.tasks.har.windows import Floats, HarData, check_subjects, checked, select

WINDOW_S = 2.0
#: Subjects in the order of their numbers: the first six train, the next two validate, the last two test.
VAL_SUBJECTS = (7, 8)
TEST_SUBJECTS = (9, 10)
#: What a reflection at the body's plane of symmetry reverses: an arrow's x (ax); for a rotation, which is a
#: pseudovector, everything but x (wy, wz).
MIRRORED = ("ax", "wy", "wz")


def load_watch(*, val_subjects: Sequence[int] | None, test_subjects: Sequence[int] | None, mirror: bool) -> HarData:
    """Windows of two seconds at half overlap, split by subject.

    Args:
        mirror: reflect the recordings of the left arm, so that both arms look like a right one.

    Raises:
        ConfigError: subjects that are not there, or in two splits.
    """
    val = VAL_SUBJECTS if val_subjects is None else tuple(val_subjects)
    test = TEST_SUBJECTS if test_subjects is None else tuple(test_subjects)
    with files("lockstep.tasks.har").joinpath("watch.npz").open("rb") as file, np.load(file) as content:
        arrays = {name: content[name] for name in content.files}
    train = check_subjects(sorted(set(arrays["subject"].tolist())), val, test)
    signals = arrays["signals"] * arrays["scale"].astype(np.float32)[:, None]
    length = round(WINDOW_S * int(arrays["rate_hz"]))
    flip = np.array([[-1.0 if name in MIRRORED else 1.0] for name in arrays["channel_names"]], dtype=np.float32)
    samples, labels, subjects = [], [], []
    stops = np.cumsum(arrays["lengths"])
    for place, (start, stop) in enumerate(zip(stops - arrays["lengths"], stops, strict=True)):
        is_left = arrays["side"][place] == 0
        recording = signals[:, start:stop] * flip if mirror and is_left else signals[:, start:stop]
        cut = cut_windows(recording, length, length // 2)
        samples.append(cut)
        labels += [arrays["label"][place]] * len(cut)
        subjects += [arrays["subject"][place]] * len(cut)
    names = tuple(arrays["class_names"].tolist())
    windows = checked(np.concatenate(samples), np.array(labels), classes=len(names), where="watch.npz")
    of = np.array(subjects)
    return HarData(
        train=select(windows, of, train),
        val=select(windows, of, val),
        test=select(windows, of, test),
        class_names=names,
        split=f"by subject: training {list(train)}, validation {list(val)}, test {list(test)}",
    )


def cut_windows(recording: Floats, length: int, hop: int) -> Floats:
    """``(channels, time)`` → ``(windows, channels, length)``; a rest shorter than a window is left out."""
    if recording.shape[1] < length:
        return np.empty((0, len(recording), length), dtype=np.float32)
    views = np.lib.stride_tricks.sliding_window_view(recording, length, axis=1)[:, ::hop]
    return np.ascontiguousarray(views.transpose(1, 0, 2), dtype=np.float32)
