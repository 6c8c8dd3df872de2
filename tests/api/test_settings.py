"""The typed keywords are the settings."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

from pydantic import TypeAdapter

import lockstep
from lockstep.api.settings import Settings, mapping_of
from lockstep.config import RunConfig, resolve
from lockstep.config.load import SHORT_NAMES


def test_the_typed_keywords_are_the_short_names() -> None:
    of_tasks = {name for name, key in SHORT_NAMES.items() if key.startswith("task.")}
    assert set(get_type_hints(Settings)) == {*SHORT_NAMES, "name"} - of_tasks


def test_every_default_is_of_the_keywords_type() -> None:
    defaults = RunConfig().model_dump()
    for name, kind in get_type_hints(Settings).items():
        value = defaults
        for part in SHORT_NAMES.get(name, name).split("."):
            value = value[part]
        TypeAdapter(kind).validate_python(value)


def test_keywords_override_the_config_in_each_of_its_forms(tmp_path: Path) -> None:
    forms = [
        {"training": {"epochs": 9, "seed": 5}},
        {"training.epochs": 9, "training.seed": 5},
        resolve({"training": {"epochs": 9, "seed": 5}}),
    ]
    for form in forms:
        config = resolve(mapping_of(form, {"epochs": 2, "save_dir": tmp_path / "run", "max_grad_norm": None}))
        assert (config.training.epochs, config.training.seed, config.save_dir) == (2, 5, tmp_path / "run")
        assert config.training.max_grad_norm is None


def test_a_config_object_passes_on_only_what_was_set() -> None:
    given = lockstep.RunConfig(name="mine")
    assert mapping_of(given, {"lr": 0.5}) == {"name": "mine", "optimizer": {"lr": 0.5}}
