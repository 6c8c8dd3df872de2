"""The WebSocket: history, deltas, resumes and long files, read by a client as the page reads them."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from lockstep.config import resolve
from lockstep.rundir.folder import RunDir
from lockstep.studio.live import MAX_BAD_MESSAGES
from lockstep.studio.tailing import FULL_ROWS, POINTS
from tests.hardware.machines import machine
from tests.studio.serving import WAIT_S, Address, studio


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Address]:
    with studio(tmp_path, machine(0)) as found:
        yield found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "runs" / "run-0000000a", resolve(), run_id="run-0000000a", command=["lockstep"])
    made.begin_attempt({"epochs": 3}, {"devices": ["cpu"], "strategy": "single"})
    made.update(status="running")
    return made


def step(number: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {"attempt": attempt, "step": number, "loss": 1.0 / number, "grad_norm": None, "scalars": {"a": 2}, **more}


class Page:
    """What a page knows of the streams of one run."""

    def __init__(self, tab: ClientConnection) -> None:
        self.tab = tab
        self.headers: dict[str, dict[str, Any]] = {}
        self.columns: dict[str, dict[str, list[Any]]] = {}
        self.messages: list[dict[str, Any]] = []

    def ask(self, **message: Any) -> None:
        self.tab.send(json.dumps(message))

    def turn(self) -> dict[str, Any]:
        """Take one message in, and return it."""
        message: dict[str, Any] = json.loads(self.tab.recv(timeout=WAIT_S))
        if message["type"] not in {"rows", "alive"}:
            self.messages.append(message)
        if message["type"] == "rows":
            self._take(message)
        return message

    def _take(self, message: dict[str, Any]) -> None:
        stream, columns = message["stream"], message["columns"]
        if message["kind"] == "history":
            self.headers[stream] = message
            self.columns[stream] = columns
        elif message["kind"] == "delta" and message["generation"] == self.headers[stream]["generation"]:
            known = self.columns[stream]
            before = len(known.get(message["x"], []))
            for name in columns.keys() | known.keys():
                old = known.setdefault(name, [None] * before)
                old += columns.get(name, [None] * len(columns[message["x"]]))

    def hear(self) -> dict[str, Any]:
        """The next message that is no sign of life."""
        while (message := self.turn())["type"] == "alive":
            pass
        return message

    def until(self, done: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < deadline
            self.turn()

    def steps(self) -> list[float]:
        return self.columns.get("steps", {}).get("step", [])


@pytest.mark.long
def test_history_then_deltas_then_a_resume(address: Address, run: RunDir) -> None:
    for number in range(1, 11):
        run.append_step(step(number * 10))
    with address.live() as tab:
        page = Page(tab)
        assert page.hear()["type"] == "hello"
        page.ask(type="subscribe", run="run-0000000a")
        page.until(lambda: page.steps() == [number * 10.0 for number in range(1, 11)])
        columns = page.columns["steps"]
        assert columns["loss"][0] == pytest.approx(0.1)
        assert columns["scalars.a"] == [2.0] * 10
        assert "grad_norm" not in columns

        run.append_step(step(110, late=5.0))
        page.until(lambda: page.steps()[-1:] == [110.0])
        assert page.columns["steps"]["late"][:10] == [None] * 10
        assert page.columns["steps"]["late"][10] == 5.0

        (run.path / "system-box.jsonl").write_text(
            json.dumps({"time": 1e9, "host": {"cpu": 0.5}, "devices": [{"id": "gpu:0", "utilisation": 0.25}]}) + "\n"
        )
        page.until(lambda: "system-box" in page.columns)
        assert page.columns["system-box"]["gpu:0.utilisation"] == [0.25]
        assert page.columns["system-box"]["host.cpu"] == [0.5]

        run.write_epochs([{"epoch": 1, "val_loss": 0.5, "step": 50, "attempt": 1}])
        page.until(lambda: any(m["type"] == "epochs" and m["epochs"] for m in page.messages))

        generation = page.headers["steps"]["generation"]
        run.begin_attempt({"epochs": 3}, {"devices": ["cpu"], "strategy": "single"}, resumed_from_step=50)
        page.until(lambda: page.steps() == [10.0, 20.0, 30.0, 40.0, 50.0])
        assert page.headers["steps"]["generation"] > generation
        run.append_step(step(60, attempt=2))
        page.until(lambda: page.steps()[-1] == 60.0)
        assert page.steps() == [row["step"] for row in run.steps()]


def test_evaluations_between_epochs_are_a_stream_and_rows(address: Address, run: RunDir) -> None:
    rows = [
        {"attempt": 1, "step": number, "epoch": 1, "improved": True, "val_loss": 1.0 / number} for number in (20, 40)
    ]
    run.evaluations_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with address.live() as tab:
        page = Page(tab)
        page.ask(type="subscribe", run="run-0000000a")
        page.until(lambda: "evaluations" in page.columns)
        assert page.columns["evaluations"]["step"] == [20.0, 40.0]
        assert page.columns["evaluations"]["val_loss"] == pytest.approx([0.05, 0.025])
        run.begin_attempt({"epochs": 3}, {"devices": ["cpu"], "strategy": "single"}, resumed_from_step=30)
        page.until(lambda: page.columns["evaluations"]["step"] == [20.0])
    assert run.evaluations() == rows[:1]


@pytest.mark.long
def test_a_long_run_is_shown_coarsely_then_thinned_out_and_in_full_in_parts(address: Address, run: RunDir) -> None:
    rows = 120_000
    with run.steps_file.open("w") as file:
        for number in range(1, rows + 1):
            loss = 99.0 if number == 54_321 else number % 7
            row = {"attempt": 1, "step": number, "loss": loss, "note": "x" * 60}
            file.write(json.dumps(row) + "\n")
    with address.live() as tab:
        page = Page(tab)
        page.ask(type="subscribe", run="run-0000000a")
        page.until(lambda: page.headers.get("steps", {}).get("total") == rows)
        header = page.headers["steps"]
        assert header["downsampled"]
        losses = page.columns["steps"]["loss"]
        assert len(losses) <= 2 * POINTS
        assert max(losses) == 99.0, "a single peak stays visible"
        assert page.steps() == sorted(page.steps())
        part = "/api/runs/run-0000000a/rows?stream=steps&column=loss"
        answer = address.get(f"{part}&from=54300&to=54399")
        assert not answer["downsampled"]
        assert answer["columns"].keys() == {"step", "loss"}
        assert answer["columns"]["step"] == list(range(54_300, 54_400))
        assert answer["columns"]["loss"][21] == 99.0
        assert address.get(f"{part}&full=true")["columns"]["step"] == list(range(1, rows + 1)), "of a CSV file"

        # Rows that come while the page is open are sent as they are, until they are so many as would slow it down.
        grown = rows + FULL_ROWS + 1
        with run.steps_file.open("a") as file:
            file.writelines(f'{{"step":{number},"loss":1}}\n' for number in range(rows + 1, grown + 1))
        page.until(lambda: page.headers["steps"]["total"] == grown)
        assert page.headers["steps"]["downsampled"]
        page.until(lambda: page.steps()[-1] > grown - FULL_ROWS / 100)
        assert len(page.steps()) <= 2 * POINTS


def test_eight_tabs_see_the_same(address: Address, run: RunDir) -> None:
    with ExitStack() as tabs:
        pages = [Page(tabs.enter_context(address.live())) for _ in range(8)]
        for page in pages:
            page.ask(type="subscribe", run="run-0000000a")
        for number in range(1, 31):
            run.append_step(step(number))
            time.sleep(0.02)
        for page in pages:
            page.until(lambda page=page: len(page.steps()) == 30)
            assert page.steps() == list(range(1, 31))


@pytest.mark.long
def test_the_list_of_runs_is_kept_up_to_date(address: Address, run: RunDir, tmp_path: Path) -> None:
    with address.live() as tab:
        page = Page(tab)
        page.ask(type="watch", runs=True)
        page.until(lambda: any(message["type"] == "runs" for message in page.messages))
        assert [found["id"] for found in page.messages[-1]["runs"]] == ["run-0000000a"]
        run.update(status="completed")
        RunDir.create(tmp_path / "runs" / "run-0000000b", resolve(), run_id="run-0000000b", command=["lockstep"])
        seen: dict[str, Any] = {}

        def both() -> bool:
            for message in page.messages:
                if message["type"] == "runs_changed":
                    seen.update({found["id"]: found for found in message["runs"]})
            return seen.get("run-0000000a", {}).get("status") == "completed" and "run-0000000b" in seen

        page.until(both)
        address.call("DELETE", "/api/runs/run-0000000a")
        page.until(lambda: any(message.get("removed") == ["run-0000000a"] for message in page.messages))
        assert page.messages[-1]["problems"] == []
        (tmp_path / "runs" / "run-0000000b" / "run.json").write_text("{")  # it does not vanish without a word
        page.until(lambda: page.messages[-1].get("removed") == ["run-0000000b"])
        (problem,) = page.messages[-1]["problems"]
        assert "run-0000000b/run.json" in problem


def test_a_tab_hears_why_something_is_refused(address: Address, run: RunDir) -> None:
    with address.live() as tab:
        page = Page(tab)
        page.hear()
        page.ask(type="subscribe", run="nothing")
        assert page.hear()["code"] == "RUN_NOT_FOUND"
        page.ask(type="subscribe", run="run-0000000a", runs=1)
        assert page.hear()["code"] == "INVALID_REQUEST"
    assert address.call("GET", "/api/runs/nothing/rows", 404)["code"] == "RUN_NOT_FOUND"
    assert address.call("GET", "/api/runs/run-0000000a/rows?stream=dreams", 404)["code"] == "NOT_FOUND"
    run.append_step(step(1))
    assert address.get("/api/runs/run-0000000a/rows")["columns"]["loss"] == [1.0], "of a run that no tab follows"


@pytest.mark.slow
def test_a_tab_that_asks_and_never_reads_takes_little_memory_and_is_closed_at_the_end(
    run: RunDir, tmp_path: Path
) -> None:
    with run.steps_file.open("w") as file:
        for number in range(20_000):
            file.write(json.dumps(step(number + 1, scalars={str(name): 0.5 for name in range(20)})) + "\n")
    wanted = {"type": "subscribe", "run": "run-0000000a"}
    with ExitStack() as clients, studio(tmp_path, machine(0)) as address:
        tab = clients.enter_context(address.live(max_queue=1))
        with address.live() as other:
            other.send(json.dumps({"type": "subscribe", "run": "run-0000000a"}))
            while '"type":"rows"' not in str(other.recv(timeout=WAIT_S)):
                pass
            before = psutil.Process().memory_info().rss
            for _ in range(400):  # the histories have 700 MB
                tab.send(json.dumps(wanted))
            time.sleep(3)
            grown = psutil.Process().memory_info().rss - before
            assert grown < 150 << 20, grown
            other.send('{"type": "watch", "runs": true}')
            while '"type":"runs"' not in str(other.recv(timeout=WAIT_S)):
                pass
        clients.enter_context(suppress(OSError))
        clients.callback(tab.socket.shutdown, 2)
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        gc.collect()
    assert not [str(one.message) for one in left if one.category is ResourceWarning]


def test_a_tab_that_cannot_be_sent_to_is_closed_and_connects_again(
    address: Address, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would stay open and hear nothing more."""

    def fails(*_: object) -> Any:
        raise RuntimeError("dictionary changed size during iteration")

    with address.live() as tab:
        assert json.loads(tab.recv(timeout=WAIT_S))["type"] == "hello"
        with monkeypatch.context() as patch:
            patch.setattr("lockstep.studio.live.Tab._news_of_list", fails)
            tab.send(json.dumps({"type": "watch", "runs": True}))
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    tab.recv(timeout=10)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
    with address.live() as tab:
        tab.send(json.dumps({"type": "watch", "runs": True}))
        while json.loads(tab.recv(timeout=WAIT_S))["type"] != "runs":
            pass


def test_a_tab_that_has_been_closed_is_not_reported(
    address: Address, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = WebSocket.close

    async def slowly(self: WebSocket, code: int = 1000, reason: str | None = None) -> None:
        await close(self, code, reason)
        await asyncio.sleep(1.0)  # meanwhile, there is something to send

    monkeypatch.setattr(WebSocket, "close", slowly)
    with address.live() as tab, pytest.raises(ConnectionClosed) as closed:
        for _ in range(MAX_BAD_MESSAGES + 1):
            tab.send("{")
        while True:
            tab.recv(timeout=WAIT_S)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    time.sleep(1.0)
    assert not caplog.records
