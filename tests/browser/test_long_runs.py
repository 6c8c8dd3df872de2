"""Curves of more points than a page draws: thinned out, and in full where they are zoomed. Needs Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import PATIENCE_MS, OpenPage
from tests.browser.gpus import DEVICES
from tests.browser.runs import make_run
from tests.browser.where import Network
from tests.studio.serving import studio

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def network() -> Network:
    return Network(None)


@pytest.mark.drill
def test_a_long_run_is_thinned_out_until_it_is_zoomed(open_page: OpenPage, tmp_path: Path) -> None:
    steps = 150_000
    run = make_run(tmp_path / "runs", "endless", "completed", steps=steps)
    with studio(tmp_path, DEVICES) as address:
        page = open_page(address.url)
        delay: list[bool] = []
        late: list[Route] = []
        page.route(re.compile("/rows[?]"), lambda route: late.append(route) if delay else route.continue_())
        page.get_by_role("link", name=re.compile("^endless")).click()
        note = page.get_by_text(re.compile(r"down-sampled: [\d,]+ of 150,000 points"))
        expect(note).to_be_visible()
        loss = page.get_by_role("img", name=re.compile("^Loss against step: loss"))
        assert 1000 < int(loss.get_attribute("data-points") or 0) <= 5_000
        # What comes later is appended in full.
        run.append_step({"attempt": 1, "step": steps + 1, "epoch": 9, "loss": 0.25})
        newest = page.get_by_role("img", name=re.compile("^Loss against step: loss 0.25 at step 150,001"))
        expect(newest).to_have_attribute("data-shown", re.compile(" 150001$"))
        whole, thinned = (loss.get_attribute(f"data-{what}") or "" for what in ("shown", "points"))
        loss.focus()
        for _ in range(7):
            page.keyboard.press("+")
        part = loss.get_attribute("data-shown") or ""
        low, high = (float(end) for end in part.split())
        every_step = range(int(high - low) - 1, int(high - low) + 2)
        expect(loss).to_have_attribute("data-points", re.compile("|".join(f"^{count}$" for count in every_step)))
        # Another scale shows the same part, and the end of the zoom all again.
        page.get_by_label("Log scale").check()
        expect(page.get_by_role("figure", name="Loss", exact=True)).to_contain_text("log scale")
        page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        expect(loss).to_have_attribute("data-shown", part)
        loss.focus()
        page.keyboard.press("0")
        expect(loss).to_have_attribute("data-shown", whole)
        expect(loss).to_have_attribute("data-points", thinned)

        # An answer that comes after the end of the zoom changes nothing.
        delay.append(True)
        loss.focus()
        page.keyboard.press("+")
        page.keyboard.press("0")
        for _ in range(PATIENCE_MS // 100):
            if late:
                break
            page.wait_for_timeout(100)
        delay.clear()
        late.pop().continue_()
        page.wait_for_load_state("networkidle")
        run.append_step({"attempt": 1, "step": steps + 2, "epoch": 9, "loss": 0.125})
        newest = page.get_by_role("img", name=re.compile("^Loss against step: loss 0.125 at step 150,002"))
        expect(newest).to_have_attribute("data-points", str(int(thinned) + 1))
