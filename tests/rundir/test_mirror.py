"""A run folder and its mirror: what goes up and when, what comes back, what is refused. S3 is moto's, with faults."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import lockstep
from lockstep.checkpoint import mirror as fetching
from lockstep.checkpoint.mirror import fetch_run
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.cli.main import main
from lockstep.config import resolve
from lockstep.errors import LockstepError, RunFolderError
from lockstep.rundir import mirror as mirror_module
from lockstep.rundir.folder import RunDir
from lockstep.rundir.mirror import Mirror, check_mirror
from lockstep.rundir.remote import Remote
from tests import s3
from tests.gloo import ROOT
from tests.toys import Toy

PLAN: dict[str, Any] = {"task": {"name": "toy"}, "decisions": {}, "notes": []}


@pytest.fixture(scope="module")
def server() -> Iterator[s3.Storage]:
    with s3.serve() as storage:
        yield storage


@pytest.fixture
def storage(server: s3.Storage, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Storage]:
    """The server as the only S3 of this process, whose library gives up at once: the mirror itself tries again."""
    import s3fs

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    patience = {"retries": {"max_attempts": 1}, "connect_timeout": 5, "read_timeout": 5}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": server.url, "config_kwargs": patience})
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    server.puts.clear()
    yield server
    server.status = server.cuts = server.refused = 0
    server.pause_s = 0.0


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.long), "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A new URL of each kind of place."""
    if request.param == "s3":
        request.getfixturevalue("storage")
    name = f"{tmp_path.name}-{tmp_path.parent.name}"
    yield {"s3": f"s3://{s3.BUCKET}/{name}", "file": f"file://{tmp_path}/mirror", "memory": f"memory://{name}"}[
        request.param
    ]
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INTERVAL_S", "LONGEST_PAUSE_S", "_STARTING_S"):
        monkeypatch.setattr(mirror_module, name, 0.05)


def new_run(folder: Path, run_id: str = "run-1") -> tuple[RunDir, CheckpointStore]:
    run = RunDir.create(folder, resolve({"training": {"epochs": 3}}), run_id=run_id, command=["lockstep"])
    run.begin_attempt(PLAN, {})
    return run, CheckpointStore(run.checkpoints)


def save(run: RunDir, store: CheckpointStore, step: int, *, best: bool = False) -> None:
    """A row, and the checkpoint after it."""
    run.append_step({"attempt": 1, "step": step, "loss": 1.0})
    weights = {"weight": torch.full((64, 64), float(step)), "frozen": torch.ones(600, 600)}
    manifest = {"epoch": 0, "position": step, "samples_seen": step, "global_batch": 1}
    store.save(Snapshot(step, weights, {"step": step}, manifest, frozen=("frozen",)), best)


def started(run: RunDir, url: str, said: list[str] | None = None) -> Mirror:
    mirror = Mirror(run.path, url, interval_s=0.05, report=(said if said is not None else []).append)
    mirror.start(run.last_attempt())
    return mirror


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def content(folder: Path) -> dict[str, bytes]:
    """The files of a run folder and what they hold; ``last`` and ``best`` as the checkpoints that they name."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    found = {name: path.read_bytes() for name, path in files.items() if not path.is_symlink() and name != ".claim"}
    store = CheckpointStore(folder / "checkpoints")
    return {**found, **{f"checkpoints/{name}": str(store.step_of(name)).encode() for name in ("last", "best")}}


def without_claims(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: value for name, value in files.items() if not name.endswith("/mirror.json")}


def test_a_mirror_gives_back_the_run(url: str, tmp_path: Path) -> None:
    run, store = new_run(tmp_path / "run")
    (run.path / "secret").symlink_to("/etc/hostname")
    mirror = started(run, url)
    for step in (1, 2, 3, 4):
        save(run, store, step, best=step == 1)
        store.retain({step, step - 1})
        mirror.request()
    run.update(status="stopped")
    assert mirror.close(60.0)
    names = Remote(url).names()
    steps = {name.split("/")[1] for name in names if name.startswith("checkpoints/step-")}
    assert steps == {"step-00000001", "step-00000003", "step-00000004"}, "kept as in the folder"
    assert not {"secret", ".claim"} & names.keys()
    said: list[str] = []
    fetched = fetch_run(url, tmp_path / "fetched", said.append)
    assert fetched is not None
    expected = content(run.path)
    older = [name for name in expected if "step-00000003" in name]
    assert without_claims(content(fetched.path)) == {name: expected[name] for name in expected if name not in older}
    assert CheckpointStore(fetched.checkpoints).newest_verified(said.append) == 4


@pytest.mark.long
def test_an_outage_ends_nothing_and_loses_nothing(storage: s3.Storage, tmp_path: Path) -> None:
    """Refused, cut and slow requests; checkpoints that retire meanwhile; a manifest follows all that belongs to it."""
    url, said = f"s3://{s3.BUCKET}/outage", list[str]()
    run, store = new_run(tmp_path / "run")
    mirror = started(run, url, said)
    save(run, store, 1, best=True)
    wait_for(lambda: "outage/checkpoints/step-00000001/manifest.json" in dict(storage.puts))
    storage.status = 503
    save(run, store, 2)
    wait_for(lambda: storage.refused > 3)
    for step in (3, 4):
        save(run, store, step)
        store.retain({step})
    storage.status, storage.cuts, storage.pause_s = 0, 3, 0.01
    run.update(status="completed")
    assert mirror.close(60.0)
    assert sum(line.startswith("warning") for line in said) <= 4, "said once an outage, not once a try"
    remote = Remote(url)
    assert {name: remote.read(name) for name in remote.names() if name.startswith("checkpoints/step-")} == {
        name: value for name, value in content(run.path).items() if name.startswith("checkpoints/step-")
    }
    manifests = [number for number, (name, _) in enumerate(storage.puts) if name.endswith("manifest.json")]
    assert len(manifests) == 2
    for number in manifests:
        folder, before = storage.puts[number][0].rpartition("/")[0], dict(storage.puts[:number])
        assert {f"{folder}/{file}" for file in ("model.safetensors", "trainer.pt")} <= before.keys()
        assert f'"step":{int(folder[-8:])},'.encode() in before["outage/steps.jsonl"]
    fetched = fetch_run(url, tmp_path / "fetched", said.append)
    assert fetched is not None
    assert [row["step"] for row in fetched.steps()] == [1, 2, 3, 4]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_broken_checkpoints_are_passed_over(url: str, tmp_path: Path) -> None:
    """The newest is half uploaded, one lacks a file, one has a wrong byte: the oldest is taken, those two are named."""
    run, store = new_run(tmp_path / "run")
    for step in (1, 2, 3, 4):
        save(run, store, step)
    run.update(status="failed")
    mirror = started(run, url)
    assert mirror.close(60.0)
    remote = Remote(url)
    remote.remove("checkpoints/step-00000004/manifest.json")
    remote.remove("checkpoints/step-00000003/trainer.pt")
    file = "checkpoints/step-00000002/model.safetensors"
    damaged = bytearray(remote.read(file))
    damaged[-1] ^= 1
    remote.write(file, bytes(damaged))
    said: list[str] = []
    fetched = fetch_run(url, tmp_path / "fetched", said.append)
    assert fetched is not None
    fetched_store = CheckpointStore(fetched.checkpoints)
    assert (fetched_store.steps(), fetched_store.step_of("last")) == ([1], 1)
    assert [sum(f"step {step}" in line for line in said) for step in (2, 3, 4)] == [1, 1, 0]


def test_names_that_lead_out_of_a_folder_are_not_fetched(storage: s3.Storage, tmp_path: Path) -> None:
    """Keys of an object store may be anything."""
    url = f"s3://{s3.BUCKET}/stranger"
    run, _ = new_run(tmp_path / "run")
    run.update(status="failed")
    assert started(run, url).close(60.0)
    for name in ("../outside", "logs/../../outside", "logs/a.tmp-1"):
        Remote(url).write(name, b"evil")
    fetched = fetch_run(url, tmp_path / "inner" / "fetched", [].append)
    assert fetched is not None
    assert "evil" not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("url", ["s3", "memory"], indirect=True)
def test_one_attempt_at_a_time_writes_a_mirror(url: str, tmp_path: Path) -> None:
    run, store = new_run(tmp_path / "run")
    said: list[str] = []
    first = started(run, url, said)
    save(run, store, 1)
    run.update(status="failed")
    first.request()
    remote = Remote(url)
    wait_for(lambda: remote.read_if_there("checkpoints/last") is not None)
    wait_for(lambda: json.loads(remote.read("run.json"))["status"] == "failed")
    with pytest.raises(RunFolderError, match=re.escape(url)) as refusal:
        started(RunDir(Path(shutil.copytree(run.path, tmp_path / "copy", symlinks=True))), url)
    assert refusal.value.exit_code == 2
    fetched = fetch_run(url, tmp_path / "fetched", [].append)
    assert fetched is not None
    fetched.begin_attempt(PLAN, {}, 1)
    second = started(fetched, url)
    save(fetched, CheckpointStore(fetched.checkpoints), 2)
    save(run, store, 5)
    assert not first.close(60.0), "the older attempt notices the newer one"
    assert "attempt 2" in said[-1]
    assert second.close(60.0)
    manifests = {name for name in remote.names() if name.endswith("manifest.json")}
    assert "checkpoints/step-00000005/manifest.json" not in manifests
    with pytest.raises(RunFolderError, match=re.escape(url)):
        check_mirror(url, run.path)
    check_mirror(url, fetched.path)


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_run_on_another_machine_has_ended_when_its_heartbeat_stays_the_same(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = new_run(tmp_path / "run")
    save(run, store, 1)
    run.update(status="running")
    assert started(run, url).close(60.0)
    remote = Remote(url)
    beat = {**json.loads(remote.read("heartbeat.json")), "host": "elsewhere", "updated": time.time()}
    counter = itertools.count()

    class Beating(Remote):
        def read_if_there(self, name: str) -> bytes | None:
            if name == "heartbeat.json":  # the other machine's process writes between two looks
                self.write(name, json.dumps({**beat, "counter": next(counter)}).encode())
            return super().read_if_there(name)

    remote.write("heartbeat.json", json.dumps(beat).encode())
    monkeypatch.setattr(fetching, "SILENCE_S", 0.2)
    monkeypatch.setattr(fetching, "_LOOK_S", 0.05)
    with monkeypatch.context() as patch, pytest.raises(LockstepError, match="still running") as refusal:
        patch.setattr(fetching, "Remote", Beating)
        fetch_run(url, tmp_path / "fetched", [].append)
    assert refusal.value.exit_code == 2
    assert not (tmp_path / "fetched").exists()
    fetched = fetch_run(url, tmp_path / "fetched", [].append)
    assert fetched is not None
    assert (fetched.status(), CheckpointStore(fetched.checkpoints).step_of("last")) == ("lost", 1)


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_claim_of_an_attempt_that_was_killed_at_once_is_taken_over(url: str, tmp_path: Path) -> None:
    Remote(url).write("attempts/1/mirror.json", b"{}")
    run, _ = new_run(tmp_path / "run")
    assert started(run, url).close(60.0)
    assert json.loads(Remote(url).read("run.json"))["id"] == "run-1"


@pytest.mark.parametrize("url", ["file", "memory"], indirect=True)
def test_a_mirror_has_one_run(url: str, tmp_path: Path) -> None:
    """A new run is refused, unless the other one failed before its first checkpoint."""
    run, store = new_run(tmp_path / "run")
    run.update(status="failed")
    assert started(run, url).close(60.0)
    check_mirror(url, run.path)
    other, _ = new_run(tmp_path / "other", "run-2")
    with pytest.raises(RunFolderError, match=r"\brun-1\b") as refusal:
        check_mirror(url, other.path)
    assert refusal.value.exit_code == 2
    check_mirror(url, tmp_path / "new")
    assert Remote(url).names() == {}
    save(run, store, 1)
    assert started(run, url).close(60.0)
    with pytest.raises(RunFolderError, match=r"\brun-1\b"):
        check_mirror(url, tmp_path / "new")


def test_a_slow_mirror_holds_up_the_end_no_longer_than_it_may(
    storage: s3.Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lines of progress: how much has not been copied, and why."""
    monkeypatch.setattr(mirror_module, "PROGRESS_S", 0.1)
    run, store = new_run(tmp_path / "run")
    said: list[str] = []
    mirror = started(run, f"s3://{s3.BUCKET}/slow", said)
    storage.status = 503
    save(run, store, 1)
    assert mirror.close(0.5) is False
    assert str(run.path) in said[-1]
    progress = [line for line in said[:-1] if re.search(r"\d files .*\d MB.* s3://", line)]
    assert len(progress) > 1, said


def test_a_mirror_is_read_as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """By the library and the command line: results, weights, metrics, a new run's first weights, and a resume."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/mirrors/first"
    settings: dict[str, Any] = {"devices": "cpu", "config": {"telemetry.progress": "silent"}}
    task = f"{ROOT / 'tests' / 'toys.py'}:Toy"
    run = lockstep.train(task, save_dir="run", mirror=url, epochs=2, **settings)
    before = content(tmp_path / "mirrors" / "first")
    copy = lockstep.Run(url)
    assert (copy.status, copy.history, copy.metrics) == ("completed", run.history, run.metrics)
    assert copy.evaluate(split="val") == run.evaluate(split="val")
    weights = copy.load_model("last").state_dict()
    assert all(torch.equal(weights[name], value) for name, value in run.load_model("last").state_dict().items())
    assert main(["runs", "--runs-dir", f"file://{tmp_path}/mirrors", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)["runs"]
    assert main(["show", url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (listed["id"], shown["id"], shown["step"]) == (run.id, run.id, run.step)
    assert [checkpoint["step"] for checkpoint in shown["checkpoints"]] == [13, 26]
    assert main(["export", url, "--no-program"]) == 0
    assert (tmp_path / "export" / "weights.safetensors").is_file()
    assert content(tmp_path / "mirrors" / "first") == before, "reading writes nothing"
    warm = lockstep.train(task, init_from=url, fast_dev_run=True, save_dir="warm", **settings)
    assert warm.config.init_from is not None
    shutil.rmtree("run")
    resumed = lockstep.Run(url, runs_dir="runs").resume(epochs=3)
    assert (resumed.run_dir, resumed.step, resumed.status) == (tmp_path / "runs" / shown["id"], 39, "completed")
    assert lockstep.Run(url).history == resumed.history
    with pytest.raises(LockstepError) as refusal:
        lockstep.Run(f"{url}-missing")
    assert (refusal.value.code, refusal.value.exit_code) == ("RUN_NOT_USABLE", 2)


def test_runs_below_a_url_are_listed_as_long_as_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged run hides no other one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mirrors = tmp_path / "mirrors"

    def listed() -> set[str]:
        assert main(["runs", "--runs-dir", mirrors.as_uri(), "--json"]) == 0
        return {run["id"] for run in json.loads(capsys.readouterr().out)["runs"]}

    for name in ("one", "two", "three"):
        run, _ = new_run(tmp_path / name, f"run-{name}")
        run.update(status="failed")
        assert started(run, (mirrors / name).as_uri()).close(60.0)
    assert listed() == {"run-one", "run-two", "run-three"}
    (mirrors / "two" / "run.json").write_text("{")
    assert listed() == {"run-one", "run-three"}
    shutil.rmtree(mirrors / "one")
    assert listed() == {"run-three"}
    [copies] = (tmp_path / "cache").glob("lockstep/mirrors/*/runs")
    new_run(copies / "here", "run-here")  # as from the page
    assert listed() == {"run-three", "run-here"}


@pytest.mark.parametrize(
    ("address", "status", "code"),
    [
        ("nowhere://bucket/run", 0, "INVALID_CONFIG"),
        ("s3://missing-bucket/run", 0, "RUN_NOT_USABLE"),
        (f"s3://{s3.BUCKET}/run", 403, "RUN_NOT_USABLE"),
        (f"s3://{s3.BUCKET}/run", 503, "RUN_NOT_USABLE"),
        ("file://{folder}/runs/inside", 0, "INVALID_CONFIG"),
        ("file:///proc/run", 0, "RUN_NOT_USABLE"),
        ("bucket/run", 0, "INVALID_CONFIG"),
    ],
)
def test_what_cannot_be_used_is_refused_before_there_is_a_run(
    storage: s3.Storage, tmp_path: Path, address: str, status: int, code: str
) -> None:
    storage.status = status
    folder = tmp_path / "runs"
    with pytest.raises(LockstepError) as refusal:
        lockstep.train(Toy(), save_dir=folder, mirror=address.format(folder=tmp_path), devices="cpu")
    assert (refusal.value.code, refusal.value.exit_code) == (code, 2)
    assert not folder.exists()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # type: ignore[attr-defined]
    with pytest.raises(LockstepError) as refusal:
        check_mirror("s3://bucket/run", tmp_path / "run")
    assert refusal.value.exit_code == 2
    assert "lockstep-train[s3]" in str(refusal.value.fix)


def test_removed_settings_name_the_mirror() -> None:
    for key in ("upload_to", "upload_every_epochs"):
        with pytest.raises(LockstepError) as refusal:
            resolve({"telemetry": {key: None}})
        assert "storage.mirror" in str(refusal.value.fix)
