"""The images task: folders, files of all kinds, augmentation, scores, ranks, bad input."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import lockstep
from lockstep import Task
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.recipes.images.folders import Augmentation, Images, is_grey, list_images, read_image
from lockstep.recipes.images.resnet import ResNet
from lockstep.recipes.images.task import ImagesConfig, ImagesTask
from lockstep.tasks.har.task import HarConfig, HarTask
from lockstep.tasks.har.vision import LinePlots, Vit
from lockstep.tasks.registry import make_task

Image = pytest.importorskip("PIL.Image")


def task(folder: Path, **settings: Any) -> ImagesTask:
    return ImagesTask(ImagesConfig(**{"data": folder, "size": 8, "widths": (8,), **settings}))


def folders(root: Path, classes: int = 2, number: int = 12, mode: str = "L") -> Path:
    """Class k has a bright row k."""
    rng = np.random.default_rng(0)
    for label in range(classes):
        place = root / f"class{label}"
        place.mkdir(parents=True)
        for index in range(number):
            pixels = rng.integers(0, 60, (8, 8)).astype(np.uint8)
            pixels[2 * label + 1] = 250
            Image.fromarray(pixels).convert(mode).save(place / f"{index}.png")
    return root


def test_splits_are_of_names_and_hold_each_image_once(tmp_path: Path) -> None:
    found = list_images(folders(tmp_path, number=30), 0.2)
    assert {name: len(listed.files) for name, listed in found.items()} == {"train": 48, "val": 12}
    assert len({file for listed in found.values() for file in listed.files}) == 60
    assert list_images(tmp_path, 0.2) == found
    assert found["val"].labels == (0,) * 6 + (1,) * 6


def test_grey_palette_and_transparent_images_are_read(tmp_path: Path) -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(grey).save(tmp_path / "L.png")
    for mode in ("RGB", "RGBA", "P", "LA", "1"):
        Image.fromarray(grey).convert(mode).save(tmp_path / f"{mode}.png")
    expected = grey.astype(np.float32) / 255
    for name in ("L", "RGB", "RGBA", "P", "LA"):
        for channels in (1, 3):
            pixels = read_image(tmp_path / f"{name}.png", channels, 8)
            assert pixels.shape == (channels, 8, 8) and pixels.dtype == np.float32
            np.testing.assert_allclose(pixels[0], expected, atol=0.01)
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png", 3, 4).min() == 1.0


def test_grey_images_of_more_than_8_bits_are_refused_with_their_file(tmp_path: Path) -> None:
    grey = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    Image.fromarray(grey).save(tmp_path / "16.png")
    Image.fromarray(grey.astype(np.int32)).save(tmp_path / "32.tiff")
    Image.fromarray(grey.astype(np.float32) / 65535).save(tmp_path / "F.tiff")
    (tmp_path / "deep.pgm").write_bytes(b"P5 8 8 65535\n" + grey.astype(">u2").tobytes())
    for name in ("16.png", "32.tiff", "F.tiff", "deep.pgm"):
        with pytest.raises(DataError) as caught:
            read_image(tmp_path / name, 1, 8)
        assert name in caught.value.what and "8 bits" in caught.value.why


@pytest.mark.parametrize(("colours", "kind"), [(3, 2), (4, 6), (2, 4)], ids=["RGB", "RGBA", "LA"])
def test_colours_of_16_bits_are_refused_with_their_file(tmp_path: Path, colours: int, kind: int) -> None:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = b"".join(b"\0" + struct.pack(f">{4 * colours}H", *range(4 * colours)) for _ in range(4))
    header = struct.pack(">IIBBBBB", 4, 4, 16, kind, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    (tmp_path / "deep.ppm").write_bytes(b"P6 4 4 65535\n" + bytes(4 * 4 * 3 * 2))
    for name in ("deep.png", "deep.ppm"):
        with pytest.raises(DataError, match=rf"{name}(.|\n)*16 bits"):
            read_image(tmp_path / name, 3, 4)


def test_one_image_of_many_has_colours_and_all_usual_names_are_found(tmp_path: Path) -> None:
    folders(tmp_path, number=100)
    file = tmp_path / "class0" / "57.png"
    Image.open(file).convert("RGB").save(file)
    found = list_images(tmp_path, 0.2)
    assert [is_grey(listed.files) for listed in found.values()].count(False) == 1
    for name in ("a.jfif", "b.JPE", "c.ppm", "d.avif"):
        file.rename(tmp_path / "class0" / name) if name == "a.jfif" else (tmp_path / "class0" / name).touch()
    names = {each.name for listed in list_images(tmp_path, 0.2).values() for each in listed.files}
    assert {"a.jfif", "b.JPE", "c.ppm", "d.avif"} <= names


def test_photos_are_turned_as_their_exif_orientation_says(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:, :4] = 255  # the left half
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # is shown turned to the right: the upper half
    image.save(tmp_path / "turned.png", exif=exif)
    image.save(tmp_path / "damaged.png", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff" + b"\xff" * 20)
    assert read_image(tmp_path / "turned.png", 1, 8)[0].mean(1).tolist() == [1] * 4 + [0] * 4
    assert read_image(tmp_path / "damaged.png", 1, 8)[0].mean(0).tolist() == [1] * 4 + [0] * 4


def test_films_print_colours_and_palettes_are_read(tmp_path: Path) -> None:
    red, blue = (Image.new("RGB", (8, 8), name) for name in ("red", "blue"))
    red.save(tmp_path / "film.gif", save_all=True, append_images=[blue])
    red.convert("CMYK").save(tmp_path / "print.jpg")
    palette = red.convert("P")
    palette.save(tmp_path / "clear.png", transparency=palette.getpixel((0, 0)))
    np.testing.assert_allclose(read_image(tmp_path / "film.gif", 3, 8)[:, 0, 0], [1, 0, 0], atol=0.02)
    np.testing.assert_allclose(read_image(tmp_path / "print.jpg", 3, 8)[:, 0, 0], [1, 0, 0], atol=0.02)
    assert read_image(tmp_path / "clear.png", 3, 8).min() == 1


def test_hidden_files_are_left_out_and_links_are_followed(tmp_path: Path) -> None:
    folders(tmp_path / "data")
    cat = (tmp_path / "data" / "class0").rename(tmp_path / "data" / "große Katze, „rot“")
    for file in ("._0.png", ".ipynb_checkpoints/0.png", "../__MACOSX/cat/._0.png"):
        (cat / file).parent.mkdir(parents=True, exist_ok=True)
        (cat / file).write_bytes(b"\0\5\x16\7")
    (cat / "folder.png").mkdir()
    (cat / "link.PNG").symlink_to(tmp_path / "data" / "class1" / "0.png")
    made = task(tmp_path / "data")
    data = made.datasets()
    assert made.class_names == ("class1", "große Katze, „rot“")
    assert sum(len([split[index] for index in range(len(split))]) for split in (data.train, data.val)) == 25
    (cat / "link.PNG").unlink()
    (cat / "link.PNG").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"link\.PNG"):
        [split[index] for split in (data.train, data.val) for index in range(len(split))]


@pytest.mark.parametrize(("train", "val"), [("train", "valid"), ("Train", "Validation"), ("training", "val")])
def test_usual_names_of_splits(tmp_path: Path, train: str, val: str) -> None:
    folders(tmp_path / train)
    folders(tmp_path / val, number=3)
    found = list_images(tmp_path, 0.2)
    assert {name: len(listed.files) for name, listed in found.items()} == {"train": 24, "val": 6}


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    folders(tmp_path)
    (tmp_path / "class0").rename(tmp_path / "train")
    assert list_images(tmp_path, 0.2)["train"].classes == ("class1", "train")


def test_a_sample_is_changed_by_its_generator_alone(tmp_path: Path) -> None:
    listed = list_images(folders(tmp_path), 0.2)["train"]
    data = Images(listed, 1, 8, Augmentation(crop=0.2, flip=True, color=0.2))
    for index in range(len(data)):
        first, second = (data.sample(index, np.random.default_rng(index)) for _ in range(2))
        assert np.array_equal(first[0], second[0]) and first[1] == second[1] == listed.labels[index]
        assert first[0].shape == (1, 8, 8) and first[0].min() >= 0 and first[0].max() <= 1.001
    assert len({data.sample(0, np.random.default_rng(seed))[0].tobytes() for seed in range(9)}) > 3


@pytest.mark.parametrize(
    "header", [b"\x89PNG\r\n\x1a\n\0\0\0\x04IHDR\0\0\0\0", b"BM" + b"\xff" * 60, b"GIF89a" + b"\xff" * 60]
)
def test_a_broken_header_is_an_error_with_the_files_name(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "broken.png"
    file.write_bytes(header)
    with pytest.raises(DataError, match=r"broken\.png"):
        read_image(file, 3, 8)
    assert not is_grey([file])


def test_other_folders_have_the_labels_of_their_class_folders(tmp_path: Path) -> None:
    settings = {"task.data": folders(tmp_path / "data"), "task.size": 8, "task.widths": [8]}
    run = lockstep.train("images", settings, devices="cpu", max_steps=2, num_workers=0, save_dir=tmp_path / "run")
    new = folders(tmp_path / "new", number=5)
    rows = run.predict(new, loss=True)
    assert rows["file"].tolist() == [str(new / f"class{label}" / f"{n}.png") for label in (0, 1) for n in range(5)]
    metrics = run.evaluate(new)
    assert rows["loss"].mean() == pytest.approx(metrics["test_loss"], rel=1e-5)
    right = [row["class"] == Path(row["file"]).parent.name for row in rows.to_dict("records")]
    assert metrics["test_accuracy"] == pytest.approx(sum(right) / 10)

    (new / "class1" / "0.png").rename(new / "loose.png")
    assert run.predict(new, loss=True).set_index("file")["loss"].isna().tolist() == [False] * 9 + [True]
    assert run.predict(new / "class1", loss=True)["loss"].notna().all()
    with pytest.raises(DataError, match=r"loose\.png"):
        run.evaluate(new)


def test_models() -> None:
    images = torch.randn(2, 3, 16, 16)
    network = ResNet(3, 5, widths=(4, 8)).eval()
    assert network(images).shape == (2, 5)
    cut = images
    for stage in network.stages():
        cut = stage(cut)
    torch.testing.assert_close(cut, network(images))
    assert Vit(3, 5, (16, 16), width=16, depth=1)(images).shape == (2, 5)


def test_line_plots_have_a_line_from_left_to_right() -> None:
    windows = torch.linspace(-3, 3, 20).expand(1, 2, 20)
    plots = LinePlots(height=10)(windows)
    assert plots.shape == (1, 2, 10, 20)
    assert plots[0, 0, -1, 0] == 1 and plots[0, 0, 0, -1] == 1 and plots[0, 0, 0, 0] == 0
    assert bool((plots.amax(dim=2) > 0.7).all())
    assert LinePlots(8, 12)(windows).shape == (1, 2, 8, 12)


class SmallConfig(ImagesConfig):
    size: int | None = 8
    model: str = "vit"
    width: int = 16
    depth: int | None = 1
    dropout: float = 0.0


class SmallImages(ImagesTask):
    Config = SmallConfig


@pytest.mark.parametrize("kind", ["images", "har"])
def test_padding_does_not_count(tmp_path: Path, kind: str) -> None:
    folders(tmp_path / "data")
    made: Task = SmallImages() if kind == "images" else HarTask(HarConfig(model="mlp"))
    made.data = replace(made.data, data_dir=tmp_path / "data" if kind == "images" else None)
    train, model = made.datasets().train, made.model().eval()
    batch = tuple(default_collate([train.sample(k, np.random.default_rng(k)) for k in range(3)]))
    found = [made.loss(model, one) for one in (batch, made.pad(batch, 8))]
    assert [int(count) for _, count in found] == [3, 3]
    assert found[0].total.item() == pytest.approx(found[1].total.item(), rel=1e-6)


def spoil(folder: Path) -> None:
    (folder / "class0" / "0.png").write_bytes(b"no image")


def loose(folder: Path) -> None:
    for file in (folder / "class0").iterdir():
        file.rename(folder / file.name)
    for file in (folder / "class1").iterdir():
        file.unlink()


def single(folder: Path) -> None:
    for file in sorted(folder.rglob("*.png"))[1:]:
        file.unlink()


def without_train(folder: Path) -> None:
    (folder / "class0").rename(folder / "val")
    (folder / "class1").rename(folder / "test")


def twice(folder: Path) -> None:
    folders(folder / "train"), folders(folder / "val"), folders(folder / "valid")


@pytest.mark.parametrize(
    ("change", "more", "error", "text"),
    [
        (lambda folder: (folder / "class2").mkdir(), {}, DataError, "class2 .*images"),
        (without_train, {}, DataError, r"\btest\b.*\bval\b.*\btrain\b"),
        (twice, {}, DataError, r"\bval\b.*\bvalid\b"),
        (spoil, {}, DataError, r"0\.png"),
        (loose, {}, DataError, "0 class folder"),
        (single, {}, DataError, "1 class folder"),
        (lambda folder: None, {"model": "vit", "patch": 3}, ConfigError, "patches"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    more: dict[str, Any],
    error: type[LockstepError],
    text: str,
) -> None:
    change(folders(tmp_path))
    monkeypatch.chdir(tmp_path)
    made = task(tmp_path, **more)
    with pytest.raises(error, match=text):
        data = made.datasets()
        [data.train[index] for index in range(len(data.train))]
        [data.val[index] for index in range(len(data.val))]
        made.model()


@pytest.mark.parametrize("setting", sorted(ImagesConfig.removed_settings))
def test_removed_settings_are_refused_by_name(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_task(ImagesTask, {setting: 1})
    assert f"task.{setting}" in caught.value.what
    assert caught.value.fix == ImagesConfig.removed_settings[setting]
