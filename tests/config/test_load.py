"""From files, ``--set`` pairs and flags to one configuration, and back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from lockstep import TaskConfig
from lockstep.cli.main import main
from lockstep.config import RunConfig, dump, load, resolve
from lockstep.config.load import (
    REMOVED,
    SHORT_NAMES,
    all_keys,
    explain,
    from_keywords,
    merge,
    nested,
    parse_set,
    parse_yaml,
    read_file,
    to_yaml,
)
from lockstep.errors import ConfigError


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


# files


def test_defaults_go_under_the_file_that_names_them(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "training: {epochs: 5, batch_size: 8}\noptimizer: {lr: 0.1}\n")
    write(tmp_path, "more.yaml", "training: {batch_size: 16}\n")
    file = write(tmp_path, "run.yaml", "defaults: [base, more.yaml]\noptimizer: {lr: 0.2}\n")
    assert read_file(file) == {"training": {"epochs": 5, "batch_size": 16}, "optimizer": {"lr": 0.2}}


def test_defaults_are_relative_to_their_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "common/deep/leaf.yaml", "training: {epochs: 3}\n")
    write(tmp_path, "common/base.yaml", "defaults: [deep/leaf]\n")
    write(tmp_path, "runs/run.yaml", "defaults: [../common/base]\n")
    monkeypatch.chdir(tmp_path)
    assert read_file(Path("runs/run.yaml")) == {"training": {"epochs": 3}}


def test_a_file_that_is_named_twice_without_a_cycle_is_fine(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "training: {epochs: 3}\n")
    write(tmp_path, "one.yaml", "defaults: [base]\n")
    file = write(tmp_path, "run.yaml", "defaults: [one, base]\n")
    assert read_file(file) == {"training": {"epochs": 3}}


def test_a_cycle_is_an_error_that_shows_it(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "defaults: [b]\n")
    file = write(tmp_path, "b.yaml", "defaults: [a]\n")
    with pytest.raises(ConfigError, match=r"b\.yaml → a\.yaml → b\.yaml"):
        read_file(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training: [", "YAML"),
        ("- a\n- b\n", "settings"),
        ("hello", "settings"),
        ("3: {a: 1}\n", "settings"),
        ("defaults: base\n", "list"),
        ("defaults: [1]\n", "list"),
        ("defaults: [nowhere]\n", "nowhere"),
        ("x: !!python/object/apply:os.system ['true']\n", "YAML"),
        ("d: 2024-99-99\n", "YAML"),
        ("a: " + "[" * 3000, "YAML"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(write(tmp_path, "bad.yaml", text))
    assert words in caught.value.what
    assert caught.value.fix


def test_a_missing_a_binary_a_large_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "large.yaml").write_text("#" * (1 << 20) + "\n")
    for name in ("missing.yaml", "binary.yaml", "large.yaml", "."):
        with pytest.raises(ConfigError) as caught:
            read_file(tmp_path / name)
        assert caught.value.fix


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    assert read_file(write(tmp_path, "empty.yaml", "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training:\n  epochs: 5\n  seed: 1\n  epochs: 3\n", ["'epochs'", "line 2", "line 4"]),
        ("training: {seed: 1}\noptimizer: {lr: 0.1}\ntraining: {epochs: 3}\n", ["'training'", "line 1", "line 3"]),
        ("optimizer: {lr: 0.1, lr: 0.2}\n", ["'lr'", "line 1"]),
        ('{"name": "a",\n "name": "b"}\n', ["'name'", "line 1", "line 2"]),
    ],
)
def test_a_key_that_is_written_twice_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(write(tmp_path, "run.yaml", text))
    assert all(word in caught.value.why for word in words), caught.value.why
    twice_but_apart = "optimizer: {lr: 0.1}\ntask: {lr: 0.2, inner: [{lr: 1}, {lr: 2}]}\n"
    assert read_file(write(tmp_path, "fine.yaml", twice_but_apart))["task"]["lr"] == 0.2


def test_numbers_in_a_file_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    text = "optimizer: {lr: 1e-5, betas: [0.9, 1e-5]}\nname: [1E3, -5., +.5e1, '1e5', 1:4]\n"
    text += "data: [010, 08, -012, 0o17, 0x1F, '010']\n"
    found = {
        "optimizer": {"lr": 1e-5, "betas": [0.9, 1e-5]},
        "name": [1e3, -5.0, 5.0, "1e5", "1:4"],
        "data": [10, 8, -12, 15, 31, "010"],
    }
    assert read_file(write(tmp_path, "run.yaml", text)) == found


def test_json_is_read_too(tmp_path: Path) -> None:
    file = write(tmp_path, "run.json", '{"hardware": {"selected_devices": ["gpu:0"], "precision": "32"}}')
    assert resolve(load([file])).hardware.selected_devices == ("gpu:0",)


# --set


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("training.epochs=3", {"training": {"epochs": 3}}),
        ("optimizer.lr=1e-3", {"optimizer": {"lr": 1e-3}}),
        ("optimizer.lr=-5E-4", {"optimizer": {"lr": -5e-4}}),
        ("training.max_grad_norm=null", {"training": {"max_grad_norm": None}}),
        ("optimizer.betas=[0.9, 0.95]", {"optimizer": {"betas": [0.9, 0.95]}}),
        ("optimizer.betas=[0.9, 1e-05]", {"optimizer": {"betas": [0.9, 1e-5]}}),
        ("training.seed=010", {"training": {"seed": 10}}),
        ("name='1e-05'", {"name": "1e-05"}),
        ("name=1e-05-small", {"name": "1e-05-small"}),
        ("task.name=my.py:Task", {"task": {"name": "my.py:Task"}}),
        ("name=a=b", {"name": "a=b"}),
        ("name=", {"name": None}),
        ("name='007'", {"name": "007"}),
        ("launch.nodes=1:4", {"launch": {"nodes": "1:4"}}),  # not 64, as in YAML 1.1
        ("name=12:30:01.5", {"name": "12:30:01.5"}),
    ],
)
def test_set_pairs(pair: str, expected: dict[str, Any]) -> None:
    assert parse_set(pair) == expected


@pytest.mark.parametrize("pair", ["", "training", "=3", "training.=3", "a..b=1", "a b=1", "training.x=[", "1.2=3"])
def test_set_pairs_that_are_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_set(pair)


@given(st.text(max_size=40))
def test_any_pair_parses_or_is_refused(pair: str) -> None:
    try:
        parsed = parse_set(pair)
    except ConfigError as error:
        assert error.fix
    else:
        assert len(parsed) == 1


# precedence and the way back


def test_later_wins_files_then_sets_then_flags(tmp_path: Path) -> None:
    first = write(tmp_path, "1.yaml", "training: {epochs: 1, batch_size: 1, accumulate: 1, seed: 1}\n")
    second = write(tmp_path, "2.yaml", "training: {batch_size: 2, accumulate: 2, seed: 2}\n")
    merged = load([first, second], ["training.accumulate=3", "training.seed=3"], {"training": {"seed": 4}})
    training = resolve(merged).training
    assert (training.epochs, training.batch_size, training.accumulate, training.seed) == (1, 2, 3, 4)


def test_loading_does_not_change_what_it_is_given() -> None:
    base = {"training": {"epochs": 1}}
    assert merge(base, {"training": {"seed": 2}}) == {"training": {"epochs": 1, "seed": 2}}
    assert base == {"training": {"epochs": 1}}


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.none() | st.text(max_size=20),
        "save_dir": st.sampled_from(["a", "b/c", "/tmp/ü"]),
        "hardware": st.fixed_dictionaries(
            {},
            optional={
                "selected_devices": st.none() | st.lists(st.sampled_from(["cpu", "gpu:0"]), max_size=3),
                "precision": st.sampled_from(["32", "16-mixed", "bf16-mixed"]),
            },
        ),
        "optimizer": st.fixed_dictionaries({}, optional={"lr": st.floats(1e-12, 1e3), "weight_decay": st.floats(0, 1)}),
        "distributed": st.fixed_dictionaries({}, optional={"sync_batchnorm": st.sampled_from(["auto", "on", "off"])}),
        "scheduler": st.fixed_dictionaries({}, optional={"milestones": st.lists(st.floats(0, 100), max_size=3)}),
        "training": st.fixed_dictionaries({}, optional={"seed": st.integers(0, 2**63 - 1)}),
        "task": st.fixed_dictionaries(
            {"name": st.just("har")}, optional={"mode": st.sampled_from(["on", "no", "1e3"])}
        ),
    },
)


@example({"name": "\x85"})
@given(CHANGES)
def test_a_dumped_configuration_loads_as_the_same(changes: dict[str, Any]) -> None:
    config = resolve(changes)
    assert resolve(parse_yaml(dump(config))) == config


def test_all_keys_can_be_set() -> None:
    keys = all_keys(RunConfig)
    assert {"name", "training.batch_size", "hardware.selected_devices", "task.name"} <= set(keys)
    assert len(set(keys)) == len(keys)
    values = RunConfig().model_dump(mode="json")
    values["task"]["unrecorded"] = []  # written only where there are some
    for key in keys:
        value = values
        for part in key.split("."):
            value = value[part]
        assert resolve(
            parse_set(f"{key}={yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10))}")
        )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("training: {epochs: " + "9" * 5000 + "}\n", "read"),
        ("training: {compile: !!bool maybe}\n", "read"),
        ("a: !!python/object/apply:os.system ['true']\n", "constructor"),
    ],
)  # fmt: skip
def test_what_yaml_cannot_read_is_one_error(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(tmp_path / "c.yaml")
    assert why in caught.value.why


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("optimizer: &o {lr: 0.1}\nscheduler: {<<: *o, gamma: 0.5}\n")
    assert read_file(tmp_path / "c.yaml") == {"optimizer": {"lr": 0.1}, "scheduler": {"lr": 0.1, "gamma": 0.5}}


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_is_refused_with_its_replacement(key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)) as caught:
        resolve(load(sets=[f"{key}=off"]))
    assert caught.value.fix == REMOVED[key]
    assert key not in all_keys(RunConfig)


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
        ("epoch", " epochs?"),
        ("max_epochs", " epochs?"),
        ("learning_rate", " lr?"),
        ("accumulate", " grad_accum_steps?"),
        ("momentum", '"optimizer.momentum"'),
        ("quux", "docs/configuration.md"),
    ],
)
def test_an_unknown_keyword_is_one_error_with_a_suggestion(name: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'") as caught:
        from_keywords({name: 1})
    assert fix in caught.value.fix


@pytest.mark.parametrize("text", ["010", "08", "0o17", "0x1f", "1e5", "0b1", "on", "null"])
def test_texts_that_look_like_numbers_stay_texts(text: str) -> None:
    assert parse_yaml(to_yaml({"task": {"code": text}})) == {"task": {"code": text}}


def test_paths_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class WithPath(TaskConfig):
        corpus: Path

    monkeypatch.setenv("HOME", str(tmp_path))
    config = resolve({"save_dir": "~/run", "data": {"data_dir": "~"}})
    assert (config.save_dir, config.data.data_dir) == (tmp_path / "run", tmp_path)
    assert WithPath(corpus=Path("~/texts")).corpus == tmp_path / "texts"
    with pytest.raises(ConfigError, match="save_dir"):
        resolve({"save_dir": "~no-such-user/run"})


def test_a_flag_with_a_path_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["runs", "--runs-dir=~/none"]) == 0
    shown = capsys.readouterr()
    assert f"{tmp_path}/none" in shown.out + shown.err


def test_a_text_that_looks_like_a_number_needs_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    class Coded(BaseModel):
        code: str

    with pytest.raises(ValidationError) as caught:
        Coded.model_validate(parse_set("task.code=007")["task"])
    assert """--set task.code='"…"'""" in explain(caught.value, Coded, prefix="task.").fix
    assert parse_set("""task.code="007\"""") == {"task": {"code": "007"}}


def test_absurd_numbers_of_loader_workers_are_refused() -> None:
    assert resolve({"data": {"num_workers": 8}}).data.num_workers == 8
    with pytest.raises(ConfigError, match=r"data\.num_workers"):
        resolve({"data": {"num_workers": 10**6}})
