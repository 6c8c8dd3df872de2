from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from lockstep.config import resolve
from lockstep.errors import ConfigError, DataError
from lockstep.tasks.har import HarConfig, HarTask
from lockstep.tasks.har.data import Standardiser, Windows
from lockstep.tasks.registry import find_task, make_task
from tests.tasks.har_folders import make_tensors, make_uci

SMALL: dict[str, Any] = {"source": "synthetic", "synthetic_samples": 60, "synthetic_shape": (3, 32)}


def make(data_dir: Path | str | None = None, *, download: bool = False, seed: int = 42, **settings: Any) -> HarTask:
    task = HarTask(HarConfig(**settings))
    task.data = replace(task.data, data_dir=data_dir, download=download, seed=seed)
    return task


def batch_of(task: HarTask, dataset: Any, indices: range | list[int]) -> Any:
    if hasattr(dataset, "sample"):
        return task.collate([dataset.sample(index, np.random.default_rng((42, 0, index))) for index in indices])
    return dataset.__getitems__(list(indices))


# Where the windows come from


def test_the_default_is_the_data_in_the_package() -> None:
    datasets = find_task("har")().datasets()
    assert [len(part) for part in (datasets.train, datasets.val, datasets.test)] == [2669, 1006, 1002]


def test_the_folder_decides_the_source(tmp_path: Path) -> None:
    uci, tensors = make_uci(tmp_path / "a"), make_tensors(tmp_path / "b")
    assert make(uci).source == "uci"
    assert make(uci.parent).datasets().train[0][0].shape == (9, 128)
    assert make(str(tensors)).source == "pt"
    assert make(tensors).datasets().train[0][0].shape == (3, 16)


@pytest.mark.parametrize(
    ("settings", "data_dir", "error", "message"),
    [
        ({}, "missing", DataError, "folder .*missing"),
        ({}, ".", DataError, "holds no data that this task knows"),
        ({"source": "uci"}, ".", DataError, "UCI-HAR"),
        ({"source": "uci"}, None, ConfigError, "--data-dir"),
        ({"source": "pt"}, ".", DataError, r"train\.pt .*missing"),
        ({"source": "watch"}, ".", ConfigError, "data.data_dir"),
        ({"source": "synthetic"}, ".", ConfigError, "data.data_dir"),
        ({**SMALL, "val_subjects": (1,)}, None, ConfigError, "task.val_subjects"),
        ({**SMALL, "test_subjects": (1,)}, None, ConfigError, "task.test_subjects"),
        ({"val_subjects": (9,)}, None, ConfigError, "subject 9 "),
        ({**SMALL, "synthetic_shape": (2, 32), "rotate_deg": 5}, None, ConfigError, "xyz"),
        ({**SMALL, "mode": "first", "gain": 0.1}, None, ConfigError, "task.mode=first"),
    ],
)
def test_settings_that_do_not_fit_are_one_clear_error(
    settings: dict[str, Any],
    data_dir: str | None,
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        make(data_dir, **settings).datasets()
    assert caught.value.fix  # type: ignore[attr-defined]


def test_only_uci_har_can_be_downloaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        make(tmp_path, download=True, source="watch").prepare()
    with pytest.raises(ConfigError):
        make(download=True).prepare()
    make().prepare()


def test_data_that_is_there_is_not_downloaded(tmp_path: Path) -> None:
    task = make(make_uci(tmp_path), download=True)
    task.prepare()
    assert task.source == "uci"


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"fix: .*\btask\.dropout\?"):
        make_task(HarTask, {"drop_out": 0.1})
    for bad in ({"hidden": (0,)}, {"dropout": 1.0}, {"synthetic_shape": (0, 4)}, {"label_smoothing": float("nan")}):
        with pytest.raises(ValidationError):
            HarConfig(**bad)


def test_its_defaults_make_a_valid_run() -> None:
    config = resolve(HarTask.defaults)
    assert config.training.max_grad_norm == 1.0
    assert HarTask.monitor == ("val_accuracy", "max")


# How windows become samples


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tensors(tmp_path_factory.mktemp("pt"))


def test_training_windows_have_mean_0_and_deviation_1_in_each_channel_and_others_use_their_scale(
    tensors: Path,
) -> None:
    task = make(tensors)
    datasets = task.datasets()
    train = datasets.train.tensors[0]
    torch.testing.assert_close(train.mean(dim=(0, 2)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.std(dim=(0, 2), correction=0), torch.ones(3))
    mean, std = task.standardiser.mean[:, None], task.standardiser.std[:, None]
    np.testing.assert_allclose(datasets.val.tensors[0].numpy() * std + mean, task.windows.val.samples, atol=1e-5)


def test_a_constant_channel_becomes_zero() -> None:
    samples = np.ones((4, 2, 8), dtype=np.float32)
    samples[:, 1] = np.arange(8)
    windows = Windows(samples, np.zeros(4, dtype=np.int64))
    result = Standardiser.fit(windows).apply(samples)
    assert (result[:, 0] == 0).all() and np.isfinite(result).all()


def test_the_modes_turn_channels_into_samples(tensors: Path) -> None:
    joint = make(tensors).datasets().train.tensors[0]
    average = make(tensors, mode="average").datasets().train
    first = make(tensors, mode="first").datasets().train
    flatten = make(tensors, mode="flatten").datasets().train
    torch.testing.assert_close(average.tensors[0], joint.mean(1, keepdim=True))
    assert torch.equal(first.tensors[0], joint[:, :1])
    assert len(flatten) == 3 * len(joint)
    sample, label, window = flatten[3 * 7 + 2]
    assert torch.equal(sample, joint[7, 2:]) and label == 7 % 4 and window == 7


# Augmentation


def test_augmentation_is_a_function_of_seed_epoch_and_sample() -> None:
    train = make().datasets().train
    one, again, other_epoch, other_seed = (
        train.sample(5, np.random.default_rng((seed, epoch, 5)))[0] for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other_epoch) and not torch.equal(one, other_seed)


def test_a_rotation_keeps_the_length_of_every_arrow() -> None:
    task = make(rotate_deg=40, gain=0)
    turned, label = task.datasets().train.sample(11, np.random.default_rng((1, 0, 11)))
    mean, std = task.standardiser.mean[:, None], task.standardiser.std[:, None]
    arrows = (turned.numpy() * std + mean).reshape(2, 3, 100)
    original = task.windows.train.samples[11].reshape(2, 3, 100)
    np.testing.assert_allclose(np.linalg.norm(arrows, axis=1), np.linalg.norm(original, axis=1), rtol=1e-4)
    assert not np.allclose(arrows, original, atol=0.05)
    assert label == task.windows.train.labels[11]


def test_without_augmentation_whole_batches_are_gathered() -> None:
    assert hasattr(make(rotate_deg=0, gain=0).datasets().train, "__getitems__")
    assert hasattr(make().datasets().val, "__getitems__")


def test_the_other_modes_are_not_augmented_unless_asked() -> None:
    assert hasattr(make(mode="average").datasets().train, "__getitems__")


# Synthetic data


def test_synthetic_data_is_the_same_for_a_seed_and_differs_between_splits() -> None:
    task = make(**SMALL)
    one, again = task.datasets().train, make(**SMALL).datasets().train
    other = make(seed=7, **SMALL).datasets().train
    assert torch.equal(one.tensors[0], again.tensors[0])
    assert not torch.equal(one.tensors[0], other.tensors[0])
    assert not torch.equal(one.tensors[0][:6], task.datasets().val.tensors[0])


# Models, loss and scores


@pytest.mark.parametrize("model", ["cnn", "mlp"])
@pytest.mark.parametrize("mode", ["joint", "flatten", "average", "first"])
def test_every_model_takes_every_mode(model: str, mode: str) -> None:
    task = make(**SMALL, model=model, mode=mode)
    batch = batch_of(task, task.datasets().train, range(6))
    net = task.model()
    loss = task.loss(net, batch)
    loss.total.backward()
    assert loss.count == 6 and torch.isfinite(loss.total)
    rows = task.evaluate(net, batch)
    assert all(len(row) == 6 for row in rows)
    metrics = task.metrics()
    metrics.update(*rows)
    values = metrics.compute()
    assert {"accuracy", "f1", "confusion"} <= set(values)
    assert values["confusion"].shape == (6, 6)
    assert ("channel_accuracy" in values) == (mode == "flatten")


def test_the_settings_of_a_model_reach_it() -> None:
    assert make(model="mlp", hidden=(5, 4), **SMALL).model().layers[1].out_features == 5
    assert make(hidden=(8,), dropout=0.25, **SMALL).model().head[0].p == 0.25
    assert make(model="vit_plots", hidden=(16,), **SMALL).model()[1].embed.out_channels == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": (8,) * 6}, "halve"),
        ({"model": "vit_plots", "hidden": (8, 8)}, "width"),
        ({"model": "vit_plots", "hidden": (9,)}, "4 heads"),
    ],
)
def test_a_model_that_does_not_fit_is_a_clear_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.model=") as caught:
        make(**SMALL, **settings).model()
    assert message in caught.value.why


def test_the_loss_is_a_sum_with_label_smoothing() -> None:
    task = make(**SMALL, label_smoothing=0.2)
    batch = batch_of(task, task.datasets().val, range(5))
    net = task.model().eval()
    loss = task.loss(net, batch)
    expected = F.cross_entropy(net(batch[0]), batch[1], label_smoothing=0.2)
    torch.testing.assert_close(loss.total / loss.count, expected)
    total, rows = task.validate(net, batch)
    assert torch.equal(total.total, loss.total)
    assert all(torch.equal(a, b) for a, b in zip(rows, task.evaluate(net, batch), strict=True))


def test_the_loss_is_in_full_precision_under_autocast() -> None:
    task = make(**SMALL)
    batch = batch_of(task, task.datasets().val, range(5))
    with torch.autocast("cpu", torch.bfloat16):
        assert task.loss(task.model(), batch).total.dtype == torch.float32


def test_flatten_scores_windows_and_channels_over_any_chunks() -> None:
    task = make(**SMALL, mode="flatten")
    datasets, net = task.datasets(), task.model().eval()
    samples = task.standardiser.apply(task.windows.val.samples)
    labels = torch.from_numpy(task.windows.val.labels)
    with torch.no_grad():
        logits = net(torch.from_numpy(samples).reshape(-1, 1, 32))
    by_channel = (logits.argmax(1) == labels.repeat_interleave(3)).float().mean()
    by_window = (logits.softmax(1).reshape(-1, 3, 6).mean(1).argmax(1) == labels).float().mean()
    metrics = task.metrics()
    with torch.inference_mode():
        for start in range(0, len(datasets.val), 4):
            chunk = range(start, min(start + 4, len(datasets.val)))
            metrics.update(*task.evaluate(net, batch_of(task, datasets.val, chunk)))
    values = metrics.compute()
    torch.testing.assert_close(values["accuracy"], by_window)
    torch.testing.assert_close(values["channel_accuracy"], by_channel)
    assert values["confusion"].sum() == len(labels)


def test_a_small_cnn_learns_the_synthetic_classes() -> None:
    torch.manual_seed(0)
    task = make(source="synthetic", synthetic_samples=256, synthetic_shape=(3, 32), hidden=(16, 16))
    datasets, net = task.datasets(), task.model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(40):
        loss = task.loss(net, batch_of(task, datasets.train, [(32 * step + k) % 256 for k in range(32)]))
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    metrics = task.metrics()
    metrics.update(*task.evaluate(net.eval(), batch_of(task, datasets.val, range(len(datasets.val)))))
    assert metrics.compute()["accuracy"] > 0.9


# State


def test_the_model_can_be_built_first_and_without_memory() -> None:
    task = make()
    with torch.device("meta"):
        assert all(p.is_meta for p in task.model().parameters())
    assert task.datasets().val[0][0].device.type == "cpu"


def test_a_checkpoint_keeps_what_users_of_the_weights_need() -> None:
    task = make()
    buffer = io.BytesIO()
    torch.save(task.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert state["class_names"] == ["PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW"]
    other = make(test_subjects=(1, 2))
    other.load_state_dict(state)
    np.testing.assert_array_equal(other.standardiser.mean, task.standardiser.mean)
    np.testing.assert_array_equal(other.standardiser.std, task.standardiser.std)
    assert make(test_subjects=(1, 2)).standardiser.mean.tolist() != task.standardiser.mean.tolist()
