"""Convert scikit-learn's handwritten digits into the compressed arrays that Lockstep carries.

    python scripts/convert_digits.py scikit_learn-1.9.1-*.whl
    python scripts/convert_digits.py digits.csv.gz --output somewhere/digits.npz

Get the wheel with ``pip download --no-deps scikit-learn==1.9.1``. The source is a table of 1,797 rows: 64 pixels from
0 to 16, and the digit. Nothing is changed but the form.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MEMBER = "sklearn/datasets/data/digits.csv.gz"
SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
OUTPUT = Path(__file__).resolve().parents[1] / "src/lockstep/recipes/autoencoder/digits.npz"


def read_source(path: Path) -> bytes:
    """``digits.csv.gz``, from the wheel or as it is. Raises :class:`ValueError` for any other file."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            content = wheel.read(MEMBER)
    else:
        content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ValueError(f"{path} does not hold scikit-learn 1.9.1's {MEMBER}: SHA-256 {found}, not {SHA256}")
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Convert scikit-learn's digits into digits.npz.")
    parser.add_argument("source", type=Path, help="scikit-learn's wheel (1.9.1), or the digits.csv.gz from it")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        table = np.loadtxt(gzip.decompress(read_source(options.source)).decode().splitlines(), delimiter=",")
        images = table[:, :64].reshape(-1, 8, 8).astype(np.uint8)
        np.savez_compressed(options.output, images=images, labels=table[:, 64].astype(np.uint8))
    except (OSError, KeyError, ValueError) as error:
        print(f"convert_digits: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {len(images):,} images, {options.output.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
