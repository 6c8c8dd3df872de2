"""The form of the next run: devices and labels, what is loaded into it, and what it will not take. Needs Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.browser.conftest import NARROW, PATIENCE_MS, WIDE, OpenPage, open_form
from tests.gloo import ROOT
from tests.hardware.machines import machine
from tests.studio.serving import Address, studio

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def browser(shared_browser: Browser) -> Browser:
    return shared_browser


@pytest.mark.parametrize("viewport", [WIDE, pytest.param(NARROW, marks=pytest.mark.drill)], ids=["wide", "narrow"])
def test_labels_follow_the_ticks(server: Address, open_page: OpenPage, viewport: ViewportSize) -> None:
    page = open_form(open_page(server.url, viewport))
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
    expect(page.get_by_text("Fix: select a device above")).to_be_visible()  # the form's words, not the command's
    expect(multi).to_be_hidden()
    expect(page.get_by_label("Number of ranks")).to_be_hidden()
    cpu.check()
    page.get_by_label("Number of ranks").fill("4")
    expect(batch).to_have_text(re.compile("4 CPU ranks"))
    expect(page.get_by_text(re.compile("is not supported on"))).to_be_hidden()  # "32" is, and others matter to nobody
    size = page.get_by_role("textbox", name="Batch size", exact=True)
    size.fill("many")
    expect(run).to_be_disabled()
    expect(run).to_have_accessible_description(re.compile("training.batch_size: input should be a valid integer.*many"))
    expect(size).to_have_accessible_description(re.compile("^input should be a valid integer.*many"))
    expect(page.get_by_text("of earlier input")).to_be_visible()


def test_an_error_stands_beside_its_field_and_run_leads_to_the_first(server: Address, open_page: OpenPage) -> None:
    page = open_form(open_page(server.url))
    form = page.get_by_role("dialog", name="Configuration")
    run, foot = form.get_by_role("button", name="Run", exact=True), form.locator(".foot")
    epochs, betas = form.get_by_label("Epochs", exact=True), form.locator("[name='optimizer.betas']")
    optimizer, wrong = (
        form.locator("details").filter(has=page.locator("[name='optimizer.betas']")),
        form.locator("[aria-invalid=true]"),
    )
    expect(run).to_be_enabled()
    expect(wrong).to_have_count(0)
    load(server, page, training={"epochs": 7}, optimizer={"betas": [0.5, 0.75]})
    betas.fill("0.5, large")
    epochs.fill("-3")
    expect(foot).to_have_text("RunTo correct: Epochs, Betas")
    assert wrong.evaluate_all("all => all.map(({ name }) => name)") == ["training.epochs", "optimizer.betas"]
    expect(epochs).to_have_accessible_description(
        re.compile(r"^input should be greater than or equal to 1 \(given: -3\)")
    )
    expect(betas).to_have_accessible_description(re.compile(r"^input should be a valid number.* \(given: 'large'\)"))

    # Run leads to the first one, then to the next one, also in a folded section and while others are searched for.
    optimizer.locator("summary").click()
    expect(betas).to_be_hidden()
    run.click(force=True)  # it is disabled, and says why
    expect(epochs).to_be_focused()
    epochs.fill("3")
    expect(foot).to_have_text("RunTo correct: Betas")
    expect(epochs).not_to_have_attribute("aria-invalid", "true")
    form.get_by_label("Search settings").fill("seed")
    run.press("Enter")
    expect(betas).to_be_focused()
    expect(betas).to_have_value("0.5, large")

    # Devices, and an error that no field has, which stays where it is.
    load(server, page, hardware={"selected_devices": ["gpu:7"]})
    boxes = form.get_by_role("group", name="Devices").get_by_role("checkbox")
    expect(wrong).to_have_count(4)
    expect(boxes.first).to_have_accessible_description(re.compile("^there is no gpu:7 on this machine"))
    run.click(force=True)
    expect(boxes.first).to_be_focused()
    load(server, page, hardware={"strategy": "single", "selected_devices": ["gpu:0", "gpu:1"]})
    expect(foot.get_by_role("alert")).to_contain_text("strategy single takes one device, but 2 devices are selected")
    expect(wrong).to_have_count(0)


def test_configurations_are_saved_and_loaded(server: Address, open_page: OpenPage) -> None:
    page = open_form(open_page(server.url))
    epochs, dialog = (
        page.get_by_label("Epochs", exact=True),
        page.get_by_role("dialog", name=re.compile("configuration")),
    )
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
    expect(dialog.get_by_text("No saved configurations.")).to_be_visible()
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()


def load(server: Address, page: Page, **config: object) -> None:
    """Save a configuration in the studio, as from another machine, and load it into the form."""
    server.call("PUT", "/api/configs/other machine", json={"task": "har", "config": config})
    page.get_by_role("button", name="Load", exact=True).click()
    page.get_by_role("dialog", name="Load configuration").get_by_role("button", name="other machine har").click()
    expect(page.get_by_role("dialog", name="Load configuration")).to_be_hidden()
    server.call("DELETE", "/api/configs/other machine")


def test_a_configuration_of_another_machine_and_numbers_that_a_browser_rounds(
    server: Address, open_page: OpenPage
) -> None:
    page = open_form(open_page(server.url))
    run, seed = page.get_by_role("button", name="Run", exact=True), 2**60 + 1
    box = {name: page.get_by_role("checkbox", name=name) for name in ("CPU", "GPU 0", "GPU 1", "GPU 2")}
    absent, command = (
        page.get_by_role("alert").filter(has_text="gpu:7"),
        page.get_by_label("Command", exact=True),
    )
    load(server, page, training={"seed": seed}, hardware={"selected_devices": "gpu:7, gpu:0"})
    expect(page.get_by_label("Name", exact=True)).to_have_value("other machine")
    expect(absent).to_be_visible()
    expect(run).to_be_disabled()
    box["GPU 1"].check()
    expect(absent).to_be_hidden()
    expect(run).to_be_enabled()
    page.get_by_text("Command and YAML", exact=True).click()
    expect(command).to_have_text(re.compile(rf"--devices gpu:0,gpu:1\b.* --seed {seed}\b|--seed {seed} .*gpu:0,gpu:1"))
    expect(command).to_contain_text("name=other machine")

    load(server, page, hardware={"selected_devices": ["gpu:7", "cpu"]})
    expect(absent).to_be_visible()
    expect(box["CPU"]).to_be_checked()
    box["GPU 0"].check()
    expect(absent).to_be_hidden()
    expect(run).to_be_enabled()
    load(server, page, hardware={"selected_devices": "all"})
    for name in ("GPU 0", "GPU 1", "GPU 2"):
        expect(box[name]).to_be_checked()
    box["GPU 2"].uncheck()
    expect(command).to_contain_text("--devices gpu:0,gpu:1")
    expect(run).to_be_enabled()


def test_every_setting_has_a_field_and_a_mistake_goes_with_it(server: Address, open_page: OpenPage) -> None:
    page = open_form(open_page(server.url))
    run = page.get_by_role("button", name="Run", exact=True)
    expect(run).to_be_enabled()
    offered = set(page.evaluate("[...document.querySelectorAll('.group [name]')].map((field) => field.name)"))
    answer = server.get("/api/schema")
    # The others are shown by the chosen task, optimizer and schedule, and as boxes for the devices.
    sections = {name: one["$ref"] for name, one in answer["schema"]["properties"].items() if "$ref" in one}
    for section in sections.keys() - {"task", "hardware", "optimizer", "scheduler"}:
        kind = sections[section].rpartition("/")[2]
        settings = {f"{section}.{name}" for name in answer["schema"]["$defs"][kind]["properties"]}
        assert settings - set(answer["refused"]) == {name for name in offered if name.startswith(f"{section}.")}

    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    page.get_by_label("Betas").fill("large")
    expect(run).to_be_disabled()
    page.locator("[name='optimizer.name']").select_option(label="sgd")
    expect(page.get_by_label("Betas")).to_be_hidden()
    expect(run).to_be_enabled()
    options = page.locator("[name='optimizer.options']")
    options.fill("nesterov: true, momentum: 0.5")
    options.blur()
    expect(options).to_have_value("nesterov: true, momentum: 0.5")
    expect(page.get_by_label("YAML", exact=True)).to_contain_text("momentum: 0.5")
    options.fill("nesterov")
    expect(options).to_have_accessible_description(
        re.compile(r"^input should be a valid dictionary \(given: 'nesterov'\)")
    )
    options.fill("")
    expect(run).to_be_enabled()
    for seed in (2**53 - 1, 2**53 + 1):  # a browser would round the second
        page.get_by_label("Seed", exact=True).fill(str(seed))
        expect(page.get_by_label("Command", exact=True)).to_contain_text(f"--seed {seed}")
        expect(run).to_be_enabled()


SCALED = """

class Scaled(Task):
    def __init__(self, scale: float = 1.0, names: tuple[str, ...] = ("a",)) -> None:
        super().__init__()
"""


@pytest.mark.slow
def test_a_first_visit_shows_devices_the_tasks_of_the_folder_and_a_run_that_is_ready(
    open_page: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text((ROOT / "tests" / "toys.py").read_text() + SCALED)
    monkeypatch.chdir(tmp_path)
    with studio(tmp_path, machine(2)) as address:
        page = open_page(address.url)
        form = page.get_by_role("dialog", name="Configuration")
        expect(form).to_be_visible()
        expect(form.get_by_role("checkbox", name="GPU 0")).to_be_checked()
        run = form.get_by_role("button", name="Run", exact=True)
        expect(run).to_be_enabled()
        task = form.get_by_label("Task", exact=True)
        task.select_option("mine.py:Toy (in this folder)")
        expect(task).to_have_value(f"{tmp_path / 'mine.py'}:Toy")
        expect(task.get_by_role("option", name="mine.py:Toy (in this folder)")).to_have_count(0)
        expect(run).to_be_enabled()
        task.select_option("mine.py:Scaled (in this folder)")
        form.get_by_label("Search settings").fill("scale")
        scale = form.get_by_label("Scale", exact=True)
        expect(scale).to_have_value("1")
        scale.fill("0.5")
        form.get_by_text("Command and YAML", exact=True).click()
        expect(form.get_by_label("Command", exact=True)).to_contain_text("--set task.scale=0.5")
