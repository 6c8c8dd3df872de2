"""A folder that is uploaded while it grows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lockstep.errors import ConfigError
from lockstep.events import EpochEnded
from lockstep.telemetry.upload import Retry, Uploader, UploadSink

IMPATIENT = Retry(attempts=2, backoff_s=0.0)


@pytest.fixture
def remote() -> Any:
    """A storage that is not a file system of this machine."""
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/", recursive=True)


def epoch(number: int) -> EpochEnded:
    return EpochEnded(attempt=1, epoch=number, step=number, row={}, improved=False)


def test_new_and_changed_files_travel_and_temporary_ones_do_not(tmp_path: Path, remote: Any) -> None:
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1" / "weights").write_bytes(b"1")
    (tmp_path / "checkpoints" / "last").symlink_to("step-1", target_is_directory=True)
    (tmp_path / ".metrics.json.tmp-1-a").write_text("half")
    sink = UploadSink(Uploader(tmp_path, "memory://bucket/run"))
    sink.emit(epoch(1))
    (tmp_path / "metrics.json").write_text("{}")
    sink.close()
    sink.close()
    assert {path: remote.cat(path) for path in remote.find("/bucket")} == {
        "/bucket/run/checkpoints/last": b"step-1",
        "/bucket/run/checkpoints/step-1/weights": b"1",
        "/bucket/run/metrics.json": b"{}",
    }


def test_a_slow_target_holds_nobody_up_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink answers at once while the storage hangs; closing waits no longer than it was told."""
    hanging, released = threading.Event(), threading.Event()

    def put_file(self: Any, *args: Any, **kwargs: Any) -> None:
        hanging.set()
        released.wait(30)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    (tmp_path / "file").write_text("x")
    said: list[str] = []
    uploader = Uploader(tmp_path, "memory://slow", report=said.append, close_timeout_s=0.05)
    sink = UploadSink(uploader, every_epochs=2)
    sink.emit(epoch(1))
    assert uploader._thread is None, "only every second epoch"
    sink.emit(epoch(2))
    assert hanging.wait(10)
    sink.emit(epoch(4))
    assert uploader.close() is False
    assert "given up" in said[-1]
    released.set()
    assert uploader._thread is not None
    uploader._thread.join(10)
    assert not uploader._thread.is_alive()


def test_what_failed_is_reported_and_tried_again_in_the_next_pass(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("x")
    target = tmp_path / "target"
    target.write_text("in the way")
    said = threading.Event()
    uploader = Uploader(tmp_path / "run", str(target), retry=IMPATIENT, report=lambda _: said.set())
    uploader.request()
    assert said.wait(10)
    assert list(uploader.failures) == ["file"]
    target.unlink()
    assert uploader.close() is True
    assert (target / "file").read_text() == "x"


@pytest.mark.parametrize("target", ["{run}", "{run}/copy", "file://{run}/copy", "nowhere://bucket/x"])
def test_targets_that_cannot_be(tmp_path: Path, target: str) -> None:
    with pytest.raises(ConfigError, match="cannot upload"):
        Uploader(tmp_path, target.format(run=tmp_path))
