"""Tokens of texts: bytes, or a byte-level BPE that is trained on the corpus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import DataError, UnsupportedError

END = "<|end|>"
#: A byte that a tokenizer with fallback to bytes has no character for.
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer(Protocol):
    """``size`` counts the token ``end``, which follows each document."""

    size: int
    end: int

    def encode(self, text: str) -> NDArray[np.int64]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def lengths(self) -> NDArray[np.int64]:
        """Bytes of the text of each token; 0 for ``end``."""
        ...

    def as_json(self) -> str:
        """What :func:`tokenizer_of` makes it from again."""
        ...


class Bytes:
    """A token for each byte of UTF-8, and one for the end of a document."""

    size, end = 257, 256

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number for number in ids if number < 256).decode(errors="replace")

    def lengths(self) -> NDArray[np.int64]:
        return np.array([1] * 256 + [0])

    def as_json(self) -> str:
        return "bytes"


class Bpe:
    """A tokenizer of the library ``tokenizers``, from its JSON."""

    def __init__(self, text: str) -> None:
        self._text, self._own = text, _library().Tokenizer.from_str(text)
        self.size = self._own.get_vocab_size()
        found = [self._own.token_to_id(name) for name in (END, "<|endoftext|>", "</s>", "<eos>")]
        self.end = next((number for number in found if number is not None), self.size - 1)

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self._own.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._own.decode(list(ids)))

    def lengths(self) -> NDArray[np.int64]:
        own, size = self._own, self.size
        added = {number: token.content for number, token in own.get_added_tokens_decoder().items()}
        names = [added.get(number) or own.id_to_token(number) or "" for number in range(size)]
        found: list[int] = []
        bytewise = "ByteLevel" in json.dumps(json.loads(self._text).get("decoder"))
        # What a token adds to a text: decoded alone, it may lose the space that it begins with.
        before = next((n for n, name in enumerate(names) if n not in added and name.isascii() and name.isalnum()), 0)
        start = len(own.decode([before]).encode())
        for number, name in enumerate(names):
            if number in added:
                found.append(len(name.encode()))
            elif bytewise:  # one character for each byte
                found.append(len(name))
            elif _BYTE.fullmatch(name):
                found.append(1)
            else:
                found.append(len(own.decode([before, number]).encode()) - start)
        found[self.end] = 0
        return np.array(found)

    def as_json(self) -> str:
        return self._text


def tokenizer_of(text: str) -> Tokenizer:
    return Bytes() if text == "bytes" else Bpe(text)


def train_bpe(documents: Iterable[str], vocabulary: int) -> str:
    """The JSON of a byte-level BPE of ``vocabulary`` tokens (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909)."""
    library = _library()
    own = library.Tokenizer(library.models.BPE())
    own.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator(documents, trainer)
    return str(own.to_str())


def read_tokenizer(file: Path) -> str:
    """The JSON in ``file``. Raises :class:`DataError`: it is not a tokenizer."""
    text = file.read_text(encoding="utf-8")
    try:
        Bpe(text)
    except UnsupportedError:
        raise
    except Exception as error:  # the library has its own in Rust
        raise DataError(f"{file} is not a tokenizer", why=str(error)[:200], fix="name a tokenizer.json") from None
    return text


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise UnsupportedError(
            "the package tokenizers, which task.tokenizer=bpe needs, is not installed",
            fix="pip install 'lockstep-train[text]', or use task.tokenizer=bytes",
        ) from None
    return tokenizers
