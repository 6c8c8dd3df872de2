"""Convert seglearn's smart-watch recordings into the compressed array that Lockstep carries.

    python scripts/convert_watch.py seglearn-1.2.5-py3-none-any.whl
    python scripts/convert_watch.py watch_dataset.npy --output somewhere/watch.npz

Get the wheel with ``pip download --no-deps seglearn==1.2.5``. The source holds the recordings as a
pickled dictionary of 64-bit floats (18 MB); the result holds whole numbers of 16 bits and a scale for
each channel (2.7 MB), and loads without pickle. The same input gives the same bytes (with the same zlib).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MEMBER = "seglearn/data/watch_dataset.npy"
#: Of ``watch_dataset.npy`` in seglearn 1.2.5. Unpickling runs code, so only this very file is unpickled.
SHA256 = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"
OUTPUT = Path(__file__).resolve().parents[1] / "src/lockstep/tasks/har/watch.npz"
RATE_HZ = 50
LARGEST = np.iinfo(np.int16).max

Arrays = dict[str, npt.NDArray[Any]]


def read_source(path: Path) -> Mapping[str, Any]:
    """The source's dictionary, from the wheel or from the ``.npy`` file itself."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            content = wheel.read(MEMBER)
    else:
        content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ValueError(f"{path} does not hold seglearn 1.2.5's {MEMBER}: SHA-256 {found}, not {SHA256}")
    source: Mapping[str, Any] = np.load(io.BytesIO(content), allow_pickle=True).item()
    return source


def convert(source: Mapping[str, Any]) -> Arrays:
    """The arrays of ``watch.npz``.

    Recordings are joined along time in the source's order: ``signals`` has shape (channels, samples) and
    ``signals * scale[:, None]`` is in the source's units; ``lengths``, ``subject``, ``side`` (0 left,
    1 right) and ``label`` have one entry per recording.
    """
    recordings = [np.asarray(recording, dtype=np.float64) for recording in source["X"]]
    joined = np.concatenate(recordings).T
    scale = np.abs(joined).max(axis=1) / LARGEST
    return {
        "signals": np.rint(joined / scale[:, None]).astype(np.int16),
        "scale": scale,
        "lengths": np.array([len(recording) for recording in recordings], dtype=np.int32),
        "subject": np.asarray(source["subject"], dtype=np.uint8),
        "side": np.asarray(source["side"], dtype=np.uint8),
        "label": np.asarray(source["y"], dtype=np.uint8),
        "class_names": np.array(source["y_labels"], dtype=np.str_),
        "channel_names": np.array(source["X_labels"], dtype=np.str_),
        "rate_hz": np.array(RATE_HZ, dtype=np.int32),
    }


def quantisation_error(source: Mapping[str, Any], arrays: Arrays) -> tuple[float, float]:
    """Largest and root-mean-square error over all values, in standard deviations of the value's channel."""
    original = np.concatenate([np.asarray(recording, dtype=np.float64) for recording in source["X"]]).T
    error = (arrays["signals"] * arrays["scale"][:, None] - original) / original.std(axis=1, keepdims=True)
    return float(np.abs(error).max()), float(np.sqrt(np.square(error).mean()))


def write(arrays: Arrays, output: Path) -> None:
    """Compress ``arrays`` into ``output``, whole or not at all."""
    temporary = output.with_name(output.name + ".tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    temporary.replace(output)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Convert seglearn's smart-watch recordings into watch.npz.")
    parser.add_argument("source", type=Path, help="seglearn's wheel (1.2.5), or the watch_dataset.npy from it")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        source = read_source(options.source)
        arrays = convert(source)
        write(arrays, options.output)
    except (OSError, KeyError, ValueError) as error:
        print(f"convert_watch: {error}", file=sys.stderr)
        return 2
    largest, typical = quantisation_error(source, arrays)
    recordings, samples, size = len(arrays["lengths"]), arrays["signals"].shape[1], options.output.stat().st_size
    print(f"{options.output}: {recordings} recordings, {samples:,} samples, {size:,} bytes")
    print(f"quantisation error: at most {largest:.1e}, typically {typical:.1e} standard deviations of a channel")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
