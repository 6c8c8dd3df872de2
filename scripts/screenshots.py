"""Takes the pictures of the page tour from real runs in Chromium, light and dark: ``python -m scripts.screenshots``.

Starts the studio in a temporary folder, trains two runs of ``har`` on the CPU, and writes
``docs/images/tour-*-{light,dark}.png``. Takes about a minute; needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.where import BROWSER_FLAGS, Network, Studio, find_browser

ROOT = Path(__file__).resolve().parents[1]
WAIT_MS = 120_000


def tour(pages: dict[str, Page], out: Path) -> None:
    """Start two runs, and take each picture in both modes."""

    def take(name: str) -> None:
        for mode, page in pages.items():
            page.wait_for_timeout(700)  # animations
            page.screenshot(path=out / f"tour-{name}-{mode}.png")

    light = pages["light"]
    for page in pages.values():
        fill_form(page, "two ranks", ranks=2, epochs=12)
    take("form")
    light.get_by_role("button", name="Run", exact=True).click()
    pages["dark"].keyboard.press("Escape")  # closes the form
    pages["dark"].get_by_role("link", name="two ranks").first.click()
    for page in pages.values():
        expect(page.locator("main")).to_contain_text("running")
        expect(page.get_by_role("figure", name="Loss", exact=True)).to_be_visible()
        expect(page.get_by_text("Epoch", exact=False).first).to_be_visible()
    light.wait_for_timeout(6000)
    take("running")
    for page in pages.values():
        expect(page.get_by_role("columnheader", name="Test")).to_be_visible()
    take("completed")

    for page in pages.values():
        page.get_by_role("link", name="← Runs").click()
    fill_form(light, "one rank", ranks=1, epochs=6)
    light.get_by_role("button", name="Run", exact=True).click()
    expect(light.get_by_role("columnheader", name="Test")).to_be_visible()
    light.get_by_role("link", name="← Runs").click()
    for page in pages.values():
        for name in ("two ranks", "one rank"):
            page.get_by_role("checkbox", name=f"Select {name}").check()
        page.get_by_role("link", name="Compare 2").click()
        expect(page.get_by_role("region", name="Differences in configuration")).to_be_visible()
    take("compare")


def fill_form(page: Page, name: str, *, ranks: int, epochs: int) -> None:
    button = page.get_by_role("button", name="New run")
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Number of ranks").fill(str(ranks))
    page.get_by_label("Epochs", exact=True).fill(str(epochs))
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="where to write the pictures")
    out = parser.parse_args().out
    browser_path = find_browser()
    if browser_path is None:
        print("error: there is no chromium here. fix: apt-get install chromium", file=sys.stderr)
        return 2
    expect.set_options(timeout=WAIT_MS)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        studio = Studio(Path(folder), Network(None))
        studio.start()
        try:
            browser = playwright.chromium.launch(executable_path=browser_path, args=list(BROWSER_FLAGS))
            pages = {}
            for mode in ("light", "dark"):
                context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=mode)
                pages[mode] = context.new_page()
                pages[mode].set_default_timeout(WAIT_MS)
                pages[mode].goto(studio.url)
            tour(pages, out)
            browser.close()
        finally:
            studio.stop()
            studio.end_runs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
