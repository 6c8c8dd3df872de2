"""Every point of a chart is where the run folder says, on every axis: what the server sends, as the page places it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page

from lockstep.config import resolve
from lockstep.rundir.files import write_json
from lockstep.rundir.folder import RunDir
from lockstep.studio import tailing
from lockstep.studio.tailing import Feed, Subscription
from tests.browser.conftest import OpenPage
from tests.studio.serving import Address

#: By stream and axis, [its name, the place of each point], from the messages of a run.
PLACED = """async (messages) => {
    const { axisOf, Stream } = await import('/static/app/columns.js');
    const streams = new Map();
    let [rows, perEpoch] = [[], null];
    for (const message of messages) {
        if (message.type === 'epochs') [rows, perEpoch] = [message.epochs, message.steps_per_epoch];
        else if (message.kind === 'history') streams.set(message.stream, new Stream(message));
        else streams.get(message.stream).append(message);
    }
    const steps = streams.get('steps');
    const points = { steps: [...(steps?.column('step') ?? [])], epochs: rows.map(({ step }) => step) };
    return Object.fromEntries(['step', 'samples', 'epoch', 'time'].map((kind) => {
        const { against, place } = axisOf(kind, [steps, streams.get('evaluations')], rows, perEpoch);
        return [kind, { against, steps: points.steps.map(place), epochs: points.epochs.map(place) }];
    }));
}"""


@pytest.fixture
def browser(shared_browser: Browser) -> Browser:
    return shared_browser


@dataclass(frozen=True)
class State:
    step: int = 0
    samples: int = 0
    epoch: int = 0
    position: int = 0


def train(
    run: RunDir, state: State, attempt: int, steps: int, batch: int, size: int, every: int, speed: float
) -> State:
    """Write what an attempt of ``steps`` steps writes, ended within an epoch or at its end."""
    rows = [row for row in run.epochs() if row["step"] <= state.step]
    for number in range(1, steps + 1):
        state = replace(state, step=state.step + 1, samples=state.samples + min(batch, size - state.position))
        state = replace(state, position=min(size, state.position + batch))
        place: dict[str, Any] = {"attempt": attempt, "step": state.step, "epoch": state.epoch + 1}
        place["samples_seen"] = state.samples
        if state.step % every == 0:
            run.append_step({**place, "loss": 1.0, "samples_per_s": speed})
        ended = state.position == size
        if ended or number == steps:
            rows = [row for row in rows if row["epoch"] != place["epoch"]]
            rows.append({**place, "val_loss": 0.5} | ({} if ended else {"complete": False}))
            run.write_epochs(rows)
        if ended:
            state = replace(state, epoch=state.epoch + 1, position=0)
    return state


def check(run: RunDir, placed: dict[str, Any], size: int, per_epoch: int | None) -> None:
    steps, epochs = run.steps(), run.epochs()
    assert placed["step"]["steps"] == [row["step"] for row in steps]
    assert placed["step"]["epochs"] == [row["step"] for row in epochs]
    if steps or epochs:
        assert placed["samples"]["steps"] == pytest.approx([row["samples_seen"] for row in steps], rel=1e-12)
        assert placed["samples"]["epochs"] == pytest.approx([row["samples_seen"] for row in epochs], rel=1e-12)
    seconds, before = [], (0, 0.0)
    for row in steps:
        before = (row["samples_seen"], before[1] + (row["samples_seen"] - before[0]) / row["samples_per_s"])
        seconds.append(before[1])
    assert placed["time"]["against"] == ("training time (s)" if steps else "step")
    if steps:
        assert placed["time"]["steps"] == pytest.approx(seconds, rel=1e-9)
    known = per_epoch or any(row.get("complete", True) for row in epochs)
    assert placed["epoch"]["against"] == ("epoch" if known else "step")
    for kind, rows in (("steps", steps), ("epochs", epochs)) if known else ():
        for row, place in zip(rows, placed["epoch"][kind], strict=True):
            assert row["epoch"] - 1 < place <= row["epoch"] + 1e-9
            if kind == "epochs" and row.get("complete", True):
                assert place == row["epoch"]
            elif kind == "steps" and row["samples_seen"] == size * row["epoch"]:
                assert place == pytest.approx(row["epoch"])


attempts = st.tuples(
    st.integers(1, 30),  # steps
    st.integers(1, 9),  # batch
    st.sampled_from([20.0, 3.0, 700.0]),  # samples per second
    st.floats(0, 1),  # which of the states until here it resumes from
)


def test_every_point_is_where_the_run_folder_says(
    machine_with_gpus: Address, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_page(machine_with_gpus.url)
    page.wait_for_load_state("networkidle")
    monkeypatch.setattr(tailing, "TICK_S", 0)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(attempts, min_size=1, max_size=4), st.integers(5, 40), st.integers(1, 7), st.booleans())
    def placed(parts: list[tuple[int, int, float, float]], size: int, every: int, sized: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = RunDir.create(Path(folder) / "run", resolve(), run_id="run-0000000a", command=["lockstep"])
            follow, messages, states = Subscription(Feed(run, "run-0000000a")), [], [State()]
            per_epoch = None
            for steps, batch, speed, share in parts:
                state = states[round(share * (len(states) - 1))]
                per_epoch = -(-size // batch) if sized else None
                plan = {"decisions": {}, "steps_per_epoch": per_epoch}
                attempt = run.begin_attempt(plan, {"devices": ["cpu"]}, resumed_from_step=state.step)
                states = [one for one in states if one.step <= state.step]
                states.append(train(run, state, attempt, steps, batch, size, every, speed))
                messages += [one if isinstance(one, dict) else json.loads(one) for one in follow.news()]
            check(run, page.evaluate(PLACED, messages), size, per_epoch)

    placed()


def csv_of(page: Page, title: str) -> list[list[float]]:
    """The rows of the file that a chart's menu saves."""
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Download CSV of {title}", exact=True).click()
    lines = download.value.path().read_text().splitlines()
    return [[float(cell) for cell in line.split(",")] for line in lines[1:]]


def test_the_charts_and_their_files_have_those_places(machine_with_gpus: Address, open_page: OpenPage) -> None:
    """Four epochs of 28 steps, logged every 50, were shown as three, from 1.19 on."""
    runs = Path(machine_with_gpus.get("/api/studio")["runs_dir"])
    run = RunDir.create(runs / "run-0000cafe", resolve(), run_id="run-0000cafe", command=["lockstep"])
    run.begin_attempt({"decisions": {}, "steps_per_epoch": 28}, {"devices": ["cpu"]})
    end = train(run, State(), attempt=1, steps=112, batch=16, size=440, every=50, speed=100.0)
    assert asdict(end) == {"step": 112, "samples": 1760, "epoch": 4, "position": 0}
    run.update(status="completed")
    page = open_page(machine_with_gpus.url)
    page.get_by_role("button", name="New run").wait_for()
    page.evaluate("location.hash = '#/run/run-0000cafe/charts?x=epoch'")
    page.get_by_role("img", name="Loss per epoch against epoch").wait_for()
    assert csv_of(page, "Loss per epoch") == [[1, 0.5], [2, 0.5], [3, 0.5], [4, 0.5]]
    assert csv_of(page, "Loss") == [[pytest.approx(50 / 28), 1], [pytest.approx(100 / 28), 1]]
    page.get_by_label("X axis").select_option("samples")
    assert csv_of(page, "Loss per epoch") == [[440, 0.5], [880, 0.5], [1320, 0.5], [1760, 0.5]]
    page.get_by_label("X axis").select_option("training time (s)")
    assert csv_of(page, "Loss") == [[7.92, 1], [15.76, 1]]
    # Many rows are thinned out for the chart, and whole in the file.
    with run.steps_file.open("a") as file:
        rows = ({"attempt": 1, "step": step, "epoch": 5, "loss": float(step)} for step in range(113, 6113))
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    write_json(run.plan_file, {"decisions": {}, "steps_per_epoch": None})
    page.get_by_label("X axis").select_option("step")
    page.get_by_text("down-sampled").wait_for()
    assert csv_of(page, "Loss")[2:] == [[step, step] for step in range(113, 6113)]
