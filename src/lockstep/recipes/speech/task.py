"""The speech task: settings, sources of data, the recogniser, CTC, scores, and the transcripts of recordings."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from lockstep.engine.task import Datasets, Loss, Metrics, Task, TaskConfig
from lockstep.errors import ConfigError, DataError, UnsupportedError
from lockstep.events import Sound
from lockstep.recipes.speech.audio import RATE_HZ, read_audio
from lockstep.recipes.speech.dataset import AugmentedRecordings, Perturbation, Recordings, SpeechBatch, collate
from lockstep.recipes.speech.decoding import (
    ErrorRates,
    Hypotheses,
    Ngram,
    count,
    decode_beam,
    decode_greedy,
    read_texts,
    texts,
)
from lockstep.recipes.speech.features import MELS, SpecAugment, extract
from lockstep.recipes.speech.manifest import (
    Row,
    Utterance,
    fetch_librispeech,
    find_librispeech,
    librispeech_rows,
    open_rows,
    read_manifest,
    read_rows,
    report_repeats,
)
from lockstep.recipes.speech.recogniser import Recogniser, output_lengths
from lockstep.recipes.speech.synthesis import SET_PREFIX, SPLITS, Recipe, synthesise, synthesised_folder
from lockstep.recipes.speech.vocabulary import BLANK, LETTERS, Vocabulary
from lockstep.rundir.files import names_in

#: Pairs of transcript and hypothesis, shown after a validation.
EXAMPLES = 3
#: The settings that name data, by the source that they are for.
DATA_SETTINGS = {
    "manifest": ("train_manifest", "val_manifest", "test_manifest"),
    "librispeech": ("librispeech_train", "librispeech_val", "librispeech_test"),
    "synthesised": ("utterances",),
}

#: Shape of each size; ``base`` has 7.16 million parameters, ``tiny`` trains on two cores in minutes.
SIZES: dict[str, dict[str, Any]] = {
    "base": {"width": 512, "layers": 4, "heads": 8, "memory_size": 256, "theta": 1000.0, "form": "recurrent"},
    "tiny": {"width": 192, "layers": 2, "heads": 4, "memory_size": 32, "theta": 16.0, "form": "recurrent"},
}
DOWNSAMPLE = {"base": 1, "tiny": 4}
#: The paper's masks are meant for recordings of many seconds and large models; a small one learns little behind them.
MASKS = {"base": SpecAugment(), "tiny": SpecAugment(1, 10, 1, 100, time_share=0.1)}


class SpeechConfig(TaskConfig):
    """Settings of the speech task (``task.<key>``)."""

    source: Literal["auto", "synthesised", "manifest", "librispeech"] = Field(
        default="auto",
        description="auto: manifest when train_manifest is set, librispeech when data.data_dir holds it or download is "
        "on, else digits and commands synthesised on this machine; a data.data_dir with something else is refused",
    )
    train_manifest: Path | None = Field(default=None, description="JSON lines of audio_path, text and duration")
    val_manifest: Path | None = Field(default=None, description="the same, for validation")
    test_manifest: Path | None = Field(default=None, description="the same, for the test")
    librispeech_train: tuple[str, ...] = Field(
        default=("train-clean-100",), description="splits of LibriSpeech to train on"
    )
    librispeech_val: tuple[str, ...] = Field(default=("dev-clean",), description="splits to validate on")
    librispeech_test: tuple[str, ...] = Field(default=("test-clean",), description="splits to test on")
    utterances: int = Field(default=4000, ge=1, description="synthesised: training utterances")
    skip_bad: bool = Field(
        default=False, description="leave out lines that cannot be used, instead of refusing to start"
    )
    longest_s: float = Field(default=60.0, gt=0, description="seconds; an utterance that is longer cannot be used")
    alphabet: str = Field(
        default=LETTERS,
        min_length=1,
        description="letters of the transcripts, each once; space and apostrophe are added. Other than the default: "
        "numbers are not written out",
    )
    size: Literal["tiny", "base"] = Field(
        default="tiny", description="tiny: trains on two CPU cores; base: 7.2M parameters"
    )
    form: Literal["parallel", "recurrent"] | None = Field(default=None, description="of the LMU; unset: by size")
    downsample: Literal[1, 2, 4] | None = Field(default=None, description="frames stacked to a step; unset: by size")
    width: int | None = Field(default=None, ge=1, description="of the recogniser; unset: by size")
    layers: int | None = Field(default=None, ge=1, description="blocks of attention and LMU; unset: by size")
    heads: int | None = Field(default=None, ge=1, description="of attention; unset: by size")
    memory_size: int | None = Field(default=None, ge=1, le=256, description="order of the LMU's memory; unset: by size")
    theta: float | None = Field(default=None, gt=0, description="steps the memory looks back; unset: by size")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="behind each block")
    augment: bool = Field(
        default=True, description="SpecAugment: mask bands and frames of training utterances at random"
    )
    perturb: bool = Field(
        default=False, description="other speed, noise and the band of a telephone, at random, in training"
    )
    decoder: Literal["greedy", "beam"] = Field(default="greedy", description="how text is read from the output")
    beam_width: int = Field(default=16, ge=1, description="beam: prefixes kept after each frame")
    lm_text: tuple[Path, ...] = Field(
        default=(),
        description="beam: texts with a sentence a line, or manifests, whose n-grams of letters weigh hypotheses; "
        "counted as often as named",
    )
    lm_weight: float = Field(default=0.8, ge=0, description="lm_text: factor of the n-gram's log-probability")
    lm_bonus: float = Field(default=1.5, description="lm_text: added for each symbol, since else shorter texts win")

    @model_validator(mode="after")
    def _text_needs_a_beam(self) -> SpeechConfig:
        if self.lm_text and self.decoder != "beam":
            raise ValueError("task.lm_text would be ignored: task.decoder is greedy; set task.decoder=beam")
        return self


class SpeechTask(Task):
    """Letters from speech with CTC; by default digits and commands that the machine itself speaks."""

    Config = SpeechConfig
    defaults: ClassVar[Mapping[str, Any]] = {
        "training": {"epochs": 36, "batch_size": 4, "max_grad_norm": 0.5, "early_stopping_patience": 8},
        "optimizer": {"name": "adamw", "lr": 1.5e-3, "weight_decay": 1e-4},
        "scheduler": {"name": "cosine", "warmup_epochs": 0.5},
        "validation": {"batch_size": 32},
        "telemetry": {"log_interval": 50},
    }
    #: Letters come out right long before words do.
    monitor = ("val_cer", "min")
    config: SpeechConfig
    _examples: Sequence[tuple[str, str]] = ()

    # Data.

    def prepare(self) -> None:
        """Synthesise or download missing data, and check every line once."""
        self._refuse_foreign_settings()
        for path in self.config.lm_text:
            read_texts(path, self.vocabulary)
        if self.source == "synthesised":
            synthesise(Recipe(self.config.utterances), self.data.data_dir)
        elif self.source == "librispeech" and self.data.download:
            splits = chain.from_iterable(getattr(self.config, f"librispeech_{split}") for split in SPLITS)
            fetch_librispeech(splits, self._folder())
        if self.source != "synthesised":
            report_repeats({split: self._open(split, recheck=True) for split in SPLITS})

    @cached_property
    def source(self) -> Literal["synthesised", "manifest", "librispeech"]:
        """Where the utterances come from, decided. Raises :class:`DataError`: ``data.data_dir`` holds other things."""
        config = self.config
        folder = self.data.data_dir
        if config.source != "auto":
            return config.source
        if config.train_manifest is not None:
            return "manifest"
        if self.data.download or (folder is not None and find_librispeech(Path(folder))):
            return "librispeech"
        if folder is not None:
            _refuse_foreign_folder(Path(folder))
        return "synthesised"

    def _refuse_foreign_settings(self) -> None:
        source = self.source
        fields = SpeechConfig.model_fields
        unused = [name for owner, names in DATA_SETTINGS.items() if owner != source for name in names]
        foreign = [f"task.{name}" for name in unused if getattr(self.config, name) != fields[name].default]
        if source == "synthesised" and self.config.alphabet != LETTERS:
            foreign.append("task.alphabet")
        if self.data.download and source != "librispeech":
            foreign.append("data.download")
        if self.data.data_dir is not None and source == "manifest":
            foreign.append("data.data_dir")
        if foreign:
            raise ConfigError(
                f"{', '.join(foreign)} would be ignored: the utterances are of the source {source}",
                why="training on other data than was named is never a silent choice",
                fix="leave it out; task.train_manifest chooses manifests, --download LibriSpeech (docs/speech.md)",
            )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        letters = unicodedata.normalize("NFC", self.config.alphabet)
        if len(set(letters)) < len(letters) or {" ", "'"} & set(letters):
            raise ConfigError(
                f"task.alphabet {letters!r} repeats a letter, or contains the space or the apostrophe",
                fix="give each letter once; space and apostrophe are always symbols",
            )
        return Vocabulary(letters)

    @cached_property
    def _recordings(self) -> dict[str, Recordings]:
        if self.source == "synthesised":
            folder = synthesised_folder(Recipe(self.config.utterances), self.data.data_dir)
            return {split: Recordings(read_manifest(folder / f"{split}.jsonl"), self.vocabulary) for split in SPLITS}
        opened = {split: self._open(split) for split in SPLITS}
        return {split: Recordings(utterances, self.vocabulary) for split, utterances in opened.items() if utterances}

    def _open(self, split: str, *, recheck: bool = False) -> list[Utterance]:
        rows, name = self._rows(split)
        return self._checked(rows, name, recheck=recheck) if rows or split == "train" else []

    def _checked(self, rows: list[Row], name: str, *, recheck: bool) -> list[Utterance]:
        return open_rows(
            rows,
            name,
            downsampling=self.downsample,
            longest_s=self.config.longest_s,
            skip_bad=self.config.skip_bad,
            recheck=recheck,
            vocabulary=self.vocabulary,
        )

    def _rows(self, split: str) -> tuple[list[Row], str]:
        """Return the lines of a split, and their name for people."""
        if self.source == "librispeech":
            split_folders = find_librispeech(self._folder())
            names = getattr(self.config, f"librispeech_{split}")
            missing = [name for name in names if name not in split_folders]
            if missing:
                raise DataError(
                    f"{self._folder()} lacks {', '.join(missing)} of LibriSpeech",
                    why=f"it holds {', '.join(sorted(split_folders)) or 'none of its splits'}",
                    fix="add --download to fetch it, or name other splits in task.librispeech_" + split,
                )
            return [
                row for name in names for row in librispeech_rows(split_folders[name])
            ], f"LibriSpeech {' '.join(names)}"
        manifest: Path | None = getattr(self.config, f"{split}_manifest")
        if manifest is None and split == "train":
            raise ConfigError(
                "task.source=manifest needs a manifest to train on", fix="set task.train_manifest=my.jsonl"
            )
        return ([], "") if manifest is None else (read_rows(manifest), str(manifest))

    def _folder(self) -> Path:
        if self.data.data_dir is None:
            raise ConfigError("no folder for LibriSpeech is given", fix="name one with --data-dir")
        return Path(self.data.data_dir)

    def datasets(self) -> Datasets:
        recordings = self._recordings
        config = self.config
        train = recordings["train"]
        if config.augment or config.perturb:
            mask = MASKS[config.size] if config.augment else None
            perturb = Perturbation() if config.perturb else None
            train = AugmentedRecordings(train, mask, perturb, self.downsample)
        return Datasets(train, recordings.get("val"), recordings.get("test"))

    def evaluation_data(self, path: Path) -> Recordings:
        return Recordings(self._checked(read_rows(path), str(path), recheck=True), self.vocabulary)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Feature frames of each training utterance."""
        return self._recordings["train"].lengths()

    def collate(self, samples: Sequence[Any]) -> SpeechBatch:
        return collate(samples)

    # Model.

    @property
    def downsample(self) -> int:
        """Frames of features to one of the output."""
        return self.config.downsample or DOWNSAMPLE[self.config.size]

    def model(self) -> nn.Module:
        config = self.config
        shape = dict(SIZES[self.config.size])
        shape |= {key: value for key in shape if (value := getattr(config, key)) is not None}
        if shape["width"] % shape["heads"]:
            raise ConfigError(
                f"{shape['heads']} heads do not divide a width of {shape['width']}",
                fix="change task.width or task.heads",
            )
        return Recogniser(MELS, len(self.vocabulary), **shape, dropout=config.dropout, downsample=self.downsample)

    def stages(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Recogniser)
        return model.stages()

    def loss(self, model: nn.Module, batch: SpeechBatch) -> Loss:
        return self._loss(model(batch.features, batch.lengths), batch)

    def _loss(self, log_probs: Tensor, batch: SpeechBatch) -> Loss:
        """Negative log-likelihood of the transcripts (Graves et al. 2006), counted in symbols."""
        lengths = output_lengths(batch.lengths, self.downsample)
        total = F.ctc_loss(
            log_probs.transpose(0, 1), batch.targets, lengths, batch.target_lengths, blank=BLANK, reduction="sum"
        )
        return Loss(total, batch.target_lengths.sum())

    # Evaluation: rows of hypotheses and transcripts.

    def decode(self, log_probs: Tensor, lengths: Tensor) -> Hypotheses:
        """Symbols from the model's output [n, frames, symbols] for ``lengths`` [n] frames of features."""
        lengths = output_lengths(lengths, self.downsample)
        if self.config.decoder == "beam":
            return decode_beam(log_probs, lengths, self.config.beam_width, self._ngram)
        return decode_greedy(log_probs, lengths)

    @cached_property
    def _ngram(self) -> Ngram | None:
        config = self.config
        if not config.lm_text:
            return None
        lines = [line for path in config.lm_text for line in read_texts(path, self.vocabulary)]
        return count(lines, len(self.vocabulary)).weighted(config.lm_weight, config.lm_bonus)

    def evaluate(self, model: nn.Module, batch: SpeechBatch) -> tuple[Tensor, ...]:
        return self.validate(model, batch)[1]

    def validate(self, model: nn.Module, batch: SpeechBatch) -> tuple[Loss, tuple[Tensor, ...]]:
        log_probs = model(batch.features, batch.lengths)
        heard = self.decode(log_probs, batch.lengths)
        rows = heard.ids, heard.lengths, batch.targets, batch.target_lengths
        if not self._examples:
            references = texts(*rows[2:], self.vocabulary)
            hypotheses = heard.texts(self.vocabulary)
            self._examples = list(zip(references, hypotheses, strict=True))[:EXAMPLES]
        return self._loss(log_probs, batch), rows

    def remarks(self) -> list[str | Sound]:
        """The first utterances of the last evaluation, as they were said and heard, with their recordings."""
        examples = self._examples
        self._examples = ()
        recordings = self._recordings.get("val")
        remarks = list[str | Sound]()
        for index, (reference, hypothesis) in enumerate(examples):
            text = f"said: {reference!r}  heard: {hypothesis!r}"
            # Evaluations of other data, and of a part on each rank, begin with other utterances.
            is_recorded = (
                recordings is not None
                and index < len(recordings)
                and recordings.symbols(index) == self.vocabulary.encode(reference)
            )
            remarks.append(Sound(text, recordings.waveform(index), RATE_HZ) if recordings and is_recorded else text)
        return remarks

    def predict(self, model: nn.Module, batch: SpeechBatch) -> dict[str, Any]:
        heard = self.decode(model(batch.features, batch.lengths), batch.lengths)
        return {"text": heard.texts(self.vocabulary), "log_probability": heard.scores.float()}

    def metrics(self) -> Metrics:
        return ErrorRates(self.vocabulary)


def _refuse_foreign_folder(folder: Path) -> None:
    """Raise :class:`DataError` where ``folder`` is missing, or holds things and no set of synthesised speech."""
    message = f"there is no folder {folder}"
    if folder.is_dir():
        names = [name for name in names_in(folder) if not name.startswith(".")]
        if not names or any(name.startswith(SET_PREFIX) for name in names):
            return
        message = f"{folder} holds no data that this task knows"
    raise DataError(
        message,
        why="looked for LibriSpeech, and for speech that was synthesised there before",
        fix="check --data-dir; your recordings need task.train_manifest=FILE, LibriSpeech needs --download, "
        "and task.source=synthesised makes speech there",
    )


class Transcript(NamedTuple):
    """``log_probability`` is natural, of the path (greedy) or of the text (beam); ``duration`` in seconds."""

    file: str
    text: str
    duration: float
    log_probability: float


def transcribe(task: object, model: nn.Module, files: Iterable[Path]) -> Iterator[Transcript]:
    """One transcript a file, in order.

    Args:
        task: the run's; a :class:`SpeechTask`.
        model: in evaluation mode, with its weights.

    Raises:
        UnsupportedError: another task. DataError: a file that cannot be read, or has no samples.
    """
    if not isinstance(task, SpeechTask):
        raise UnsupportedError(
            "this run recognises no speech", why=f"its task is {type(task).__name__}", fix="name a run of `speech`"
        )
    for file in files:
        wave = read_audio(file)
        if not len(wave):
            raise DataError(f"{file} has no samples", fix="check the recording")
        features = extract(torch.from_numpy(wave))
        lengths = torch.tensor([len(features)])
        with torch.inference_mode():
            heard = task.decode(model(features[None], lengths), lengths)
        yield Transcript(str(file), heard.texts(task.vocabulary)[0], len(wave) / RATE_HZ, float(heard.scores[0]))
