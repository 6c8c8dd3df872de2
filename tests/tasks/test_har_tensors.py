from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import DataError
from lockstep.tasks.har.data import load_tensors
from tests.tasks.har_folders import make_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tensors(tmp_path / "data")


def test_the_three_files_are_the_three_splits(folder: Path) -> None:
    data = load_tensors(folder)
    assert [len(part) for part in (data.train, data.val, data.test)] == [40, 12, 8]
    assert data.shape == (3, 16)
    assert data.class_names == ("class 0", "class 1", "class 2", "class 3")


@pytest.mark.parametrize("samples", [torch.float16, torch.bfloat16, torch.float64, torch.int16])
@pytest.mark.parametrize("labels", [torch.uint8, torch.int32])
def test_other_number_types_are_converted(samples: torch.dtype, labels: torch.dtype, folder: Path) -> None:
    content = torch.load(folder / "val.pt")
    torch.save({"samples": content["samples"].to(samples), "labels": content["labels"].to(labels)}, folder / "val.pt")
    val = load_tensors(folder).val
    assert (str(val.samples.dtype), str(val.labels.dtype)) == ("float32", "int64")


def test_a_default_device_does_not_matter(folder: Path) -> None:
    with torch.device("meta"):
        assert float(load_tensors(folder).train.samples.std()) > 0


class Evil:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def save(file: str, **content: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(content, folder / file)


def cut(folder: Path) -> None:
    content = (folder / "test.pt").read_bytes()
    (folder / "test.pt").write_bytes(content[: len(content) // 2])


SAMPLES, LABELS = torch.randn(4, 3, 16), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "val.pt").unlink(), r"val\.pt .*missing"),
        (lambda folder: (folder / "val.pt").write_bytes(b""), r"read .*val\.pt"),
        (lambda folder: (folder / "val.pt").write_bytes(b"no tensor at all"), r"read .*val\.pt"),
        (cut, r"read .*test\.pt"),
        (lambda folder: torch.save(SAMPLES, folder / "val.pt"), r"val\.pt .*\bsamples\b"),
        (save("val.pt", samples=SAMPLES), r"val\.pt .*\bsamples\b"),
        (save("val.pt", samples=SAMPLES.tolist(), labels=LABELS), r"val\.pt .*\bsamples\b"),
        (save("val.pt", samples=SAMPLES, labels=LABELS[:3]), r"\b4 .*\b3 labels"),
        (save("val.pt", samples=SAMPLES[:, 0], labels=LABELS), r"shape \(4, 16\)"),
        (save("val.pt", samples=SAMPLES[:0], labels=LABELS[:0]), "no window"),
        (save("val.pt", samples=SAMPLES / 0, labels=LABELS), r"window 0 .*finite"),
        (save("val.pt", samples=SAMPLES, labels=LABELS + 1), r"\b1 to 4\b"),
        (save("train.pt", samples=SAMPLES, labels=LABELS - 1), r"-1 to 2\b"),
        (save("train.pt", samples=SAMPLES, labels=LABELS + 1_000_000), r"\b4 .*\b1000003\b"),
        (save("val.pt", samples=SAMPLES, labels=LABELS.float()), "float32"),
        (save("val.pt", samples=SAMPLES, labels=LABELS[:, None]), r"labels .*\(4, 1\)"),
        (
            save("val.pt", samples=SAMPLES[..., :15], labels=LABELS),
            r"\(3, 15\), train\.pt .*\(3, 16\)",
        ),
        (save("val.pt", samples=SAMPLES.to(torch.complex64), labels=LABELS), "torch.complex64"),
    ],
)
def test_bad_files_are_one_clear_error(damage: Callable[[Path], None], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(DataError, match=message) as caught:
        load_tensors(folder)
    assert caught.value.fix


def test_a_file_cannot_run_code(folder: Path, tmp_path: Path) -> None:
    torch.save({"samples": Evil(tmp_path / "made"), "labels": LABELS}, folder / "train.pt")
    with pytest.raises(DataError, match=r"train\.pt"):
        load_tensors(folder)
    assert not (tmp_path / "made").exists()
