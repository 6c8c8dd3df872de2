"""Flags to settings: one table, overriding only when given, contradictions refused."""

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from cyclopts import Parameter
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.settings import NO_SETTINGS, Settings, all_flags, flag_table, to_mapping
from lockstep.config import RunConfig, resolve
from lockstep.config.load import all_keys
from lockstep.config.named import code_in, named
from lockstep.errors import ConfigError, LockstepError, RunFolderError, TaskError, UsageError
from lockstep.rundir.folder import RunDir
from lockstep.tasks import DEFAULTS


def mapping_of(*, task: str | None = "har", **flags: Any) -> dict[str, Any]:
    return to_mapping(Settings(**flags), task)[1]


def value_at(mapping: Any, key: str) -> Any:
    for part in key.split("."):
        mapping = mapping[part] if isinstance(mapping, dict) else getattr(mapping, part)
    return mapping


def leaves(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in mapping.items():
        result |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return result


VALUES: dict[str, Any] = {
    "devices": "cpu,cpu", "strategy": "ddp", "precision": "bf16-mixed", "reproducibility": "exact",
    "epochs": 3, "max_steps": 7, "batch_size": 16, "grad_accum_steps": 2, "lr": 0.5, "lr_scaling": "linear",
    "warmup_epochs": 0.5, "weight_decay": 0.0, "max_grad_norm": 2.0, "early_stopping_patience": 0, "seed": 1,
    "fast_dev_run": True, "data_dir": Path("data"), "download": False, "num_workers": 0, "save_dir": Path("run"),
    "runs_dir": Path("all"), "log_interval": 1, "mode": "first", "skip_bad": True,
}  # fmt: skip


def test_every_flag_stands_for_a_key_that_there_is() -> None:
    assert set(flag_table().values()) - {"task.mode", "task.skip_bad"} <= set(all_keys(RunConfig))
    design = {
        "--config", "--devices", "--strategy", "--precision", "--epochs", "--max-steps", "--batch-size",
        "--global-batch-size", "--grad-accum-steps", "--lr", "--lr-scaling", "--warmup-epochs", "--weight-decay",
        "--max-grad-norm", "--early-stopping-patience", "--num-workers", "--log-interval", "--seed",
        "--reproducibility", "--save-dir", "--data-dir", "--download", "--init-from", "--fast-dev-run", "--set",
        "--multi-gpu", "--gpu-ids", "--mode", "--no-amp",
    }  # fmt: skip
    assert design <= set(all_flags())


def test_the_defaults_that_the_help_states_are_those_of_the_settings() -> None:
    hints = get_type_hints(Settings, include_extras=True)
    keys = flag_table()
    checked = 0
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        help_text = next(mark.help for mark in hints[field.name].__metadata__ if isinstance(mark, Parameter))
        if flag not in keys or keys[flag].startswith("task."):
            continue
        stated = re.search(r"Default: (.+?)(?: \((.+)\))?\.$", help_text)
        assert stated, f"{flag} does not say its default"
        section, _, key = keys[flag].rpartition(".")
        for of_task in (stated[2] or "").split(", ") if stated[2] and stated[2].split()[0] in DEFAULTS else ():
            task, value = of_task.split()
            assert float(value) == DEFAULTS[task][section][key], f"{flag}: {task}"
        default = value_at(RunConfig(), keys[flag])
        if default is None:
            assert not re.fullmatch(r"[\d.]+", stated[1]), flag
        elif isinstance(default, bool):
            assert stated[1] == ("on" if default else "off"), flag
        elif isinstance(default, int | float):
            assert float(stated[1]) == default, flag
        else:
            text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            assert stated[1] == text, flag
        checked += 1
    assert checked > 20


def test_flags_that_are_not_given_override_nothing() -> None:
    assert to_mapping(NO_SETTINGS, "har") == ("har", {"task": {"name": "har"}})


@given(st.sets(st.sampled_from(sorted(VALUES))))
def test_exactly_the_given_flags_override(names: set[str]) -> None:
    mapping = mapping_of(**{name: VALUES[name] for name in names})
    keys = {flag_table()["--" + name.replace("_", "-")]: VALUES[name] for name in names}
    expected = {key: str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    assert leaves(mapping) == {"task.name": "har", **expected}


def test_later_places_win(tmp_path: Path) -> None:
    base, over = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text("training: {epochs: 1, seed: 1, batch_size: 1}\noptimizer: {lr: 0.1}\n")
    over.write_text("training: {epochs: 2, seed: 2}\n")
    mapping = mapping_of(config=[base, over], set=["training.epochs=3", "optimizer.name=sgd"], lr=0.4)
    assert mapping["training"] == {"epochs": 3, "seed": 2, "batch_size": 1}
    assert mapping["optimizer"] == {"lr": 0.4, "name": "sgd"}


def test_the_task_comes_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("task: {name: other.py:Task, width: 3}\n")
    with pytest.raises(TaskError, match=r"task\.name other\.py:Task"):
        to_mapping(Settings(config=[file]), None)
    named.add(code_in({"task": {"name": "other.py:Task"}}))
    assert to_mapping(Settings(config=[file]), None)[0] == "other.py:Task"
    name, mapping = to_mapping(Settings(config=[file]), "mine.py:Task")
    assert (name, mapping["task"]) == ("mine.py:Task", {"name": "mine.py:Task", "width": 3})
    with pytest.raises(UsageError, match=r"\btask\.name\b"):
        to_mapping(NO_SETTINGS, None)


def test_the_configuration_of_a_run_can_be_given_again(tmp_path: Path) -> None:
    config = resolve({"task": {"name": "har"}, "hardware": {"selected_devices": ["cpu", "cpu"]}, "runs_dir": "r"})
    run = RunDir.create(tmp_path / "run", config, run_id="run-00000000", command=[])
    name, mapping = to_mapping(Settings(config=[run.config_file]), None)
    assert name == "har"
    assert resolve(mapping) == config


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ({"gpu_ids": "0,1,3"}, {"selected_devices": ["gpu:0", "gpu:1", "gpu:3"]}),
        ({"gpu_ids": " 2 "}, {"selected_devices": ["gpu:2"]}),
        ({"multi_gpu": "ddp"}, {"strategy": "ddp", "selected_devices": "all"}),
        ({"multi_gpu": "dp", "gpu_ids": "0,1"}, {"strategy": "dp", "selected_devices": ["gpu:0", "gpu:1"]}),
        ({"multi_gpu": "ddp", "devices": "cpu,cpu"}, {"strategy": "ddp", "selected_devices": "cpu,cpu"}),
        ({"multi_gpu": "ddp", "strategy": "ddp", "devices": "all"}, {"strategy": "ddp", "selected_devices": "all"}),
        ({"no_amp": True}, {"precision": "32"}),
        ({"no_amp": True, "precision": "32"}, {"precision": "32"}),
    ],
)
def test_other_spellings_of_flags(flags: dict[str, Any], settings: dict[str, Any]) -> None:
    assert mapping_of(**flags)["hardware"] == settings


def test_under_torchrun_its_processes_are_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert to_mapping(Settings(multi_gpu="ddp"), "har")[1]["hardware"] == {"strategy": "ddp"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"gpu_ids": "0", "devices": "gpu:0"}, ["--gpu-ids", "--devices"]),
        ({"multi_gpu": "ddp", "strategy": "dp"}, ["--multi-gpu ddp", "--strategy dp"]),
        ({"no_amp": True, "precision": "16-mixed"}, ["--no-amp", "--precision 16-mixed"]),
        ({"gpu_ids": "0,,1"}, ["--gpu-ids", "0,,1"]),
        ({"gpu_ids": "²"}, ["--gpu-ids"]),
        ({"set": ["training.epoch=1"]}, ["training.epoch", "did you mean training.epochs?"]),
        ({"set": ["epochs"]}, ["--set", "section.key=value"]),
        ({"set": ["task=har"]}, ["task"]),
        ({"lr": float("nan")}, ["optimizer.lr", "finite"]),
        ({"batch_size": 0}, ["training.batch_size", "0"]),
        ({"global_batch_size": 64, "grad_accum_steps": 2}, ["global_batch_size", "accumulate"]),
        ({"config": [Path("nowhere.yaml")]}, ["nowhere.yaml"]),
    ],
)
def test_what_cannot_be_is_refused_before_torch_is_loaded(flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        mapping_of(**flags)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    assert [word for word in words if word not in str(caught.value)] == []


def test_weights_come_from_a_folder_or_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir.create(tmp_path / "runs" / "run-0123abcd", RunConfig(), run_id="run-0123abcd", command=[])
    assert mapping_of(init_from="run-0123")["init_from"] == str(run.path)
    assert mapping_of(init_from="last")["init_from"] == str(run.path)
    (tmp_path / "weights").mkdir()
    assert mapping_of(init_from="weights")["init_from"] == "weights"
    with pytest.raises(RunFolderError, match="'nope'"):
        mapping_of(init_from="nope")


@given(st.lists(st.text(max_size=20), max_size=3), st.text(max_size=20))
def test_any_text_is_settings_or_one_clear_error(sets: list[str], gpu_ids: str) -> None:
    try:
        mapping_of(set=sets, gpu_ids=gpu_ids)
    except (ConfigError, UsageError) as error:
        assert isinstance(error, LockstepError)
        assert error.what
