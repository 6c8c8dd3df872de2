"""Texts, and their tokens: bytes, or a byte-level BPE that is trained on them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import DataError, LockstepError, UnsupportedError
from lockstep.readers.files import inside

#: Of the files that are read in a folder.
SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson")
END = "<|end|>"
#: Usual names of the token that ends a document.
ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
#: A byte that a tokenizer with fallback to bytes has no character for.
_BYTE = re.compile("<0x[0-9A-F]{2}>")


def standard_library() -> list[str]:
    """Return the default corpus: 0.46 MB about Python, of its standard library (``pydoc_data.topics``, PSF licence)."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    return [topics[name] for name in sorted(topics)]


def read_documents(path: Path, field: str) -> list[str]:
    """Read the texts of a file, or of the files below a folder in the order of their names.

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
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file}", why=str(error), fix="save it as UTF-8 text, or remove it") from None
    if file.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text_of_line = json.loads(line)[field]
            if not isinstance(text_of_line, str):
                raise TypeError(f"{field} is {json.dumps(text_of_line)[:40]}, not a text")
            text_of_line.encode()  # half of a surrogate pair cannot be encoded
            yield text_of_line
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"line {number} of {file} has no text",
                why=f"{type(error).__name__}: {error}",
                fix=f'write {{"{field}": "…"}} on each line, or set task.field',
            ) from None


def read_tokens(file: Path, vocabulary: int) -> NDArray[np.uint16]:
    """Map the tokens of a ``.bin`` file, 16 bits each, as nanoGPT writes them."""
    size = file.stat().st_size if file.is_file() else 0
    if not size or size % 2:
        raise DataError(
            f"{file} has no tokens of 16 bits",
            why=f"it has {size:,} bytes" if size else "",
            fix="name a file of 16-bit token ids",
        )
    tokens = np.memmap(file, dtype=np.uint16, mode="r")
    if int(tokens.max()) >= vocabulary:
        raise DataError(
            f"{file} has the token {int(tokens.max())}, and the tokenizer has {vocabulary}",
            fix="set task.tokenizer to the one that wrote the file (a tokenizer.json)",
        )
    return tokens


class Bytes:
    """A token for each byte of UTF-8, and one for the end of a document."""

    #: Number of tokens.
    size = 257
    #: The token that follows each document.
    end = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number for number in ids if number < 256).decode(errors="replace")

    def lengths(self) -> NDArray[np.int64]:
        """Return bytes of the text of each token; 0 for ``end``."""
        return np.array([1] * 256 + [0])

    def state(self) -> dict[str, Any]:
        """Return the arguments with which :func:`tokenizer_of` makes it again."""
        return {"tokenizer": "bytes"}


class Bpe:
    """A tokenizer of the library ``tokenizers``, from its JSON; ``end``: its end token, by default a usual one."""

    def __init__(self, text: str, end: str | None = None) -> None:
        self._text = text
        self._own = _library().Tokenizer.from_str(text)
        self.size = max(self._own.get_vocab().values(), default=-1) + 1  # ids may have gaps
        end_ids = {name: self._own.token_to_id(name) for name in ([end] if end else ENDS)}
        self._end = next((name for name, number in end_ids.items() if number is not None), "")
        if not self._end:
            raise DataError(
                f"the tokenizer has no token {', '.join(end_ids)}",
                why="documents are separated by an end token",
                fix='write {"eos_token": "…"}, one of its tokens, to a tokenizer_config.json beside the tokenizer.json',
            )
        self.end = end_ids[self._end]

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self._own.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._own.decode(list(ids)))

    def lengths(self) -> NDArray[np.int64]:
        tokenizer = self._own
        size = self.size
        added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        names = [added.get(number) or tokenizer.id_to_token(number) or "" for number in range(size)]
        lengths: list[int] = []
        bytewise = "ByteLevel" in json.dumps(json.loads(self._text).get("decoder"))
        # Bytes that a token adds to a text: decoded alone, it may lose the space that it begins with.
        before = next((n for n, name in enumerate(names) if n not in added and name.isascii() and name.isalnum()), 0)
        start = len(tokenizer.decode([before]).encode())
        for number, name in enumerate(names):
            if number in added:
                lengths.append(len(name.encode()))
            elif bytewise:  # one character for each byte
                lengths.append(len(name))
            elif _BYTE.fullmatch(name):
                lengths.append(1)
            else:
                lengths.append(len(tokenizer.decode([before, number]).encode()) - start)
        lengths[self.end] = 0
        return np.array(lengths)

    def state(self) -> dict[str, Any]:
        return {"tokenizer": self._text, "end": self._end}


Tokenizer = Bytes | Bpe


def tokenizer_of(tokenizer: str, end: str | None = None) -> Tokenizer:
    return Bytes() if tokenizer == "bytes" else Bpe(tokenizer, end)


def train_bpe(documents: Iterable[str], vocabulary: int) -> str:
    """Train a byte-level BPE of ``vocabulary`` tokens (Sennrich et al. 2016, arXiv 1508.07909); return its JSON."""
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return str(tokenizer.to_str())


def read_tokenizer(file: Path) -> Tokenizer:
    """Read the tokenizer in ``file``; a ``tokenizer_config.json`` beside it names the end token."""
    beside = file.with_name("tokenizer_config.json")
    try:
        end = json.loads(beside.read_text(encoding="utf-8")).get("eos_token") if beside.is_file() else None
        return Bpe(file.read_text(encoding="utf-8"), end["content"] if isinstance(end, dict) else end)
    except LockstepError:
        raise
    except Exception as error:  # raised in Rust, without a class
        raise DataError(f"{file} is not a tokenizer", why=str(error)[:200], fix="name a tokenizer.json") from None


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UnsupportedError(
            "the package tokenizers, which task.tokenizer=bpe needs, is not installed",
            fix="pip install 'lockstep-train[text]', or use task.tokenizer=bytes",
        ) from None
    return tokenizers
