"""Where the texts of the language model come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.data.files import inside
from lockstep.errors import DataError

#: Of the files that are read in a folder.
SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson")


def standard_library() -> list[str]:
    """The default corpus: 0.46 MB about Python, of its standard library (``pydoc_data.topics``, PSF licence)."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    return [topics[name] for name in sorted(topics)]


def read_documents(path: Path, field: str) -> list[str]:
    """The texts of a file, or of the files below a folder in the order of their names.

    A ``.jsonl``, ``.ndjson`` or ``.json`` file has a document on each line, in ``field``. Hidden files are left out.

    Raises:
        DataError: there is none, or one cannot be read.
    """
    if not path.exists():
        raise DataError(f"there is no {path}", fix="check task.data: a .txt, .jsonl or .bin file, or a folder of texts")
    files = [path] if path.is_file() else sorted(map(Path, inside(str(path), SUFFIXES)))
    documents = [text for file in files for text in _texts(file, field) if text]
    if not documents:
        raise DataError(
            f"{path} has no text",
            why="it is empty" if path.is_file() else f"it has no {', '.join(SUFFIXES)} file with text",
            fix="name a file or folder of texts, or one .bin file",
        )
    return documents


def _texts(file: Path, field: str) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read {file}", why=str(error), fix="check the file, or remove it") from None
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {file}", why=str(error), fix="save it as UTF-8 text") from None
    if file.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)[field]
            if not isinstance(found, str):
                raise TypeError(f"{field} is {json.dumps(found)[:40]}, not a text")
            found.encode()  # half of a surrogate pair cannot be encoded
            yield found
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"line {number} of {file} has no text",
                why=f"{type(error).__name__}: {error}",
                fix=f'write {{"{field}": "…"}} on each line, or set task.field',
            ) from None


def read_tokens(file: Path, vocabulary: int) -> NDArray[np.uint16]:
    """The tokens of a ``.bin`` file, 16 bits each, as nanoGPT writes them; mapped, not read.

    Raises:
        DataError: it is empty or of other numbers, or has a token that the tokenizer does not have.
    """
    size = file.stat().st_size if file.is_file() else 0
    if not size or size % 2:
        why = f"it has {size:,} bytes" if size else ""
        raise DataError(f"{file} has no tokens of 16 bits", why=why, fix="name a file of 16-bit token ids")
    tokens = np.memmap(file, dtype=np.uint16, mode="r")
    if int(tokens.max()) >= vocabulary:
        raise DataError(
            f"{file} has the token {int(tokens.max())}, and the tokenizer has {vocabulary}",
            fix="set task.tokenizer to the one that wrote the file (a tokenizer.json)",
        )
    return tokens
