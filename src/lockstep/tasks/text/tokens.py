"""Tokens of texts: bytes, or a byte-level BPE that is trained on the corpus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import DataError, LockstepError, UnsupportedError

END = "<|end|>"
#: Usual names of the token that ends a document.
ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
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

    def state(self) -> dict[str, Any]:
        """What :func:`tokenizer_of` makes it from again: its JSON, and the name of the end token."""
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

    def state(self) -> dict[str, Any]:
        return {"tokenizer": "bytes"}


class Bpe:
    """A tokenizer of the library ``tokenizers``, from its JSON.

    Args:
        end: the token that ends a document; ``None``: one with a usual name.

    Raises:
        DataError: it has no such token.
    """

    def __init__(self, text: str, end: str | None = None) -> None:
        self._text, self._own = text, _library().Tokenizer.from_str(text)
        self.size = self._own.get_vocab_size()
        found = {name: self._own.token_to_id(name) for name in ([end] if end else ENDS)}
        self._end = next((name for name, number in found.items() if number is not None), "")
        if not self._end:
            raise DataError(
                f"the tokenizer has no token {', '.join(found)}",
                why="documents are separated by an end token",
                fix='write {"eos_token": "…"}, one of its tokens, to a tokenizer_config.json beside the tokenizer.json',
            )
        self.end = found[self._end]

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

    def state(self) -> dict[str, Any]:
        return {"tokenizer": self._text, "end": self._end}


def tokenizer_of(tokenizer: str, end: str | None = None) -> Tokenizer:
    return Bytes() if tokenizer == "bytes" else Bpe(tokenizer, end)


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


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in ``file``; a ``tokenizer_config.json`` beside it names the end token.

    Raises:
        DataError: it is not a tokenizer, or has no end token.
    """
    beside = file.with_name("tokenizer_config.json")
    try:
        end = json.loads(beside.read_text(encoding="utf-8")).get("eos_token") if beside.is_file() else None
        return Bpe(file.read_text(encoding="utf-8"), end["content"] if isinstance(end, dict) else end)
    except LockstepError:
        raise
    except Exception as error:  # the library has its own in Rust
        raise DataError(f"{file} is not a tokenizer", why=str(error)[:200], fix="name a tokenizer.json") from None


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
