"""Where the utterances come from: what was named, or one clear error; never something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.errors import ConfigError, DataError
from lockstep.events import Sound
from lockstep.recipes.speech import espeak
from lockstep.recipes.speech.task import SpeechConfig, SpeechTask
from lockstep.tasks.registry import make_task
from tests.recipes.speech_files import make_recordings


def make(data_dir: Path | str | None = None, *, download: bool = False, **settings: Any) -> SpeechTask:
    task = SpeechTask(SpeechConfig(**settings))
    task.data = replace(task.data, data_dir=data_dir, download=download)
    return task


@pytest.mark.parametrize(
    ("settings", "data", "ignored"),
    [
        ({"val_manifest": "val.jsonl"}, {}, "task.val_manifest"),
        ({"test_manifest": "test.jsonl"}, {}, "task.test_manifest"),
        ({"train_manifest": "t.jsonl", "utterances": 7}, {}, "task.utterances"),
        ({"train_manifest": "t.jsonl"}, {"data_dir": ".", "download": True}, "data.download, data.data_dir"),
        ({}, {"download": True}, "data.download"),
    ],
)
def test_settings_for_another_source_are_refused_by_name(
    settings: dict[str, Any], data: dict[str, Any], ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(espeak, "PACKAGE", "not-here")  # so that nothing is spoken where nothing is refused
    with pytest.raises(ConfigError, match=f"^{ignored} "):
        make(**data, **settings).prepare()


def test_a_folder_without_known_data_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    make_recordings(tmp_path / "mine", 2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=r"mine holds\b") as caught:
        make(tmp_path / "mine").prepare()
    assert "task.train_manifest" in caught.value.fix
    with pytest.raises(DataError, match=r"\bfolder .*mien"):
        make(tmp_path / "mien").prepare()
    assert sorted(tmp_path.rglob("*")) == before


def test_an_example_of_an_evaluation_can_be_heard(tmp_path: Path) -> None:
    manifest = make_recordings(tmp_path, 3)
    task = make(train_manifest=manifest, val_manifest=manifest)
    task._examples = (("ON", "OH"), ("STOP", "TOP"), ("GO UP", "GO"))  # the second is of other data
    first, *others = task.remarks()
    assert isinstance(first, Sound)
    assert (first.text, first.rate_hz) == ("said: 'ON'  heard: 'OH'", 16_000)
    assert np.array_equal(first.samples, task.datasets().val.waveform(0))
    assert [isinstance(one, Sound) for one in others] == [False, True]
    assert not task.remarks()


def test_speech_is_made_in_an_empty_folder_and_beside_what_was_made_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(espeak, "PACKAGE", "not-here")
    for name in ("empty", "spoken/speech-0123456789ab"):
        (tmp_path / name).mkdir(parents=True)
        with pytest.raises(DataError, match=r"lockstep-train\[speech\]"):
            make(tmp_path / name.partition("/")[0]).prepare()


@pytest.mark.parametrize("setting", sorted(SpeechConfig.removed_settings))
def test_removed_settings_are_refused_by_name(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_task(SpeechTask, {setting: 1})
    assert f"task.{setting}" in caught.value.what
    assert caught.value.fix == SpeechConfig.removed_settings[setting]
