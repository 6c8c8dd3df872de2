"""Where the texts of the language model come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import DataError

SUFFIXES = (".txt", ".md", ".jsonl", ".bin")


def standard_library() -> list[str]:
    """The default corpus: 0.46 MB about Python, of its standard library (``pydoc_data.topics``, PSF licence)."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    return [topics[name] for name in sorted(topics)]


def read_documents(path: Path, field: str) -> list[str]:
    """The texts of a file, or of the files below a folder in the order of their names.

    A ``.jsonl`` file has a document on each line, in ``field``.

    Raises:
        DataError: there is none, or one cannot be read.
    """
    if not path.exists():
        raise DataError(f"there is no {path}", fix="check task.data: a .txt, .jsonl or .bin file, or a folder of them")
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES[:3])
    documents = [text for file in files for text in _texts(file, field) if text]
    if not documents:
        raise DataError(
            f"{path} has no text",
            why="it is empty" if path.is_file() else f"it has no {', '.join(SUFFIXES[:3])} file with text",
            fix="name a file or folder of texts",
        )
    return documents


def _texts(file: Path, field: str) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file}", why=str(error), fix="save it as UTF-8 text") from None
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield str(json.loads(line)[field])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"line {number} of {file} has no text",
                why=f"{type(error).__name__}: {error}",
                fix=f'write {{"{field}": "…"}} on each line, or set task.field',
            ) from None


def read_tokens(file: Path, vocabulary: int) -> NDArray[np.uint16]:
    """The tokens of a ``.bin`` file, 16 bits each, as nanoGPT writes them; mapped, not read.

    Raises:
        DataError: it is empty, or has a token that the tokenizer does not have.
    """
    if not file.is_file() or file.stat().st_size < 2:
        raise DataError(f"{file} has no tokens", fix="name a file of 16-bit token ids")
    tokens = np.memmap(file, dtype=np.uint16, mode="r")
    if int(tokens.max()) >= vocabulary:
        raise DataError(
            f"{file} has the token {int(tokens.max())}, and the tokenizer has {vocabulary}",
            fix="set task.tokenizer to the one that wrote the file (a tokenizer.json)",
        )
    return tokens
