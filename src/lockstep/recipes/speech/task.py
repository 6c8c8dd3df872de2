"""The speech task: settings, sources of data, the recogniser, CTC, scores, and the transcripts of recordings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from lockstep.engine.task import Datasets, Loss, Metrics, Task, TaskConfig
from lockstep.errors import ConfigError, DataError, UnsupportedError
from lockstep.events import Sound
from lockstep.recipes.speech.audio import RATE_HZ, read_audio
from lockstep.recipes.speech.dataset import AugmentedRecordings, Recordings, SpeechBatch, collate
from lockstep.recipes.speech.decoding import ErrorRates, Hypotheses, decode_beam, decode_greedy, texts
from lockstep.recipes.speech.features import MELS, SpecAugment, extract
from lockstep.recipes.speech.manifest import open_manifest
from lockstep.recipes.speech.recogniser import Recogniser, output_lengths
from lockstep.recipes.speech.synthesis import SET_PREFIX, SPLITS, Recipe, synthesise, synthesised_folder
from lockstep.recipes.speech.vocabulary import BLANK, SYMBOLS, encode
from lockstep.rundir.files import names_in
from lockstep.tasks import DEFAULTS

#: Pairs of transcript and hypothesis, shown after a validation.
EXAMPLES = 3
#: Shape of each size; ``base`` has 7.16 million parameters, ``tiny`` trains on two cores in minutes.
SIZES: dict[str, dict[str, Any]] = {
    "base": {"width": 512, "layers": 4, "heads": 8, "memory_size": 256, "theta": 1000.0},
    "tiny": {"width": 192, "layers": 2, "heads": 4, "memory_size": 32, "theta": 16.0},
}
DOWNSAMPLE = {"base": 1, "tiny": 4}
#: The paper's masks are meant for recordings of many seconds and large models; a small one learns little behind them.
MASKS = {"base": SpecAugment(), "tiny": SpecAugment(1, 10, 1, 100, time_share=0.1)}


class SpeechConfig(TaskConfig):
    """Settings of the speech task (``task.<key>``)."""

    removed_settings: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("librispeech_train", "librispeech_val", "librispeech_test"), "write a manifest of it"),
        **dict.fromkeys(("lm_text", "lm_weight", "lm_bonus"), "leave it out: the beam search has no language model"),
        "form": "leave it out: the LMU is the whole cell",
        "source": "leave it out: task.train_manifest decides",
        "alphabet": "leave it out: letters are A to Z",
        "perturb": "leave it out; task.augment masks features",
    }
    train_manifest: Path | None = Field(
        default=None,
        description="JSON lines of audio_path, text and duration; unset: digits and commands synthesised here",
    )
    val_manifest: Path | None = Field(default=None, description="the same, for validation")
    test_manifest: Path | None = Field(default=None, description="the same, for the test")
    utterances: int = Field(default=4000, ge=1, description="synthesised: training utterances")
    skip_bad: bool = Field(
        default=False, description="leave out lines that cannot be used, instead of refusing to start"
    )
    longest_s: float = Field(default=60.0, gt=0, description="seconds; an utterance that is longer cannot be used")
    size: Literal["tiny", "base"] = Field(
        default="tiny", description="tiny: trains on two CPU cores; base: 7.2M parameters"
    )
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
    decoder: Literal["greedy", "beam"] = Field(default="greedy", description="how text is read from the output")
    beam_width: int = Field(default=16, ge=1, description="beam: prefixes kept after each frame")


class SpeechTask(Task):
    """Letters from speech with CTC; by default digits and commands that the machine itself speaks."""

    Config = SpeechConfig
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS["speech"]
    #: Letters come out right long before words do.
    monitor = ("val_cer", "min")
    config: SpeechConfig
    _examples: Sequence[tuple[str, str]] = ()

    # Data.

    def prepare(self) -> None:
        """Synthesise missing data, and check every line of the manifests once."""
        self._refuse_foreign_settings()
        is_synthesised = self.config.train_manifest is None
        if is_synthesised:
            if self.data.data_dir is not None:
                _refuse_foreign_folder(Path(self.data.data_dir))
            synthesise(Recipe(self.config.utterances), self.data.data_dir)
        for manifest in self._manifests.values():
            self._open(manifest, recheck=not is_synthesised)

    def _refuse_foreign_settings(self) -> None:
        config = self.config
        foreign = {"data.download": self.data.download}
        if config.train_manifest is None:
            foreign["task.val_manifest"] = config.val_manifest is not None
            foreign["task.test_manifest"] = config.test_manifest is not None
        else:
            foreign["task.utterances"] = config.utterances != SpeechConfig.model_fields["utterances"].default
            foreign["data.data_dir"] = self.data.data_dir is not None
        names = [name for name, is_set in foreign.items() if is_set]
        if names:
            raise ConfigError(
                f"{', '.join(names)} would be ignored",
                why="the utterances are those of task.train_manifest, or synthesised without it",
                fix="leave it out, or name manifests (docs/speech.md)",
            )

    @property
    def _manifests(self) -> dict[str, Path]:
        """The manifests of the splits that there are."""
        if self.config.train_manifest is None:
            folder = synthesised_folder(Recipe(self.config.utterances), self.data.data_dir)
            return {split: folder / f"{split}.jsonl" for split in SPLITS}
        paths = {split: getattr(self.config, f"{split}_manifest") for split in SPLITS}
        return {split: path for split, path in paths.items() if path is not None}

    @cached_property
    def _recordings(self) -> dict[str, Recordings]:
        return {split: self._open(manifest) for split, manifest in self._manifests.items()}

    def _open(self, manifest: Path, *, recheck: bool = False) -> Recordings:
        config = self.config
        utterances = open_manifest(
            manifest,
            downsampling=self.downsample,
            longest_s=config.longest_s,
            skip_bad=config.skip_bad,
            recheck=recheck,
        )
        return Recordings(utterances)

    def datasets(self) -> Datasets:
        recordings = self._recordings
        train = recordings["train"]
        if self.config.augment:
            train = AugmentedRecordings(train.utterances, MASKS[self.config.size])
        return Datasets(train, recordings.get("val"), recordings.get("test"))

    def evaluation_data(self, path: Path) -> Recordings:
        return self._open(path, recheck=True)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Count feature frames of each training utterance."""
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
        return Recogniser(
            bands=MELS,
            symbols=len(SYMBOLS),
            width=shape["width"],
            layers=shape["layers"],
            heads=shape["heads"],
            memory_size=shape["memory_size"],
            theta=shape["theta"],
            dropout=config.dropout,
            downsample=self.downsample,
        )

    def stages(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Recogniser)
        return model.stages()

    def loss(self, model: nn.Module, batch: SpeechBatch) -> Loss:
        return self._loss(model(batch.features, batch.lengths), batch)

    def _loss(self, log_probs: Tensor, batch: SpeechBatch) -> Loss:
        """Compute the negative log-likelihood of the transcripts (Graves et al. 2006), counted in symbols."""
        lengths = output_lengths(batch.lengths, self.downsample)
        total = F.ctc_loss(
            log_probs.transpose(0, 1), batch.targets, lengths, batch.target_lengths, blank=BLANK, reduction="sum"
        )
        return Loss(total, batch.target_lengths.sum())

    # Evaluation: rows of hypotheses and transcripts.

    def decode(self, log_probs: Tensor, lengths: Tensor) -> Hypotheses:
        """Decode symbols from the model's output [n, frames, symbols] for ``lengths`` [n] frames of features."""
        lengths = output_lengths(lengths, self.downsample)
        if self.config.decoder == "beam":
            return decode_beam(log_probs, lengths, self.config.beam_width)
        return decode_greedy(log_probs, lengths)

    def evaluate(self, model: nn.Module, batch: SpeechBatch) -> tuple[Tensor, ...]:
        return self.validate(model, batch)[1]

    def validate(self, model: nn.Module, batch: SpeechBatch) -> tuple[Loss, tuple[Tensor, ...]]:
        log_probs = model(batch.features, batch.lengths)
        heard = self.decode(log_probs, batch.lengths)
        rows = heard.ids, heard.lengths, batch.targets, batch.target_lengths
        if not self._examples:
            references = texts(batch.targets, batch.target_lengths)
            self._examples = list(zip(references, heard.texts(), strict=True))[:EXAMPLES]
        return self._loss(log_probs, batch), rows

    def remarks(self) -> list[str | Sound]:
        """Return the first utterances of the last evaluation, as spoken and as recognised, with their recordings."""
        examples = self._examples
        self._examples = ()
        recordings = self._recordings.get("val")
        remarks = list[str | Sound]()
        for index, (reference, hypothesis) in enumerate(examples):
            text = f"said: {reference!r}  heard: {hypothesis!r}"
            # Evaluations of other data, and of a part on each rank, begin with other utterances.
            is_recorded = (
                recordings is not None and index < len(recordings) and recordings.symbols(index) == encode(reference)
            )
            remarks.append(Sound(text, recordings.waveform(index), RATE_HZ) if recordings and is_recorded else text)
        return remarks

    def predict(self, model: nn.Module, batch: SpeechBatch) -> dict[str, Any]:
        heard = self.decode(model(batch.features, batch.lengths), batch.lengths)
        return {"text": heard.texts(), "log_probability": heard.scores.float()}

    def metrics(self) -> Metrics:
        return ErrorRates()


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
        why="looked for speech that was synthesised there before",
        fix="check --data-dir, or name an empty folder; your recordings need task.train_manifest=FILE",
    )


class Transcript(NamedTuple):
    """``log_probability`` is natural, of the path (greedy) or of the text (beam); ``duration`` in seconds."""

    file: str
    text: str
    duration: float
    log_probability: float


def transcribe(task: object, model: nn.Module, files: Iterable[Path]) -> Iterator[Transcript]:
    """Yield one transcript a file, in order.

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
        yield Transcript(str(file), heard.texts()[0], len(wave) / RATE_HZ, float(heard.scores[0]))
