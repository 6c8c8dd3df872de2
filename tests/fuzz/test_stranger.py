"""A run folder of somebody else: whatever it names, no command and no route runs, sends or writes anything."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from lockstep.config import RunConfig, merge, resolve
from lockstep.config.load import all_keys, parse_path
from lockstep.config.named import named, script_reference
from lockstep.errors import LockstepError
from lockstep.rundir.folder import RunDir
from tests.fuzz.test_hostile import TOY, alarm, command
from tests.hardware.machines import machine
from tests.studio.serving import Address, studio


def _takes_text(setting: str) -> bool:
    with contextlib.suppress(LockstepError):
        return bool(resolve(parse_path(setting, "/x.py:Y")))
    return False


#: Every setting that takes a text, and those of a task that Lockstep itself reads.
SETTINGS = [
    *(key for key in all_keys(RunConfig) if _takes_text(key)),
    *(
        "storage.mirror",
        "task.datamodule",
        "task.cli.model.class_path",
        "task.trainer.default_root_dir",
    ),
]
#: Settings that a resume must refuse by name, whatever text they have.
REFUSED = {
    *("task.name", "task.datamodule", "task.cli.model.class_path", "task.trainer.default_root_dir", "optimizer.name"),
    *("storage.mirror", "telemetry.mlflow_uri"),
}
#: Files that a run may have and this one has not; `script.json` has tests below.
MORE_FILES = (
    *("job.json", ".claim", "remarks.jsonl", "ranks.jsonl", "evaluations.jsonl", "system-0.jsonl"),
    *(
        "logs/output.log",
        "logs/rank-0.log",
        "logs/launcher.json",
        "samples-rank0.jsonl",
        "pictures",
        "audio",
        "profile",
    ),
    "training_results.json",
)
COMMANDS: dict[str, Callable[[Path], tuple[str | Path, ...]]] = {
    "show": lambda run: ("show", run),
    "runs": lambda run: ("runs", "--runs-dir", run.parent),
    "compare": lambda run: ("compare", run, run),
    "report": lambda run: ("report", run, "--out", run.parent / "report"),
    "evaluate": lambda run: ("evaluate", run, "--checkpoint", "last"),
    "export": lambda run: ("export", run, "--no-program", "--checkpoint", "last", "--out", run.parent / "out"),
    "resume": lambda run: ("resume", run, "--devices", "cpu"),
    "train": lambda run: ("train", TOY, "--save-dir", run, "--resume"),
    "config": lambda run: ("train", "--config", run / "config.yaml", "--save-dir", run.parent / "new"),
    "stop": lambda run: ("stop", run, "--timeout", "1"),
}
#: Commands that train with the folder's configuration.
TRAINING = ("resume", "train", "config")


@dataclass
class World:
    """What a stranger's folder could reach: files of the user, code, and an address."""

    folder: Path
    port: int
    connections: list[Any]

    @property
    def outside(self) -> Path:
        return self.folder / "outside"

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    @classmethod
    def make(cls, folder: Path, port: int, connections: list[Any]) -> World:
        world = cls(folder, port, connections)
        code = f"open({str(world.canary)!r}, 'w')\n\n\nclass Evil:\n    pass\n"
        for place in (world.outside, world.outside / "checkpoints", folder / "modules"):
            place.mkdir()
        (world.outside / "evil.py").write_text(code)
        (folder / "modules" / "stranger_module.py").write_text(code)
        for name in ("precious", "checkpoints/step-00000001"):
            (world.outside / name).write_text("{}\n")
        os.mkfifo(world.outside / "pipe")
        return world

    def values(self, run: Path) -> dict[str, str]:
        """Texts of a setting, by kind."""
        return {
            "script": f"{run}/evil.py:Evil",
            "file": f"{self.outside}/evil.py",
            "module": "stranger_module:Evil",
            "url": f"http://127.0.0.1:{self.port}/x",
            "path": f"{self.outside}/evil.py:Evil",
            "folder": str(self.outside),
            "link": f"{run}/checkpoints/last",
            "pipe": f"{self.outside}/pipe",
        }

    def state(self) -> dict[str, bytes]:
        """The user's files, without what importing leaves beside code."""
        files = [file for file in self.outside.rglob("*") if "__pycache__" not in file.parts]
        return {str(file): file.read_bytes() if file.is_file() else b"" for file in files}


@pytest.fixture(scope="module")
def listener() -> Iterator[tuple[int, list[Any]]]:
    """A port on this machine, and the connections that were made to it."""
    connections: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, peer = server.accept()
                    connections.append(peer)
                    connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1], connections
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 of 14 steps."""
    run = tmp_path_factory.mktemp("trained") / "run"
    flags = ("--devices", "cpu", "--max-steps", "8", "--log-interval", "1", "--set", "telemetry.tensorboard=off")
    code, _, errors = command("train", TOY, "--save-dir", run, *flags)
    assert code == 0, errors
    change(run, parse_path("training.max_steps", 9))
    return run


def change(run: Path, settings: dict[str, Any]) -> None:
    """Change settings of a run in every file, so that no edit is seen."""
    for file in run.glob("**/config.yaml"):
        file.write_text(yaml.safe_dump(merge(yaml.safe_load(file.read_text()), settings)))


def copy(trained: Path, folder: Path) -> Path:
    run = folder / "runs" / "run"
    shutil.copytree(trained, run, symlinks=True)
    (run / "evil.py").write_text((folder / "outside" / "evil.py").read_text())
    return run


def set_up(rng: random.Random, world: World, run: Path, kind: str = "") -> tuple[str, str]:
    """Attack by one setting or one file: its name, and how."""
    if kind == "setting" or (not kind and rng.random() < 0.5):
        setting = rng.choice(SETTINGS)
        how, value = rng.choice(list(world.values(run).items()))
        change(run, merge(parse_path(setting, value), {"telemetry": {"mlflow": setting == "telemetry.mlflow_uri"}}))
        return setting, how
    names = [str(entry.relative_to(run)) for entry in run.rglob("*") if not entry.is_symlink()]
    name, how = rng.choice(sorted({*names, *MORE_FILES} - {"evil.py"})), rng.choice(("link", "folder", "pipe"))
    file = run / name
    if file.is_dir():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    if how == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(world.outside / ("checkpoints" if how == "folder" else "precious"))
    return name, how


def run_case(number: int, trained: Path, folder: Path, listener: tuple[int, list[Any]]) -> None:
    rng = random.Random(f"stranger {number}")
    world = World.make(folder, *listener)
    run = copy(trained, folder)
    name, how = set_up(rng, world, run)
    verb = rng.choice([verb for verb in COMMANDS if verb != "report" or number >= 1000])  # it draws for seconds
    before = world.state()
    try:
        with alarm():
            code, _, error = command(*COMMANDS[verb](run))
        assert code in {0, 1, 2}, error
        assert "Traceback" not in error, error
        assert not world.canary.exists(), "it ran code"
        assert world.state() == before, "it wrote outside"
        assert not world.connections, "it called an address"
        if name in REFUSED and verb == "resume":
            assert code == 2, error
            assert name.split(".model")[0].split(".default")[0] in error or "inside the run folder" in error, error
        if (run / name).is_symlink() and how in {"link", "folder"} and verb == "resume":
            assert code == 2, error
    except BaseException as error:
        error.add_note(f"case {number}: {verb} with {name}: {how}")
        raise


def run_cases(
    numbers: range, trained: Path, folder: Path, listener: tuple[int, list[Any]], patch: pytest.MonkeyPatch
) -> None:
    patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for number in numbers:
        case = folder / str(number)
        case.mkdir()
        with patch.context() as context:
            context.syspath_prepend(case / "modules")
            context.setenv("HOME", str(case))
            run_case(number, trained, case, listener)
        shutil.rmtree(case)


@pytest.mark.slow
def test_a_strangers_run(
    trained: Path, tmp_path: Path, listener: tuple[int, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cases(range(30), trained, tmp_path, listener, monkeypatch)


@pytest.mark.drill
@pytest.mark.parametrize("start", range(1000, 3000, 20))
def test_many_strangers_runs(
    start: int, trained: Path, tmp_path: Path, listener: tuple[int, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cases(range(start, start + 20), trained, tmp_path, listener, monkeypatch)


def test_without_a_list_the_fix_names_all_at_once_and_works(
    trained: Path, tmp_path: Path, listener: tuple[int, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World.make(tmp_path, *listener)
    run = copy(trained, tmp_path)
    target = world.folder / "mirror"
    change(run, parse_path("storage.mirror", target.as_uri()))
    (run / "secret").symlink_to("run.json")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "unwritable"))
    (tmp_path / "unwritable").write_text("a file: no list can be written below it")
    code, _, error = command("resume", run, "--devices", "cpu")
    assert (code, "task.name" in error, "storage.mirror" in error) == (2, True, True)
    words = error.partition("name it: ")[2].split()
    assert words[:3] == ["lockstep", "resume", str(run)]
    assert not target.exists()
    code, _, error = command(*words[1:], "--devices", "cpu")
    assert code == 0, error
    files = {file.name for file in target.iterdir()}
    assert {"run.json", "steps.jsonl"} <= files
    assert "secret" not in files, "a link is not followed"


def script_run(trained: Path, folder: Path, path: str, **more: Any) -> Path:
    """A run that says it is a script's."""
    run = copy(trained, folder)
    content = {"path": path, "arguments": [], "folder": str(folder), "given": {}} | more
    (run / "script.json").write_text(json.dumps(content))
    return run


@pytest.mark.parametrize("kind", ["inside", "outside", "settings"])
def test_script_json_starts_only_a_script_that_the_user_has_started(
    kind: str, trained: Path, tmp_path: Path, listener: tuple[int, list[Any]]
) -> None:
    world = World.make(tmp_path, *listener)
    path = str(tmp_path / "runs" / "run" / "evil.py") if kind == "inside" else f"{world.outside}/evil.py"
    given = {"storage": {"mirror": (tmp_path / "mirror").as_uri()}} if kind == "settings" else {}
    run = script_run(trained, tmp_path, path, given=given)
    if kind != "outside":  # even then
        named.add([script_reference(path, [], str(tmp_path))])
    code, _, error = command("resume", run, "--devices", "cpu")
    assert code == 2
    assert ("storage.mirror" if kind == "settings" else "script.json") in error
    assert not world.canary.exists()
    if kind == "outside":
        named.add([script_reference(path, ["--other"], str(tmp_path))])
        assert command("resume", run, "--devices", "cpu")[0] == 2, "with other arguments it is something else"


@pytest.mark.slow
def test_the_pages_routes(trained: Path, tmp_path: Path, listener: tuple[int, list[Any]]) -> None:
    world = World.make(tmp_path, *listener)
    attacks: dict[str, Callable[[Path], object]] = {
        "optimizer.name": lambda run: change(run, parse_path("optimizer.name", f"{world.outside}/evil.py:Evil")),
        "storage.mirror": lambda run: change(run, parse_path("storage.mirror", (tmp_path / "mirror").as_uri())),
        "script.json": lambda run: (run / "script.json").write_text(
            json.dumps({"path": f"{world.outside}/evil.py", "arguments": [], "folder": str(tmp_path), "given": {}})
        ),
        "output.log": lambda run: (run / "logs" / "output.log").symlink_to(world.outside / "precious"),
        "steps.jsonl": lambda run: ((run / "steps.jsonl").unlink(), os.mkfifo(run / "steps.jsonl")),
    }
    for number, attack in enumerate(attacks.values()):
        run = tmp_path / "runs" / f"run-0000000{number}"
        shutil.copytree(trained, run, symlinks=True)
        record = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**record, "id": run.name}))
        attack(run)
    before = world.state()
    with studio(tmp_path, machine(0), tasks=[TOY]) as address:
        for number, name in enumerate(attacks):
            _ask_everything(address, f"run-0000000{number}", name)
        form = {"task": TOY, "config": {"optimizer": {"name": "stranger_module:Evil"}}}
        plan = address.post("/api/plan", form)
        assert (plan["run"]["enabled"], plan["problem"]["code"]) == (False, "TASK_NOT_USABLE")
        assert "optimizer.name" in plan["problem"]["message"]
        assert "optimizer.name" in address.post("/api/runs", form, 422)["message"]
    assert not world.canary.exists()
    assert world.state() == before
    assert not (tmp_path / "mirror").exists()


def _ask_everything(address: Address, run: str, name: str) -> None:
    headers = {"Authorization": f"Bearer {address.token}"}

    def ask(method: str, path: str, body: Any = None) -> httpx.Response:
        url = f"{address.base}/api/runs/{run}{path}"
        answer = httpx.request(method, url, json=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code < 500, (name, path, answer.text)
        return answer

    for path in ("", "/metrics", "/log", "/files", "/file?path=steps.jsonl", "/log?name=output.log"):
        ask("GET", path)
    assert "{}" not in ask("GET", "/log?name=output.log").text.partition('"lines"')[2][:9], (
        "the user's file is not shown"
    )
    refused = ask("POST", "/resume", {})
    assert refused.status_code in {409, 422}, name
    assert name in refused.text
    if name == "optimizer.name":
        assert ask("POST", "/duplicate").status_code == 422
    elif name == "storage.mirror":
        copied = ask("POST", "/duplicate").json()["data"]
        assert "storage.mirror" in copied["left_out"]
    assert ask("DELETE", "").status_code == 200


def test_stop_signals_no_process_but_the_runs(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run, symlinks=True)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            beat = {"counter": 1, "pid": process.pid, "created": psutil.Process(process.pid).create_time()}
            for updated in (time.time(), time.time() + 1e6):
                content = {**beat, "host": socket.gethostname(), "updated": updated}
                (run / "heartbeat.json").write_text(json.dumps(content))
                code, _, error = command("stop", run, "--timeout", "1")
                assert (code, str(process.pid) in error) == (2, True), error
            assert process.poll() is None
            (run / "heartbeat.json").write_text(json.dumps({**content, "host": "elsewhere"}))
            assert RunDir(run).status() == "lost", "a time in the future is no sign of life"
        finally:
            process.kill()


def test_no_control_character_reaches_the_terminal(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run, symlinks=True)
    record, hostile = json.loads((run / "run.json").read_text()), "\x1b]0;title\x07\x1b[31m\x9b2J\u202eabc"
    changes = {
        "name": hostile,
        "task": hostile,
        "host": hostile,
        "error": hostile,
        "status": "failed",
        "tags": [hostile],
    }
    (run / "run.json").write_text(json.dumps({**record, **changes}))
    (run / f"{hostile[3:8]}\x1b[31m").symlink_to("/etc/passwd")
    for words in (("show", run), ("runs", "--runs-dir", tmp_path), ("compare", run, run), ("resume", run)):
        _, out, error = command(*words)
        assert not set(out + error) & {"\x1b", "\x07", "\x9b", "\u202e"}, words
