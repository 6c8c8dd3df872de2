"""Small folders of the same form as the real data sets."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from lockstep.tasks.har.data import CHANNELS, FOLDER

TRAIN_SUBJECTS = (1, 3, 5, 6, 7)
TEST_SUBJECTS = (2, 4)


def make_uci(parent: Path, windows_each: int = 12) -> Path:
    """UCI-HAR's folder with ``windows_each`` windows of each subject; returns the folder itself."""
    folder = parent / FOLDER
    for part, subjects in (("train", TRAIN_SUBJECTS), ("test", TEST_SUBJECTS)):
        rng = np.random.default_rng(len(subjects))
        (folder / part / "Inertial Signals").mkdir(parents=True)
        count = windows_each * len(subjects)
        np.savetxt(folder / part / f"y_{part}.txt", 1 + np.arange(count) % 6, fmt="%d")
        np.savetxt(folder / part / f"subject_{part}.txt", np.repeat(subjects, windows_each), fmt="%d")
        for place, channel in enumerate(CHANNELS):
            rows = rng.standard_normal((count, 128)) + 10 * place
            np.savetxt(folder / part / "Inertial Signals" / f"{channel}_{part}.txt", rows, fmt=" %.7e")
    return folder


def make_uci_archive(folder: Path, archive: Path) -> Path:
    """A zip within a zip, as the publisher's."""
    inner = archive.with_name("inner.zip")
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as content:
        for file in sorted(folder.rglob("*.txt")):
            content.write(file, Path(FOLDER) / file.relative_to(folder))
        content.writestr(f"__MACOSX/{FOLDER}/._train", b"")
    with zipfile.ZipFile(archive, "w") as content:
        content.write(inner, f"{FOLDER}.zip")
        content.writestr("UCI HAR Dataset.names", b"about")
    inner.unlink()
    return archive


def make_tensors(folder: Path, shape: tuple[int, int] = (3, 16), classes: int = 4) -> Path:
    """``train.pt``, ``val.pt`` and ``test.pt``."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 40), ("val", 12), ("test", 8)):
        samples = torch.randn(count, *shape, generator=generator)
        torch.save({"samples": samples, "labels": torch.arange(count) % classes}, folder / f"{part}.pt")
    return folder
