"""The HAR task: settings, sources, networks, loss and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.arithmetic import ceil_div
from lockstep.data.arrays import NO_LABEL, ArrayDataset, filled
from lockstep.engine.task import Datasets, Loss, Metrics, Task, TaskConfig
from lockstep.errors import ConfigError, DataError
from lockstep.tasks import DEFAULTS
from lockstep.tasks.har import data
from lockstep.tasks.har.data import HarData, Mode, Standardiser, Windows
from lockstep.tasks.har.models import Cnn, Mlp
from lockstep.tasks.har.vision import LinePlots, Vit

Source = Literal["watch", "uci", "pt", "synthetic"]
Subjects = tuple[int, ...]

#: Default augmentation of the watch data, chosen by cross-validation over
#: the subjects that train and validate.
WATCH_ROTATION_DEG = 30.0
WATCH_GAIN = 0.1


class HarConfig(TaskConfig):
    """Settings of the HAR task (``task.<key>``)."""

    source: Literal["auto", "watch", "uci", "pt", "synthetic"] = Field(
        default="auto",
        description="auto: what data.data_dir holds (UCI-HAR or train, val, test.pt); without one, watch",
    )
    model: Literal["cnn", "mlp", "vit_plots"] = Field(
        default="cnn",
        description="the network; its sizes: hidden. vit_plots: a vision transformer over the windows as line plots",
    )
    mode: Mode = Field(
        default="joint",
        description="how a window becomes samples: joint (all channels), flatten (each channel is a sample), "
        "average (the mean of the channels) or first (the first channel)",
    )
    hidden: tuple[PositiveInt, ...] | None = Field(
        default=None,
        description="cnn: channels per block; mlp: hidden layers; vit_plots: width; unset: the model's default",
    )
    dropout: float | None = Field(default=None, ge=0, lt=1, description="unset: the model's default")
    label_smoothing: float = Field(default=0.1, ge=0, lt=1, description="share of each label spread over all classes")
    rotate_deg: float | None = Field(
        default=None,
        ge=0,
        description="turn training windows by a random angle of this deviation; unset: 30 for watch, else 0",
    )
    gain: float | None = Field(
        default=None,
        ge=0,
        description="scale training channels by about 1, with this deviation; unset: 0.1 for watch, else 0",
    )
    mirror: bool = Field(
        default=True, description="watch: reflect recordings of the left arm, so that both arms look alike"
    )
    val_subjects: Subjects | None = Field(default=None, description="watch, uci: subjects kept apart for validation")
    test_subjects: Subjects | None = Field(default=None, description="watch: subjects kept apart for the test")
    synthetic_samples: int = Field(default=10_000, ge=1, description="synthetic: training windows")
    synthetic_shape: tuple[PositiveInt, PositiveInt] = Field(
        default=(9, 128), description="synthetic: channels and time steps"
    )
    synthetic_classes: int = Field(default=6, ge=2, description="synthetic: number of classes")


class HarTask(Task):
    """Activities from motion sensors; by default shoulder exercises from a smart watch, in the package."""

    Config = HarConfig
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS["har"]
    monitor = ("val_accuracy", "max")
    config: HarConfig

    def prepare(self) -> None:
        if self.data.download:
            if self.config.source not in ("auto", "uci"):
                raise ConfigError(
                    f"there is nothing to download for task.source={self.config.source}",
                    fix="leave --download out, or choose task.source=uci",
                )
            data.fetch_uci(self._folder())

    @cached_property
    def source(self) -> Source:
        """Where the windows come from, decided."""
        setting = self.config.source
        if setting in ("watch", "synthetic") and self.data.data_dir is not None:
            raise ConfigError(
                f"task.source={setting} reads no folder, but data.data_dir is set", fix="leave one of the two out"
            )
        if setting != "auto":
            return setting
        if self.data.data_dir is None and not self.data.download:
            return "watch"
        folder = self._folder()
        if data.find_uci(folder) is not None:
            return "uci"
        if any((folder / f"{part}.pt").exists() for part in data.PARTS):
            return "pt"
        raise DataError(
            f"{folder} holds no data that this task knows" if folder.is_dir() else f"there is no folder {folder}",
            why="looked for UCI-HAR as it is unpacked (train/Inertial Signals) and for train.pt, val.pt and test.pt",
            fix="check --data-dir, add --download to fetch UCI-HAR, or leave it out for the data in the package",
        )

    def _folder(self) -> Path:
        if self.data.data_dir is None:
            raise ConfigError("no folder for the data is given", fix="name one with --data-dir")
        return Path(self.data.data_dir)

    @cached_property
    def windows(self) -> HarData:
        """The windows of the source, in its units."""
        config = self.config
        source = self.source
        for name, sources in (("val_subjects", ("watch", "uci")), ("test_subjects", ("watch",))):
            if getattr(config, name) is not None and source not in sources:
                raise ConfigError(f"task.{name} has no effect on {source}, whose split is fixed", fix="leave it out")
        if source == "watch":
            return data.load_watch(
                val_subjects=config.val_subjects, test_subjects=config.test_subjects, mirror=config.mirror
            )
        if source == "synthetic":
            return data.make_synthetic(
                config.synthetic_samples, config.synthetic_shape, config.synthetic_classes, seed=self.data.seed
            )
        if source == "pt":
            return data.load_tensors(self._folder())
        folder = data.find_uci(self._folder())
        if folder is None:
            raise DataError(
                f"{self._folder()} does not hold UCI-HAR",
                why="looked for train/Inertial Signals in it and in 'UCI HAR Dataset' below it",
                fix="check --data-dir, or add --download",
            )
        return data.load_uci(folder, val_subjects=config.val_subjects)

    @cached_property
    def standardiser(self) -> Standardiser:
        """Of the training windows, or of the checkpoint that was loaded."""
        return Standardiser.fit(self.windows.train)

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.windows.class_names

    def datasets(self) -> Datasets:
        windows = self.windows
        val, test = (self._plain(part) if len(part) else None for part in (windows.val, windows.test))
        return Datasets(self._training(windows.train), val, test)

    def _training(self, windows: Windows) -> Any:
        config = self.config
        on_watch = self.source == "watch" and self.config.mode == "joint"
        rotate = config.rotate_deg if config.rotate_deg is not None else WATCH_ROTATION_DEG * on_watch
        gain = config.gain if config.gain is not None else WATCH_GAIN * on_watch
        if not rotate and not gain:
            return self._plain(windows)
        if config.mode != "joint":
            raise ConfigError(
                f"task.rotate_deg and task.gain need all channels, and do not work with task.mode={config.mode}",
                fix="set them to 0, or task.mode to joint",
            )
        if rotate and self.windows.shape[0] % 3:
            raise ConfigError(
                f"task.rotate_deg needs channels in xyz triples, these windows have {self.windows.shape[0]}",
                fix="set it to 0",
            )
        return data.AugmentedWindows(windows, self.standardiser, rotate_deg=rotate, gain=gain)

    def _plain(self, windows: Windows) -> ArrayDataset:
        return data.as_dataset(Windows(self.standardiser.apply(windows.samples), windows.labels), self.config.mode)

    def model(self) -> nn.Module:
        channels, length = self.windows.shape
        name = self.config.model
        hidden = self.config.hidden
        sizes = dict[str, Any]()
        try:
            if hidden is not None and name in ("cnn", "mlp"):
                sizes["widths" if name == "cnn" else "hidden"] = hidden
            elif hidden is not None:
                if len(hidden) != 1:
                    raise ValueError(f"a transformer has one width, task.hidden gives {len(hidden)}")
                sizes["width"] = hidden[0]
            if self.config.dropout is not None:
                sizes["dropout"] = self.config.dropout
            kinds: dict[str, Callable[..., nn.Module]] = {"cnn": Cnn, "mlp": Mlp, "vit_plots": _vit_of_plots}
            channels = channels if self.config.mode == "joint" else 1
            return kinds[name](channels, len(self.class_names), length, **sizes)
        except ValueError as error:
            raise ConfigError(
                f"task.model={name} does not fit windows of {length} steps and these settings",
                why=str(error),
                fix="change task.hidden, or choose another task.model",
            ) from None

    def stages(self, model: nn.Module) -> list[nn.Module] | None:
        """Return blocks or layers of the network, and its head; none of ``vit_plots``."""
        return model.stages() if isinstance(model, Cnn | Mlp) else None

    # A batch: samples (n, channels, time) and labels (n,); under `flatten` also the window of each sample.

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self._loss(model(batch[0]), batch[1])

    def _loss(self, logits: Tensor, labels: Tensor) -> Loss:
        # In 32 bits under any precision: a sum of many items needs its last digits.
        total = F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=self.config.label_smoothing)
        return Loss(total, (labels != NO_LABEL).sum())

    def pad(self, batch: Any, samples: int) -> Any:
        return filled(batch, samples, 1)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return self.validate(model, batch)[1]

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Tensor, ...]]:
        logits = model(batch[0])
        is_flat = self.config.mode == "flatten"
        rows = (logits.float().softmax(dim=1), *batch[1:]) if is_flat else (logits.argmax(dim=1), batch[1])
        return self._loss(logits, batch[1]), rows

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the most probable activity, and its probability."""
        probabilities, classes = model(batch[0]).float().softmax(1).max(1)
        return {"class": [self.class_names[number] for number in classes.tolist()], "probability": probabilities}

    def metrics(self) -> Metrics:
        """Return accuracy, macro F1 and confusion matrix of windows; under ``flatten`` also of single channels."""
        classes = len(self.class_names)
        return WindowScores(classes, self.windows.shape[0]) if self.config.mode == "flatten" else ClassScores(classes)

    def state_dict(self) -> dict[str, Any]:
        """Return the standardisation of each channel and the names of the classes, which users of the weights need."""
        return {
            "mean": torch.from_numpy(self.standardiser.mean),
            "std": torch.from_numpy(self.standardiser.std),
            "class_names": list(self.class_names),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Standardise data sets that are opened from now on as those that the weights were trained on."""
        mean, std = (state[key].numpy().astype(np.float32) for key in ("mean", "std"))
        self.standardiser = Standardiser(mean, std)


def _vit_of_plots(channels: int, classes: int, length: int, **sizes: Any) -> nn.Module:
    """Build a ViT of line plots with 32 rows and a multiple of 8 columns, in patches of 8×8 pixels."""
    columns = max(8, ceil_div(length, 8) * 8)
    return nn.Sequential(LinePlots(32, columns), Vit(channels, classes, (32, columns), patch=(8, 8), **sizes))


# Scores, from one confusion matrix: rows are true classes, columns predicted ones.


def count(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """Count the confusion matrix (classes, classes) of ``predicted`` and ``target``, both (rows,) of classes."""
    return torch.bincount(target * classes + predicted, minlength=classes**2).reshape(classes, classes)


def scores(confusion: Tensor) -> dict[str, Tensor]:
    """Compute accuracy and macro F1 of a confusion matrix; not a number if it counts nothing.

    F1 is the mean over the classes that occur, in truth or prediction, as torchmetrics' macro average.
    """
    right = confusion.diagonal()
    occurrences = confusion.sum(0) + confusion.sum(1)
    return {"accuracy": right.sum() / confusion.sum(), "f1": (2 * right / occurrences)[occurrences > 0].mean()}


class ClassScores:
    """Accuracy, macro F1 and confusion matrix of all rows, of ``classes`` classes."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._confusion = torch.zeros(classes, classes, dtype=torch.int64)

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Take rows: ``predicted`` (rows,), ``target`` (rows,)."""
        self._confusion = self._confusion + count(predicted, target, self.classes)

    def compute(self) -> dict[str, Tensor]:
        """Compute ``accuracy``, ``f1``, and ``confusion`` (classes, classes)."""
        return {**scores(self._confusion), "confusion": self._confusion}


class WindowScores:
    """Scores of windows when each channel of a window was classified alone (mode ``flatten``), and of channels.

    A window's class is the one with the largest mean probability over its channels. Rows may come in any order and in
    any batches; a window is counted when the last of its ``channels`` has arrived.
    """

    def __init__(self, classes: int, channels: int) -> None:
        self.classes = classes
        self.channels = channels
        self._windows = self._channels = torch.zeros(classes, classes, dtype=torch.int64)
        #: Rows of the windows that are not complete yet: probabilities, target and window.
        self.waiting = torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)

    def update(self, probabilities: Tensor, target: Tensor, window: Tensor) -> None:
        """Take rows: ``probabilities`` (rows, classes), ``target`` (rows,), ``window`` (rows,)."""
        self._channels = self._channels + count(probabilities.argmax(1), target, self.classes)
        batch = probabilities.float(), target, window
        probabilities, target, window = map(torch.cat, zip(self.waiting, batch, strict=True))
        _, window_indices, channel_counts = window.unique(return_inverse=True, return_counts=True)
        complete = (channel_counts == self.channels)[window_indices]
        self._windows = self._windows + self._of_windows(probabilities[complete], target[complete], window[complete])
        self.waiting = probabilities[~complete], target[~complete], window[~complete]

    def compute(self) -> dict[str, Tensor]:
        """Compute ``accuracy``, ``f1`` and ``confusion`` of windows, ``channel_accuracy`` and ``channel_f1``.

        Windows of which some channels never came count with those that did.
        """
        windows = self._windows + self._of_windows(*self.waiting)
        of_channels = {f"channel_{name}": value for name, value in scores(self._channels).items()}
        return {**scores(windows), "confusion": windows, **of_channels}

    def _of_windows(self, probabilities: Tensor, target: Tensor, window: Tensor) -> Tensor:
        ids, window_indices = window.unique(return_inverse=True)
        sums = torch.zeros(len(ids), self.classes).index_add_(0, window_indices, probabilities)
        truth = torch.zeros(len(ids), dtype=torch.int64).scatter_(0, window_indices, target)
        return count(sums.argmax(1), truth, self.classes)
