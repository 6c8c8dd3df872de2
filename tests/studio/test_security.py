"""Who may talk to the studio, and what nobody may ask of it. Requests as an attacker would make them."""

from __future__ import annotations

import errno
import http.client
import json
import logging
import random
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from lockstep.config import resolve
from lockstep.errors import StorageError
from lockstep.rundir.folder import RunDir
from lockstep.studio import access
from lockstep.studio.access import Sessions
from lockstep.studio.home import Home
from tests.hardware.machines import machine
from tests.studio.serving import WAIT_S, Address, studio


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def address(folder: Path) -> Iterator[Address]:
    with studio(folder, machine(1)) as found:
        yield found


def raw(address: Address, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """A request exactly as given: no client library tidies its path or adds a header."""
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        sent = {"Host": f"127.0.0.1:{address.port}", "Authorization": f"Bearer {address.token}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            sent.setdefault("Content-Length", str(len(body)))
            sent.setdefault("Content-Type", "application/json")
        for name, value in sent.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content[:1] == b"{" else content.decode()
    finally:
        connection.close()


def make_run(folder: Path, name: str = "run-00000001", status: str = "completed") -> RunDir:
    run = RunDir.create(folder / "runs" / name, resolve(), run_id=name, command=["lockstep", "train", "har"])
    run.update(status=status)
    return run


@pytest.mark.long
def test_the_token_is_exchanged_once_for_a_session_of_this_port(
    address: Address, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cookie, sessions = f"lockstep_studio_{address.port}", Sessions(Home(folder / "runs"), address.port)
    with httpx.Client(base_url=address.base, trust_env=False) as client:
        locked = client.get("/")
        assert locked.status_code == 200, "a browser reports no error at a first visit"
        assert "Token" in locked.text
        assert address.token not in locked.text
        assert client.get("/api/session").json()["data"] is False
        for path in ("/api/runs", "/static/index.html", "/nothing", "/static/app/api.js"):
            assert client.get(path).status_code == 401, path
        assert client.get(f"/?token={address.token}").text == locked.text, "an address is kept in histories and logs"
        for body in ({"token": "wrong"}, {"token": None}, {}, [], "x"):
            assert client.post("/api/session", json=body).json()["code"] == "UNAUTHORISED"
        answer = client.post("/api/session", json={"token": address.token})
        given = answer.headers["set-cookie"]
        assert given.startswith(f"{cookie}=")
        for part in ("httponly", "samesite=strict", "max-age=2592000"):
            assert part in given.lower()
        name = given.partition("=")[2].partition(";")[0]
        assert address.token not in given
        assert client.get("/api/session").json()["data"] is True
        assert client.get("/api/runs").json() == {"status": "ok", "data": {"runs": [], "problems": []}}

    def enters(port: int, value: str) -> bool:
        headers = {"Cookie": f"lockstep_studio_{port}={value}"}
        return httpx.get(f"http://127.0.0.1:{port}/api/runs", headers=headers, trust_env=False).status_code == 200

    assert enters(address.port, name)
    assert not enters(address.port, address.token), "the token itself is no session"
    assert not enters(address.port, "x")
    with studio(folder, machine(0)) as other:
        assert not enters(other.port, name), "a session of another port"
    with monkeypatch.context() as patch:
        patch.setattr(access, "SESSION_S", -1)
        assert not enters(address.port, sessions.begin()), "it has expired"
        patch.setattr(access, "SESSION_S", 60)
        begun = sessions.begin()
        assert enters(address.port, begun)
    end, _, signature = begun.partition(".")
    assert not enters(address.port, f"{int(end) + 60}.{signature}"), "a session cannot be made longer"
    by_cookie = {"Cookie": f"lockstep_studio_{address.port}={name}"}
    page = connect(f"ws://127.0.0.1:{address.port}/api/live", additional_headers=by_cookie, proxy=None)
    with page, address.live() as script:
        assert Home(folder / "runs").token(new=True) != address.token
        assert not enters(address.port, name), "a new token ends every session"
        for tab in (page, script):
            with pytest.raises(ConnectionClosed) as closed:
                for _ in range(100):
                    tab.recv(timeout=WAIT_S)
            assert closed.value.rcvd is not None and closed.value.rcvd.reason == "UNAUTHORISED"


def test_the_policy_of_every_answer(address: Address) -> None:
    for path in ("/", "/api/runs", "/nothing"):
        answer = httpx.get(address.base + path, headers={"Authorization": f"Bearer {address.token}"}, trust_env=False)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "media-src 'self'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers


def test_foreign_hosts_and_origins(address: Address) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil.example", "[", "", "0"):
        status, answer = raw(address, "GET", "/api/runs", Host=host)
        assert status == 400, host
        assert not answer or answer == "Invalid HTTP request received." or answer["code"] == "FOREIGN_HOST"
    for host in (f"localhost:{address.port}", "127.0.0.1", "[::1]:9999"):
        assert raw(address, "GET", "/api/runs", Host=host)[0] == 200
    for origin in (
        "http://evil.example",
        "null",
        "http://[",
        "https://127.0.0.1",
        f"http://127.0.0.1:{address.port + 1}",
    ):
        assert raw(address, "GET", "/api/runs", Origin=origin)[1]["code"] == "FOREIGN_ORIGIN"
    assert raw(address, "GET", "/api/runs", Origin=f"http://127.0.0.1:{address.port}")[0] == 200
    for site in ("cross-site", "same-site"):  # a browser takes other ports of this machine for the same site
        assert raw(address, "POST", "/api/plan", b"{}", Sec_Fetch_Site=site)[0] == 403
    assert raw(address, "GET", "/static/app/enter.js", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": ""},
        {"Authorization": "Bearer wrong"},
        {"Origin": "http://evil.example"},
        {"Host": "evil.example"},
    ],
)
def test_the_websocket_has_the_same_guard(
    address: Address, headers: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    sent = {"Authorization": f"Bearer {address.token}", **headers}
    host = sent.pop("Host", None)
    with pytest.raises(InvalidStatus) as refused:
        connect(
            f"ws://{host or '127.0.0.1'}:{address.port}/api/live",
            sock=socket.create_connection(("127.0.0.1", address.port)),
            additional_headers={key: value for key, value in sent.items() if value},
            proxy=None,
        )
    assert refused.value.response.status_code == 403
    address.get("/api/studio")
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")], "the server has no fault"


def test_nobody_leaves_the_runs_folder(address: Address, folder: Path) -> None:
    outside = make_run(folder / "elsewhere", "run-0000000f")
    (folder / "secret.txt").write_text("secret")
    link = folder / "runs" / "linked"
    link.symlink_to(outside.path)
    ids = ["..", ".", "..%2f..%2felsewhere", "%2e%2e", "../secret.txt", "%2Fetc", ".studio", "a%00b", "x" * 300, "%ff"]
    for name in ids:
        for method, path in (
            ("GET", f"/api/runs/{name}"),
            ("DELETE", f"/api/runs/{name}"),
            ("GET", f"/api/runs/{name}/log"),
            ("POST", f"/api/runs/{name}/stop"),
            ("GET", f"/static/{name}"),
            ("GET", f"/static/../../{name}"),
            ("GET", f"/api/configs/{name}"),
        ):
            status, answer = raw(address, method, path)
            assert status in {404, 405}, (method, path, answer)
            assert "secret" not in str(answer).replace("secret.txt", "")
    # A link in the runs folder can be read, but what it points to is not deleted.
    assert address.call("DELETE", "/api/runs/linked", 507)["code"] == "STORAGE_FAILED"
    assert outside.run_file.is_file()
    run = make_run(folder)
    for name in ("../run.json", "/etc/passwd", "..%2Frun.json", "rank-0.log"):
        assert raw(address, "GET", f"/api/runs/{run.path.name}/log?name={name}")[0] == 404
    (run.logs / "rank-0.log").symlink_to(folder / "secret.txt")
    assert address.get(f"/api/runs/{run.path.name}/log?name=rank-0.log")["lines"] == []
    (folder / "secrets").mkdir()
    (folder / "secrets/rank-0.log").write_text("secret")
    linked = make_run(folder, "run-00000002")
    linked.logs.rmdir()
    linked.logs.symlink_to(folder / "secrets")
    assert address.get(f"/api/runs/{linked.path.name}")["logs"] == []
    assert address.get(f"/api/runs/{linked.path.name}/log")["lines"] == []
    (linked.path / "stolen.txt").symlink_to(folder / "secret.txt")
    files = [file["path"] for file in address.get(f"/api/runs/{linked.path.name}/files")["files"]]
    assert "run.json" in files
    assert not [path for path in files if path.startswith(("logs", "stolen"))]
    for path in ("stolen.txt", "logs/rank-0.log", "../secret.txt", "/etc/passwd", "checkpoints/../run.json", "", "."):
        assert raw(address, "GET", f"/api/runs/{linked.path.name}/file?path={path}")[0] in {404, 422}, path
    assert raw(address, "GET", f"/api/runs/{linked.path.name}/file?path=run.json")[1]["id"] == linked.path.name
    for one in (run, linked):
        address.call("DELETE", f"/api/runs/{one.path.name}")
        assert not one.path.exists()
    assert (folder / "secrets/rank-0.log").exists()


def test_what_the_studio_keeps_is_private(address: Address, folder: Path) -> None:
    home = folder / "runs" / ".studio"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "token").stat().st_mode) == 0o600
    (home / "token").chmod(0o644)
    with studio(folder, machine(0)) as other:
        assert other.token != address.token, "a token that others could read is not used again"


def test_a_restart_keeps_the_token(folder: Path) -> None:
    with studio(folder, machine(0)) as first:
        token = first.token
    with studio(folder, machine(0)) as second:
        assert second.token == token


NOT_THE_PAGES = {
    "save_dir": "elsewhere",
    "runs_dir": "elsewhere",
    "storage.mirror": "s3://evil",
    "telemetry.mlflow_uri": "http://evil.example",
    "launch.rdzv": "evil.example",
    "launch.nodes": "2",
    "task.name": "os:system",
    "task.datamodule": "os:system",
    "task.trainer": {"logger": "x"},
    "task.cli": {"model": {"class_path": "os.system"}},
}


@pytest.mark.slow
def test_settings_that_reach_out_are_refused_wherever_settings_are_taken(address: Address, folder: Path) -> None:
    assert set(NOT_THE_PAGES) == set(address.get("/api/schema")["refused"]), "the form does not offer them"
    for key, value in NOT_THE_PAGES.items():
        section, _, name = key.rpartition(".")
        body = {"task": "har", "config": {section: {name: value}} if section else {name: value}}
        for method, path in (
            ("POST", "/api/plan"),
            ("POST", "/api/preview"),
            ("POST", "/api/runs"),
            ("PUT", "/api/configs/x"),
        ):
            assert address.call(method, path, 422, json=body)["code"] == "SETTING_NOT_ALLOWED", (path, key)
    assert sorted(entry.name for entry in (folder / "runs").iterdir()) == [".studio"]


def test_a_key_cannot_smuggle_another_setting_into_the_command(address: Address, folder: Path) -> None:
    """``--set`` would read ``datamodule`` from such a key, and import the file."""
    for section in ("task", "optimizer"):
        for key in ("datamodule=/x/evil.py:Evil #", "a.datamodule", "x y", ""):
            body = {"task": "har", "config": {section: {key: "x"}}}
            for method, path in (("POST", "/api/preview"), ("POST", "/api/runs"), ("PUT", "/api/configs/x")):
                assert address.call(method, path, 422, json=body)["code"] == "INVALID_CONFIG", (path, key)
            assert not address.call("POST", "/api/plan", json=body)["run"]["enabled"]
    assert sorted(entry.name for entry in (folder / "runs").iterdir()) == [".studio"]


@pytest.mark.slow
def test_a_start_takes_keys_of_the_task_only_and_few_ranks(address: Address) -> None:
    bad = {"task": "har", "config": {"task": {"nothing": "x"}, "hardware": {"selected_devices": ["cpu"]}}}
    assert "'nothing'" in address.post("/api/runs", bad, 422)["message"]
    many = {"task": "har", "config": {"hardware": {"selected_devices": ["cpu"] * 1024}}}
    for path in ("runs", "preview"):
        assert "1024" in address.post(f"/api/{path}", many, 422)["message"]
    assert "1024" in address.post("/api/plan", many)["run"]["reason"]


def test_labels_of_a_foreign_run_are_bounded(address: Address, folder: Path) -> None:
    run = make_run(folder, "run-long")
    run.update(status="failed", name="n" * 1_000_000, tags=["t" * 1_000_000] * 30, error="e" * 1_000_000)
    assert len(json.dumps(address.get("/api/runs"))) < 50_000
    for change in ({"name": "n" * 201}, {"tags": ["t"] * 21}, {"pinned": True}):
        assert address.call("PATCH", "/api/runs/run-long", 422, json=change)["code"] == "INVALID_REQUEST"


MALFORMED = [
    (b"", 422), (b"{", 400), (b"null", 422), (b"[]", 422), (b'"x"', 422), (b"\xff\xfe", 400), (b"{}", 422),
    (b'{"task": 5}', 422), (b'{"task": "har", "config": []}', 422),
    (b'{"task": "har", "config": {"training": 5}}', None),
    (b'{"task": "har", "more": 1}', 422), (b'{"task": "har\\u0000"}', 422), (b'{"task": "\\ud800"}', 422),
    (b'{"task": "har", "config": {"training": {"epochs": NaN}}}', None), (b"[" * 100_000, 400),
    (b'{"task": "har", "config": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001, None),
    (b'{"task": "har", "config": {"training": {"epochs": 1' + b"0" * 5_000 + b"}}}", None),
]  # fmt: skip


def test_malformed_bodies(address: Address) -> None:
    for path in ("/api/plan", "/api/preview", "/api/runs"):
        for body, expected in MALFORMED:
            status, answer = raw(address, "POST", path, body)
            assert 400 <= status < 500 or (path == "/api/plan" and status == 200), (path, body[:60], status, answer)
            assert expected in (None, status), (path, body[:60], answer)
            if status != 200:
                assert answer["status"] == "error"
                assert answer["code"]
                assert answer["message"]
    assert raw(address, "POST", "/api/plan", None, Content_Length="99999999999")[0] == 413
    assert raw(address, "POST", "/api/plan", None, Transfer_Encoding="chunked")[0] == 411
    assert raw(address, "PUT", "/api/runs", b"{}")[1]["code"] == "METHOD_NOT_ALLOWED"
    assert raw(address, "GET", "/api/nothing")[1]["code"] == "NOT_FOUND"
    assert not list((Path(address.get("/api/studio")["runs_dir"])).glob("run-*")), "nothing was started"


FIELDS = st.sampled_from(["task", "config", "name", "tags", "id", "devices", "x"])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=ANY_JSON)
def test_any_json_gets_an_answer(address: Address, body: Any) -> None:
    content = json.dumps(body).encode()
    for method, path in (
        ("POST", "/api/preview"),
        ("PATCH", "/api/runs/run-00000009"),
        ("POST", "/api/runs/run-00000009/resume"),
        ("PUT", "/api/configs/x"),
    ):
        status, answer = raw(address, method, path, content)
        assert 400 <= status < 500, answer
        assert answer["status"] == "error"


@pytest.mark.parametrize(
    "count", [300, pytest.param(1_500, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.drill)]
)
def test_malformed_frames(address: Address, folder: Path, count: int) -> None:
    make_run(folder)
    rng = random.Random(7)
    frames: list[str | bytes] = [
        "", "{", "null", "5", '"x"', "[]", "{}", '{"type": 5}', '{"type": "nothing"}', '{"type": "subscribe"}',
        '{"type": "subscribe", "run": 5}', '{"type": "subscribe", "run": "../.."}',
        '{"type": "subscribe", "run": "run-00000001", "runs": "x"}',
        '{"type": "unsubscribe", "run": {}}', '{"type": "__init__"}', '{"type": "range"}',
        '{"type": "subscribe", "run": "' + "x" * 5_000 + '"}', "[" * 20_000, b"", b"\x00\x01", rng.randbytes(200),
    ]  # fmt: skip
    sent = 0
    while sent < count:
        with address.live() as tab:
            try:
                for _ in range(min(count, 500)):
                    tab.send(rng.choice(frames))
                    sent += 1
                while True:
                    tab.recv(timeout=60)
            except ConnectionClosed as closed:
                assert closed.rcvd is None or closed.rcvd.code in {1008, 1009}
    with address.live() as tab:
        assert json.loads(tab.recv())["type"] == "hello"
        tab.send('{"type": "watch", "runs": true}')
        while json.loads(tab.recv(timeout=60))["type"] != "runs":
            pass
    with address.live() as tab, pytest.raises(ConnectionClosed):
        tab.send("x" * 100_000)
        while True:
            tab.recv(timeout=60)


def test_the_token_stays_when_a_process_runs_out_of_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(folder / "runs")
    home.make()
    token = home.token()
    known = Sessions(home, 1234).begin()

    def no_more_files(*_: object, **__: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", no_more_files)
        with pytest.raises(StorageError):
            home.token()
    assert home.token() == token
    assert Sessions(home, 1234).knows(known)
