"""The first screen of a run: its answer, metrics by split, changed settings, ranks. Needs Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from lockstep.config import resolve
from lockstep.rundir.files import write_json
from lockstep.rundir.folder import RunDir
from lockstep.tasks.registry import find_task
from tests.browser.conftest import NARROW, PATIENCE_MS, OpenPage
from tests.browser.runs import runs_of
from tests.studio.serving import Address

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def browser(shared_browser: Browser) -> Browser:
    return shared_browser


#: Best in the second epoch.
SCORES = (0.5, 0.875, 0.75, 0.8125)


def make_answered(
    folder: Path, name: str = "run-00000a11", scores: Sequence[float] = SCORES, lr: float = 0.25, more: int = 0
) -> RunDir:
    """A run of four epochs on two ranks; ``scores``: its accuracies, ``more``: further metrics of its validation."""
    changes = {"task": {"name": "har"}, "training": {"epochs": 4}, "optimizer": {"lr": lr}}
    config = resolve(find_task("har").defaults, changes)
    run = RunDir.create(folder / name, config, run_id=name, command=["lockstep", "train", "har"])
    write_json(run.plan_file, {"monitor": "val_accuracy", "mode": "max", "epochs": 4, "steps_per_epoch": 10})
    further = {f"val_metric_{number}": number / 1000 for number in range(more)}
    run.write_epochs(
        {
            **{"attempt": 1, "epoch": epoch, "step": 10 * epoch, "samples_seen": 640 * epoch, "samples_per_s": 614.0},
            **{"train_loss": 1 / epoch, "val_loss": 2 / epoch, "val_accuracy": score, **further},
        }
        for epoch, score in enumerate(scores, 1)
    )
    with run.steps_file.open("w") as steps, run.ranks_file.open("w") as ranks:
        for step, speed in ((10, 1000.0), (20, 1000.0), (30, 2000.0), (40, 2000.0)):
            row = {"attempt": 1, "step": step, "epoch": step // 10, "samples_seen": 64 * step, "loss": 1.0}
            steps.write(json.dumps({**row, "samples_per_s": speed, "lr": 0.1}) + "\n")
            work = [{"rank": rank, "own_s": 0.03, "wait_s": 0.01 * rank, "memory_gb": 1.5} for rank in (0, 1)]
            ranks.write(json.dumps({"attempt": 1, "step": step, "epoch": step // 10, "ranks": work}) + "\n")
    run.update(
        status="completed",
        placement={"devices": ["gpu:0", "gpu:1"], "strategy": "ddp"},
        best_epoch=scores.index(max(scores)) + 1,
        best_metric={"val_accuracy": max(scores), "val_loss": 1.0},
        final_metrics={"test_accuracy": 0.625, "test_loss": 1.25},
        git={"commit": "0123456789abcdef", "clean": False},
    )
    (run.logs / "run.log").write_text("epoch 1/4  val_accuracy 0.5\nstatus completed\n")
    return run


def cells(table: Locator) -> list[list[str]]:
    """The text of each cell; line breaks are spaces."""
    rows = table.locator("tr").evaluate_all("rows => rows.map((row) => [...row.cells].map((cell) => cell.innerText))")
    return [[" ".join(cell.split()) for cell in row] for row in rows]


def open_run(server: Address, open_page: OpenPage, **more: object) -> Page:
    page = open_page(server.url, **more)
    page.get_by_role("link", name="run-00000a11").click()
    return page


def test_numbers_have_their_split_epoch_and_one_throughput(server: Address, open_page: OpenPage) -> None:
    run = make_answered(runs_of(server))
    page = open_run(server, open_page)
    answer = page.get_by_role("region", name="Answer")
    expect(answer).to_contain_text("0.875 best · epoch 2 · validation")
    expect(answer.get_by_text("0.875", exact=True)).to_have_css("font-size", "30px")
    expect(answer).to_contain_text("Last 0.8125 · epoch 4 of 4")
    expect(answer).to_contain_text("no better for 2 epochs")
    table = page.get_by_role("table", name="Metrics")
    expect(table.locator("tbody tr")).to_have_count(2)
    assert cells(table) == [
        ["Metric", "Training epoch 4", "Validation best: epoch 2", "Validation epoch 4", "Test best weights", "Epochs"],
        ["Loss", "0.25", "1", "0.5", "1.25", ""],
        ["Accuracy", "–", "0.875", "0.8125", "0.625", ""],
    ]
    # 1,280 samples at 1,000/s and as many at 2,000/s: the chart's numbers, not the epochs'.
    expect(page.get_by_role("region", name="Progress")).to_contain_text("1,333 samples/s on average")
    changed = page.get_by_role("region", name="Changed settings")
    expect(changed.get_by_role("term")).to_have_text(["training.epochs", "optimizer.lr"])
    expect(changed.get_by_role("definition")).to_have_text(["4", "0.25"])
    expect(changed).to_contain_text("Commit 0123456789, with changes that are not committed")
    ranks = page.get_by_role("region", name="Ranks").get_by_role("listitem")
    expect(ranks).to_have_text(
        [
            re.compile("gpu:0 rank 0.*30 ms work · 0 ms wait · 1.5 GB"),
            re.compile("gpu:1 rank 1.*30 ms work · 10 ms wait"),
        ]
    )
    assert ranks.locator("progress").evaluate_all("all => all.map((bar) => bar.value)") == [1, 0.75]
    with run.ranks_file.open("a") as file:
        work = [{"rank": rank, "own_s": 0.02, "wait_s": 0.06, "memory_gb": 2.5} for rank in (0, 1)]
        file.write(json.dumps({"attempt": 1, "step": 41, "epoch": 5, "ranks": work}) + "\n")
    expect(ranks).to_have_text([re.compile("20 ms work · 60 ms wait · 2.5 GB")] * 2)
    assert ranks.locator("progress").evaluate_all("all => all.map((bar) => bar.value)") == [0.25, 0.25]
    page.get_by_role("tab", name="Log").click()
    expect(page.get_by_role("tabpanel", name="Log").locator("pre")).to_contain_text("epoch 1/4 val_accuracy 0.5")


def test_five_hundred_metrics_are_a_table_that_is_searched(server: Address, open_page: OpenPage) -> None:
    make_answered(runs_of(server), more=500)
    page = open_run(server, open_page, viewport=NARROW)
    table = page.get_by_role("table", name="Metrics")
    expect(table.locator("tbody tr")).to_have_count(502)
    expect(table.locator(".spark polyline")).to_have_count(502)
    page.get_by_label("Search metrics").fill("metric 321")
    expect(table.locator("tbody tr")).to_have_count(1)
    assert cells(table)[1][:3] == ["Metric 321", "–", "0.321"]
    charts = page.get_by_role("group", name="Charts").get_by_role("figure")
    assert charts.count() <= 8
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_classes_of_a_metric_are_lines_of_one_chart(server: Address, open_page: OpenPage) -> None:
    run = make_answered(runs_of(server))
    classes = {"cat": 0.5, "dog": 0.25}
    rows = [
        {**row, **{f"val_recall/{name}": value * row["epoch"] / 4 for name, value in classes.items()}}
        for row in run.epochs()
    ]
    run.write_epochs(rows)
    page = open_run(server, open_page)
    page.get_by_role("tab", name="Charts").click()
    lines = re.compile(r"^Recall per epoch .*val recall.cat 0.5 at .*val recall.dog 0.25 at ")
    expect(page.get_by_role("img", name=lines)).to_be_visible()
    expect(page.get_by_role("figure", name=re.compile("^Recall.(cat|dog)"))).to_have_count(0)


def test_which_run_is_best_what_differs_and_does_it_improve(server: Address, open_page: OpenPage) -> None:
    runs = runs_of(server)
    make_answered(runs)
    make_answered(runs, "run-00000a22", scores=(0.25, 0.5, 0.625, 0.7125))
    make_answered(runs, "run-00000a33", scores=(0.5, 0.625, 0.75, 0.9375), lr=0.125)
    others = {"run-00000a44": (0.125, 0.25, 0.5, 0.625), "run-00000a55": (0.5, 0.25), "run-00000a66": (0.25, 0.125)}
    for name, scores in others.items():
        make_answered(runs, name, scores=scores, lr=0.0625).update(git={"commit": "fedcba9876543210", "clean": True})
    page = open_page(server.url)
    expect(page.get_by_role("link", name="run-00000a66")).to_be_visible()
    names = ["run-00000a11", "run-00000a22", "run-00000a33", *others]
    page.evaluate("names => { location.hash = `#/compare/${names}` }", names)
    table = page.get_by_role("table", name="Answer")
    expect(table.get_by_role("row", name=re.compile("a11.*no better for 2 epochs"))).to_be_visible()
    expect(table.get_by_role("cell", name=re.compile("no better|still improving"))).to_have_count(6)
    assert cells(table) == [
        ["Run", "Val accuracy", "Epoch", "Last", "Epochs", "Trend", "Test accuracy", "lr"],
        ["run-00000a11", "0.875", "2", "0.8125", "", "no better for 2 epochs", "0.625", "0.25"],
        ["run-00000a22", "0.7125", "4", "0.7125", "", "still improving", "0.625", "0.25"],
        ["run-00000a33", "0.9375 ★ best", "4", "0.9375", "", "still improving", "0.625", "0.125"],
        ["run-00000a44", "0.625", "4", "0.625", "", "still improving", "0.625", "0.0625"],
        ["run-00000a55", "0.5", "1", "0.25", "", "no better for 1 epoch", "0.625", "0.0625"],
        ["run-00000a66", "0.25", "1", "0.125", "", "no better for 1 epoch", "0.625", "0.0625"],
    ]
    box = table.bounding_box()
    assert box is not None and box["y"] + box["height"] < 800, "without scrolling"
    expect(table.locator("td.number").first).to_have_css("font-variant-numeric", "tabular-nums")
    expect(table.locator("tbody th").first).to_have_css("font-variant-numeric", "normal")
    figure = page.get_by_role("figure", name="val accuracy per epoch")
    figure.locator(".u-over").hover(position={"x": 2, "y": 20})
    expect(figure.locator(".tip dt")).to_have_text(names)
    expect(figure.locator(".tip dd")).to_have_text(["0.5", "0.25", "0.5", "0.125", "0.5", "0.25"])
    # Any axis, and the mean of each group: (0.8125 + 0.7125) / 2.
    page.get_by_label("X axis").select_option("samples")
    curve = page.get_by_role("img", name=re.compile("^val accuracy per epoch against samples"))
    expect(curve).to_have_accessible_name(re.compile("run-00000a22 0.7125 at samples 2,560"))
    page.get_by_label("X axis").select_option("time")
    expect(
        page.get_by_role("img", name=re.compile(r"^Loss against training time.*a33 1 at training time \(s\) 1.92"))
    ).to_be_visible()
    page.get_by_label("Group by").select_option("optimizer.lr")
    means = re.compile(r"^val accuracy per epoch .*lr 0.25 0.7625 at .*; lr 0.125 0.9375 at ")
    expect(page.get_by_role("img", name=means)).to_be_visible()
    assert "group=optimizer.lr" in page.url
    commits = page.get_by_role("region", name="Results").get_by_role("row", name=re.compile("^git commit"))
    expect(commits.get_by_role("cell")).to_have_text(["0123456789 + changes"] * 3 + ["fedcba9876"] * 3)


def test_a_band_is_one_standard_deviation_where_all_lines_are(server: Address, open_page: OpenPage) -> None:
    page = open_page(server.url)
    expect(page.get_by_role("table", name="Runs")).to_be_visible()
    mean_of = """async (lines) => {
        const { meanOf } = await import('/static/app/overlay.js');
        return meanOf(lines);
    }"""
    lines = [{"x": [0, 1, 2], "y": [9, 1, 2]}, {"x": [1, 2, 3], "y": [3, 6, 9]}, {"x": [1, 3], "y": [5, 9]}]
    mean = page.evaluate(mean_of, lines)  # at 2, the third line is at 7, between its points
    assert mean["x"] == [1, 2]
    assert mean["y"] == [3, 5]
    assert mean["band"] == [[1, pytest.approx(5 - 7**0.5)], [5, pytest.approx(5 + 7**0.5)]]


@pytest.mark.slow
def test_the_way_back_leads_to_the_table_as_it_was(server: Address, open_page: OpenPage) -> None:
    runs = runs_of(server)
    for number in range(40):
        make_answered(runs, f"run-{number:08x}", lr=(number % 2 + 1) / 8)
    page = open_page(server.url)
    rows = page.get_by_role("table", name="Runs").locator("tbody tr")
    expect(rows).to_have_count(43)
    page.get_by_label("Search runs").fill("lr > 0.2")
    expect(rows).to_have_count(20)
    page.get_by_role("button", name="Name", exact=True).click()
    page.get_by_role("button", name="Charts", exact=True).click()
    curves = page.get_by_role("region", name="Curves")
    expect(curves.get_by_role("figure", name="val accuracy per epoch")).to_be_visible()
    expect(curves).to_contain_text("The first 10 of 20 runs")
    figure = curves.get_by_role("figure", name="val accuracy per epoch")
    figure.scroll_into_view_if_needed()
    figure.locator(".u-over").hover(position={"x": 2, "y": 20})
    expect(figure.locator(".tip dt")).to_have_text(rows.get_by_role("link").all_inner_texts()[:10])
    expect(figure.locator(".tip dd")).to_have_text(["0.5"] * 10)
    view = page.get_by_role("region", name="Runs")
    view.evaluate("it => it.scrollTo(0, 120)")
    for way in ("← Runs", None):
        page.get_by_role("link", name="run-00000005").click()
        expect(page.get_by_role("region", name="Answer")).to_be_visible()
        page.go_back() if way is None else page.get_by_role("link", name=way).click()
        expect(rows).to_have_count(20)
        expect(page.get_by_label("Search runs")).to_have_value("lr > 0.2")
        expect(page.get_by_role("columnheader", name="Name")).to_have_attribute("aria-sort", "ascending")
        expect(curves).to_be_visible()
        expect(view).to_have_js_property("scrollTop", 120)
    # Named, it is found again in another visit.
    page.get_by_role("button", name="Views").click()
    page.get_by_role("menuitem", name="Name this view…").click()
    page.get_by_role("dialog").get_by_label("Name").fill("large rates")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    page.goto(server.base)
    expect(rows).to_have_count(43)
    page.get_by_role("button", name="Views").click()
    page.get_by_role("menuitem", name="large rates").click()
    expect(rows).to_have_count(20)
    expect(page.get_by_label("Search runs")).to_have_value("lr > 0.2")
    page.get_by_role("button", name="Views").click()
    page.get_by_role("menuitem", name="Forget large rates").click()
    page.get_by_role("button", name="Views").click()
    expect(page.get_by_role("menuitem")).to_have_text(["Name this view…"])


def test_a_phone_has_every_column_and_names_have_a_title(server: Address, open_page: OpenPage) -> None:
    run = make_answered(runs_of(server))
    name = "a long name " * 8
    run.update(name=name)
    page = open_page(server.url, viewport=NARROW)
    row = page.get_by_role("row").filter(has_text="a long name")
    expect(row).to_contain_text("gpu:0–1")
    titles = row.locator("td[data-title]").evaluate_all("all => all.map((cell) => cell.dataset.title)")
    assert titles == ["Status", "Monitored", "Created", "Duration", "Task", "Devices", "Tags"]
    for cell in row.locator("td[data-title]:not(:empty)").all():
        box = cell.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= NARROW["width"]
    link = row.get_by_role("link")
    expect(link).to_have_attribute("title", re.compile(name.strip()))
    assert link.evaluate("it => it.scrollWidth > it.clientWidth"), "it is cut"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_the_runs_of_a_sweep_have_a_page(server: Address, open_page: OpenPage) -> None:
    last = {0.25: (0.5, 1.0), 0.125: (0.875, 0.625)}
    for lr, values in last.items():
        for value in values:
            name = f"run-00000b{len(list(runs_of(server).iterdir())):02d}"
            make_answered(runs_of(server), name, scores=(0.25, value), lr=lr).update(tags=("sweep-1",))
    page = open_page(server.url)
    page.get_by_role("link", name="sweep-1").first.click()
    expect(page.get_by_role("heading", name="sweep-1")).to_be_visible()
    table = page.get_by_role("table", name="Answer")
    expect(table.locator("tbody tr")).to_have_count(4)
    assert sorted(row[1] for row in cells(table)[1:]) == ["0.5", "0.625", "0.875", "1 ★ best"]
    # The means of what was swept, without a choice: (0.5 + 1) / 2 and (0.875 + 0.625) / 2.
    means = page.get_by_role(
        "img", name=re.compile(r"^val accuracy per epoch .*lr 0\.\d+ 0.75 at .*; lr 0\.\d+ 0.75 at ")
    )
    expect(means).to_be_visible()
    page.get_by_label("Group by").select_option("")
    expect(page.get_by_role("img", name=re.compile("^val accuracy per epoch .*run-00000b.* 0.875 at "))).to_be_visible()
    page.get_by_role("link", name="All 4 runs").click()
    expect(page.get_by_label("Search runs")).to_have_value('tag:"sweep-1"')
    expect(page.get_by_role("table", name="Runs").locator("tbody tr")).to_have_count(4)


def test_a_failed_run_of_a_terminal_has_its_last_lines_and_the_output_of_every_rank(
    server: Address, open_page: OpenPage
) -> None:
    run = make_answered(runs_of(server))
    run.update(status="failed", error="RuntimeError: made up")
    (run.logs / "run.log").write_text("epoch 1/4\nits last words\n")
    for rank in (0, 1):
        (run.logs / f"rank-{rank}.log").write_text(f"rank {rank} speaks\n")
    page = open_run(server, open_page)
    expect(page.get_by_label("Output of the command")).to_contain_text("its last words")
    page.get_by_role("tab", name="Log").click()
    log = page.get_by_role("tabpanel", name="Log")
    expect(log.get_by_label("File").get_by_role("option")).to_have_text(["run.log", "rank-0.log", "rank-1.log"])
    log.get_by_label("File").select_option("rank-1.log")
    expect(log.locator("pre")).to_have_text(re.compile("rank 1 speaks"))


def test_columns_and_groups_survive_the_way_back(server: Address, open_page: OpenPage) -> None:
    make_answered(runs_of(server))
    page = open_page(server.url)
    page.get_by_role("button", name="Columns").click()
    page.get_by_role("dialog").get_by_label("optimizer.lr").check()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_label("Group by").select_option("status")
    page.get_by_role("button", name="Status completed").click()
    page.get_by_role("link", name="run-00000a11").click()
    expect(page.get_by_role("region", name="Answer")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("columnheader", name="optimizer.lr")).to_be_visible()
    expect(page.get_by_label("Group by")).to_have_value("status")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="run-00000a11"))
    expect(row.locator("td[data-title='optimizer.lr']")).to_have_text("0.25")
