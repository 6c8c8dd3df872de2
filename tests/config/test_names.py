"""Short names of settings, and keys with dots."""

from __future__ import annotations

import pytest

from lockstep.config import RunConfig, resolve
from lockstep.config.load import all_keys
from lockstep.config.names import SHORT_NAMES, from_keywords, nested
from lockstep.errors import ConfigError


def test_every_short_name_is_a_setting() -> None:
    assert {key for key in SHORT_NAMES.values() if not key.startswith("task.")} <= set(all_keys(RunConfig))


def test_dotted_keys_are_merged_into_sections() -> None:
    settings = {"optimizer.name": "sgd", "optimizer": {"lr": 0.1}, "training.epochs": 3, "save_dir": "x"}
    assert nested(settings) == {
        "optimizer": {"name": "sgd", "lr": 0.1},
        "training": {"epochs": 3},
        "save_dir": "x",
    }


def test_keywords_are_short_names_keys_and_top_level_names() -> None:
    config = resolve(from_keywords({"lr": 0.5, "devices": "cpu,cpu", "optimizer.momentum": 0.5, "name": "mine"}))
    assert (config.optimizer.lr, config.optimizer.momentum, config.name) == (0.5, 0.5, "mine")
    assert config.hardware.selected_devices == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("epoch", "did you mean epochs?"),
        ("max_epochs", "did you mean epochs?"),
        ("learning_rate", "did you mean lr?"),
        ("accumulate", "did you mean grad_accum_steps?"),
        ("momentum", '"optimizer.momentum"'),
        ("quux", "docs/configuration.md"),
    ],
)
def test_an_unknown_keyword_is_one_error_with_a_suggestion(name: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'") as caught:
        from_keywords({name: 1})
    assert fix in caught.value.fix
