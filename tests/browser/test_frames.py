"""What the server packs, the page unpacks: any history, followed by any deltas. Needs Chromium."""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser

from lockstep.studio.tailing import Columns, columns_of, pack
from tests.browser.conftest import OpenPage
from tests.studio.serving import Address

UNPACK = """async (frames) => {
    const { decode, Stream } = await import('/static/app/columns.js');
    let stream = null;
    for (const frame of frames) {
        const bytes = Uint8Array.from(atob(frame), (letter) => letter.charCodeAt(0));
        const { header, columns } = decode(bytes.buffer);
        if (header.kind === 'history') stream = new Stream(header, columns);
        else stream.append(header, columns);
    }
    const plain = (values) => [...values].map((value) => (Number.isNaN(value) ? null : value));
    return Object.fromEntries([stream.x, ...stream.names()].map((name) => [name, plain(stream.column(name))]));
}"""

values = st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = st.lists(st.dictionaries(st.sampled_from(["loss", "lr", "scalars.f1"]), values, max_size=3), max_size=12)


@pytest.fixture
def browser(shared_browser: Browser) -> Browser:
    return shared_browser


def test_any_history_and_deltas_arrive_as_they_were_sent(machine_with_gpus: Address, open_page: OpenPage) -> None:
    page = open_page(machine_with_gpus.url)
    page.wait_for_load_state("networkidle")

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.lists(rows, min_size=1, max_size=4))
    def arrives(parts: list[list[dict[str, Any]]]) -> None:
        held, frames, step, names = Columns("step"), [], 0, set[str]()
        for number, part in enumerate(parts):
            steps = range(step, step + len(part))
            step += len(part)
            start = held.rows
            columns = columns_of([{"step": at, **row} for at, row in zip(steps, part, strict=True)], "step")
            names.update(columns)
            held.append(columns)
            sent, _ = held.part(start, held.rows)
            header = {
                "kind": "delta" if number else "history",
                "x": "step",
                "generation": 0,
                "rows": held.rows - start,
                "total": held.rows,
                "downsampled": False,
                "preview": False,
            }
            frames.append(base64.b64encode(pack(header, sent)).decode())
        expected = {n: [None if math.isnan(v) else v for v in held[n].astype(float).tolist()] for n in names}
        got = page.evaluate(UNPACK, frames)
        for name, column in expected.items():
            assert len(got.get(name, [])) == held.rows or all(value is None for value in column)
            for ours, theirs in zip(got.get(name, []), column, strict=False):
                assert ours == theirs or math.isclose(ours, theirs, rel_tol=1e-7)

    arrives()
