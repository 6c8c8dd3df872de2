"""The page at rest: devices and labels, the list of runs, the keyboard, accessibility. Needs Chromium."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, WebSocketRoute, expect

from lockstep.config import resolve
from lockstep.telemetry.files import write_json
from lockstep.telemetry.rundir import RunDir
from tests.browser.conftest import NARROW, PATIENCE_MS, WIDE, OpenPage, picture, running_browser
from tests.browser.gpus import DEVICES
from tests.browser.where import Network
from tests.gloo import ROOT
from tests.hardware.machines import machine
from tests.studio.serving import TOY, Address, studio

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
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
def browser(machine_with_gpus: Address, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests, in the usual network: the studio with a fake machine is a process beside this one."""
    with running_browser(Network(None), tmp_path_factory.mktemp("browser")) as browser:
        # Its helper processes start with their first use: they are not the test's that comes first.
        page = browser.new_page()
        page.goto(machine_with_gpus.url)
        page.get_by_role("button", name="Run", exact=True).wait_for(timeout=PATIENCE_MS)
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


def runs_of(address: Address) -> Path:
    return Path(address.get("/api/studio")["runs_dir"])


def make_run(folder: Path, name: str, status: str, steps: int = 40, **record: object) -> RunDir:
    config = resolve({"name": name, "task": {"name": "har"}, "training": {"epochs": 4}})
    run_id = f"run-{len(name):04x}{len(status):04x}"
    run = RunDir.create(folder / run_id, config, run_id=run_id, command=["lockstep", "train", "har"])
    with run.steps_file.open("w") as file:
        for step in range(1, steps + 1):
            row = {"attempt": 1, "step": step, "epoch": 1 + step // 11, "loss": 2 / step, "lr": 1e-3}
            file.write(json.dumps({**row, "samples_per_s": 9.5, "data_wait_share": 0.1, "grad_norm": 1.0}) + "\n")
    run.write_epochs(
        [{"attempt": 1, "epoch": n, "step": 10 * n, "train_loss": 2 / n, "val_loss": 3 / n} for n in (1, 2)]
    )
    run.update(status=status, **record)
    return run


def add_sample(run: RunDir, second: int, power_w: float) -> None:
    """What the monitor of a node with eleven GPUs writes."""
    devices = [
        {"id": f"gpu:{index}", "utilisation": 0.9, "memory_gb": 60.0 + index, "power_w": power_w + index}
        for index in range(11)
    ]
    with (run.path / "system-node7.jsonl").open("a") as file:
        host = {"name": "node7", "cpu": 0.5, "memory_gb": 20.0}
        file.write(json.dumps({"time": 1.7e9 + second, "host": host, "devices": devices}) + "\n")


def show(page: Page, tab: str) -> None:
    """On a narrow screen the columns are tabs."""
    if page.get_by_role("tab").count():
        page.get_by_role("tab", name=tab).click()


@pytest.mark.parametrize("viewport", [WIDE, pytest.param(NARROW, marks=pytest.mark.drill)], ids=["wide", "narrow"])
def test_labels_follow_the_ticks(server: Address, open_page: OpenPage, viewport: ViewportSize) -> None:
    page = open_page(server.url, viewport)
    run = page.get_by_role("button", name="Run", exact=True)
    boxes = [page.get_by_role("checkbox", name=name) for name in ("CPU", "GPU 0", "GPU 1", "GPU 2")]
    cpu, first, second, third = boxes
    for box, ticked in zip(boxes, (False, True, False, False), strict=True):
        expect(box).to_be_checked(checked=ticked)
    expect(page.get_by_text("80.0 GB · 79.0 GB free").first).to_be_visible()
    expect(run).to_be_enabled()
    batch, multi = (
        page.get_by_text("Effective batch size"),
        page.get_by_text("Multi-GPU (DDP) will be used automatically."),
    )
    expect(batch).to_be_hidden()

    second.check()
    expect(batch).to_have_text("Effective batch size: 64 (32 × 2 GPUs)")
    expect(multi).to_be_visible()
    picture(page, "devices" if viewport == WIDE else "devices-narrow")
    page.get_by_label("Accumulate").fill("4")
    expect(batch).to_have_text(re.compile("256"))
    cpu.check()
    expect(page.get_by_text("CPU is ignored").first).to_be_visible()
    cpu.uncheck()
    third.check()
    expect(batch).to_have_text(re.compile("384"))
    precision = page.get_by_label("Precision", exact=True)
    expect(precision.get_by_role("option", name=re.compile("bf16-mixed"))).to_be_disabled()
    expect(page.get_by_text(re.compile("bf16-mixed is not supported on gpu:2"))).to_be_visible()

    for box in (first, second, third):
        box.uncheck()
    expect(run).to_be_disabled()
    expect(run).to_have_accessible_description(re.compile("no device is selected"))
    expect(multi).to_be_hidden()
    expect(page.get_by_label("Number of ranks")).to_be_hidden()
    cpu.check()
    page.get_by_label("Number of ranks").fill("4")
    expect(batch).to_have_text(re.compile("4 CPU ranks"))
    page.get_by_role("textbox", name="Batch size", exact=True).fill("many")
    expect(run).to_be_disabled()
    expect(page.get_by_text("a number is needed", exact=True)).to_be_visible()


def test_every_fate_and_the_list_of_runs(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url)
    runs, state = page.get_by_role("region", name="Runs"), page.get_by_role("region", name="State")
    rows = runs.get_by_role("list", name="Runs").get_by_role("listitem")
    expect(rows).to_have_count(3)

    runs.get_by_role("link", name=re.compile("^first")).click()
    expect(state.get_by_role("region", name="Final metrics")).to_contain_text("0.91")
    loss = state.get_by_role("img", name=re.compile("^Loss against step: loss 0.05 at step 40"))
    expect(loss).to_be_visible()
    state.get_by_label("Log scale").check()
    expect(state.get_by_role("figure", name="Loss", exact=True)).to_contain_text("log scale")
    zoom_and_back(page)

    runs.get_by_role("link", name=re.compile("^second")).click()
    expect(state.get_by_label("Failure")).to_contain_text("fix: a smaller batch")
    expect(state.get_by_role("img", name=re.compile("^Loss against step: loss not finite at step 41"))).to_be_visible()
    expect(state.get_by_role("img", name=re.compile("^Gradient norm against step: .* 1 at step 40"))).to_be_visible()
    runs.get_by_role("link", name=re.compile("^third")).click()
    expect(state.get_by_text("gone without a word")).to_be_visible()
    expect(rows.nth(0).get_by_text("lost")).to_be_visible()

    page.get_by_label("Search runs").fill("baseline")
    expect(rows).to_have_count(1)
    page.get_by_label("Search runs").fill("")
    page.get_by_label("Status", exact=True).select_option("failed")
    expect(rows).to_have_count(1)
    page.get_by_label("Status", exact=True).select_option("")
    page.get_by_label("Sort").select_option("name")
    expect(rows.nth(0)).to_contain_text("first")

    choose(page, "first", "Rename")
    page.get_by_role("dialog").get_by_label("Name").fill("renamed")
    page.get_by_role("dialog").get_by_role("button", name="Rename").click()
    choose(page, "renamed", "Edit tags")
    page.get_by_role("dialog").get_by_label("Tags").fill("one, two")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(runs.get_by_text("two", exact=True)).to_be_visible()
    choose(page, "renamed", "Duplicate")
    expect(page.get_by_label("Epochs", exact=True)).to_have_value("4")
    choose(page, "second", "Delete")
    page.get_by_role("dialog", name="Delete run").get_by_role("button", name="Cancel").click()
    expect(rows).to_have_count(3)
    choose(page, "second", "Delete")
    page.get_by_role("dialog", name="Delete run").get_by_role("button", name="Delete").click()
    expect(rows).to_have_count(2)
    assert len(list(runs_of(server).glob("*/run.json"))) == 2
    assert {run["name"] for run in server.get("/api/runs")["runs"]} == {"renamed", "third"}


def test_each_device_of_a_node_has_its_line_and_it_moves(server: Address, open_page: OpenPage) -> None:
    run = RunDir.open(next(path.parent for path in runs_of(server).glob("*/run.json") if "first" in path.read_text()))
    for second in range(3):
        add_sample(run, second, 600.0)
    state = {"step_s": 0.1, "own_s": 0.1, "wait_s": 0.0, "memory_gb": 1.0, "peak_gb": 1.0, "reserved_gb": None}
    row = {"step": 1, "attempt": 1, "slow_rank": 777, "ranks": [{"rank": rank, **state} for rank in range(1500)]}
    (run.path / "ranks.jsonl").write_text(json.dumps(row) + "\n")
    page = open_page(server.url)
    page.get_by_role("link", name=re.compile("^first")).click()
    power = page.get_by_role("figure", name="Power").get_by_role("button")
    expect(power).to_have_text([re.compile(f"gpu:{index} {600 + index} W") for index in range(11)])
    expect(page.get_by_role("figure", name="Utilisation").get_by_role("button").last).to_have_text("host 50 %")
    add_sample(run, 3, 650.0)
    expect(power.last).to_have_text("gpu:10 660 W")
    # More ranks than a chart can show, and more columns than the page can hold: it says so.
    expect(page.get_by_text(re.compile(r"32 of 1,3\d\d ranks"))).to_be_visible()
    expect(page.get_by_text("ranks has more columns than the page can hold")).to_be_visible()
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
    page.get_by_role("link", name=re.compile("^first")).click()
    expect(page.get_by_role("img", name=re.compile("^Loss against step"))).to_be_visible()
    chosen = page.url.rpartition("/")[2]
    error = {"type": "error", "code": "RUN_NOT_USABLE", "message": "it cannot be followed", "why": "", "fix": "open it"}
    sockets[-1].send(json.dumps({**error, "run": chosen}))
    told = page.get_by_role("alert").filter(has_text="it cannot be followed")
    expect(told).to_contain_text("Fix: open it")
    page.get_by_role("button", name="Try again").click()
    expect(told).to_be_hidden()
    sockets[-1].send(json.dumps({**error, "run": None}))
    expect(page.get_by_text("it cannot be followed – Fix: open it")).to_be_visible()


def test_configurations_are_saved_loaded_and_pasted(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url, refused="/api/configs/parse")
    epochs, dialog = page.get_by_label("Epochs", exact=True), page.get_by_role("dialog")
    epochs.fill("7")
    page.get_by_role("button", name="Save", exact=True).click()
    dialog.get_by_label("Name").fill("seven")
    dialog.get_by_role("button", name="Save").click()
    epochs.fill("8")
    page.get_by_role("button", name="Load", exact=True).click()
    dialog.get_by_role("button", name="seven har").click()
    expect(epochs).to_have_value("7")
    page.get_by_role("button", name="Load", exact=True).click()
    dialog.get_by_role("button", name="Delete the saved configuration seven").click()
    expect(dialog.get_by_text("Nothing is saved yet.")).to_be_visible()
    dialog.get_by_label("YAML").fill("training:\n  epochs: [1")
    dialog.get_by_role("button", name="Load YAML").click()
    expect(dialog.get_by_role("alert")).to_contain_text("line 2: expected ',' or ']'")
    dialog.get_by_label("YAML").fill("training:\n  epochs: 9")
    dialog.get_by_role("button", name="Load YAML").click()
    expect(dialog).to_be_hidden()
    expect(epochs).to_have_value("9")


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
    over.dblclick()
    expect(plot).to_have_attribute("data-shown", whole)


@pytest.mark.drill
def test_a_long_run_is_thinned_out_until_it_is_zoomed(open_page: OpenPage, tmp_path: Path) -> None:
    steps = 150_000
    run = make_run(tmp_path / "runs", "endless", "completed", steps=steps)
    with studio(tmp_path, DEVICES) as address:
        page = open_page(address.url)
        page.get_by_role("link", name=re.compile("^endless")).click()
        note = page.get_by_text(re.compile(r"down-sampled: [\d,]+ of 150,000 points"))
        expect(note).to_be_visible()
        loss = page.get_by_role("img", name=re.compile("^Loss against step: loss"))
        assert 1000 < int(loss.get_attribute("data-points") or 0) <= 40_000
        # What comes later is appended in full.
        run.append_step({"attempt": 1, "step": steps + 1, "epoch": 9, "loss": 0.25})
        expect(
            page.get_by_role("img", name=re.compile("^Loss against step: loss 0.25 at step 150,001"))
        ).to_be_visible()
        loss.focus()
        for _ in range(7):
            page.keyboard.press("+")
        low, high = (float(end) for end in (loss.get_attribute("data-shown") or "").split())
        every_step = range(int(high - low) - 1, int(high - low) + 2)
        expect(loss).to_have_attribute("data-points", re.compile("|".join(f"^{count}$" for count in every_step)))
        page.keyboard.press("0")
        expect(loss).not_to_have_attribute("data-shown", f"{low} {high}")


@pytest.mark.drill
def test_the_doctor_examines_this_machine(open_page: OpenPage, tmp_path: Path) -> None:
    with studio(tmp_path) as address:
        page = open_page(address.url)
        page.get_by_role("link", name="Doctor").click()
        page.get_by_role("button", name="Examine this machine").click()
        expect(page.get_by_role("status").filter(has_text="for training on")).to_be_visible()
        findings = page.get_by_role("list", name="Findings").get_by_role("listitem")
        expect(findings.first).to_be_visible()
        expect(findings.get_by_role("heading", level=2).first).not_to_be_empty()


def test_a_report_opens_in_a_tab_of_its_own(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.get_by_role("link", name=re.compile("^first")).click()
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="Report").click()
    report = opened.value
    expect(report.get_by_role("heading", level=1).first).to_be_visible()
    loss = report.get_by_role("img", name="Loss", exact=True)
    expect(loss).to_be_visible()
    assert report.evaluate("getComputedStyle(document.querySelector('figure svg')).width") != "auto", "its style holds"
    assert report.evaluate("self.origin") == "null", "it is not of the studio's site"


SCALING = {
    "kind": "scaling",
    "title": "scaling of har",
    "verdict": "2 devices, ddp weak: 1.80 times one (efficiency 90%)",
    "notes": ["communication takes 20% of a step on 2 devices (ddp, weak)"],
    "rows": [
        {"ranks": ranks, "strategy": strategy, "mode": mode, "status": "ok", "samples_per_s": 100.0 * speed_up,
         "speed_up": speed_up, "efficiency": speed_up / ranks, "memory_mb": 440.0 + ranks}
        for ranks, strategy, mode, speed_up in (
            (1, "single", "weak", 1.0), (1, "single", "strong", 1.0), (2, "ddp", "weak", 1.8), (2, "ddp", "strong", 1.5)
        )
    ],
}  # fmt: skip


def test_scaling_is_drawn_against_the_ideal(server: Address, open_page: OpenPage) -> None:
    folder = runs_of(server) / "bench-scaling-1a2b3c4d"
    folder.mkdir()
    write_json(folder / "report.json", {**SCALING, "rows": [*SCALING["rows"], {"ranks": 4, "status": "refused"}]})
    page = open_page(server.url)
    page.get_by_role("link", name="Scaling").click()
    report = page.get_by_role("region", name="scaling of har")
    expect(report.get_by_text("1.80 times one")).to_be_visible()
    for figure in ("Speed-up", "Efficiency", "Peak memory per rank"):
        expect(report.get_by_role("figure", name=figure)).to_be_visible()
    speed_up = report.get_by_role("figure", name="Speed-up")
    for line in ("ddp weak 1.8", "ddp strong 1.5", "ideal 2"):
        expect(speed_up.get_by_role("button", name=line)).to_be_visible()
    expect(report.get_by_role("row", name=re.compile("2 ddp weak 180"))).to_be_visible()


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_scaling_is_measured_from_the_page(open_page: OpenPage, tmp_path: Path) -> None:
    with studio(tmp_path, machine(0), tasks=[TOY]) as address:
        page = open_page(address.url)
        page.get_by_role("link", name="Scaling").click()
        page.get_by_label("Task").select_option(TOY)
        page.get_by_label("Number of ranks").fill("2")
        page.get_by_role("button", name="Measure scaling").click()
        report = page.get_by_role("region", name=f"scaling of {TOY}")
        expect(report.get_by_role("figure", name="Speed-up")).to_be_visible(timeout=600_000)
        expect(report.get_by_role("row")).to_have_count(5)


def test_a_narrow_screen_trains_too(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url, NARROW)
    show(page, "Configuration")
    page.get_by_label("Task", exact=True).select_option(TOY)
    page.get_by_role("checkbox", name="CPU").check()
    page.get_by_role("checkbox", name="GPU 0").uncheck()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("tab", name="State")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("region", name="Final metrics")).to_contain_text("test accuracy")
    expect(page.get_by_role("img", name=re.compile("^loss per epoch against epoch"))).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"


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


def test_the_keyboard_alone_does_everything(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url)
    keys = page.keyboard
    expect(page.get_by_role("checkbox", name="GPU 0")).to_be_checked()
    expect(page.get_by_role("list", name="Runs").get_by_role("listitem")).to_have_count(3)
    keys.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    keys.press("Enter")

    tab_to(page, "Actions for third")
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
    tab_to(page, "Task")
    if not page.evaluate("document.activeElement.matches('select')"):
        keys.press("Tab")
        tab_to(page, "Task")
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
    expect(state.get_by_role("region", name="Final metrics")).to_be_visible()

    # A chart: + zooms, 0 shows all.
    plot = page.get_by_role("figure", name="loss per epoch").locator(".plot")
    expect(plot).to_have_attribute("data-points", "3")
    whole = plot.get_attribute("data-shown")
    assert whole is not None
    tab_to(page, "loss per epoch")
    keys.press("+")
    expect(plot).not_to_have_attribute("data-shown", whole)
    keys.press("0")
    expect(plot).to_have_attribute("data-shown", whole)


AXE = (Path(__file__).parent / "axe.min.js").read_text()


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
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()
    ids = [run["id"] for run in server.get("/api/runs")["runs"]]
    views = ["train", *(f"train/{name}" for name in ids), f"compare/{','.join(ids)}", "scaling", "doctor"]
    for view in views:
        page.evaluate("address => { location.hash = address }", f"#/{view}")
        page.wait_for_load_state("networkidle")
        if view != "train":
            expect(page.get_by_role("heading", level=1).last).to_be_visible()
        else:
            show(page, "Configuration")
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than the screen"
        page.evaluate(AXE)
        found = page.evaluate("axe.run()")["violations"]
        serious = [
            f"{view}: {fault['id']}: {fault['nodes'][0]['html'][:200]}"
            for fault in found
            if fault["impact"] in {"serious", "critical"}
        ]
        assert not serious, "\n".join(serious)
    show(page, "Runs")
