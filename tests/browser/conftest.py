"""A browser for each test, and the studio in a network that leads nowhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Response, ViewportSize, sync_playwright

from tests.browser.where import BROWSER_FLAGS, Network, Studio, closed_network, find_browser
from tests.gloo import ROOT

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

    def open_page(url: str, viewport: ViewportSize = WIDE, refused: str | None = None, **context: object) -> Page:
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


def refusals(answer: Response, expected: str | None) -> list[str]:
    fine = answer.status < 400 or urlsplit(answer.url).path == expected
    return [] if fine else [f"{answer.status} {answer.url}"]


def foreign(url: str) -> list[str]:
    parts = urlsplit(url)
    ours = parts.scheme in {"data", "blob"} or parts.hostname == "127.0.0.1"
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


def picture(page: Page, name: str) -> None:
    """Write ``docs/images/studio-<name>.png``, when the variable SCREENSHOTS asks for it."""
    if os.environ.get("SCREENSHOTS"):
        page.wait_for_timeout(500)
        page.screenshot(path=ROOT / "docs" / "images" / f"studio-{name}.png")
