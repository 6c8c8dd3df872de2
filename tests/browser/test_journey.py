"""A person trains on two ranks, loses the studio, stops, goes on with one rank and compares. Needs Chromium."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import PATIENCE_MS, OpenPage, open_form
from tests.browser.where import Network, Studio

expect.set_options(timeout=PATIENCE_MS)


def curve(page: Page, name: str) -> Locator:
    return page.get_by_role("img", name=re.compile(f"^{name} against"))


def last_step(page: Page) -> int:
    """Where the curve of the loss ends."""
    label = curve(page, "Loss").get_attribute("aria-label") or ""
    found = re.search(r"at step ([\d,]+)", label)
    return int(found.group(1).replace(",", "")) if found else 0


def wait_for_a_later_step(page: Page, step: int) -> int:
    """The end of the curve once it is beyond ``step``."""
    waits = PATIENCE_MS // 100
    for _ in range(waits):
        if curve(page, "Loss").count() and last_step(page) > step:
            return last_step(page)
        page.wait_for_timeout(100)
    raise AssertionError(f"the curve did not go beyond step {step}")


def open_group(page: Page, title: str) -> None:
    page.get_by_role("dialog", name="Configuration").get_by_text(title, exact=True).click()


@pytest.mark.timeout(600)
def test_from_ticking_devices_to_comparing_runs(studio: Studio, open_page: OpenPage, network: Network) -> None:
    page = open_page(studio.url)
    expect(page.get_by_role("dialog", name="Configuration")).to_be_visible()  # at a first visit
    state = page.get_by_role("region", name="State")
    run = page.get_by_role("button", name="Run", exact=True)

    # Devices: the CPU is pre-ticked; without a tick nothing can run, and the page says why.
    cpu = page.get_by_role("checkbox", name="CPU")
    expect(cpu).to_be_checked()
    cpu.uncheck()
    expect(run).to_be_disabled()
    expect(page.get_by_text("no device is selected").first).to_be_visible()
    cpu.check()
    page.get_by_label("Number of ranks").fill("2")
    expect(page.get_by_text("Effective batch size: 64 (32 × 2 CPU ranks)")).to_be_visible()

    page.get_by_label("Name", exact=True).fill("long")
    page.get_by_label("Epochs", exact=True).fill("500")
    page.get_by_label("Early stopping patience").fill("0")
    open_group(page, "Logging")
    page.get_by_label("Log interval").fill("2")
    open_group(page, "Command and YAML")
    expect(page.get_by_label("Command", exact=True)).to_contain_text("lockstep train har --devices cpu,cpu")
    expect(page.get_by_label("YAML", exact=True)).to_contain_text("epochs: 500")
    run.click()

    # It runs, and the curves move.
    expect(state.get_by_text("running", exact=True)).to_be_visible()
    step = wait_for_a_later_step(page, 0)
    step = wait_for_a_later_step(page, step)
    expect(state.get_by_role("progressbar")).to_be_visible()
    for name in ("Learning rate", "Throughput", "Data wait"):
        expect(curve(page, name)).to_be_visible()
    expect(page).to_have_title(re.compile(r"^[\d.]+ % long – "))

    # A reload shows the same run; so does a studio that was killed and started again.
    page.reload()
    step = wait_for_a_later_step(page, step)
    studio.kill()
    expect(page.get_by_text("The studio does not answer. Runs continue without it")).to_be_visible()
    studio.start()
    expect(page.get_by_text("The studio does not answer. Runs continue without it")).to_be_hidden()
    step = wait_for_a_later_step(page, step)

    # Stopped with a checkpoint, it goes on with one rank.
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(state.get_by_text("The run was stopped.")).to_be_visible()
    page.get_by_role("button", name=re.compile("^Resume from step ")).click()
    dialog = page.get_by_role("dialog", name="Resume run")
    dialog.get_by_label("Number of ranks").fill("1")
    dialog.get_by_role("button", name="Resume").click()
    expect(state.get_by_text("running", exact=True)).to_be_visible()
    expect(state.get_by_role("definition").filter(has_text="attempt 2")).to_be_visible()
    wait_for_a_later_step(page, step)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(state.get_by_text("The run was stopped.")).to_be_visible()

    # A second run, to its end.
    open_form(page)
    page.get_by_label("Name", exact=True).fill("short")
    page.get_by_label("Number of ranks").fill("1")
    page.get_by_label("Maximum steps").fill("12")
    expect(run).to_be_enabled()
    run.click()
    expect(state.get_by_role("columnheader", name="Test")).to_be_visible()

    # Both, laid over each other.
    page.get_by_role("link", name="← Runs").click()
    page.get_by_role("checkbox", name="Select long").check()
    page.get_by_role("checkbox", name="Select short").check()
    page.get_by_role("link", name="Compare 2").click()
    differences = page.get_by_role("region", name="Differences in configuration")
    expect(differences.get_by_role("row", name=re.compile("training.max_steps"))).to_be_visible()
    curves = page.get_by_role(
        "img", name=re.compile("^Loss against step: .*long.*short|^Loss against step: .*short.*long")
    )
    expect(curves).to_be_visible()
