"""Asking torch in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lockstep.hardware import probe
from lockstep.hardware.probe import ProbedDevice, TorchBuild, read_answer, read_torch_build, worth_probing


def test_the_build_is_read_without_importing() -> None:
    assert read_torch_build() == TorchBuild(torch.version.cuda, torch.version.hip, torch.version.xpu)


def test_the_probe_agrees_with_torch_here() -> None:
    found = probe.probe()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    expected = torch.accelerator.device_count() if accelerator is not None else 0
    assert [device.index for device in found] == list(range(expected))


def test_a_probe_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('no such library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(OSError, match="no such library"):
        probe.probe()


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.5)
    with pytest.raises(OSError, match=r"within 0\.5 s"):
        probe.probe()


def test_a_file_called_torch_in_the_working_directory_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('not the library')")
    monkeypatch.chdir(tmp_path)
    assert isinstance(probe.probe(), list)


def test_answers() -> None:
    line = '[{"kind": "cuda", "index": 0, "name": "X", "total": 2, "free": 1, "uuid": "u", "capability": [8, 6]}]'
    assert read_answer(f"a library says hello\n{line}\n") == [ProbedDevice("cuda", 0, "X", 2, 1, "u", (8, 6))]
    assert read_answer("[]") == []


@pytest.mark.parametrize("text", ["", "hello", "3", '[{"kind": "cuda"}]', '[{"unknown": 1}]'])
def test_answers_that_are_none(text: str) -> None:
    with pytest.raises(OSError, match="not understood"):
        read_answer(text)


@pytest.mark.skipif(sys.platform == "darwin", reason="always worth it there")
def test_a_cpu_build_is_not_worth_a_probe() -> None:
    assert not worth_probing(TorchBuild())
    assert worth_probing(TorchBuild(hip="6.4"))
    assert worth_probing(TorchBuild(xpu="2025"))
