"""Strategies of other packages: one file is enough for flags, plan, training, memory and page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep import strategies
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import ConfigError
from lockstep.rundir.folder import RunDir
from lockstep.strategies import MODULES, StrategySpec, auto_strategy, find_strategy, register_strategy
from tests.gloo import ROOT
from tests.studio.serving import studio
from tests.toys import Toy

TOY = f"{ROOT / 'tests' / 'toys.py'}:Toy"
FILE = ROOT / "tests" / "one_by_one.py"


def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "_KNOWN", dict(strategies._KNOWN))
    monkeypatch.setenv(MODULES, "")


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file is imported, as by a user's script."""
    own_table(monkeypatch)
    (tmp_path / FILE.name).write_bytes(FILE.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    import_module(FILE.stem)
    yield
    del sys.modules[FILE.stem]


def weights(run: Path) -> dict[str, torch.Tensor]:
    store = CheckpointStore(RunDir(run).checkpoints)
    return dict(store.load(store.step_of("last") or 0).model)


@pytest.mark.usefixtures("registered")
@pytest.mark.slow
def test_a_script_that_registers_a_strategy_trains_by_it(tmp_path: Path) -> None:
    """Its ranks import the file themselves. The weights are those of ddp."""
    config: dict[str, Any] = {
        "hardware": {"selected_devices": ["cpu", "cpu"]},
        "training": {"epochs": 1},
        "telemetry": {"tensorboard": "off", "progress": "off"},
    }
    for name in ("one-by-one", "ddp"):
        hardware = {**config["hardware"], "strategy": name}
        result = lockstep.train(Toy, {**config, "hardware": hardware, "save_dir": str(tmp_path / name)})
        assert result.status == "completed"
        assert RunDir(tmp_path / name).plan()["placement"]["strategy"] == name
        logs = (log.read_text(encoding="utf-8") for log in (tmp_path / name / "logs").iterdir())
        assert any("one by one" in log for log in logs) is (name == "one-by-one")
    torch.testing.assert_close(weights(tmp_path / "one-by-one"), weights(tmp_path / "ddp"))


@pytest.mark.usefixtures("registered")
def test_the_page_offers_a_registered_strategy(tmp_path: Path) -> None:
    with studio(tmp_path) as address:
        hardware = address.get("/api/schema")["schema"]["$defs"]["HardwareConfig"]["properties"]
        assert hardware["strategy"]["enum"] == ["auto", "single", "dp", "ddp", "fsdp", "pipeline", "one-by-one"]
        assert "summed one parameter after the other" in hardware["strategy"]["description"]


@pytest.mark.slow
def test_commands_know_a_strategy_that_the_environment_names(tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / FILE.name).write_bytes(FILE.read_bytes())
    env = {MODULES: FILE.stem}
    assert "one-by-one" in run_cli("train", "--help", env=env).out
    flags = (TOY, "--devices", "cpu,cpu", "--strategy", "one-by-one", "--json")
    planned = run_cli("plan", *flags, env=env)
    assert planned.code == 0, planned.err
    assert json.loads(planned.out)["placement"]["strategy"] == "one-by-one"
    assert "one parameter after the other" in planned.out
    counted = run_cli("memory", *flags, env=env)
    assert counted.code == 0, counted.err
    assert json.loads(counted.out)["strategies"]["one-by-one"]["mailbox"] == 2e9


def test_commands_know_the_strategy_of_an_installed_package(tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / FILE.name).write_bytes(FILE.read_bytes())
    package = tmp_path / "one_by_one-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: one-by-one\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[lockstep.strategies]\none-by-one = one_by_one:SPEC\n")
    unknown = run_cli("plan", TOY, "--set", "hardware.strategy=two-by-two")
    assert unknown.code == 2
    assert "'one-by-one'" in unknown.err


def test_names_and_scripts_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    own_table(monkeypatch)
    for name, module in (("ddp", "other"), ("auto", "other"), ("own", "__main__")):
        with pytest.raises(ConfigError):
            register_strategy(StrategySpec(name=name, summary="", module=module))
    with pytest.raises(ConfigError, match="'own'"):
        find_strategy("own")


def test_auto_follows_the_number_of_ranks_and_their_memory() -> None:
    assert [auto_strategy(1), auto_strategy(2), auto_strategy(2, fits=False)] == ["single", "ddp", "fsdp"]
    assert auto_strategy(1, fits=False) == "single"
