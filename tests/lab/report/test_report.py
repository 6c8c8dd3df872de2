"""``lockstep report`` and ``lockstep compare``, on runs that were trained."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.cli.main import main
from lockstep.lab.commands.report import grouped
from lockstep.lab.report.figures import group_pictures, pictures
from lockstep.lab.report.source import read_run, thinned
from lockstep.rundir.files import flattened
from lockstep.rundir.folder import RunDir
from lockstep.rundir.summary import differences

pytestmark = pytest.mark.long  # trains twice, and draws

PNG = b"\x89PNG\r\n\x1a\n"
NAME = "_<b>first</b> & $x_$ best"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs of the HAR task: ``a`` and ``b``."""
    root = tmp_path_factory.mktemp("runs")
    for name, label, lr in (("a", NAME, 1e-3), ("b", None, 3e-3)):
        settings = {
            "name": label,
            "save_dir": str(root / name),
            "training": {"threads": 1, "max_steps": 30},
            "optimizer": {"lr": lr},
            "hardware": {"selected_devices": ["cpu"]},
            "data": {"num_workers": 0},
            "telemetry": {"progress": "silent", "log_interval": 10, "tensorboard": "off"},
        }
        lockstep.train("har", settings)
    return root


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


class Links(HTMLParser):
    """What a page would fetch, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [value for name, value in attrs if name in {"src", "href"} and value]

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(path: Path) -> Links:
    page = Links()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.mark.slow
def test_a_report_is_one_page_that_needs_nothing_else(runs: Path, cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("report", runs / "a", runs / "b", "--out", tmp_path / "out")
    assert code == 0
    files = [Path(line) for line in out.splitlines()]
    assert files[0] == tmp_path / "out" / "report.html"
    assert all(file.read_bytes().startswith(PNG) for file in files[1:])
    shown = {file.stem for file in files[1:]}
    assert shown >= {"loss", "val_accuracy", "lr", "throughput", "data_wait"}
    assert sum(name.startswith("test_confusion-") for name in shown) == 2
    page = read_page(files[0])
    assert all(link.startswith(("#", "data:")) for link in page.fetched), page.fetched
    assert page.tags.isdisjoint({"script", "link", "iframe", "b"}), "a run's name is text, not HTML"
    assert NAME in page.text
    assert "url(http" not in files[0].read_text()
    classes = json.loads((runs / "a" / "tables.json").read_text())["class_names"]
    for expected in ("optimizer.lr", "0.003", "val_accuracy", "completed", "true class (recall)", f"{classes[0]} ("):
        assert expected in page.text
    first, again = ([picture.svg() for picture in pictures([read_run(RunDir(runs / "a"))])[:2]] for _ in range(2))
    assert first == again, "the same runs give the same page"
    code, out, _ = cli("report", runs / "a", "--out", tmp_path / "new" / "a.html")
    assert out.split() == [str(tmp_path / "new" / "a.html")] == [str(file) for file in (tmp_path / "new").iterdir()]
    assert NAME in read_page(tmp_path / "new" / "a.html").text


def test_compare_tells_results_and_differences(runs: Path, cli: Cli) -> None:
    code, out, _ = cli("compare", runs / "a", runs / "b", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["differences"] == {
        "name": [NAME, None],
        "optimizer.lr": [0.001, 0.003],
        "plan: schedule.lr": [0.001, 0.003],
    }
    assert document["summary"]["status"] == ["completed", "completed"]
    assert document["summary"]["steps"] == [30, 30]
    final = [json.loads((runs / name / "run.json").read_text())["final_metrics"] for name in ("a", "b")]
    assert document["summary"]["final test_accuracy"] == [one["test_accuracy"] for one in final]
    code, out, _ = cli("compare", runs / "a", runs / "b")
    assert code == 0
    assert re.search(r"^optimizer\.lr +0\.001 +0\.003$", out, re.MULTILINE)


def test_a_report_of_groups_has_a_curve_with_its_deviation(runs: Path, cli: Cli, tmp_path: Path) -> None:
    code, _, _ = cli("report", runs / "a", runs / "b", "--by", "training.seed", "--out", tmp_path / "groups.html")
    assert code == 0 and "seed=42" in read_page(tmp_path / "groups.html").text
    losses = [RunDir(runs / name).epochs()[-1]["val_loss"] for name in ("a", "b")]
    grouping = grouped([str(runs / "a"), str(runs / "b")], runs, "training.seed", "val_loss")
    assert grouping is not None
    (axes,) = group_pictures(grouping)[0].figure.axes
    mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(mean)
    edges = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (edges.min(), edges.max()) == pytest.approx((mean - deviation, mean + deviation))


def test_a_run_against_itself_and_alone(runs: Path, cli: Cli) -> None:
    for arguments in ((runs / "a",), (runs / "a", runs / "a"), ()):
        code, _, error = cli("compare", *arguments)
        assert code == 2
        assert "needs two runs" in error
    assert cli("report")[0] == 2
    assert "'nothing'" in cli("report", "nothing", "--runs-dir", runs)[2]


@pytest.mark.slow
def test_a_damaged_file_is_a_gap_that_the_page_tells_of(runs: Path, cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(runs / "a", tmp_path / "a", symlinks=True)
    (tmp_path / "a" / "metrics.json").write_text('{"epochs": 5}')
    tables = {"test_confusion": [[1, "x"], [2]], "../a/b": [[1]], ".._a_b": [[1]]}
    (tmp_path / "a" / "tables.json").write_text(json.dumps(tables))
    (tmp_path / "a" / "steps.jsonl").write_bytes(b'{"step": 1, "loss": "NaN"}\n\xff\xfe broken')
    code, out, _ = cli("report", tmp_path / "a")
    assert code == 0
    names = {Path(line).stem for line in out.splitlines()}
    assert "loss" not in names
    assert not any("confusion" in name for name in names)
    assert len([name for name in names if name.startswith(".._a_b-")]) == 2, "each has a file, and it is in the folder"
    assert "metrics.json" in read_page(tmp_path / "a" / "report" / "report.html").text


def test_evaluations_between_epochs_stand_beside_those_at_their_ends(runs: Path, cli: Cli, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(runs / name, tmp_path / name, symlinks=True)
    run = RunDir.open(tmp_path / "a")
    ends = run.epochs()
    between = {"attempt": 1, "step": 15, "epoch": 1, "improved": False, "val_accuracy": 0.25, "val_loss": 4.0}
    run.evaluations_file.write_text(json.dumps(between) + "\n")
    drawn = {picture.name: picture.figure.axes[0] for picture in pictures([read_run(run)])}
    (accuracy,) = drawn["val_accuracy"].lines
    points = sorted([(15, 0.25), *((row["step"], row["val_accuracy"]) for row in ends)])
    assert drawn["val_accuracy"].get_xlabel() == "step"
    assert list(zip(accuracy.get_xdata(), accuracy.get_ydata(), strict=True)) == points
    assert (15, 4.0) in zip(drawn["loss"].lines[1].get_xdata(), drawn["loss"].lines[1].get_ydata(), strict=True)
    found = json.loads(cli("compare", run.path, tmp_path / "b", "--json")[1])["evaluations"]
    assert list(found.values()) == [[between], []]
    assert json.loads(cli("show", run.path, "--json")[1])["metrics"]["evaluations"] == [between]
    shown = cli("show", run.path)[1]
    assert re.search(r"^last evaluation between epochs *\nattempt +1\nstep +15$", shown, re.MULTILINE)


def test_without_matplotlib_the_error_says_what_to_install(
    runs: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, error = cli("report", runs / "a", "--out", tmp_path / "out")
    assert code == 2
    assert "lockstep-train[report]" in error
    assert not (tmp_path / "out").exists()
    assert cli("compare", runs / "a", runs / "b")[0] == 0


def test_a_folder_that_cannot_be_written(runs: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, error = cli("report", runs / "a", "--out", tmp_path / "file")
    assert code != 0
    assert "Traceback" not in error
    assert str(tmp_path / "file") in error


def test_a_run_has_its_curves(runs: Path) -> None:
    data = read_run(RunDir.open(runs / "a"))
    assert data.label == NAME
    assert [row["step"] for row in data.steps] == [10, 20, 30]
    assert data.config["optimizer.lr"] == 1e-3
    assert data.problems == ()


SETTINGS = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text("ab", min_size=1, max_size=2), SETTINGS, max_size=4), min_size=2, max_size=4))
def test_differences_are_what_is_not_the_same(settings: list[dict[str, Any]]) -> None:
    flats = [flattened(one) for one in settings]
    found = differences(flats)
    for key in {key for one in flats for key in one}:
        values = [one.get(key) for one in flats]
        assert (key in found) == any(value != values[0] for value in values)
    assert not differences([flats[0], flats[0]])


@given(st.integers(0, 20_000))
def test_thinning_keeps_the_end_and_the_order(size: int) -> None:
    rows = [{"step": step} for step in range(size)]
    kept = [row["step"] for row in thinned(rows)]
    assert len(kept) <= 4001
    assert kept == sorted(kept)
    assert kept[-1:] == [size - 1][:size]
