"""One of several nodes: what is asked for, what must agree, what a node says when it is alone."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import RunConfig
from lockstep.config.load import parse_set
from lockstep.errors import ConfigError
from lockstep.launch.engines.spec import Job, NodeRange
from lockstep.launch.engines.torchrun import Rendezvous
from lockstep.launch.meeting.membership import compared_settings
from lockstep.rundir.folder import RunDir
from tests.conftest import RunCli
from tests.e2e.test_train import TOY, finish, start, wait_for_step


def meeting(rdzv: str | None) -> Rendezvous:
    options = {"rdzv": rdzv, "join_timeout_s": 1.0}
    return Rendezvous.of(Job(command=(), run_folder=Path("run"), nodes=NodeRange(2, 2), options=options))


def node_range(nodes: str | int) -> NodeRange:
    return NodeRange.parse(RunConfig.model_validate({"launch": {"nodes": nodes}}).launch.nodes)


@pytest.mark.parametrize(
    ("rdzv", "host", "port"),
    [
        ("node1", "node1", 29400),
        ("node1:5000", "node1", 5000),
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("[fd00::1]:5000", "fd00::1", 5000),
        ("fd00::1", "fd00::1", 29400),
    ],
)
def test_where_nodes_meet(rdzv: str, host: str, port: int) -> None:
    rendezvous = meeting(rdzv)
    assert (rendezvous.host, rendezvous.port) == (host, port)


@pytest.mark.parametrize("rdzv", [None, "node1:", "node1:x", ":80", "node1:0", "node1:70000", ""])
def test_no_place_to_meet(rdzv: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        meeting(rdzv)
    assert "HOST:PORT" in caught.value.fix


@given(st.integers(1, 99), st.integers(1, 99))
def test_any_range_of_nodes(least: int, most: int) -> None:
    text = f"{least}:{most}"
    if least > most:
        with pytest.raises(ConfigError):
            node_range(text)
    else:
        nodes = node_range(text)
        assert nodes == (least, most)
        assert nodes.is_elastic == (least < most)


@pytest.mark.parametrize("pair", ["launch.nodes=2", "launch.nodes='2'", "launch.nodes=2:2"])
def test_a_number_of_nodes_may_be_bare(pair: str) -> None:
    assert node_range(parse_set(pair)["launch"]["nodes"]) == (2, 2)


def test_what_may_differ_between_nodes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.py").write_text("class Mine: ...\n")

    def config(name: str, **more: object) -> RunConfig:
        own = {"save_dir": name, "hardware": {"selected_devices": "cpu" if name == "one" else "cpu,cpu"}}
        return RunConfig.model_validate({"task": {"name": f"{tmp_path / name}/task.py:Mine"}, **own, **more})

    assert compared_settings(config("one")) == compared_settings(config("two"))
    assert compared_settings(config("one")) != compared_settings(config("two", optimizer={"lr": 0.5}))
    (tmp_path / "two" / "task.py").write_text("class Mine: other = 1\n")
    one, two = compared_settings(config("one")), compared_settings(config("two"))
    assert [key for key in one if one[key] != two[key]] == ["task.name"]


ALONE = ("train", TOY, "--devices", "cpu", "--nodes", "2", "--set", "launch.join_timeout_s=1")


@pytest.mark.parametrize(
    ("rdzv", "code", "says"),
    [
        ("no-such-host.invalid", 2, "no-such-host.invalid"),
        pytest.param("localhost:TAKEN", 1, " localhost:", marks=pytest.mark.drill),
        pytest.param("localhost:FREE", 1, "2 nodes", marks=pytest.mark.drill),
    ],
)
def test_nobody_comes(run_cli: RunCli, tmp_path: Path, rdzv: str, code: int, says: str) -> None:
    with socket.socket() as taken, socket.socket() as free:
        for probe in (taken, free):
            probe.bind(("0.0.0.0", 0))
        taken.listen()
        ports = {"TAKEN": str(taken.getsockname()[1]), "FREE": str(free.getsockname()[1])}
        free.close()
        for name, port in ports.items():
            rdzv = rdzv.replace(name, port)
        result = run_cli(*ALONE, "--rdzv", rdzv)
    assert result.code == code, result.err
    assert says in result.err
    assert "fix:" in result.err
    assert "Traceback" not in result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stop", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.drill)]
)
def test_who_waits_for_the_others_can_be_stopped(tmp_path: Path, stop: signal.Signals, code: int) -> None:
    with socket.socket() as free:
        free.bind(("0.0.0.0", 0))
        port = free.getsockname()[1]
    process = start("train", TOY, "--devices", "cpu", "--nodes", "2", "--rdzv", f"localhost:{port}", cwd=tmp_path)
    try:
        assert process.stdout is not None
        assert "meeting 2 nodes" in process.stdout.readline()
        # Its launcher serves the store where the nodes meet.
        while not listens(port):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(stop)
        assert finish(process, code) == ""
    finally:
        process.kill()
        process.communicate()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_on_several_nodes_is_shown_and_stopped_from_another_terminal(tmp_path: Path, run_cli: RunCli) -> None:
    with socket.socket() as free:
        free.bind(("0.0.0.0", 0))
        meeting = ("--nodes", "2", "--rdzv", f"localhost:{free.getsockname()[1]}")
    long = ("--devices", "cpu", "--save-dir", "run", "--epochs", "1000", "--set", "task.pause_s=0.25")
    nodes = [start("train", TOY, *long, *meeting, cwd=tmp_path) for _ in range(2)]
    try:
        wait_for_step(tmp_path / "run", 2, nodes[0])
        shown = json.loads(run_cli("show", "run", "--json").out)
        assert (shown["status"], shown["job"]) == ("running", None)
        assert [Path(log).name for log in shown["logs"]] == ["rank-0.log", "rank-1.log", "run.log"]
        stopped = run_cli("stop", "run")
        assert (stopped.code, stopped.out) == (0, f"{shown['id']}: stopped\n")
        for node in nodes:
            finish(node, 143)
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert RunDir.open(tmp_path / "run").read().status == "stopped"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


@pytest.mark.parametrize("engine", ["torchrun", "ray"])
def test_an_engine_that_prints_nothing_refuses_print(engine: str, run_cli: RunCli, tmp_path: Path) -> None:
    result = run_cli(*ALONE, "--rdzv", "localhost", "--on", engine, "--print")
    assert (result.code, result.err.count("error:")) == (2, 1)
    assert not list(tmp_path.iterdir())
