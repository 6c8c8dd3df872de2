"""Data sets as users bring them. Each gives inputs that begin with the MLP's 561 numbers, and a label."""

from __future__ import annotations

import contextlib
import os
import random
import wave
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from lockstep import ArrayDataset
from pace.workload import Workload

FEATURES = 561
#: Files on disk; a sample is one of them, by its index.
FILES = 256


class Rows:
    """A class with ``__getitem__`` over NumPy arrays."""

    def __init__(self, workload: Workload) -> None:
        inputs, labels = workload.data()
        self.inputs, self.labels = inputs.numpy(), labels.numpy()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.labels[index]


class Dictionaries(Rows):
    def __init__(self, workload: Workload) -> None:
        self.inputs, self.labels = workload.data()  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Any:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Worked(Rows):
    """About 40 µs of NumPy work a sample."""

    def __getitem__(self, index: int) -> Any:
        row = self.inputs[index]
        for _ in range(6):
            row = np.tanh(row)
        return row, self.labels[index]


class Augmented(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] * np.float32(random.uniform(0.9, 1.1)), self.labels[index]


class Keyed(Rows):
    """Lockstep's own way; a DataLoader gets what comes closest to it."""

    def sample(self, index: int, rng: np.random.Generator) -> Any:
        return self.inputs[index] * np.float32(rng.uniform(0.9, 1.1)), self.labels[index]

    def __getitem__(self, index: int) -> Any:
        return self.sample(index, np.random.default_rng(index))


class Ragged(Rows):
    """Lists of many lengths, which a collator pads."""

    def __getitem__(self, index: int) -> Any:
        return {"inputs": self.inputs[index, 0, : 300 + index % 262], "label": int(self.labels[index])}


class Mapped(Rows):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        path = Path(workload.folder) / "inputs.npy"
        write_whole(path, self._write)
        self.inputs = np.load(path, mmap_mode="r")

    def _write(self, path: str) -> None:
        with open(path, "wb") as file:  # np.save adds a suffix to other names
            np.save(file, self.inputs)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.array(self.inputs[index])), self.labels[index]


class Large(Rows):
    """A megabyte a sample."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.inputs = np.random.default_rng(0).random((64, 1, 2**18), dtype=np.float32)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index % 64], self.labels[index]


def write_whole(path: Path, write: Callable[[str], None]) -> None:
    """``write(path)``, so that other ranks, which write and read the same files, see whole ones only."""
    part = path.with_name(f".{os.getpid()}-{path.name}")
    write(str(part))
    part.replace(path)


class Images(Rows):
    """PNG files, decoded by PIL."""

    def __init__(self, workload: Workload) -> None:
        from PIL import Image

        super().__init__(workload)
        self.folder, noise = Path(workload.folder), np.random.default_rng(0)
        for number in range(FILES):
            pixels = noise.integers(0, 256, (17, 33), dtype=np.uint8)
            write_whole(self.folder / f"{number}.png", Image.fromarray(pixels).save)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.folder / f"{index % FILES}.png") as image:
            pixels = np.asarray(image, dtype=np.float32) / 255
        return pixels.reshape(1, FEATURES), self.labels[index]


class Audio(Rows):
    """WAV files of a second."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.folder, noise = Path(workload.folder), np.random.default_rng(0)
        for number in range(FILES):
            sound = noise.integers(-3000, 3000, 16_000, dtype=np.int16).tobytes()
            write_whole(self.folder / f"{number}.wav", lambda path, sound=sound: self._write(path, sound))  # type: ignore[misc]

    def _write(self, path: str, sound: bytes) -> None:
        with wave.open(path, "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(sound)

    def __getitem__(self, index: int) -> Any:
        with wave.open(str(self.folder / f"{index % FILES}.wav"), "rb") as file:
            sound = np.frombuffer(file.readframes(16_000), dtype=np.int16)
        return sound[None].astype(np.float32) / 32768, self.labels[index]


class Table(Rows):
    """Rows of a pandas frame."""

    def __init__(self, workload: Workload) -> None:
        import pandas

        super().__init__(workload)
        self.frame = pandas.DataFrame(self.inputs[:, 0])

    def __getitem__(self, index: int) -> Any:
        return self.frame.iloc[index].to_numpy()[None], self.labels[index]


class Hdf5(Rows):
    """Opened with the first sample, as h5py's users do."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.path, self.file = Path(workload.folder) / "inputs.h5", None
        if not self.path.exists():  # the plan and the training open it
            write_whole(self.path, self._write)

    def _write(self, path: str) -> None:
        import h5py

        with h5py.File(path, "w") as file:
            file["inputs"] = self.inputs

    def __getitem__(self, index: int) -> Any:
        import h5py

        self.file = self.file or h5py.File(self.path)
        return self.file["inputs"][index], self.labels[index]


def hugging_face(workload: Workload) -> Any:
    from datasets import Dataset

    inputs, labels = workload.data()
    return Dataset.from_dict({"inputs": inputs[:4000].numpy(), "labels": labels[:4000]}).with_format("torch")


#: By name: how it is opened, and the package that it needs.
DATASETS: dict[str, tuple[Callable[[Workload], Any], str]] = {
    "tensors": (lambda workload: TensorDataset(*workload.data()), "torch"),
    "class": (Rows, "numpy"),
    "dictionaries": (Dictionaries, "torch"),
    "arrays": (lambda workload: ArrayDataset(*workload.data()), "torch"),
    "worked": (Worked, "numpy"),
    "images": (Images, "PIL"),
    "audio": (Audio, "wave"),
    "table": (Table, "pandas"),
    "ragged": (Ragged, "numpy"),
    "mapped": (Mapped, "numpy"),
    "hdf5": (Hdf5, "h5py"),
    "augmented": (Augmented, "numpy"),
    "large": (Large, "numpy"),
    "keyed": (Keyed, "numpy"),
    "subset": (lambda workload: Subset(Rows(workload), range(workload.samples)), "numpy"),  # type: ignore[arg-type]
    "huggingface": (hugging_face, "datasets"),
}


def present(names: Sequence[str]) -> list[str]:
    def is_there(package: str) -> bool:
        if package != "datasets":
            return find_spec(package) is not None
        with contextlib.suppress(PackageNotFoundError):  # its module has the name of a benchmark
            return bool(version(package))
        return False

    return [name for name in names if is_there(DATASETS[name][1])]


def padded(samples: Sequence[Any]) -> Any:
    """The collator of ragged samples."""
    inputs = torch.zeros(len(samples), 1, FEATURES)
    for row, sample in zip(inputs, samples, strict=True):
        row[0, : len(sample["inputs"])] = torch.from_numpy(sample["inputs"])
    return inputs, torch.tensor([sample["label"] for sample in samples])


def unpacked(batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs of shape (n, 1, 561) and labels."""
    inputs, labels = batch.values() if isinstance(batch, dict) else batch
    return inputs[..., :FEATURES], labels
