"""Temporary folders: gone afterwards, also when their maker was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lockstep.launch.local.on_ranks import temporary_folder
from tests.gloo import clean_environment

MAKER = """
import sys
from lockstep.launch.local.on_ranks import temporary_folder
with temporary_folder("lockstep-test-") as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(path: Path) -> None:
    then = time.time() - 3600
    os.utime(path, (then, then))


def test_a_folder_is_gone_afterwards_whatever_happened(place: Path) -> None:
    with pytest.raises(ValueError, match="inside"), temporary_folder("lockstep-test-") as path:
        (path / "file").touch()
        raise ValueError("inside")
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_goes_and_what_is_in_use_stays(place: Path) -> None:
    environ = clean_environment(TMPDIR=str(place))
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        theirs = Path(maker.stdout.readline().strip())
        age(theirs)
        with temporary_folder("lockstep-test-"):
            assert theirs.is_dir(), "its maker lives"
        maker.kill()
        maker.wait()
    with temporary_folder("lockstep-test-"):
        assert theirs.is_dir() is False


def test_foreign_files_and_new_folders_stay(place: Path) -> None:
    (place / "lockstep-test-link").symlink_to(place / "elsewhere")
    (place / "lockstep-test-file").touch()
    (place / "lockstep-test-new").mkdir()
    with temporary_folder("lockstep-test-"):
        pass
    assert len(list(place.iterdir())) == 3
