"""Settings: what is accepted, what is refused, and that they never change."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from lockstep.config import HardwareConfig, OptimizerConfig, RunConfig, SchedulerConfig, Section, resolve
from lockstep.errors import ConfigError
from lockstep.precisions import PRECISIONS


def sections(model: type[BaseModel] = RunConfig) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += sections(field.annotation)
    return found


def test_the_hardware_section_of_one_gpu_is_valid_as_it_stands() -> None:
    config = resolve({"hardware": {"selected_devices": ["gpu:0"], "precision": "32"}})
    assert config.hardware.selected_devices == ("gpu:0",)
    assert config.hardware.precision == "32"


@pytest.mark.parametrize(
    ("given", "expected"),
    [("gpu:0, gpu:1", ("gpu:0", "gpu:1")), ("cpu,cpu", ("cpu", "cpu")), (["cpu"], ("cpu",)), ("", ()), (None, None)],
)
def test_devices_as_text_or_list(given: Any, expected: Any) -> None:
    assert resolve({"hardware": {"selected_devices": given}}).hardware.selected_devices == expected


@pytest.mark.parametrize(
    ("section", "key", "given", "expected"),
    [
        ("hardware", "precision", 32, "32"),  # YAML reads 32 as a number
        ("distributed", "sync_batchnorm", True, "on"),  # and `on` as a boolean
        ("distributed", "sync_batchnorm", False, "off"),
        ("telemetry", "tensorboard", "auto", "auto"),
        ("scheduler", "name", None, "constant"),
        ("scheduler", "name", "none", "constant"),
        ("training", "max_grad_norm", None, None),
        ("data", "data_dir", "here", Path("here")),
    ],
)
def test_values_as_people_write_them(section: str, key: str, given: Any, expected: Any) -> None:
    assert getattr(getattr(resolve({section: {key: given}}), section), key) == expected


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "batch_size", 0),
        ("training", "batch_size", -1),
        ("training", "batch_size", 2.5),
        ("training", "batch_size", None),
        ("training", "accumulate", 0),
        ("training", "epochs", 0),
        ("training", "lanes", 6),
        ("training", "lanes", 0),
        ("training", "seed", -1),
        ("training", "seed", 2**63),
        ("training", "max_grad_norm", 0),
        ("training", "tail", "pad"),
        ("optimizer", "lr", float("nan")),
        ("optimizer", "lr", float("inf")),
        ("optimizer", "lr", 0),
        ("optimizer", "lr", "fast"),
        ("optimizer", "betas", [0.9, 1.0]),
        ("optimizer", "betas", [0.9]),
        ("optimizer", "name", "lyon"),
        ("hardware", "precision", "8"),
        ("hardware", "precision", True),
        ("hardware", "strategy", "horovod"),
        ("hardware", "selected_devices", [0, 1]),
        ("scheduler", "warmup_epochs", -1),
        ("checkpoint", "keep_last", 0),
    ],
)
def test_bad_values_are_refused_by_name(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({section: {key: value}})
    assert f"{section}.{key}" in caught.value.what
    assert caught.value.fix


def test_several_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"training": {"batch_size": 0, "epochs": 0}, "optimizer": {"lr": -1}})
    for key in ("training.batch_size", "training.epochs", "optimizer.lr"):
        assert key in caught.value.what


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"training": {"batchsize": 3}}, "training.batch_size"),
        ({"training": {"epoch": 3}}, "training.epochs"),
        ({"trainign": {"epochs": 3}}, "training"),
        ({"batch_size": 3}, "batch_size"),
        ({"optimizer": {"learning_rate": 1}}, "optimizer.lr"),
        ({"optimizer": {"speed_of_things": 1}}, "docs/configuration.md"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(given: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        resolve(given)
    assert hint in caught.value.fix


def test_settings_of_a_task_stay_with_the_task() -> None:
    config = resolve({"task": {"name": "har", "mode": "joint", "hidden": 3}})
    assert config.task.settings == {"mode": "joint", "hidden": 3}


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_sections_are_frozen_and_refuse_infinities(section: type[BaseModel]) -> None:
    assert issubclass(section, Section)
    assert section.model_config["frozen"] is True
    assert section.model_config["allow_inf_nan"] is False


def test_a_configuration_cannot_be_changed() -> None:
    config = RunConfig()
    with pytest.raises(ValidationError):
        config.training.epochs = 3  # type: ignore[misc]


def test_the_schema_knows_every_key() -> None:
    schema = RunConfig.model_json_schema()
    for section in sections():
        where = schema if section is RunConfig else schema["$defs"][section.__name__]
        assert set(where["properties"]) == set(section.model_fields)


def test_settings_of_one_optimizer_or_schedule_name_it_in_the_schema() -> None:
    for section, expected in ((OptimizerConfig, {"nesterov": ["sgd"]}), (SchedulerConfig, {"power": ["poly"]})):
        properties = section.model_json_schema()["properties"]
        named = {name: field["applies_to"] for name, field in properties.items() if "applies_to" in field}
        assert expected.items() <= named.items()
        assert all(set(names) <= set(properties["name"]["enum"]) for names in named.values())


def test_every_precision_can_be_chosen() -> None:
    choices = get_args(HardwareConfig.model_fields["precision"].annotation)
    assert set(choices) == {"auto", "tf32", *PRECISIONS}
