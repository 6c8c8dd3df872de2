"""A user's recordings: noise, but with transcripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.speech_files import make_recordings


@pytest.fixture
def speech_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(make_recordings(tmp_path / "recordings", 40))
