"""The images task: settings, class folders, models, loss and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data.arrays import NO_LABEL, filled
from lockstep.engine.task import Callback, Context, Datasets, Loss, Metrics, Task, TaskConfig
from lockstep.errors import ConfigError, UnsupportedError, many
from lockstep.recipes.images.folders import (
    Augmentation,
    Images,
    Listed,
    digits_folder,
    images_below,
    is_grey,
    list_images,
    readable,
)
from lockstep.recipes.images.resnet import ResNet
from lockstep.tasks.har.task import ClassScores
from lockstep.tasks.har.vision import Vit

#: Pictures of mistakes that are shown.
WORST = 16


class ImagesConfig(TaskConfig):
    """Settings of the images task (``task.<key>``)."""

    data: Path | None = Field(
        default=None,
        description="a folder with a folder for each class, or with train, val and test folders of them; unset: "
        "data.data_dir, else handwritten digits",
    )
    size: int | None = Field(
        default=None, ge=4, description="pixels of a side of an image; unset: 16 for digits, else 64"
    )
    model: str = Field(default="resnet", description="resnet, vit, or a model of the package timm by its name there")
    widths: tuple[PositiveInt, ...] = Field(default=(32, 64, 128), description="resnet: channels of each stage")
    depth: int | None = Field(default=None, ge=1, description="resnet: blocks per stage (1); vit: layers (4)")
    patch: int = Field(default=4, ge=1, description="vit: side of a patch")
    width: int = Field(default=64, ge=4, description="vit: features of a patch")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="vit")
    crop: float = Field(default=0.1, ge=0, lt=1, description="move training images by up to this share of their side")
    flip: bool | None = Field(default=None, description="mirror half of the training images; unset: not for digits")
    color: float = Field(default=0.1, ge=0, lt=1, description="change brightness and contrast by up to this share")
    mixup: float = Field(default=0.0, ge=0, description="parameter of mixup; 0: off")
    cutmix: float = Field(default=0.0, ge=0, description="parameter of CutMix; 0: off")
    label_smoothing: float = Field(default=0.1, ge=0, lt=1, description="share of each label spread over all classes")
    val_share: float = Field(
        default=0.1, gt=0, lt=1, description="share of each class to validate on, without a folder val"
    )
    skip_broken: bool = Field(default=False, description="read all images first, and leave out and count broken ones")
    weights: Path | None = Field(
        default=None, description="a .safetensors file to begin with; parameters of other shapes, as the head, are new"
    )
    freeze_epochs: int = Field(default=0, ge=0, description="train the head only in the first N epochs")


class ImageScores(ClassScores):
    """Scores of classes, a table of them, and the mistakes with the largest losses.

    ``per_class``: (classes, 4): precision, recall, F1 and number of images.
    """

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self._rows = 0
        #: (loss, index, predicted, label) of the worst ones.
        self.mistakes: list[tuple[float, int, int, int]] = []

    def update(self, predicted: Tensor, labels: Tensor, losses: Tensor) -> None:  # type: ignore[override]
        super().update(predicted, labels)
        wrong = (predicted != labels).nonzero().flatten().tolist()
        self.mistakes += [(float(losses[i]), self._rows + i, int(predicted[i]), int(labels[i])) for i in wrong]
        self.mistakes = sorted(self.mistakes, reverse=True)[:WORST]
        self._rows += len(labels)

    def compute(self) -> dict[str, Tensor]:
        correct = self._confusion.diagonal()
        predicted = self._confusion.sum(0)
        actual = self._confusion.sum(1)
        columns = (
            correct / predicted.clamp(min=1),
            correct / actual.clamp(min=1),
            2 * correct / (predicted + actual).clamp(min=1),
            actual,
        )
        table = torch.stack([column.double() for column in columns], dim=1)
        return {**super().compute(), "per_class": table}


class _Unfreeze(Callback):
    """Trains the head alone in the first epochs."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def on_epoch_start(self, context: Context, model: nn.Module) -> None:
        head = set(map(id, head_of(model).parameters()))
        for parameter in model.parameters():
            parameter.requires_grad_(context.epoch >= self._epochs or id(parameter) in head)


def head_of(model: nn.Module) -> nn.Module:
    """The last linear layer."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


class ImagesTask(Task):
    """Classify images in class folders; by default handwritten digits, which are in the package."""

    Config = ImagesConfig
    defaults: ClassVar[Mapping[str, Any]] = {
        "training": {"epochs": 10, "batch_size": 32, "early_stopping_patience": 0},
        "optimizer": {"name": "adamw", "lr": 2e-3, "weight_decay": 0.05, "weight_decay_on": "matrices"},
        "scheduler": {"name": "cosine", "warmup_epochs": 1},
    }
    monitor = ("val_accuracy", "max")
    config: ImagesConfig
    _scores: ImageScores | None = None

    @property
    def _folder(self) -> Path | None:
        folder = self.config.data or self.data.data_dir
        return None if folder is None else Path(folder)

    def prepare(self) -> None:
        """Write the digits, if they are wanted."""
        if self._folder is None:
            digits_folder()

    @cached_property
    def _found(self) -> tuple[dict[str, Listed], list[Path]]:
        """The splits, and broken images that are left out."""
        splits = list_images(self._folder or digits_folder(), self.config.val_share)
        if not self.config.skip_broken:
            return splits, []
        broken: list[Path] = []
        for name, listed in splits.items():
            splits[name], more = readable(listed, 1, 4)
            broken += more
        return splits, broken

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._found[0]["train"].classes

    @property
    def _size(self) -> int:
        return self.config.size or (16 if self._folder is None else 64)

    @cached_property
    def _channels(self) -> int:
        return 1 if is_grey(self._found[0]["train"].files) else 3

    def datasets(self) -> Datasets:
        """Images (channels, size, size) from 0 to 1, two labels and the share of the first."""
        config = self.config
        flip = self._folder is not None if config.flip is None else config.flip
        augmentation = Augmentation(config.crop, flip, config.color, config.mixup, config.cutmix)
        splits = {name: Images(listed, self._channels, self._size) for name, listed in self._found[0].items()}
        train = Images(self._found[0]["train"], self._channels, self._size, augmentation)
        return Datasets(train, splits["val"], splits.get("test"))

    def prediction_data(self, path: Path) -> Images:
        """The images of a file or below a folder, in the order of their paths; their labels mean nothing."""
        files = images_below(path)
        listed = Listed(files, (0,) * len(files), self.class_names)
        return Images(listed, self._channels, self._size, in_training=False)

    def model(self) -> nn.Module:
        config = self.config
        channels = self._channels
        classes = len(self.class_names)
        try:
            if config.model == "resnet":
                model: nn.Module = ResNet(channels, classes, widths=config.widths, depth=config.depth or 1)
            elif config.model == "vit":
                side = (self._size, self._size)
                patch = (config.patch, config.patch)
                model = Vit(
                    channels,
                    classes,
                    side,
                    patch=patch,
                    width=config.width,
                    depth=config.depth or 4,
                    dropout=config.dropout,
                )
            else:
                model = _of_timm(config.model, channels, classes, self._size)
        except ValueError as error:
            raise ConfigError(
                f"task.model={config.model} does not fit these settings",
                why=str(error),
                fix="change the settings that it names",
            ) from None
        if config.weights is not None:
            _begin_with(model, config.weights)
        return model

    def callbacks(self) -> Sequence[Callback]:
        return [_Unfreeze(self.config.freeze_epochs)] if self.config.freeze_epochs else []

    def stages(self, model: nn.Module) -> Sequence[nn.Module] | None:
        return model.stages() if isinstance(model, ResNet) else None

    # A batch: images (n, channels, size, size), labels (n,), other labels (n,), shares of the first (n,).

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(self._losses(model(batch[0]), batch).sum(), (batch[1] != NO_LABEL).sum())

    def pad(self, batch: Any, samples: int) -> Any:
        return filled(batch, samples, 1, 2)

    def _losses(self, logits: Tensor, batch: Any) -> Tensor:
        _, labels, partner_labels, share = batch
        first, second = (
            F.cross_entropy(logits.float(), classes, reduction="none", label_smoothing=self.config.label_smoothing)
            for classes in (labels, partner_labels)
        )
        losses: Tensor = share * first + (1 - share) * second
        return losses

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return self.validate(model, batch)[1]

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Tensor, ...]]:
        logits = model(batch[0])
        losses = self._losses(logits, batch)
        return Loss(losses.sum(), len(losses)), (logits.argmax(1), batch[1], losses)

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """The most probable class, and its probability."""
        probabilities, classes = model(batch[0]).float().softmax(1).max(1)
        return {"class": [self.class_names[number] for number in classes.tolist()], "probability": probabilities}

    def metrics(self) -> Metrics:
        self._scores = ImageScores(len(self.class_names))
        return self._scores

    @property
    def _mistakes(self) -> list[tuple[float, int, int, int]]:
        """Of the last evaluation, if it was of the validation images."""
        files = self._found[0]["val"].files
        return [mistake for mistake in (self._scores.mistakes if self._scores else []) if mistake[1] < len(files)]

    def remarks(self) -> list[str]:
        """The worst mistakes of the last evaluation by name, and how many broken images were left out."""
        broken = self._found[1]
        names = self.class_names
        lines = [f"{many(len(broken), 'broken image')} left out, such as {broken[0]}"] if broken else []
        for loss, index, predicted, label in self._mistakes[:3]:
            file = self._found[0]["val"].files[index]
            mistake = f"{file.parent.name}/{file.name} is {names[label]}, not {names[predicted]}"
            lines.append(f"mistake: {mistake} ({loss:.2f})")
        return lines

    def pictures(self) -> Mapping[str, NDArray[np.uint8]]:
        """The images with the largest losses among the mistakes of the last evaluation."""
        data = Images(self._found[0]["val"], self._channels, self._size)
        worst = [np.pad(data.read(index), ((0, 0), (1, 1), (1, 1))) for _, index, *_ in self._mistakes]
        if not worst:
            return {}
        row = np.concatenate(worst, axis=2)
        pixels = (row * 255).astype(np.uint8)
        return {"mistakes": pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)}

    def state_dict(self) -> dict[str, Any]:
        return {"class_names": list(self.class_names)}


def _of_timm(name: str, channels: int, classes: int, size: int) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision of another torch
        message = f"task.model={name} is a model of timm, which cannot be imported"
        fix = "pip install timm, and the torchvision of this torch (https://pytorch.org/get-started/locally)"
        raise UnsupportedError(message, why=str(error), fix=f"{fix}; or use task.model=resnet or vit") from None
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model {name}", fix="use resnet, vit, or a name of timm.list_models()")
    # A model that takes images of one size only is made for ours.
    fixed = getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False)
    sizes = {"img_size": size} if fixed else {}
    return timm.create_model(name, pretrained=False, in_chans=channels, num_classes=classes, **sizes)


def _begin_with(model: nn.Module, file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise ConfigError(f"there is no file {file}", fix="check task.weights")
    try:
        parameters = model.state_dict()
        saved = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file} is not a .safetensors file",
            why=str(error),
            fix="save the weights with safetensors.torch.save_file",
        ) from None
    fitting = {
        name: value for name, value in saved.items() if name in parameters and parameters[name].shape == value.shape
    }
    if not fitting:
        raise ConfigError(f"{file} has no parameter of this model", fix="check task.model and task.weights")
    if not next(model.parameters()).is_meta:
        model.load_state_dict(fitting, strict=False)
