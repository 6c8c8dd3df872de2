"""A browser for each test, and the studio in a network that leads nowhere."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Response, ViewportSize, sync_playwright

from lockstep.rundir.files import write_json
from tests.browser.runs import make_run, runs_of
from tests.browser.where import BROWSER_FLAGS, Network, Studio, closed_network, find_browser
from tests.gloo import ROOT
from tests.studio.serving import Address

WIDE: ViewportSize = {"width": 1280, "height": 800}
NARROW: ViewportSize = {"width": 390, "height": 844}
PATIENCE_MS = 90_000


@pytest.fixture
def network() -> Iterator[Network]:
    with closed_network() as network:
        yield network


@pytest.fixture
def browser(network: Network, tmp_path: Path) -> Iterator[Browser]:
    with running_browser(network, tmp_path) as browser:
        yield browser


@contextmanager
def running_browser(network: Network, folder: Path) -> Iterator[Browser]:
    """Chromium in ``network``; skips the test where there is none."""
    path = find_browser()
    if path is None:
        message = "there is no chromium here: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=network.program(folder, path),
            args=list(BROWSER_FLAGS),
            timeout=PATIENCE_MS,
        )
        yield browser
        browser.close()


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """``open_page(url, viewport, refused=None, **context)``: a page of its own profile.

    The test fails when the page said something on the console, threw, asked another host, or was refused something at
    another address than ``refused``.
    """
    complaints: list[str] = []
    contexts: list[BrowserContext] = []

    def open_page(
        url: str, viewport: ViewportSize = WIDE, refused: str | re.Pattern[str] | None = None, **context: object
    ) -> Page:
        contexts.append(browser.new_context(viewport=viewport, **context))  # type: ignore[arg-type]
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(f"threw {error}"))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: complaints.extend(foreign(request.url)))
        page.on("response", lambda answer: complaints.extend(refusals(answer, refused)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    # Refusals are told with their address; a server that was killed on purpose is not the page's fault.
    left = [line for line in complaints if not re.search("Failed to load resource|WebSocket connection", line)]
    assert not left, left


def refusals(answer: Response, expected: str | re.Pattern[str] | None) -> list[str]:
    fine = answer.status < 400 or re.fullmatch(expected or "-", urlsplit(answer.url).path)
    return [] if fine else [f"{answer.status} {answer.url}"]


def foreign(url: str) -> list[str]:
    parts = urlsplit(url)
    ours = parts.scheme in {"data", "blob", "file", "about"} or parts.hostname == "127.0.0.1"
    return [] if ours else [f"asked {url}"]


@pytest.fixture
def studio(network: Network, tmp_path: Path) -> Iterator[Studio]:
    """The command `lockstep studio`, started, in a folder of its own."""
    studio = Studio(tmp_path, network)
    try:
        studio.start()
        yield studio
    finally:
        studio.stop()
        studio.end_runs()


@pytest.fixture(scope="session")
def machine_with_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A studio on a machine with three GPUs, which all tests share; its helper process runs already."""
    folder = tmp_path_factory.mktemp("page")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.browser.gpus", str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        address = Address(process.stdout.readline().strip())
        try:
            address.get("/api/tasks")
            yield address
        finally:
            process.stdin.close()
            process.wait()


@pytest.fixture(scope="module")
def shared_browser(machine_with_gpus: Address, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for the tests of a module, in the usual network, since that studio is a process beside this one.

    Its helper processes start with their first use: they are not the test's that comes first. After some minutes it
    starts others, so it does not live for the session.
    """
    with running_browser(Network(None), tmp_path_factory.mktemp("browser")) as browser:
        page = browser.new_page()
        page.goto(machine_with_gpus.url)
        page.get_by_role("button", name="New run").wait_for(timeout=PATIENCE_MS)
        page.screenshot()
        page.close()
        yield browser


@pytest.fixture
def server(machine_with_gpus: Address) -> Address:
    """That studio, with a run of each fate and no other."""
    runs = runs_of(machine_with_gpus)
    for folder in [*runs.glob("*"), *runs.glob(".studio/starts/*")]:
        if folder.name != ".studio":
            shutil.rmtree(folder)
    make_run(runs, "first", "completed", final_metrics={"test_accuracy": 0.91}, tags=["baseline"])
    broken = make_run(runs, "second", "failed", error="rank 1 ran out of memory\nfix: a smaller batch")
    broken.append_step({"attempt": 1, "step": 41, "epoch": 4, "loss": float("nan"), "grad_norm": float("inf")})
    lost = make_run(runs, "third", "running")
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    beat = {"step": 30, "total": 40, "counter": 3, "pid": gone.pid, "created": 1.0, "host": socket.gethostname()}
    write_json(lost.heartbeat_file, {**beat, "updated": time.time() - 60})
    return machine_with_gpus


def open_form(page: Page) -> Page:
    """The form of a new run, and its page."""
    button = page.get_by_role("button", name="New run")
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    return page


def rows(page: Page) -> Locator:
    """The rows of the table of runs."""
    return page.get_by_role("table", name="Runs").locator("tbody tr")
