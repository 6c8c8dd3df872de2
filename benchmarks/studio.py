"""What the studio costs: start, a list of 1,000 runs, a run of 1,000,000 points, a live run that tabs watch, idling.

::

    python benchmarks/studio.py --out studio        # studio.json and studio.md; some minutes

The server is `lockstep studio` in a process of its own; its CPU seconds are those of that process. Beside them stands
the wall time that a client on the same machine sees. Targets: a start under 1 s of CPU, the list under 0.3 s from the
first call on, the points under 1 s, the live run under 5 % of a core, 0.2 % when idle, with a tab too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from report import header, write_json
from websockets.sync.client import ClientConnection, connect

from lockstep.config import resolve
from lockstep.rundir.folder import RunDir
from lockstep.rundir.heartbeat import Heartbeat, announce

WAIT_S = 120.0


class Server:
    """`lockstep studio` over one runs folder, with its CPU time."""

    def __init__(self, runs: Path) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "lockstep", "studio", "--no-browser", "--port", "0", "--runs-dir", str(runs)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().split()[-1]
        self.base, _, self.token = url.partition("/#token=")
        self.get("/api/studio")
        self.start = {"wall_s": time.perf_counter() - began, "cpu_s": self.cpu_s()}

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(self.base + path, headers={"Authorization": f"Bearer {self.token}"})
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError:
                raise
            except OSError:  # the port is taken, and nobody answers yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def tab(self) -> ClientConnection:
        return connect(
            f"{self.base.replace('http', 'ws')}/api/live",
            additional_headers={"Authorization": f"Bearer {self.token}"},
            proxy=None,
            max_size=None,
        )

    def measure(self, work: Callable[[], object]) -> dict[str, float]:
        cpu, began = self.cpu_s(), time.perf_counter()
        work()
        return {"wall_s": time.perf_counter() - began, "cpu_s": self.cpu_s() - cpu}


@contextmanager
def serving(runs: Path) -> Iterator[Server]:
    server = Server(runs)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


def make_run(runs: Path, number: int, status: str = "completed") -> RunDir:
    """A run with all that a list shows of one."""
    name = f"run-{number:08x}"
    config = resolve({"name": f"number {number}", "task": {"name": "har"}, "training": {"epochs": 20}})
    run = RunDir.create(runs / name, config, run_id=name, command=["lockstep", "train", "har"])
    run.begin_attempt({"epochs": 20, "total_steps": 2000}, {"devices": ["cpu"], "strategy": "single"})
    rows = [{"attempt": 1, "epoch": epoch, "step": 100 * epoch, "val_loss": 1 / epoch} for epoch in range(1, 21)]
    run.write_epochs(rows)
    announce(run.heartbeat_file, 2000, 2000, ended=status == "completed")
    run.update(status=status, final_metrics={"test_accuracy": 0.9})
    return run


def copy_run(run: Path, copy: Path) -> None:
    shutil.copytree(run, copy)
    record = json.loads((copy / "run.json").read_text(encoding="utf-8"))
    (copy / "run.json").write_text(json.dumps({**record, "id": copy.name}), encoding="utf-8")


def write_steps(run: RunDir, rows: int) -> None:
    with run.steps_file.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(step_row(step)) + "\n" for step in range(1, rows + 1))


def step_row(step: int) -> dict[str, Any]:
    return {
        "attempt": 1, "step": step, "epoch": 1, "samples_seen": 32 * step, "loss": 2 / step + step % 7, "lr": 1e-3,
        "grad_norm": 1.5, "samples_per_s": 1234.5, "data_wait_share": 0.01,
    }  # fmt: skip


def header_of(frame: bytes) -> dict[str, Any]:
    length = int.from_bytes(frame[:4], "little")
    found: dict[str, Any] = json.loads(frame[4 : 4 + length])
    return found


def open_run(server: Server, name: str, rows: int) -> dict[str, Any]:
    """Seconds until a tab has a first picture of the run, and until it has all of it."""
    with server.tab() as tab:
        first: list[float] = []
        began = time.perf_counter()

        def read() -> None:
            tab.send(json.dumps({"type": "subscribe", "run": name, "streams": ["steps"]}))
            while True:
                message = tab.recv(timeout=WAIT_S)
                if isinstance(message, bytes):
                    first.append(time.perf_counter() - began)
                    found = header_of(message)
                    if not found["preview"] and found["total"] == rows:
                        return

        whole = server.measure(read)
    return {"first_picture_s": first[0], "whole_s": whole["wall_s"], "cpu_s": whole["cpu_s"]}


def watch_live(server: Server, run: RunDir, tabs: int, seconds: float) -> dict[str, Any]:
    """The server's share of a core while ``run`` writes ten rows a second and ``tabs`` pages watch it."""
    over = threading.Event()

    def write() -> None:
        heartbeat = Heartbeat()
        heartbeat.start(run.heartbeat_file)
        step = 0
        while not over.wait(0.1):
            step += 1
            run.append_step(step_row(step))
            heartbeat.beat(step, None)
        heartbeat.stop()

    writer = threading.Thread(target=write)
    writer.start()
    frames = 0
    try:
        with ExitStack() as stack:
            pages = [stack.enter_context(server.tab()) for _ in range(tabs)]
            for page in pages:
                page.send(json.dumps({"type": "watch", "runs": True}))
                page.send(json.dumps({"type": "subscribe", "run": run.path.name}))
            time.sleep(2.0)
            cpu, began = server.cpu_s(), time.perf_counter()
            while (left := seconds - (time.perf_counter() - began)) > 0:
                for page in pages:
                    try:
                        while True:
                            frames += isinstance(page.recv(timeout=0), bytes)
                    except TimeoutError:
                        pass
                time.sleep(min(0.2, left))
            spent, took = server.cpu_s() - cpu, time.perf_counter() - began
    finally:
        over.set()
        writer.join()
    return {"cpu_share": spent / took, "frames_per_tab_and_s": frames / tabs / took}


def watch_idle(server: Server, tabs: int, seconds: float) -> dict[str, float]:
    """The server's share of a core while nothing happens and ``tabs`` pages show the list of runs."""
    with ExitStack() as stack:
        for page in [stack.enter_context(server.tab()) for _ in range(tabs)]:
            page.send(json.dumps({"type": "watch", "runs": True}))
        time.sleep(5.0)
        found = server.measure(lambda: time.sleep(seconds))
    return {"cpu_share": found["cpu_s"] / found["wall_s"]}


def medians(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Median, least and most of each value over the repeats."""
    return {
        name: {
            "median": round(statistics.median(row[name] for row in rows), 4),
            "least": round(min(row[name] for row in rows), 4),
            "most": round(max(row[name] for row in rows), 4),
        }
        for name in rows[0]
    }


def measure(folder: Path, runs: int, points: int, repeats: int, live_s: float) -> dict[str, Any]:
    empty, many, long, live = (folder / name for name in ("empty", "many", "long", "live"))
    make_run(folder / "one", 0)
    for number in range(runs):
        copy_run(folder / "one" / "run-00000000", many / f"run-{number:08x}")
    write_steps(make_run(long, 1), points)
    starts, firsts, later, opened = [], [], [], []
    idle: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for _ in range(repeats):
        with serving(empty) as server:
            starts.append(server.start)
        with serving(many) as server:
            firsts.append(server.measure(lambda: server.get("/api/runs")))
            later += [server.measure(lambda: server.get("/api/runs")) for _ in range(5)]
            for tabs, rows in idle.items():
                rows.append(watch_idle(server, tabs, live_s))
        with serving(long) as server:
            opened.append(open_run(server, "run-00000001", points))
    result = {
        "start": medians(starts),
        "list, first call": medians(firsts),
        "list, later calls": medians(later),
        "open a long run": medians(opened),
        **{f"idle, {tabs} tabs on the list": medians(rows) for tabs, rows in idle.items()},
    }
    for tabs in (1, 8):
        rows = []
        for repeat in range(repeats):
            run = make_run(live, 100 * tabs + repeat, status="running")
            with serving(live) as server:
                rows.append(watch_live(server, run, tabs, live_s))
        result[f"live, {tabs} tab{'s' if tabs > 1 else ''}"] = medians(rows)
    return result


def publish(report: dict[str, Any], title: str, sizes: str, out: Path | None) -> None:
    """Print the medians of ``report["results"]`` as Markdown, and write them and the report beside ``out``."""
    lines = [
        f"# {title}, {report['date']}",
        "",
        f"{report['machine']}, load {report['load_before']} before; {sizes}, {report['repeats']} repeats.",
        "",
        "| what | value | median | least | most |",
        "| --- | --- | --- | --- | --- |",
    ]
    for what, values in report["results"].items():
        for name, found in values.items():
            lines.append(f"| {what} | {name} | {found['median']} | {found['least']} | {found['most']} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if out is not None:
        write_json(out.with_suffix(".json"), report)
        out.with_suffix(".md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--live-s", type=float, default=20.0)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    given = parser.parse_args()
    asked = {"runs": given.runs, "points": given.points, "repeats": given.repeats, "live_s": given.live_s}
    report = {**header(), **asked}
    with tempfile.TemporaryDirectory() as folder:
        report["results"] = measure(Path(folder), given.runs, given.points, given.repeats, given.live_s)
    publish(report, "The studio's costs", f"{given.runs} runs, {given.points:,} points", given.out)


if __name__ == "__main__":
    main()
