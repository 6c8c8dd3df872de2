"""The page at rest: devices and labels, the list of runs, the keyboard, accessibility. Needs Chromium."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from playwright.sync_api import Browser, Page, Route, ViewportSize, WebSocketRoute, expect

from lockstep.checkpoint.manifest import folder_name
from lockstep.rundir.files import write_json
from lockstep.rundir.folder import RunDir
from lockstep.studio.home import Home
from tests.browser.conftest import NARROW, PATIENCE_MS, WIDE, OpenPage, open_form, rows
from tests.browser.runs import add_sample, make_run, runs_of
from tests.hardware.machines import machine
from tests.studio.serving import TOY, Address, start_studio, studio

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def browser(shared_browser: Browser) -> Browser:
    return shared_browser


#: The page's WebSocket opens when ``openLive`` is called.
LATE_SOCKET = """window.WebSocket = class extends WebSocket {
    set onopen(open) {
        super.onopen = (event) => (window.openLive = () => open(event));
    }
};"""


#: Keeps the text of every frame, through reloads.
FRAMES = """(() => {
    const frames = JSON.parse(sessionStorage.frames ?? '[]');
    const look = () => {
        const text = document.body?.innerText ?? '';
        if (text !== frames.at(-1)) frames.push(text);
        sessionStorage.frames = JSON.stringify(frames);
        requestAnimationFrame(look);
    };
    look();
})()"""


def test_a_first_visit_asks_for_each_module_at_once_and_for_few_answers(server: Address, open_page: OpenPage) -> None:
    page = open_page("about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(f"{request.method} {urlsplit(request.url).path}"))
    page.add_init_script(LATE_SOCKET)
    page.add_init_script(FRAMES)
    page.goto(server.url)
    expect(page.get_by_role("status").filter(has_text="Loading runs…")).to_be_visible()
    frames = page.evaluate("JSON.parse(sessionStorage.frames)")
    assert any("Loading runs…" in text for text in frames)
    assert not [text for text in frames if "paste its token" in text], "the page with the token's field never shows"
    open_form(page)
    page.get_by_label("Search settings").fill("warm")
    expect(page.get_by_label("Warmup epochs")).to_be_visible()
    expect(page.get_by_label("Epochs", exact=True)).to_be_hidden()
    page.get_by_label("Search settings").fill("")
    expect(page.get_by_label("Learning rate", exact=True)).to_be_visible()
    run = page.get_by_role("button", name="Run", exact=True)
    expect(run).to_be_enabled()
    answers = [one for one in asked if "/static" not in one]
    assert len(answers) < 9, f"{answers} and the WebSocket"
    # Each module is named in the page, so that no import waits for another; later visits have them already.
    scripts = sorted(one.split()[1] for one in asked if one.endswith(".js"))
    preloads = page.locator('link[rel="modulepreload"]').evaluate_all(
        "all => all.map(({ href }) => new URL(href).pathname)"
    )
    assert scripts == sorted({*preloads, "/static/app/enter.js"})
    # The list of runs arrives after the plan, as on a slow machine: the plan is not made again.
    page.wait_for_function("Boolean(window.openLive)")
    page.evaluate("openLive()")
    expect(rows(page)).to_have_count(3)
    with page.expect_response("**/api/plan"):
        page.get_by_label("Name", exact=True).fill("x")
    assert asked.count("POST /api/plan") == 2, asked
    expect(page.get_by_text("Not found")).to_be_hidden()


@pytest.mark.slow
def test_the_token_leaves_the_address_and_a_new_one_is_asked_for(open_page: OpenPage, tmp_path: Path) -> None:
    with studio(tmp_path, []) as address:
        home = Home(tmp_path / "runs")
        address.get("/api/tasks")  # its helper process is not left in the middle of its start
        door = home.write_door(address.url)
        page = open_page(door.as_uri(), refused=re.compile("/.*"))
        train = page.get_by_role("region", name="Runs")
        expect(train).to_be_visible()
        assert page.url.rstrip("/") == address.base
        assert address.token not in page.evaluate("document.cookie + JSON.stringify([localStorage, sessionStorage])")
        seen = []
        while page.go_back() is not None:
            seen.append(page.url)
        assert not [url for url in seen if address.token in url]
        page.goto(address.url)  # once more, with a session
        expect(train).to_be_visible()
        assert address.token not in page.url
        page.goto("data:text/html,<a href='" + address.base + "'>studio</a>")
        page.get_by_role("link").click()  # a link elsewhere: without the cookie
        expect(train).to_be_visible()
        expect(page.get_by_role("dialog", name="Configuration")).to_be_visible()  # there are no runs yet
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Compare").click()
        expect(page.get_by_text("Choose two runs or more")).to_be_visible()
        token = home.token(new=True)  # which ends the page's connection
        expect(page.get_by_role("alert")).to_contain_text("token has changed")
        page.get_by_role("button", name="Enter the token").click()
        expect(page.get_by_text("your session has expired")).to_be_visible()
        for given in ("wrong", token):
            page.get_by_label("Token").fill(given)
            page.get_by_role("button", name="Open").click()
            if given == "wrong":
                expect(page.get_by_role("alert")).to_contain_text("not the studio's token")
        expect(page.get_by_role("heading", name="Compare")).to_be_visible()


def back(page: Page) -> None:
    page.get_by_role("link", name="← Runs").click()


@pytest.mark.slow
def test_every_fate_and_the_table_of_runs(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url)
    runs, state = page.get_by_role("region", name="Runs"), page.get_by_role("region", name="State")
    expect(rows(page)).to_have_count(3)

    runs.get_by_role("link", name="first").click()
    expect(
        state.get_by_role("table", name="Metrics").get_by_role("row", name=re.compile("^Accuracy – – 0.91"))
    ).to_be_visible()
    expect(state.get_by_text("Early stopping: it ended at step")).to_be_hidden()
    loss = state.get_by_role("img", name=re.compile("^Loss against step: loss 0.05 at step 40"))
    expect(loss).to_be_visible()
    state.get_by_label("Log scale").check()
    expect(state.get_by_role("figure", name="Loss", exact=True)).to_contain_text("log scale")
    assert "log=1" in page.url, "the link keeps it"
    zoom_and_back(page)
    state.get_by_label("X axis").select_option("epoch")
    expect(state.get_by_role("img", name=re.compile("^Loss against epoch: loss 0.05 at epoch"))).to_be_visible()
    with page.expect_download() as kept:
        page.get_by_role("button", name="Download CSV of Loss", exact=True).click()
    assert Path(kept.value.path()).read_text().splitlines()[-1].endswith(",0.05")
    for tab, text in (("Configuration", "lockstep train har"), ("Files", "steps.jsonl"), ("Log", "has no log yet")):
        state.get_by_role("tab", name=tab).click()
        expect(state.get_by_text(text).first).to_be_visible()
        if tab == "Files":
            expect(state.get_by_role("row", name=re.compile(r"steps.jsonl .*\d+:\d\d"))).to_be_visible()
    assert page.url.endswith("/log")
    state.get_by_role("tab", name="Evaluation").click()
    matrix = state.get_by_role("region", name="Test confusion")
    expect(matrix.get_by_role("row", name=re.compile("^sit 80.0 % 66.7 % 72.7 % 6$"))).to_be_visible()
    # The samples behind a cell: of the most frequent mistake, of the cell that is clicked, of the classes chosen.
    samples = matrix.get_by_role("table", name="Samples").locator("tbody tr")
    expect(samples).to_have_text(["3sit/d.pngsitwalk", "7sit/<b>.pngsitwalk"])
    matrix.get_by_title(re.compile("^walk as sit: 1 ")).click()
    expect(samples).to_have_text(["8walk/h.pngwalksit"])
    matrix.get_by_label("Predicted").select_option("walk")
    expect(samples).to_have_count(0)
    expect(matrix.get_by_role("region", name="Samples of a cell")).to_contain_text("the first 0 of 4 samples")
    expect(state.get_by_role("img", name="Samples, epoch 2")).to_have_js_property("complete", True)
    remarks = state.get_by_role("region", name="Remarks")
    expect(remarks).not_to_contain_text("sample: to be")
    heard = remarks.get_by_label("said: 'on'  heard: 'oh'")
    # Playing it would start Chromium's audio service, which outlives the test.
    assert heard.evaluate("it => fetch(it.src).then((answer) => answer.headers.get('content-type'))") == "audio/wav"
    # One slider for all: the chosen epoch beside the newest.
    state.get_by_role("slider", name="Epoch").fill("0")
    expect(remarks).to_contain_text("epoch 1sample: to beepoch 2said: 'on'")
    for epoch in (1, 2):
        expect(state.get_by_role("img", name=f"Samples, epoch {epoch}")).to_be_visible()

    back(page)
    runs.get_by_role("link", name="second").click()
    expect(state.get_by_label("Failure")).to_contain_text("fix: a smaller batch")
    expect(state.get_by_role("strong").filter(has_text="fix: a smaller batch")).to_be_visible()
    expect(state.get_by_role("img", name=re.compile("^Loss against step: loss not finite at step 41"))).to_be_visible()
    state.get_by_role("tab", name="Charts").click()
    expect(state.get_by_role("img", name=re.compile("^Gradient norm against step: .* 1 at step 40"))).to_be_visible()
    back(page)
    runs.get_by_role("link", name="third").click()
    expect(state.get_by_text("ended without a final status")).to_be_visible()
    back(page)
    expect(rows(page).nth(0).get_by_text("lost")).to_be_visible()

    filters = {"baseline": 1, "test_accuracy > 0.9": 1, "test_accuracy>.9 tag:no": 0, "status=failed": 1}
    for text, count in {**filters, "training.epochs = 4": 3, "": 3}.items():
        page.get_by_label("Search runs").fill(text)
        expect(rows(page)).to_have_count(count)
    page.get_by_label("Status", exact=True).select_option("failed")
    expect(rows(page)).to_have_count(1)
    page.get_by_label("Status", exact=True).select_option("")
    page.get_by_role("button", name="Name").click()
    expect(rows(page).nth(0)).to_contain_text("first")
    page.reload()
    expect(page.get_by_role("columnheader", name="Name")).to_have_attribute("aria-sort", "ascending")

    choose(page, "first", "Rename")
    page.get_by_role("dialog").get_by_label("Name").fill("renamed")
    page.get_by_role("dialog").get_by_role("button", name="Rename").click()
    choose(page, "renamed", "Edit tags")
    page.get_by_role("dialog").get_by_label("Tags").fill("one, two")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(runs.get_by_text("two", exact=True)).to_be_visible()
    page.get_by_label("Group by").select_option("status")
    expect(rows(page)).to_have_count(3)
    page.get_by_role("button", name="Status lost").click()
    expect(rows(page)).to_have_count(4)
    page.get_by_label("Group by").select_option("")
    choose(page, "renamed", "Duplicate")
    expect(page.get_by_label("Epochs", exact=True)).to_have_value("4")
    page.keyboard.press("Escape")
    for name in ("renamed", "second"):
        page.get_by_role("checkbox", name=f"Select {name}").check()
    page.get_by_role("button", name="Add tag…").click()
    page.get_by_role("dialog").get_by_label("Tag").fill("both")
    page.get_by_role("dialog").get_by_role("button", name="Add").click()
    expect(runs.get_by_text("both", exact=True)).to_have_count(2)
    page.get_by_role("checkbox", name="Select renamed").uncheck()
    page.get_by_role("button", name="Delete…").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(rows(page)).to_have_count(3)
    choose(page, "second", "Delete")
    page.get_by_role("dialog", name="Delete run").get_by_role("button", name="Delete").click()
    expect(rows(page)).to_have_count(2)
    assert len(list(runs_of(server).glob("*/run.json"))) == 2
    assert {run["name"] for run in server.get("/api/runs")["runs"]} == {"renamed", "third"}


@pytest.mark.slow
def test_runs_that_are_deleted_damaged_or_too_many(server: Address, open_page: OpenPage) -> None:
    made = [make_run(runs_of(server), f"{'x' * length}", "completed", steps=2) for length in range(20, 41)]
    page = open_page(server.url)
    boxes = page.get_by_role("checkbox", name=re.compile("^Select x"))
    expect(boxes).to_have_count(21)
    for run in made:
        page.get_by_role("checkbox", name=f"Select {run.read().name}", exact=True).check()
    chosen = page.get_by_role("group", name="Selected runs")
    compare = chosen.get_by_role("button", name="Compare")
    expect(compare).to_have_accessible_description("20 runs at most")
    boxes.first.uncheck()
    expect(chosen.get_by_role("link", name="Compare 20")).to_be_visible()

    deleted, damaged, *others = made[:-1]
    page.evaluate("ids => { location.hash = `#/compare/${ids}` }", f"{deleted.path.name},{others[0].path.name}")
    expect(page.get_by_role("region", name="Differences in configuration")).to_contain_text("name")
    shutil.rmtree(deleted.path)
    expect(page.get_by_text(f"No longer in this folder: {deleted.path.name}")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
    damaged.run_file.write_text("{")
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.get_by_role("status", name="Runs that cannot be shown")).to_contain_text(
        f"{damaged.run_file} is damaged"
    )
    expect(page.get_by_role("link", name="Compare 18")).to_be_visible()


PAINTED = """([title, share]) => {
    const figure = document.querySelector(`figure[aria-label="${title}"]`);
    const [over, canvas] = [figure?.querySelector('.u-over'), figure?.querySelector('canvas')];
    if (!over) return false;
    const colour = document.createElement('canvas').getContext('2d');
    document.body.style.setProperty('color', 'var(--series-1)');
    colour.fillStyle = getComputedStyle(document.body).color;
    document.body.style.removeProperty('color');
    colour.fillRect(0, 0, 1, 1);
    const line = colour.getImageData(0, 0, 1, 1).data;
    const [inner, outer] = [over.getBoundingClientRect(), canvas.getBoundingClientRect()];
    const x = (inner.x - outer.x + share * inner.width) * (canvas.width / outer.width);
    const { data } = canvas.getContext('2d').getImageData(Math.round(x), 0, 1, canvas.height);
    const far = (at) => [0, 1, 2, 3].reduce((sum, i) => sum + Math.abs(data[at + i] - line[i]), 0);
    return Array.from({ length: canvas.height }, (_, row) => far(4 * row)).some((distance) => distance < 60);
}"""


def test_a_loss_that_was_not_finite_is_a_gap_in_its_curve(server: Address, open_page: OpenPage) -> None:
    """But what is not measured at every step is joined."""
    run = make_run(runs_of(server), "with holes", "completed", steps=0)
    for step in range(1, 62):
        value = float("nan") if 21 <= step <= 41 else 1.0
        run.append_step({"attempt": 1, "step": step, "epoch": 1, "loss": value, "grad_norm": value})
    page = open_page(server.url)
    page.get_by_role("link", name="with holes").click()
    page.get_by_role("tab", name="Charts").click()
    for title, share in (("Gradient norm", 0.5), ("Loss", 0.1), ("Loss", 0.9)):
        page.wait_for_function(PAINTED, arg=[title, share])
    assert not page.evaluate(PAINTED, ["Loss", 0.5])
    for second in [*range(0, 300, 5), *range(900, 1200, 5)]:  # between them the run was stopped
        add_sample(run, second, 600.0)
    for share in (0.1, 0.9):
        page.wait_for_function(PAINTED, arg=["Power", share])
    assert not page.evaluate(PAINTED, ["Power", 0.5])


def test_evaluations_between_epochs_are_points_beside_the_epochs(server: Address, open_page: OpenPage) -> None:
    run = make_run(runs_of(server), "between", "completed", steps=20)
    rows = [{"attempt": 1, "step": step, "epoch": 1, "improved": False, "val_loss": 5.0} for step in (5, 25)]
    run.evaluations_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = open_page(server.url)
    page.get_by_role("link", name="between").click()
    chart = page.get_by_role("img", name=re.compile("^Loss per evaluation against step: .*Val loss 5 at step 25", re.I))
    expect(chart).to_be_visible()
    expect(chart).to_have_attribute("data-points", "4")  # two epochs' ends, at 10 and 20
    other = make_run(runs_of(server), "only ends", "completed", steps=20)
    run.update(final_metrics={"test_accuracy": 0.5, "test_loss": 2.0})
    other.update(final_metrics={"test_accuracy": 0.25, "test_loss": 3.0})
    page.evaluate("ids => { location.hash = `#/compare/${ids}` }", f"{run.path.name},{other.path.name}")
    # One legend for all charts.
    charts = page.get_by_role("group", name="Charts")
    keys = page.locator(".shared").get_by_role("button", name="between", exact=True)
    loss = charts.get_by_role("figure", name="Loss", exact=True)
    loss.locator(".u-over").hover()
    expect(loss.locator(".tip dt")).to_have_text([re.compile("between"), re.compile("only ends")])
    keys.click()
    loss.locator(".u-over").hover()
    expect(loss.locator(".tip dt")).to_have_text([re.compile("only ends")])
    keys.click()
    parallel = page.get_by_role("region", name="Parallel coordinates")
    expect(parallel.get_by_role("img", name=re.compile("test_accuracy.* of between, only ends"))).to_be_visible()
    expect(parallel.locator("polyline")).to_have_count(2)
    parallel.get_by_role("button", name="between").click()
    expect(parallel.locator("polyline.faint")).to_have_count(1)
    both = re.compile("^Val loss per evaluation against step: between 5 at step 25; only ends 1.5 at step 20", re.I)
    expect(page.get_by_role("img", name=both)).to_be_visible()


def test_each_device_of_a_node_has_its_line_and_it_moves(server: Address, open_page: OpenPage) -> None:
    run = RunDir.open(next(path.parent for path in runs_of(server).glob("*/run.json") if "first" in path.read_text()))
    for second in range(3):
        add_sample(run, second, 600.0)
    state = {"step_s": 0.1, "own_s": 0.1, "wait_s": 0.0, "memory_gb": 1.0, "peak_gb": 1.0, "reserved_gb": None}
    row = {"step": 1, "attempt": 1, "slow_rank": 777, "ranks": [{"rank": rank, **state} for rank in range(1500)]}
    (run.path / "ranks.jsonl").write_text(json.dumps(row) + "\n")
    page = open_page(server.url)
    page.get_by_role("link", name="first").click()
    page.get_by_role("tab", name="Charts").click()
    power = page.get_by_role("figure", name="Power").locator(".legend").get_by_role("button")
    expect(power).to_have_text([re.compile(f"gpu:{index} {600 + index} W") for index in range(11)])
    expect(page.get_by_role("figure", name="Utilisation").get_by_role("button").last).to_have_text("host 50 %")
    add_sample(run, 3, 650.0)
    expect(power.last).to_have_text("gpu:10 660 W")
    # More ranks than a chart can show, and more columns than the page can hold: it says so.
    expect(page.get_by_text(re.compile(r"32 of 1,3\d\d ranks"))).to_be_visible()
    expect(page.get_by_text("ranks has more columns than the page can show")).to_be_visible()
    step_time = page.get_by_role("figure", name="Step time per rank")
    expect(step_time.get_by_role("button", name=re.compile("rank 777 – straggler"))).to_be_visible()


def test_what_the_server_refuses_is_told_and_can_be_tried_again(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url)
    sockets: list[WebSocketRoute] = []

    def relay(socket: WebSocketRoute) -> None:
        socket.connect_to_server()
        sockets.append(socket)

    page.route_web_socket(re.compile("/api/live$"), relay)
    page.reload()
    page.get_by_role("link", name="first").click()
    expect(page.get_by_role("img", name=re.compile("^Loss against step"))).to_be_visible()
    chosen = page.url.rpartition("/")[2].partition("?")[0]
    error = {"type": "error", "code": "RUN_NOT_USABLE", "message": "it cannot be followed", "why": "", "fix": "open it"}
    sockets[-1].send(json.dumps({**error, "run": chosen}))
    told = page.get_by_role("alert").filter(has_text="it cannot be followed")
    expect(told).to_contain_text("Fix: open it")
    page.get_by_role("button", name="Try again").click()
    expect(told).to_be_hidden()
    sockets[-1].send(json.dumps({**error, "run": None}))
    expect(page.get_by_text("it cannot be followed – Fix: open it")).to_be_visible()


def choose(page: Page, run: str, action: str) -> None:
    page.get_by_role("button", name=f"Actions for {run}").click()
    page.get_by_role("menuitem", name=action).click()


def zoom_and_back(page: Page) -> None:
    """Drag over a part of the loss: fewer steps are shown; a double click shows all."""
    figure = page.get_by_role("figure", name="Loss", exact=True)
    over = figure.locator(".u-over")
    expect(over).to_be_visible()
    figure.scroll_into_view_if_needed()  # the plot within it is drawn anew with the scale
    box = over.bounding_box()
    assert box is not None
    whole = over.evaluate("node => node.closest('.plot').dataset.shown")
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40, steps=4)
    page.mouse.up()
    plot = figure.locator(".plot")
    expect(plot).not_to_have_attribute("data-shown", whole)
    part = (plot.get_attribute("data-shown") or "").partition(".")[0]
    page.reload()  # the link keeps it
    expect(plot).to_have_attribute("data-shown", re.compile(rf"^{part}\."))
    page.get_by_role("combobox", name="X axis").select_option("epoch")  # steps are no epochs
    expect(figure).to_contain_text("Loss")
    page.get_by_role("combobox", name="X axis").select_option("step")
    expect(plot).to_have_attribute("data-shown", whole)
    expect(page).not_to_have_url(re.compile("zoom"))
    figure.scroll_into_view_if_needed()
    plot.focus()
    page.keyboard.press("+")
    expect(plot).not_to_have_attribute("data-shown", whole)
    over.dblclick()
    expect(plot).to_have_attribute("data-shown", whole)
    expect(page).not_to_have_url(re.compile("zoom"))


@pytest.mark.slow
def test_what_a_page_says_of_a_run_stays_true(server: Address, open_page: OpenPage) -> None:
    run = make_run(runs_of(server), "live", "running", created_at=datetime.now(UTC) - timedelta(hours=5))
    run.update(placement={"devices": ["gpu:0"]})
    me = psutil.Process()
    state = {"step_s": 0.1, "own_s": 0.1, "wait_s": 0.0, "memory_gb": 1.0}

    def beat(step: int, slow: int | None, **more: bool) -> None:
        now = time.time()
        # This attempt has done ten steps in ten seconds.
        alive = {"host": socket.gethostname(), "updated": now, "began": now - 10, "began_at": step - 10}
        alive |= {**more, "pid": me.pid, "created": me.create_time()}
        write_json(run.heartbeat_file, {"step": step, "total": 100, "counter": step, **alive})
        row = {"step": step, "attempt": 1, "slow_rank": slow, "ranks": [{"rank": rank, **state} for rank in (0, 1)]}
        with run.ranks_file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    beat(10, 1)
    for rank in (0, 1):
        (run.logs / f"rank-{rank}.log").write_text("\x1b[31mred\x1b[0m\n" + "".join(f"line {n}\n" for n in range(10)))
    page = open_page("about:blank")
    page.clock.install(time=datetime.now() - timedelta(hours=7))  # the browser's clock is wrong
    page.goto(server.url)
    expect(rows(page).filter(has_text="live")).to_contain_text("5 h ago")
    page.get_by_role("link", name="live").click()
    page.get_by_role("tab", name="Charts").click()
    legend = page.get_by_role("figure", name="Step time per rank").locator(".legend")
    expect(legend).to_contain_text("rank 1 – straggler")
    beat(20, None)
    expect(legend).not_to_contain_text("straggler")
    page.get_by_role("tab", name="Overview").click()
    expect(page.get_by_role("region", name="Progress")).to_contain_text("step 20 of 100")
    expect(page.get_by_role("region", name="Progress")).to_contain_text("1 min 20 s left")
    stop = page.get_by_role("button", name="Stop", exact=True).bounding_box()
    assert stop is not None
    run.update(status="completed", best_metric={"val_loss": 0.5}, completed_at=datetime.now(UTC))
    beat(20, None, ended=True)
    expect(page.get_by_text("Early stopping: it ended at step 20 of 100")).to_be_visible()
    expect(page.get_by_role("button", name="More epochs…")).to_be_visible()
    middle = [stop["x"] + stop["width"] / 2, stop["y"] + stop["height"] / 2]
    under = page.evaluate("at => Boolean(document.elementFromPoint(...at).closest('button, a'))", middle)
    assert not under, "a second click on Stop does nothing else"
    page.get_by_role("tab", name="Log").click()
    page.get_by_label("File").select_option("rank-1.log")
    log = page.get_by_role("tabpanel", name="Log").locator("pre")
    expect(log.locator("[style*='--bad']")).to_have_text("red")
    page.get_by_label("Search the log").fill("line 9")
    expect(log).to_have_text("line 9\n")
    # An answer that a part of the page cannot show leaves the rest.
    page.route("**/files", lambda route: route.fulfill(json={"status": "ok", "data": {"files": [None]}}))
    page.get_by_role("tab", name="Files").click()
    expect(page.get_by_role("alert").filter(has_text="This part of the page cannot be shown")).to_be_visible()
    page.get_by_role("tab", name="Configuration").click()
    expect(page.get_by_label("Command of the run")).to_be_visible()
    back(page)
    expect(rows(page).filter(has_text="live")).to_contain_text("Val loss 0.5")
    page.evaluate("location.hash = '#/run/%E0%A4%A/x/y?z'")
    expect(page.get_by_role("link", name="Compare")).to_be_visible()
    failed = make_run(
        runs_of(server), "died", "failed", error="Traceback\n  a line\nRuntimeError: no data\nfix: add some"
    )
    page.evaluate("id => { location.hash = `#/run/${id}` }", failed.path.name)
    ended = page.get_by_role("region", name="How it ended")
    expect(ended.get_by_role("strong")).to_have_text(["RuntimeError: no data", "fix: add some"])


def test_the_log_follows_its_end_and_another_file_shows_nothing_of_the_first(
    server: Address, open_page: OpenPage
) -> None:
    run = make_run(runs_of(server), "talkative", "running")
    me = psutil.Process()
    alive = {"host": socket.gethostname(), "updated": time.time() + 3600, "pid": me.pid, "created": me.create_time()}
    write_json(run.heartbeat_file, {"step": 1, "total": 9, "counter": 1, **alive})
    for rank in (0, 1):
        (run.logs / f"rank-{rank}.log").write_text("".join(f"rank {rank} line {n}\n" for n in range(200)))
    page = open_page(server.url)
    page.get_by_role("link", name="talkative").click()
    page.get_by_role("tab", name="Log").click()
    log = page.get_by_role("tabpanel", name="Log").locator("pre")
    expect(log).to_contain_text("rank 0 line 199")
    end = "it => it.scrollHeight - it.scrollTop - it.clientHeight < 2"
    page.wait_for_function(f"({end})(document.querySelector('pre.log'))")
    with (run.logs / "rank-0.log").open("a") as file:
        file.write("rank 0 has written more\n" * 50)
    expect(log).to_contain_text("rank 0 has written more")
    page.wait_for_function(f"({end})(document.querySelector('pre.log'))")
    waiting: list[Route] = []
    held = [True]
    page.route(re.compile("name=rank-1"), lambda route: waiting.append(route) if held else route.continue_())
    page.get_by_label("File").select_option("rank-1.log")
    expect(log).to_have_text("loading…")
    expect(page.get_by_text("0 lines", exact=True)).to_be_visible()
    held.clear()
    for route in waiting:
        route.continue_()
    expect(log).to_contain_text("rank 1 line 199")


def test_a_long_log_is_read_from_its_first_to_its_last_line(server: Address, open_page: OpenPage) -> None:
    run = make_run(runs_of(server), "long log", "completed")
    names = ["run.log", "rank-0.log", "rank-1.log"]
    lines = {name: [f"{name} line {number}: äöü <b>" for number in range(50_000)] for name in names}
    for name in names:
        (run.logs / name).write_text("".join(f"{line}\n" for line in lines[name]))
    page = open_page(server.url)
    page.get_by_role("link", name="long log").click()
    page.get_by_role("tab", name="Log").click()
    panel = page.get_by_role("tabpanel", name="Log")
    for name in names:
        panel.get_by_label("File").select_option(name)
        expect(panel.locator("pre")).to_have_text("\n".join(lines[name][-2000:]))
        with page.expect_popup() as opened:
            panel.get_by_role("link", name="all lines").click()
        opened.value.wait_for_load_state()
        assert opened.value.locator("pre").inner_text().splitlines() == lines[name]
        opened.value.close()


@pytest.mark.slow
def test_a_narrow_screen_trains_too(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url, NARROW)
    for view in ("Runs", "Compare"):
        expect(page.get_by_role("link", name=view, exact=True)).to_be_in_viewport(ratio=1)
    open_form(page)
    page.get_by_label("Task", exact=True).select_option(TOY)
    page.get_by_role("checkbox", name="CPU").check()
    page.get_by_role("checkbox", name="GPU 0").uncheck()
    page.get_by_label("Number of ranks").fill("99")
    run = page.get_by_role("button", name="Run", exact=True)
    expect(run).to_have_accessible_description("99 ranks on the CPU are too many")
    expect(run).to_be_disabled()
    expect(page.get_by_role("status", name="Hardware notes")).to_have_text("")
    page.get_by_label("Number of ranks").fill("1")
    run.click()
    expect(page.get_by_role("dialog", name="Configuration")).to_be_hidden()
    expect(page.get_by_role("button", name="More epochs…")).to_be_visible()
    expect(page.get_by_role("columnheader", name="Test")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Loss per epoch against step"))).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"


#: Ticks of an axis, and how they are written: alike, with the decimals that tell them apart.
TICKS: list[tuple[list[float], dict[str, object], list[str]]] = [
    ([0, 0.005, 0.01], {}, ["0", "0.005", "0.010"]),
    ([2e-4, 5e-4, 1e-3], {}, ["0.0002", "0.0005", "0.0010"]),
    ([1e-6, 2e-6], {}, ["1e-6", "2e-6"]),
    ([0, 2500, 5000], {}, ["0", "2,500", "5,000"]),
    ([0, 20_000, 40_000], {}, ["0", "20k", "40k"]),
    ([1e6, 1.5e6], {}, ["1.0M", "1.5M"]),
    ([1.7e31, 1.75e31], {}, ["1.70e31", "1.75e31"]),
    ([0.9996, 0.9998, 1], {"unit": [100, " %"]}, ["99.96 %", "99.98 %", "100.00 %"]),
    ([1e-4, 5e-4, 1e-3], {"log": True}, ["1e-4", "5e-4", "1e-3"]),
    ([0.001, 1, 1000], {"log": True}, ["0.001", "1", "1000"]),
]


def test_ticks_are_told_apart_and_written_alike(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url)
    expect(rows(page)).to_have_count(3)
    write = """async (all) => {
        const { tickTexts } = await import('/static/app/plot.js');
        return all.map((one) => tickTexts(...one));
    }"""
    assert page.evaluate(write, [[ticks, how] for ticks, how, _ in TICKS]) == [texts for _, _, texts in TICKS]


def test_a_plan_that_arrives_after_a_newer_one_is_dropped(server: Address, open_page: OpenPage) -> None:
    page = open_form(open_page(server.url))
    page.get_by_role("checkbox", name="GPU 1").check()
    batch = page.get_by_text("Effective batch size")
    expect(batch).to_have_text("Effective batch size: 64 (32 × 2 GPUs)")
    late: list[Route] = []
    page.route("**/api/plan", lambda route: route.continue_() if late else late.append(route))
    size = page.get_by_role("textbox", name="Batch size", exact=True)
    with page.expect_request("**/api/plan"):
        size.fill("16")
    size.fill("48")
    expect(batch).to_have_text("Effective batch size: 96 (48 × 2 GPUs)")
    with page.expect_response("**/api/plan"):
        late[0].continue_()
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()
    expect(batch).to_have_text("Effective batch size: 96 (48 × 2 GPUs)")


def test_what_a_run_says_is_shown_as_it_is_meant(server: Address, open_page: OpenPage) -> None:
    runs = runs_of(server)
    images = make_run(runs, "four classes", "completed", final_metrics={"val_loss": 0.5}, best_metric={"val_loss": 0.5})
    scores = [[0.5, 0.25, 1 / 3, 1897 + row] for row in range(4)]
    tables = {
        "test_per_class": scores,
        "test_bins": [0.5, 0.25],
        "attention": [[1.5, 2.0], [0.5, 1.0]],
        "class_names": ["a", "b", "c", "d"],
    }
    write_json(images.path / "tables.json", tables)
    cause = (
        "NonFiniteError: 3 steps had no finite gradient\nfix: find the operator with --set debug.detect_anomaly=true"
    )
    failed = make_run(runs, "no numbers", "failed", error=cause)
    moved = images.path.rename(runs / "a folder's name")
    page = open_page(server.url)
    expect(rows(page)).to_have_count(5)
    page.evaluate("names => { location.hash = `#/run/${encodeURIComponent(names)}/evaluation` }", moved.name)
    # Scores of four classes are no confusion matrix, and neither is any other square table.
    per_class = page.get_by_role("table", name="Test per class")
    expect(per_class.get_by_role("row", name="a 0.5 0.25 0.3333 1,897")).to_be_visible()
    expect(page.get_by_role("table", name="Test bins").get_by_role("row", name="1 0.25")).to_be_visible()
    expect(page.get_by_role("table", name="Attention").get_by_role("row", name="1 0.5 1")).to_be_visible()
    expect(page.get_by_text("predicted →")).to_be_hidden()
    page.get_by_role("tab", name="Overview").click()
    expect(page.get_by_role("region", name="Answer")).to_contain_text("Val loss")
    # A comparison finds runs by their folders, too.
    names = f"{moved.name.replace(' ', '%20')},{failed.path.name}"
    page.evaluate("names => { location.hash = `#/compare/${names}` }", names)
    expect(page.get_by_role("region", name="Differences in configuration")).to_contain_text("four classes")
    expect(page.get_by_text("No longer in this folder")).to_be_hidden()
    # A metric may have the name of something that every object has.
    for number in range(41, 44):
        failed.append_step({"attempt": 1, "step": number, "loss": 1.0, "scalars": {"constructor/toString": 1.0}})
    failed.update(final_metrics={"constructor": 0.25}, best_metric={"valueOf": 0.5})
    page.evaluate("id => { location.hash = `#/run/${id}/charts?x=constructor` }", failed.path.name)
    expect(page.get_by_role("figure", name="constructor/toString")).to_be_visible()
    page.evaluate("location.hash = '#/constructor'")
    expect(rows(page)).to_have_count(5)
    page.get_by_label("Search runs").fill("constructor = 0.25 valueOf > 0.1")
    expect(rows(page)).to_have_count(1)
    page.evaluate("id => { location.hash = `#/run/${id}` }", failed.path.name)
    ended = page.get_by_role("region", name="How it ended")
    expect(ended.get_by_role("strong").last).to_have_text("fix: find the operator with --set debug.detect_anomaly=true")


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the focus is on what has this label or text."""
    find = """() => {
        const it = document.activeElement;
        return it.getAttribute('aria-label') ?? it.labels?.[0]?.innerText ?? it.innerText ?? '';
    }"""
    for _ in range(120):
        if str(page.evaluate(find)).strip().startswith(name):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab never reaches {name!r}")


@pytest.mark.slow
def test_the_keyboard_alone_does_everything(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url)
    keys = page.keyboard
    expect(rows(page)).to_have_count(3)
    keys.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    keys.press("Enter")

    tab_to(page, "Select third")
    for _ in range(2):
        keys.press("Tab")
    keys.press("Enter")
    expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
    keys.press("Escape")
    expect(page.get_by_role("button", name="Actions for third")).to_be_focused()
    keys.press("Enter")
    expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
    keys.press("ArrowUp")
    expect(page.get_by_role("menuitem", name="Delete")).to_be_focused()
    keys.press("Enter")
    expect(page.get_by_role("dialog", name="Delete run")).to_be_visible()
    keys.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()

    # A toy task on the CPU: everything by Tab, Space, arrows and Enter.
    keys.press("Shift+Tab")
    page.get_by_role("button", name="New run").focus()
    keys.press("Enter")
    expect(page.get_by_role("checkbox", name="GPU 0")).to_be_checked()
    expect(page.get_by_label("Task", exact=True)).to_be_focused()
    for _ in range(3):
        keys.press("Tab")  # the name, the section of the devices, the first of them
    expect(page.get_by_role("checkbox", name="CPU")).to_be_focused()
    keys.press("Escape")
    expect(page.get_by_role("button", name="New run")).to_be_focused()
    keys.press("Enter")
    expect(page.get_by_label("Task", exact=True)).to_be_focused()
    keys.press("End")
    tab_to(page, "CPU")
    keys.press("Space")
    expect(page.get_by_role("checkbox", name="CPU")).to_be_checked()
    tab_to(page, "GPU 0")
    keys.press("Space")
    tab_to(page, "Epochs")
    keys.press("Control+a")
    keys.type("3")
    tab_to(page, "Run")
    run = page.get_by_role("button", name="Run", exact=True)
    expect(run).to_be_focused()
    expect(run).to_be_enabled()
    keys.press("Enter")
    state = page.get_by_role("region", name="State")
    expect(state.get_by_role("region", name="Metrics")).to_be_visible()

    # A chart: + zooms, 0 shows all.
    plot = page.get_by_role("figure", name="Loss per epoch").locator(".plot")
    expect(plot).to_have_attribute("data-points", "3")
    whole = plot.get_attribute("data-shown")
    assert whole is not None
    tab_to(page, "Loss per epoch")
    keys.press("+")
    expect(plot).not_to_have_attribute("data-shown", whole)
    keys.press("0")
    expect(plot).to_have_attribute("data-shown", whole)


#: Controls that are smaller than 24 px, with their labels; a checkbox of the form has its label beside it.
SMALL = """[...document.querySelectorAll('button, a, input, select, summary')]
    .filter((it) => it.offsetParent && !it.matches('.skip, .field input, p a'))
    .map((it) => [(it.closest('label') ?? it).getBoundingClientRect(), it.outerHTML.slice(0, 120)])
    .filter(([box]) => Math.min(box.width, box.height) < 23.5).map(([, text]) => text)"""
AXE = (Path(__file__).parent / "axe.min.js").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("viewport", "scheme"),
    [
        pytest.param(WIDE, "light", marks=pytest.mark.drill),
        (NARROW, "dark"),
        pytest.param(WIDE, "dark", marks=pytest.mark.drill),
    ],
    ids=["wide-light", "narrow-dark", "wide-dark"],
)
def test_axe_finds_no_serious_fault(server: Address, open_page: OpenPage, viewport: ViewportSize, scheme: str) -> None:
    page = open_page(server.url, viewport, color_scheme=scheme, reduced_motion="reduce")
    expect(rows(page)).to_have_count(3)
    ids = [run["id"] for run in server.get("/api/runs")["runs"]]
    page.evaluate(AXE)
    tabs = ("overview", "charts", "log", "evaluation", "configuration", "files")
    views = ["runs", *(f"run/{ids[-1]}/{tab}" for tab in tabs), *(f"run/{name}" for name in ids[:-1])]
    for view in [*views, f"compare/{','.join(ids)}", "form"]:
        if view == "form":
            open_form(page)
            expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()
        else:
            page.evaluate("address => { location.hash = address }", f"#/{view}")
            page.wait_for_load_state("networkidle")
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than the screen"
        assert not (small := page.evaluate(SMALL)), f"{view}: less than 24 px to hit: {small}"
        found = page.evaluate("axe.run()")["violations"]
        serious = [
            f"{view}: {fault['id']}: {fault['nodes'][0]['html'][:200]}"
            for fault in found
            if fault["impact"] in {"serious", "critical"}
        ]
        assert not serious, "\n".join(serious)


#: The contrast of each cell's text with its colour, as WCAG 2.2 defines it.
CONTRASTS = """() => {
    const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const luminance = (colour) => {
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        const linear = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
            .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    return [...document.querySelectorAll('.confusion td')].map((cell) => {
        const { color, backgroundColor } = getComputedStyle(cell);
        const [low, high] = [luminance(color), luminance(backgroundColor)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_cell_of_a_confusion_matrix_can_be_read(server: Address, open_page: OpenPage, scheme: str) -> None:
    run = make_run(runs_of(server), "eleven classes", "completed")
    matrix = [[0] * 11 for _ in range(11)]
    for share in range(11):  # of ten samples, so many are right
        matrix[share][share] = share
        matrix[share][(share + 1) % 11] = 10 - share
    write_json(run.path / "tables.json", {"test_confusion": matrix, "class_names": list("abcdefghijk")})
    page = open_page(server.url, color_scheme=scheme)
    page.get_by_role("link", name="eleven classes").click()
    page.get_by_role("tab", name="Evaluation").click()
    expect(page.locator(".confusion td")).to_have_count(121)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) == 121
    assert min(contrasts) >= 4.5
    assert max(contrasts) < 21, "the cells have colours"


@pytest.mark.slow
def test_a_strangers_run_starts_nothing(open_page: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary, code = tmp_path / "canary", tmp_path / "modules" / "stranger_module.py"
    code.parent.mkdir()
    code.write_text(f"open({str(canary)!r}, 'w')\n")
    monkeypatch.setenv("PYTHONPATH", str(code.parent))  # of the helper that plans, and of commands
    run = make_run(tmp_path / "runs", "theirs", "stopped")
    config = run.config_file.read_text()
    run.config_file.write_text(config.replace("name: adamw", "name: stranger_module:Evil"))
    script = {"path": str(code), "arguments": [], "folder": str(tmp_path), "given": {}}
    write_json(run.path / "script.json", script)
    with studio(tmp_path, machine(0)) as address:
        page = open_page(address.url, refused=re.compile("/api/runs/.*"))
        choose(page, "theirs", "Duplicate")
        expect(page.get_by_text("optimizer.name stranger_module:Evil").first).to_be_visible()
        page.get_by_role("link", name="theirs").click()
        page.get_by_role("button", name="Start again…").click()  # it has no checkpoint
        dialog = page.get_by_role("dialog", name="Start run again")
        expect(dialog).to_contain_text("at step 0")
        dialog.get_by_role("button", name="Start again").click()
        expect(page.get_by_text("script.json").first).to_be_visible()
    assert not canary.exists()


@pytest.mark.slow
def test_what_a_silent_server_said_looks_old_and_errors_end_with_it(open_page: OpenPage, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "first", "stopped")
    (run.checkpoints / folder_name(30)).mkdir()
    with start_studio(tmp_path) as command:
        page = open_page(command.address.url)
        page.get_by_role("link", name="first").click()
        expect(page.get_by_role("button", name="Resume from step 30…")).to_be_visible()
        connection, stage = page.locator(".bar .link"), page.locator(".stage")
        expect(connection).to_have_text("live")
        command.process.send_signal(signal.SIGSTOP)
        expect(connection).to_have_text(re.compile(r"no answer for \d+ s"))
        expect(stage).to_have_class(re.compile("stale"))
        expect(stage.locator(".run-head .badge")).to_have_css("filter", "grayscale(1) opacity(0.6)")
        command.process.send_signal(signal.SIGCONT)
        expect(connection).to_have_text("live")
        expect(stage).not_to_have_class(re.compile("stale"))
        expect(stage.locator(".run-head .badge")).to_have_css("filter", "none")
        command.kill()
        page.get_by_role("tab", name="Files").click()
        told = page.get_by_role("tabpanel").get_by_role("alert").filter(has_text="does not answer").locator("div")
        fix = "Fix: start it again with `lockstep studio`"
        expect(told).to_have_text(["The studio does not answer.", "Runs continue without it.", fix])
    with start_studio(tmp_path, port=command.address.port):
        expect(page.get_by_role("link", name=run.steps_file.name)).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
