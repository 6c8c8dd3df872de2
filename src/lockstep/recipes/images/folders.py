"""Images in class folders: finding, reading and augmenting them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.data.arrays import NO_LABEL
from lockstep.errors import DataError, StorageError, UnsupportedError, many
from lockstep.readers.files import cache_folder, class_folders, inside
from lockstep.recipes.autoencoder.task import load_digits
from lockstep.rundir.files import make_folder

SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm"),
    *(".tif", ".tiff", ".webp"),
)
SPLITS = ("train", "val", "test")
#: Other usual names of them, in any case.
_SPLIT_ALIASES = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
Pixels = NDArray[np.float32]


class Listed(NamedTuple):
    """Files of a split, and the class of each; ``classes`` are the same in all splits."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


def digits_folder() -> Path:
    """Make class folders with the digits of scikit-learn's set as PNGs, once in the user's cache folder."""
    folder = cache_folder() / "digits-png"
    try:
        if not folder.is_dir():
            make_folder(folder, _write_digits)
    except StorageError:
        if not folder.is_dir():  # else another process was faster
            raise
    return folder


def _write_digits(folder: Path) -> None:
    image = _pillow()
    for split in SPLITS:
        digits = load_digits(split)  # type: ignore[arg-type]
        for number, (pixels, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
            class_folder = folder / split / str(label)
            class_folder.mkdir(parents=True, exist_ok=True)
            image.fromarray((pixels[0] * 255 + 0.5).astype(np.uint8)).save(class_folder / f"{number:04}.png")


def list_images(folder: Path, val_share: float) -> dict[str, Listed]:
    """List the images of ``folder``: ``train/CLASS/…``, ``val/CLASS/…`` and ``test/CLASS/…``, or ``CLASS/…`` alone.

    Without ``val``, a share of each class of ``train`` is taken, chosen by a hash of the names.

    Raises:
        DataError: no folder, no class folders, a class without images, or one that is not in ``train``.
    """
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}", fix="check task.data, or --data-dir: a folder with a folder for each class"
        )
    roots = _splits(folder)
    splits = {name: {folder.name: _images_in(folder) for folder in class_folders(root)} for name, root in roots.items()}
    empty = sorted(name for name, files in splits["train"].items() if not files)
    classes = tuple(sorted(splits["train"].keys() - set(empty)))
    if len(classes) < 2:
        reason = "at least two are needed"
        if any(file.suffix.lower() in SUFFIXES for file in roots["train"].iterdir()):
            reason = "the images have no labels: a label is the name of the folder that an image is in"
        raise DataError(
            f"{roots['train']} has {many(len(classes), 'class folder')} with images",
            why=reason,
            fix="sort the images into a folder for each class",
        )
    if empty:
        raise DataError(
            f"the class folder {roots['train'] / empty[0]} has no images",
            why=f"no file ends in {SUFFIXES}",
            fix="add or convert its images, or remove the folder",
        )
    for name, by_class in splits.items():
        strange = sorted(label for label, files in by_class.items() if files and label not in classes)
        if strange:
            raise DataError(
                f"{roots[name]} has the class {strange[0]!r}, which train does not have",
                fix="add training images of it, or remove the folder",
            )
    if "val" not in splits:
        splits["train"], splits["val"] = _divided(splits["train"], folder, val_share)
    if not any(splits["val"].values()):
        raise DataError(f"{folder} has too few images to validate on", fix="add images, or raise task.val_share")
    return {
        name: Listed(
            tuple(file for label in classes for file in by_class.get(label, ())),
            tuple(number for number, label in enumerate(classes) for _ in by_class.get(label, ())),
            classes,
        )
        for name, by_class in splits.items()
    }


def _splits(folder: Path) -> dict[str, Path]:
    """Return the folder of each split. If no subfolder is a split, ``folder`` is train. Raises :class:`DataError`."""
    split_folders: dict[str, Path] = {}
    split_or_class_of = {
        subfolder: _SPLIT_ALIASES.get(subfolder.name.lower(), subfolder.name.lower())
        for subfolder in class_folders(folder)
    }
    has_classes = any(name not in SPLITS for name in split_or_class_of.values())
    for subfolder, name in split_or_class_of.items():
        if name not in SPLITS or (has_classes and not class_folders(subfolder)):
            continue  # a class folder that happens to be named train
        if name in split_folders:
            raise DataError(
                f"{folder} has both {split_folders[name].name} and {subfolder.name}", fix="remove or rename one of them"
            )
        split_folders[name] = subfolder
    if split_folders and "train" not in split_folders:
        raise DataError(
            f"{folder} has {' and '.join(subfolder.name for subfolder in split_folders.values())}, but not train",
            why="these are names of splits, not of classes",
            fix="add a folder train with a folder for each class, or name another folder in task.data",
        )
    return split_folders or {"train": folder}


def _images_in(folder: Path) -> list[Path]:
    return sorted(map(Path, inside(str(folder), SUFFIXES)))


def _divided(by_class: dict[str, list[Path]], root: Path, share: float) -> tuple[Any, Any]:
    """Divide files of each class into training and validation; the smallest hashes are the validation's."""

    def key(file: Path) -> bytes:
        return hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()

    validation = {name: sorted(sorted(files, key=key)[: round(len(files) * share)]) for name, files in by_class.items()}
    return {name: sorted({*files} - {*validation[name]}) for name, files in by_class.items()}, validation


#: Headers of images that are read to see whether one has colours.
HEADERS = 20_000
#: Errors of Pillow for broken files, beside DecompressionBombError (a size that no memory would hold).
_BROKEN = (OSError, ValueError, SyntaxError, EOFError)


def read_image(file: Path, channels: int, size: int) -> Pixels:
    """Return pixels from 0 to 1, (channels, size, size): the middle square of the image, resized.

    Grey, palette and transparent images are converted (transparent pixels on white), and turned as their EXIF
    orientation says.

    Raises:
        DataError: it cannot be read, or has more than 8 bits for a value.
    """
    image = _pillow()
    from PIL.ImageOps import exif_transpose

    try:
        with image.open(file) as opened:
            _refuse_deep(opened)
            opened.load()
            with contextlib.suppress(Exception):  # a damaged EXIF block leaves the image as it is
                exif_transpose(opened, in_place=True)
            if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
                whole = opened.convert("RGBA")
                opened = image.alpha_composite(image.new("RGBA", whole.size, "white"), whole)
            picture = opened.convert("L" if channels == 1 else "RGB")
    except (*_BROKEN, image.DecompressionBombError) as error:
        raise DataError(
            f"cannot read the image {file}",
            why=f"{type(error).__name__}: {error}",
            fix="remove or replace it; --set data.on_bad_row=skip leaves broken training images out",
        ) from None
    side = min(picture.size)
    left = (picture.width - side) // 2
    top = (picture.height - side) // 2
    if picture.size != (size, size):
        picture = picture.resize((size, size), image.Resampling.BILINEAR, (left, top, left + side, top + side))
    pixels = np.asarray(picture, dtype=np.float32) / np.float32(255)
    if pixels.ndim == 2:
        return np.repeat(pixels[None], channels, axis=0)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _refuse_deep(opened: Any) -> None:
    """Raise :class:`ValueError` for values of more than 8 bits: Pillow would clip them or drop their lower bits."""
    if opened.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels are of type {opened.mode}: save it with 8 bits for a value")
    for codec, _, _, arguments in getattr(opened, "tile", ()):
        values = arguments if isinstance(arguments, tuple) else (arguments,)
        kind, _, bits = str(values[0]).partition(";")  # such as RGB;16B
        is_deep = bits.startswith("16") or (codec == "ppm" and values[1] > 255)
        if is_deep and kind in ("RGB", "RGBA", "RGBX", "RGBa", "LA", "CMYK"):
            raise ValueError(f"its {kind} values have 16 bits: save it with 8 bits for a value")


def is_grey(files: Sequence[Path]) -> bool:
    """Return whether images from all over the list have no colours; up to :data:`HEADERS` are looked at."""
    image = _pillow()
    modes = set()
    for file in files[:: len(files) // HEADERS + 1]:
        with contextlib.suppress(*_BROKEN, image.DecompressionBombError), image.open(file) as opened:
            modes.add(opened.mode)
    return bool(modes) and modes <= {"1", "L", "LA"}


@dataclass(frozen=True)
class Augmentation:
    """What training images are changed by; zeros leave them as they are.

    Attributes:
        crop: pixels that an image is moved by at most, as a share of its side.
        flip: mirror half of them.
        color: brightness and contrast change by up to this share.
    """

    crop: float = 0.0
    flip: bool = False
    color: float = 0.0


class Images:
    """A split as a data set of (pixels, label)."""

    def __init__(self, listed: Listed, channels: int, size: int, augmentation: Augmentation = Augmentation()) -> None:
        self.listed = listed
        self._channels = channels
        self._size = size
        self._augmentation = augmentation

    def __len__(self) -> int:
        return len(self.listed.files)

    @cached_property
    def names(self) -> Sequence[str]:
        return [str(file) for file in self.listed.files]

    def __getitem__(self, index: int) -> tuple[Pixels, int]:
        pixels = read_image(self.listed.files[index], self._channels, self._size)
        return pixels, self.listed.labels[index]

    def sample(self, index: int, rng: np.random.Generator) -> tuple[Pixels, int]:
        """Return image ``index``, changed by draws from ``rng``."""
        augmentation = self._augmentation
        pixels, label = self[index]
        reach = round(augmentation.crop * self._size)
        if reach:
            down, right = rng.integers(0, 2 * reach + 1, size=2)
            padded = np.pad(pixels, ((0, 0), (reach, reach), (reach, reach)))
            pixels = padded[:, down : down + self._size, right : right + self._size]
        if augmentation.flip and rng.random() < 0.5:
            pixels = pixels[:, :, ::-1]
        if augmentation.color:
            brightness, contrast = 1 + augmentation.color * rng.uniform(-1, 1, size=2).astype(np.float32)
            mean = pixels.mean()
            pixels = (((pixels - mean) * contrast + mean) * brightness).clip(0, 1)
        return np.array(pixels, dtype=np.float32), label


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UnsupportedError(
            "Pillow, which reads images, is not installed", fix="pip install 'lockstep-train[images]'"
        ) from None
    return Image


def images_below(path: Path) -> tuple[Path, ...]:
    """List a file, or the images below a folder by path. Raises :class:`DataError`: there is none."""
    files = [path] if path.is_file() else _images_in(path)
    if not files:
        raise DataError(f"{path} has no images", fix=f"name a folder of images ({', '.join(SUFFIXES)})")
    return tuple(files)


def labels_below(path: Path, files: Sequence[Path], classes: Sequence[str]) -> tuple[int, ...]:
    """Return the class whose name the nearest folder of each file has, up to ``path``; ``NO_LABEL`` without one."""
    numbers = {name: number for number, name in enumerate(classes)}
    named = ([numbers.get(folder.name) for folder in file.relative_to(path.parent).parents] for file in files)
    return tuple(next((number for number in labels if number is not None), NO_LABEL) for labels in named)
