"""The images task: settings, class folders, models, loss and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data.arrays import NO_LABEL, filled
from lockstep.engine.task import Datasets, Loss, Metrics, Task, TaskConfig
from lockstep.errors import ConfigError, DataError
from lockstep.recipes.images.folders import (
    Augmentation,
    Images,
    Listed,
    digits_folder,
    images_below,
    is_grey,
    labels_below,
    list_images,
)
from lockstep.recipes.images.resnet import ResNet
from lockstep.tasks import DEFAULTS
from lockstep.tasks.har.task import ClassScores
from lockstep.tasks.har.vision import Vit


class ImagesConfig(TaskConfig):
    """Settings of the images task (``task.<key>``)."""

    removed_settings: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("mixup", "cutmix"), "leave it out; a task that you write can mix images in its loss"),
        "skip_broken": "use data.on_bad_row=skip",
        "weights": "use init_from with a run",
        "freeze_epochs": "return parameter groups with lower rates from Task.optimizer() in another task",
    }
    data: Path | None = Field(
        default=None,
        description="a folder with a folder for each class, or with train, val and test folders of them; unset: "
        "data.data_dir, else handwritten digits",
    )
    size: int | None = Field(
        default=None, ge=4, description="pixels of a side of an image; unset: 16 for digits, else 64"
    )
    model: Literal["resnet", "vit"] = Field(default="resnet", description="the network")
    widths: tuple[PositiveInt, ...] = Field(default=(32, 64, 128), description="resnet: channels of each stage")
    depth: int | None = Field(default=None, ge=1, description="resnet: blocks per stage (1); vit: layers (4)")
    patch: int = Field(default=4, ge=1, description="vit: side of a patch")
    width: int = Field(default=64, ge=4, description="vit: features of a patch")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="vit")
    crop: float = Field(default=0.1, ge=0, lt=1, description="move training images by up to this share of their side")
    flip: bool | None = Field(default=None, description="mirror half of the training images; unset: not for digits")
    color: float = Field(default=0.1, ge=0, lt=1, description="change brightness and contrast by up to this share")
    label_smoothing: float = Field(default=0.1, ge=0, lt=1, description="share of each label spread over all classes")
    val_share: float = Field(
        default=0.1, gt=0, lt=1, description="share of each class to validate on, without a folder val"
    )


class ImagesTask(Task):
    """Classify images in class folders; by default handwritten digits, which are in the package."""

    Config = ImagesConfig
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS["images"]
    monitor = ("val_accuracy", "max")
    config: ImagesConfig

    @property
    def _folder(self) -> Path | None:
        folder = self.config.data or self.data.data_dir
        return None if folder is None else Path(folder)

    def prepare(self) -> None:
        """Write the digits, unless a folder is named."""
        if self._folder is None:
            digits_folder()

    @cached_property
    def _splits(self) -> dict[str, Listed]:
        return list_images(self._folder or digits_folder(), self.config.val_share)

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._splits["train"].classes

    @property
    def _size(self) -> int:
        return self.config.size or (16 if self._folder is None else 64)

    @cached_property
    def _channels(self) -> int:
        return 1 if is_grey(self._splits["train"].files) else 3

    def datasets(self) -> Datasets:
        """Return images (channels, size, size) from 0 to 1, and their labels."""
        config = self.config
        flip = self._folder is not None if config.flip is None else config.flip
        augmentation = Augmentation(crop=config.crop, flip=flip, color=config.color)
        splits = {name: Images(listed, self._channels, self._size) for name, listed in self._splits.items()}
        train = Images(self._splits["train"], self._channels, self._size, augmentation)
        return Datasets(train, splits["val"], splits.get("test"))

    def evaluation_data(self, path: Path) -> Images:
        """Return the images below a folder, each in a folder named as its class. Raises :class:`DataError`."""
        images = self.prediction_data(path)
        if NO_LABEL in images.listed.labels:
            unlabelled = images.listed.files[images.listed.labels.index(NO_LABEL)]
            raise DataError(
                f"{unlabelled} has no label",
                why=f"it is in no folder with the name of a class: {', '.join(self.class_names)}",
                fix="sort the images into such folders, or remove it",
            )
        return images

    def prediction_data(self, path: Path) -> Images:
        """Return the images of a file or below a folder, in the order of their paths, with known labels."""
        files = images_below(path)
        listed = Listed(files, labels_below(path, files, self.class_names), self.class_names)
        return Images(listed, self._channels, self._size)

    def model(self) -> nn.Module:
        config = self.config
        channels = self._channels
        classes = len(self.class_names)
        try:
            if config.model == "resnet":
                return ResNet(channels, classes, widths=config.widths, depth=config.depth or 1)
            return Vit(
                channels,
                classes,
                size=(self._size, self._size),
                patch=(config.patch, config.patch),
                width=config.width,
                depth=config.depth or 4,
                dropout=config.dropout,
            )
        except ValueError as error:
            raise ConfigError(
                f"task.model={config.model} does not fit these settings",
                why=str(error),
                fix="change the settings that it names",
            ) from None

    def stages(self, model: nn.Module) -> Sequence[nn.Module] | None:
        return model.stages() if isinstance(model, ResNet) else None

    # A batch: images (n, channels, size, size), labels (n,).

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self._loss(model(batch[0]), batch[1])

    def _loss(self, logits: Tensor, labels: Tensor) -> Loss:
        losses = F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=self.config.label_smoothing)
        return Loss(losses.sum(), (labels != NO_LABEL).sum())

    def pad(self, batch: Any, samples: int) -> Any:
        return filled(batch, samples, 1)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return self.validate(model, batch)[1]

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Tensor, ...]]:
        logits = model(batch[0])
        return self._loss(logits, batch[1]), (logits.argmax(1), batch[1])

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the most probable class, and its probability."""
        probabilities, classes = model(batch[0]).float().softmax(1).max(1)
        return {"class": [self.class_names[number] for number in classes.tolist()], "probability": probabilities}

    def metrics(self) -> Metrics:
        return ClassScores(len(self.class_names))

    def state_dict(self) -> dict[str, Any]:
        return {"class_names": list(self.class_names)}
