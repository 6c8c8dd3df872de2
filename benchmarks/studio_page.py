"""What the studio's page costs a browser: a live run with 17 charts, visits, 500 metrics, 1,024 ranks.

::

    python benchmarks/studio_page.py --out page     # page.json and page.md; needs playwright and Chromium
    python benchmarks/studio_page.py --source OLD/src --source src    # compares two versions, in turns

CPU time is that of the page's main thread, from Chromium's own counters, so other programs hardly change it; times
until something is visible are wall time. Targets: 10 % of a thread for 17 charts that get ten rows a second, a form
within 1.5 s at the first visit and 0.5 s later, the first chart of 500 metrics within 1 s, 1,024 ranks within 2 s.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright
from report import header
from studio import Server, make_run, medians, publish, serving, step_row

from lockstep.rundir.folder import RunDir
from lockstep.rundir.heartbeat import Heartbeat

SOURCE = Path(__file__).resolve().parents[1] / "src"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
#: All charts of the live run are on the screen.
TALL = {"width": 1280, "height": 3200}
USUAL = {"width": 1280, "height": 800}
WAIT_MS = 120_000
COUNT_DRAWINGS = """() => {
    const clear = CanvasRenderingContext2D.prototype.clearRect;
    window.drawn = 0;
    CanvasRenderingContext2D.prototype.clearRect = function (...box) {
        drawn += 1;
        return clear.apply(this, box);
    };
}"""
COUNTERS = {"ThreadTime": "all", "ScriptDuration": "script", "LayoutDuration": "layout", "RecalcStyleDuration": "style"}


def live_row(step: int, charts: int) -> dict[str, Any]:
    """A step with numbers of the task: with the usual five and that of the epochs they are as many ``charts``."""
    noise = lambda n: math.sin(12.9898 * (step + 17 * n)) * 43758.5453 % 1  # noqa: E731 - the same in every run
    scalars = {f"head{n}": 2 / (1 + step / 300) + noise(n) / 5 for n in range(charts - 6)}
    usual = {
        "loss": 2 / (1 + step / 300) + noise(20) / 5,
        "grad_norm": 1 + noise(21),
        "samples_per_s": 900 + 50 * noise(22),
    }
    return {
        **step_row(step),
        **usual,
        "lr": 1e-3 * math.cos(step / 9000),
        "data_wait_share": noise(23) / 9,
        "scalars": scalars,
    }


def rank_row(step: int, ranks: int) -> dict[str, Any]:
    state = {"step_s": 0.1 + step % 3 / 100, "own_s": 0.1, "wait_s": 0.01, "memory_gb": 1.0, "peak_gb": 2.0}
    return {"step": step, "attempt": 1, "slow_rank": None, "ranks": [{"rank": n, **state} for n in range(ranks)]}


@contextmanager
def training(run: RunDir, step: int, charts: int, rate: float) -> Iterator[None]:
    """``rate`` rows a second, as of a run that logs every step."""
    over = threading.Event()

    def write() -> None:
        heartbeat, at, began = Heartbeat(), step, time.monotonic()
        heartbeat.start(run.heartbeat_file)
        while not over.wait(max(0.0, began + (at + 1 - step) / rate - time.monotonic())):
            at += 1
            run.append_step(live_row(at, charts))
            heartbeat.beat(at, None)
        heartbeat.stop()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


@contextmanager
def tab(browser: Browser, viewport: dict[str, int] = USUAL) -> Iterator[Page]:
    context = browser.new_context(viewport=viewport)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    try:
        yield page
    finally:
        context.close()


def counters(cdp: CDPSession) -> dict[str, float]:
    found = {one["name"]: one["value"] for one in cdp.send("Performance.getMetrics")["metrics"]}
    return {short: found[name] for name, short in COUNTERS.items()}


def live(browser: Browser, server: Server, name: str, given: argparse.Namespace) -> dict[str, float]:
    """Shares of the page's thread while a run is watched, and how often its charts are drawn."""
    with tab(browser, TALL) as page:
        page.goto(f"{server.base}/#token={server.token}")
        page.get_by_role("button", name="New run").wait_for()
        page.evaluate("name => { location.hash = `#/run/${name}/charts` }", name)
        page.wait_for_function("count => document.querySelectorAll('.plot canvas').length >= count", arg=given.charts)
        page.wait_for_timeout(3000)
        drawn_charts = int(page.evaluate("document.querySelectorAll('.plot canvas').length"))
        assert drawn_charts == given.charts, drawn_charts
        page.evaluate(COUNT_DRAWINGS)
        cdp = page.context.new_cdp_session(page)
        cdp.send("Performance.enable", {"timeDomain": "threadTicks"})
        if given.profile:
            cdp.send("Profiler.enable")
            cdp.send("Profiler.setSamplingInterval", {"interval": 500})
            cdp.send("Profiler.start")
        before, began = counters(cdp), time.perf_counter()
        page.wait_for_timeout(1000 * given.live_s)
        after, took = counters(cdp), time.perf_counter() - began
        if given.profile:
            show(cdp.send("Profiler.stop")["profile"])
        drawn = page.evaluate("drawn")
    shares = {f"{what} share": (after[what] - before[what]) / took for what in after}
    return {**shares, "drawings of a chart per s": drawn / given.charts / took}


def show(profile: dict[str, Any]) -> None:
    """Print where the page's thread was."""
    nodes = {node["id"]: node["callFrame"] for node in profile["nodes"]}
    spent: Counter[str] = Counter()
    for node, micros in zip(profile["samples"], profile["timeDeltas"], strict=True):
        frame = nodes[node]
        spent[
            f"{frame['functionName'] or '(anonymous)'} {frame['url'].rpartition('/')[2][:12]}:{frame['lineNumber']}"
        ] += micros
    total = sum(spent.values())
    for what, micros in spent.most_common(40):
        print(f"{100 * micros / total:6.2f} %  {what}")


def visits(browser: Browser, server: Server) -> dict[str, float]:
    """Seconds until the form has its fields, and until a run can be started: while the studio starts, and later."""
    found = {}
    for what in (("visit while the studio starts",), ("first visit", "second visit")):
        with tab(browser) as page:
            for visit in what:
                page.goto("about:blank")
                began = time.perf_counter()
                page.goto(f"{server.base}/#token={server.token}", wait_until="commit")
                page.get_by_role("button", name="New run").click()
                page.get_by_label("Learning rate", exact=True).wait_for()
                found[f"{visit}: fields, s"] = time.perf_counter() - began
                page.locator("button.primary:not([aria-disabled])", has_text=re.compile("^Run$")).wait_for()
                found[f"{visit}: Run, s"] = time.perf_counter() - began
    return found


def first_chart(browser: Browser, server: Server, name: str, title: str) -> float:
    """Seconds from the address of a run's charts until that one is drawn."""
    with tab(browser) as page:
        page.goto(f"{server.base}/#token={server.token}")
        page.get_by_role("button", name="New run").wait_for()
        page.wait_for_load_state("networkidle")
        began = time.perf_counter()
        page.evaluate("name => { location.hash = `#/run/${name}/charts` }", name)
        page.wait_for_function("title => document.querySelector(`figure[aria-label='${title}'] canvas`)", arg=title)
        return time.perf_counter() - began


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def many_metrics(folder: Path, steps: int) -> None:
    run = make_run(folder, 500)
    rows = (
        {**step_row(at), "scalars": {f"layer{n % 25}/metric_{n}": at + n for n in range(500)}}
        for at in range(1, steps + 1)
    )
    write_rows(run.steps_file, rows)


def many_ranks(folder: Path, ranks: int, rows: int) -> None:
    run = make_run(folder, 1024)
    write_rows(run.steps_file, [step_row(1)])
    write_rows(run.ranks_file, (rank_row(at, ranks) for at in range(1, rows + 1)))


@contextmanager
def imported_from(source: Path) -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(source.resolve())
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def measure(browser: Browser, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    wide = folder / "wide"
    many_metrics(wide, 200)
    many_ranks(wide, 1024, 50)
    rows: dict[Path, list[dict[str, float]]] = {source: [] for source in given.source}
    for _ in range(given.repeats):
        for source in given.source:
            with imported_from(source):
                rows[source].append(measure_once(browser, folder / "live", wide, given))
    return {str(source): medians(found) for source, found in rows.items()}


def measure_once(browser: Browser, folder: Path, wide: Path, given: argparse.Namespace) -> dict[str, float]:
    shutil.rmtree(folder, ignore_errors=True)
    run = make_run(folder, 1, status="running")
    write_rows(run.steps_file, (live_row(step, given.charts) for step in range(1, given.steps + 1)))
    with serving(folder) as server, training(run, given.steps, given.charts, given.rate):
        found = live(browser, server, run.path.name, given)
    if given.profile:
        return found
    with serving(wide) as server:
        found |= visits(browser, server)
        found["500 metrics: first chart, s"] = first_chart(browser, server, "run-000001f4", "Loss")
        found["1,024 ranks: first chart, s"] = first_chart(browser, server, "run-00000400", "Step time per rank")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, action="append", help="where lockstep is imported from; may be repeated")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--charts", type=int, default=17, help="of the live run")
    parser.add_argument("--rate", type=float, default=10.0, help="its rows a second")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--live-s", type=float, default=20.0)
    parser.add_argument("--profile", action="store_true", help="print where the thread was, and measure nothing else")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    given = parser.parse_args()
    given.source = given.source or [SOURCE]
    report: dict[str, Any] = {**header(), "repeats": given.repeats, "steps": given.steps}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.chromium, args=FLAGS)
        report["results"] = measure(browser, Path(folder), given)
        browser.close()
    sizes = f"{given.steps} steps before the page is opened, {given.charts} charts, {given.rate:g} rows/s"
    publish(report, "The page's costs", sizes, given.out)


if __name__ == "__main__":
    main()
