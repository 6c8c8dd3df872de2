"""The text task: settings, corpus, tokenizer, model, loss, scores and samples."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.arithmetic import ceil_div
from lockstep.data.arrays import NO_LABEL, ArrayDataset, filled
from lockstep.data.packing import Packed, causal_mask
from lockstep.engine.task import Datasets, Loss, Metrics, Task, TaskConfig
from lockstep.errors import ConfigError, DataError, many
from lockstep.readers.files import cache_folder
from lockstep.recipes.text.corpus import (
    Tokenizer,
    read_documents,
    read_tokenizer,
    read_tokens,
    standard_library,
    tokenizer_of,
    train_bpe,
)
from lockstep.recipes.text.gpt import Gpt, generate
from lockstep.rundir.files import write_text
from lockstep.tasks import DEFAULTS


class TextConfig(TaskConfig):
    """Settings of the text task (``task.<key>``)."""

    removed_settings: ClassVar[Mapping[str, str]] = {"positions": "leave it out: positions are rotary"}
    data: Path | None = Field(
        default=None,
        description="a .txt, .md, .jsonl or .bin (16-bit tokens) file, or a folder of texts; unset: data.data_dir, "
        "else texts about Python of its standard library",
    )
    field: str = Field(default="text", description="of .jsonl files: the key of the text")
    tokenizer: Path | Literal["bytes", "bpe"] = Field(
        default="bytes", description="bytes; bpe: trained on the corpus (extra `text`); or a tokenizer.json"
    )
    vocabulary: int = Field(default=4096, ge=257, le=65_535, description="bpe: number of tokens")
    context: int = Field(default=128, ge=2, description="tokens of a sample")
    pack: bool = Field(
        default=False,
        description="pack documents into windows, with attention and positions within each document; false: the corpus "
        "is one line of tokens, cut into windows",
    )
    model: Path | None = Field(
        default=None, description="a config.json or a folder of transformers, for another causal language model"
    )
    lora: int = Field(default=0, ge=0, description="rank of LoRA adapters (peft) on task.model; 0: train all of it")
    width: int = Field(default=128, ge=2, description="features of a token")
    depth: int = Field(default=4, ge=1, description="blocks")
    heads: int = Field(default=4, ge=1, description="attention heads")
    dropout: float = Field(default=0.0, ge=0, lt=1)
    val_share: float = Field(default=0.05, gt=0, lt=0.5, description="share of the corpus, at its end, to validate on")
    prompt: str = Field(default="The ", description="beginning of the sample after each validation")
    sample_tokens: int = Field(default=120, ge=0, description="tokens of that sample; 0: none")
    temperature: float = Field(default=0.8, ge=0, description="of that sample; 0 takes the most probable tokens")


class TextScores:
    """Bits per byte and perplexity, from a row per sample: natural log-likelihood lost, tokens, bytes."""

    def __init__(self) -> None:
        self._sums = np.zeros(3)

    def update(self, lost: Tensor, tokens: Tensor, size: Tensor) -> None:
        self._sums += [float(column.double().sum()) for column in (lost, tokens, size)]

    def compute(self) -> dict[str, float]:
        lost, tokens, size = self._sums
        bits = lost / math.log(2) / size if size else math.nan
        return {"bits_per_byte": bits, "perplexity": math.exp(min(lost / tokens, 700.0)) if tokens else math.nan}


class PackedTexts(Packed):
    """Windows of packed documents: inputs, targets, document numbers and positions, each (context,)."""

    def __init__(self, tokens: NDArray[Any], end: int, context: int) -> None:
        documents = np.split(tokens, np.flatnonzero(tokens[:-1] == end) + 1)
        super().__init__(documents, context + 1, lengths=[len(document) for document in documents], pad=end)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:  # type: ignore[override]
        window = super().__getitem__(index)
        tokens = window["tokens"]
        documents = window["documents"]
        follows = (documents[1:] == documents[:-1]) & (documents[1:] > 0)
        targets = torch.where(follows, tokens[1:], NO_LABEL)
        return tokens[:-1], targets, documents[:-1], window["positions"][:-1]


class TextTask(Task):
    """A language model of a corpus; by default bytes of texts about Python, which come with it."""

    Config = TextConfig
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS["text"]
    monitor = ("val_bits_per_byte", "min")
    config: TextConfig

    def prepare(self) -> None:
        """Train the tokenizer, once per node."""
        if self.config.lora and self.config.model is None:
            raise ConfigError("task.lora needs task.model", why="adapters are added to a model of transformers")
        if self.config.pack and self.config.model is not None:
            raise ConfigError("task.pack does not work with task.model", fix="leave one of the two out")
        _ = self.tokenizer

    @property
    def _path(self) -> Path | None:
        path = self.config.data or self.data.data_dir
        return None if path is None else Path(path)

    @cached_property
    def _documents(self) -> list[str]:
        return standard_library() if self._path is None else read_documents(self._path, self.config.field)

    @property
    def _tokenizer_source(self) -> Path | str:
        """The setting, or by default the tokenizer in the folder of the model."""
        source = self.config.tokenizer
        folder = self.config.model
        if source == "bytes" and folder is not None and (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
        return source

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """As configured, or that of the checkpoint that was loaded."""
        source = self._tokenizer_source
        if isinstance(source, Path) and not source.is_file():
            raise ConfigError(f"there is no tokenizer {source}", fix="use bytes, bpe, or a tokenizer.json")
        if source != "bpe":
            return read_tokenizer(source) if isinstance(source, Path) else tokenizer_of(source)
        if self._path is not None and self._path.suffix == ".bin":
            raise ConfigError(
                "a file of tokens has no text to train a tokenizer on", fix="set task.tokenizer to its tokenizer.json"
            )
        key = hashlib.sha256(f"{self.config.vocabulary}\n".encode() + "\0".join(self._documents).encode()).hexdigest()
        file = cache_folder() / "tokenizers" / f"{key[:16]}.json"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, train_bpe(self._documents, self.config.vocabulary))
        return tokenizer_of(file.read_text(encoding="utf-8"))

    def _tokens(self, path: Path | None) -> NDArray[Any]:
        """Return a file of tokens, or texts as one line of tokens."""
        if path is not None and path.suffix == ".bin":
            return read_tokens(path, self.tokenizer.size)
        documents = self._documents if path is None or path == self._path else read_documents(path, self.config.field)
        end = np.array([self.tokenizer.end])
        return np.concatenate([part for text in documents for part in (self.tokenizer.encode(text), end)])

    def _windows(self, tokens: NDArray[Any]) -> ArrayDataset | PackedTexts:
        """Cut inputs and targets (n, context); the last window may have positions without a target."""
        context = self.config.context
        if self.config.pack and len(tokens):
            return PackedTexts(tokens, self.tokenizer.end, context)
        number = ceil_div(len(tokens) - 1, context)
        if number < 1:
            raise DataError("the text has fewer than 2 tokens", fix="use a longer text")
        line = np.full(number * context + 1, NO_LABEL, dtype=np.int64)
        line[: len(tokens)] = tokens
        inputs = line[:-1].reshape(number, context)
        targets = line[1:].reshape(number, context)
        return ArrayDataset(np.where(inputs == NO_LABEL, self.tokenizer.end, inputs), targets)

    def datasets(self) -> Datasets:
        stream = self._tokens(self._path)
        context = self.config.context
        validation_tokens = max(context + 1, round(len(stream) * self.config.val_share))
        if len(stream) < 2 * validation_tokens:
            raise DataError(
                f"the corpus has {many(len(stream), 'token')}",
                why=f"training and validation need at least {2 * (context + 1)} for a context of {context}",
                fix="use a longer text, or a smaller task.context",
            )
        return Datasets(self._windows(stream[:-validation_tokens]), self._windows(stream[-validation_tokens:]))

    def evaluation_data(self, path: Path) -> ArrayDataset | PackedTexts:
        """Return the texts of a file or folder, as one line of tokens."""
        return self._windows(self._tokens(path))

    @property
    def _vocabulary(self) -> int:
        """Tokens of the model; a small corpus may give a trained tokenizer fewer."""
        return self.config.vocabulary if self.config.tokenizer == "bpe" else self.tokenizer.size

    def model(self) -> nn.Module:
        config = self.config
        if config.model is not None:
            from lockstep.recipes.text.transformers_models import build

            has_tokenizer = isinstance(self._tokenizer_source, Path)
            return build(config.model, self._vocabulary, config.context, config.lora, has_tokenizer=has_tokenizer)
        try:
            return Gpt(
                self._vocabulary,
                config.context,
                width=config.width,
                depth=config.depth,
                heads=config.heads,
                dropout=config.dropout,
            )
        except ValueError as error:
            raise ConfigError(
                "task.width and task.heads do not fit", why=str(error), fix="change one of them"
            ) from None

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of each token, (n, context): 0 without a target."""
        ids, targets, *packed = batch
        if packed:
            documents, positions = packed
            logits = model(ids, attention_mask=causal_mask(documents), position_ids=positions)
        else:
            logits = model(ids)
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=NO_LABEL, reduction="none"
        )
        return losses.view(targets.shape)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Sum the loss over tokens; the items are tokens."""
        return Loss(self._losses(model, batch).sum(), (batch[1] != NO_LABEL).sum())

    def pad(self, batch: Any, samples: int) -> Any:
        return filled(batch, samples, 1)

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Any, ...]]:
        rows = self.evaluate(model, batch)
        return Loss(rows[0].sum(), rows[1].sum()), rows

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        """Return, per sample, the sum of its losses, its tokens and its bytes."""
        targets = batch[1]
        sizes = torch.as_tensor(self._lengths, device=targets.device)[targets.clamp(min=0)] * (targets != NO_LABEL)
        return self._losses(model, batch).double().sum(1), (targets != NO_LABEL).sum(1), sizes.sum(1)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return self.tokenizer.lengths()

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return each window's text, the bytes after its first token, and the bits that each of these takes."""
        lost, tokens, sizes = self.evaluate(model, batch)
        bits = lost / math.log(2) / sizes.clamp(min=1)
        windows = torch.cat([batch[0], batch[1][:, -1:]], dim=1).cpu()
        is_text = (windows != NO_LABEL) & (windows != self.tokenizer.end)
        texts = [self.tokenizer.decode(row[shown].tolist()) for row, shown in zip(windows, is_text, strict=True)]
        return {"tokens": tokens, "bytes": sizes, "bits_per_byte": bits.float(), "text": texts}

    def metrics(self) -> Metrics:
        return TextScores()

    def generate(self, model: nn.Module, prompt: str, tokens: int, **sampling: Any) -> str:
        """Continue ``prompt`` by ``tokens`` tokens; ``sampling``: as for :func:`lockstep.recipes.text.gpt.generate`."""
        end = self.tokenizer.end
        ids = self.tokenizer.encode(prompt).tolist() or [end]
        text = self.tokenizer.decode(generate(model, ids, tokens, context=self.config.context, end=end, **sampling))
        # Control characters could change the terminal.
        return prompt + "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)

    def remarks(self, model: nn.Module | None = None) -> list[str]:
        if model is None or not self.config.sample_tokens:
            return []
        text = self.generate(model, self.config.prompt, self.config.sample_tokens, temperature=self.config.temperature)
        return [f"sample: {text}"]

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the tokenizer, and a model of transformers with it as ``from_pretrained`` reads them."""
        state = self.tokenizer.state()
        (folder / "tokenizer.json").write_text(state["tokenizer"], encoding="utf-8")
        save = getattr(model, "save_pretrained", None)
        if save is not None:
            model.config.use_cache = True  # type: ignore[union-attr]
            pretrained = folder / "pretrained"
            save(pretrained)
            if "end" in state:  # bytes are no tokenizer of transformers
                (pretrained / "tokenizer.json").write_text(state["tokenizer"], encoding="utf-8")
                settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": state["end"]}
                (pretrained / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        return self.tokenizer.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokenizer = tokenizer_of(state["tokenizer"], state.get("end"))
