"""Every benchmark on real processes: rows that add up, failures that are results, reports that others can read."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.cli.output import deliver
from lockstep.errors import StorageError, UsageError
from lockstep.lab.bench import BenchReport, PerformanceProfiler, print_report, write_report
from lockstep.lab.bench.batch_size import bench_batch_size
from lockstep.lab.bench.comm import bench_comm
from lockstep.lab.bench.loader import bench_loader
from lockstep.lab.bench.lr import bench_lr
from lockstep.lab.bench.report import table_of
from lockstep.lab.bench.scaling import bench_scaling
from lockstep.lab.bench.step import bench_step
from lockstep.lab.bench.trials import Subject
from tests import commands
from tests.conftest import RunCli, cli_environment
from tests.dist.staged import Staged
from tests.e2e.test_train import TOY, finish, start
from tests.lab.bench.greedy import Greedy
from tests.toys import Toy

ONE: dict[str, Any] = {"hardware": {"selected_devices": ["cpu"]}, "training": {"threads": 1}}
TWO: dict[str, Any] = {"hardware": {"selected_devices": ["cpu", "cpu"]}, "training": {"threads": 1}}


def test_step_says_where_time_and_memory_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 32 samples fill two micro-batches of 16.
    twice = {**ONE, "training": {"threads": 1, "accumulate": 2, "batch_size": 64}, "task": {"samples": 32}}
    report = bench_step(Subject(Toy, twice), steps=4, warm_up=2, precisions=("16-mixed", "32"))
    rows = {row["precision"]: row for row in report.rows}
    assert rows["16-mixed"]["status"] == "skipped"
    assert "emulates" in rows["16-mixed"]["reason"]
    row = rows["32"]
    assert (row["status"], row["batch_size"]) == ("ok", 16)
    assert row["steps"] == 4
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert min(row["parts_ms"][part] for part in ("data", "forward", "backward", "optimizer")) > 0
    assert row["parts_ms"]["communication"] == 0
    assert row["memory_mb"] > 50
    # Two linear layers, 2·m·n operations a sample: forward, the weights' gradients, the second layer's input's.
    per_sample = 2 * (12 * 16 * 2 + 16 * 3 * 3)
    assert row["tflops"] * row["step_ms"] == pytest.approx(per_sample * 2 * 16 / 1e9)
    assert row["peak_share"] is None, "nobody publishes a peak for this CPU"
    files = write_report(report, tmp_path / "bench-step-1")
    document = json.loads(files[0].read_text())
    assert document["kind"] == "step"
    assert {"task", "machine", "date", "command", "settings", "rows", "verdict", "notes"} <= document.keys()
    assert {"cpu", "cores", "gpus", "torch", "python"} <= document["machine"].keys()
    assert "| 16 | 32 | False | ok |" in files[1].read_text()
    print_report(report, sys.stdout)
    assert "most samples/s" in capsys.readouterr().out


@pytest.mark.slow
def test_comm_measures_every_operation_and_every_link() -> None:
    three = {"hardware": {"selected_devices": ["cpu"] * 3}}
    report = bench_comm(three, max_bytes=4096)
    assert {row["operation"] for row in report.rows} == {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    for row in report.rows:
        assert row["status"] == "ok"
        assert row["bytes"] % 12 == 0, "every rank's part is equally large"
        assert row["algorithm_gb_s"] == pytest.approx(row["bytes"] / row["latency_us"] / 1e3)
    assert max(row["bus_gb_s"] for row in report.rows) > 0


@pytest.mark.slow
def test_scaling_compares_devices_and_says_what_is_refused(tmp_path: Path) -> None:
    report = bench_scaling(
        Subject(Staged, TWO),
        strategies=("ddp", "dp", "fsdp", "pipeline"),
        steps=4,
        warm_up=2,
        repeats=1,
    )
    rows = {(row["ranks"], row["strategy"], row["mode"]): row for row in report.rows}
    for mode, batches in {"weak": (16, 32), "strong": (32, 32)}.items():
        one, two = rows[1, "single", mode], rows[2, "ddp", mode]
        assert (one["global_batch"], two["global_batch"]) == batches
        assert one["speed_up"] == 1
        assert two["speed_up"] == pytest.approx(two["samples_per_s"] / one["samples_per_s"])
        assert two["efficiency"] == pytest.approx(two["speed_up"] / 2)
        assert two["shares"]["communication"] > 0
        assert sum(two["shares"].values()) == pytest.approx(1)
        assert len(two["memory_mb_per_device"]) == 2
        assert two["epoch_s"] == pytest.approx(200 / two["samples_per_s"])
        assert rows[2, "dp", mode]["status"] == "refused"
        assert rows[2, "fsdp", mode]["samples_per_s"] > 0
        assert rows[2, "fsdp", mode]["shares"]["communication"] is None, "it hides in forward and backward"
    pipelined = rows[2, "pipeline", "strong"]
    assert (pipelined["global_batch"], pipelined["accumulate"]) == (32, 8), "its micro-batches keep both ranks busy"
    assert len(pipelined["memory_mb_per_device"]) == 2, "each stage has a process of its own"
    assert any("communication is inside" in note for note in report.notes)
    assert {row[1] for row in table_of("scaling", report.rows)[1]} == {"single", "ddp", "dp", "fsdp", "pipeline"}
    assert any("1 thread" in note for note in report.notes)
    assert any(re.search(r"\bdp\b.*GPU", note) for note in report.notes)
    write_report(report, tmp_path / "bench-scaling-1")
    columns = (tmp_path / "bench-scaling-1" / "report.md").read_text()
    assert "| epoch s | speed up | efficiency | memory mb per device |" in columns


@pytest.mark.slow
def test_between_cases_the_compiler_is_not_imported(tmp_path: Path) -> None:
    code = "import sys, torch; from lockstep.lab.bench.measure import release; release(torch.device('cpu'))"
    assert_idle = f"{code}; assert 'torch._dynamo' not in sys.modules"
    finish(commands.start("-c", assert_idle, cwd=tmp_path, env=cli_environment(), merged=True))


PIPELINE: dict[str, Any] = {**TWO, "hardware": {**TWO["hardware"], "strategy": "pipeline"}}


@pytest.mark.slow
def test_a_pipelines_largest_batch_is_tried_with_as_many_micro_batches_as_its_devices_hold() -> None:
    report = bench_batch_size(
        Subject(Staged, {**PIPELINE, "training": {"threads": 1, "batch_size": 64}}), max_batch=500
    )
    assert report.settings["accumulate"] == 2
    assert [row["batch_size"] for row in report.rows] == [64, 100], "two of 100 are the whole data set"
    assert {row["status"] for row in report.rows} == {"ok"}


@pytest.mark.slow
def test_running_out_of_memory_on_one_rank_is_a_result() -> None:
    greedy = {**TWO, "training": {"threads": 1, "batch_size": 2, "global_batch_size": 16}}
    task = {"mb": 100, "only_rank_1": True}
    report = bench_batch_size(Subject(Greedy, {**greedy, "task": task}), memory_limit=380_000_000)
    status = {row["batch_size"]: row["status"] for row in report.rows}
    assert status[2] == "ok"
    assert status[4] == "out of memory"
    assert report.extra["largest"] in (2, 3)
    proposed = report.extra["proposed"]
    assert proposed["global_batch_size"] == 16
    assert 2 * proposed["batch_size"] * proposed["accumulate"] >= 16
    assert proposed["batch_size"] <= report.extra["largest"]


@pytest.mark.slow
def test_batches_that_leave_an_epoch_one_step_are_measured() -> None:
    large = {**ONE, "training": {"threads": 1, "batch_size": 100, "global_batch_size": 400}}
    report = bench_batch_size(Subject(Toy, large))
    assert [row["batch_size"] for row in report.rows] == [100, 200], "the data set has 200 samples"
    assert {row["status"] for row in report.rows} == {"ok"}
    assert report.extra["largest"] == 200
    assert report.extra["proposed"] == {"batch_size": 200, "accumulate": 2, "global_batch_size": 400}


@pytest.mark.parametrize(("signum", "delay_s", "code"), [(signal.SIGTERM, 0.0, 143), (signal.SIGINT, 0.05, 130)])
def test_a_stop_before_the_ranks_start_and_soon_after(signum: int, delay_s: float, code: int) -> None:
    timers: list[threading.Timer] = []

    def stop(_: str) -> None:
        timers.append(threading.Timer(delay_s, os.kill, (os.getpid(), signum)))
        timers[0].start()
        if not delay_s:
            timers[0].join()

    report = bench_comm(TWO, max_bytes=1 << 24, say=stop)
    timers[0].join()
    assert report.partial
    assert report.exit_code == code
    assert {row["status"] for row in report.rows} <= ({"ok"} if delay_s else set()), "what was measured until then"


@pytest.mark.slow
def test_a_benchmark_that_measured_nothing_has_failed() -> None:
    fails = {**ONE, "training": {"threads": 1, "batch_size": 1000}, "task": {"fail_at": 1, "fail_rank": 0}}
    report = bench_lr(Subject(Toy, fails), steps=10)
    assert "it was told to" in report.notes[0]
    assert re.search(r"\b200 samples\b.*\b1000\b", report.notes[-1])
    assert report.exit_code == 1
    report = bench_loader(Subject(Toy, fails), workers=(0, 2))
    assert "failed (" in report.notes[-1]
    assert report.rows == [], "no number of workers is to blame"
    assert report.exit_code == 1


@pytest.mark.slow
def test_loader_finds_that_slow_data_need_workers() -> None:
    slow = {**ONE, "task": {"dataset": "plain", "pause_s": 0.002, "samples": 12}}
    report = bench_loader(Subject(Toy, slow), workers=(0, 2), seconds=0.2)
    assert [row["num_workers"] for row in report.rows] == [0, 2]
    assert report.settings["batch_size"] == 12, "there are no more samples"
    assert report.extra["recommended"]["bound"] == "data"
    assert report.verdict.startswith("use --num-workers ")
    assert all(row["of_demand"] < 1 for row in report.rows)


@pytest.mark.slow
def test_lr_proposes_a_rate_at_which_the_loss_falls() -> None:
    report = bench_lr(Subject(Toy, {**ONE, "training": {"threads": 1, "seed": 7}}), steps=100)
    rates = [row["lr"] for row in report.rows]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1e-6)
    assert 1e-5 < report.extra["proposal"]["lr"] < 1
    assert report.settings["seed"] == 7


@pytest.mark.drill
def test_the_profiler_compares_mixed_precision_with_single(tmp_path: Path) -> None:
    profiler = PerformanceProfiler(Toy, ONE, steps=3, warm_up=1)
    found = profiler.compare_amp()
    assert found["off"]["forward_ms"] > 0
    assert found["on"]["precision"] == "bf16-mixed"
    assert found["speed_up"] == pytest.approx(found["on"]["samples_per_s"] / found["off"]["samples_per_s"])
    assert json.loads(profiler.save(tmp_path)[0].read_text())["kind"] == "step"


@pytest.mark.drill
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, run_cli: RunCli) -> None:
    process = start(
        *("bench", "scaling", TOY, "--devices", "cpu,cpu", "--strategies", "ddp", "--weak", "--repeats", "1"),
        *("--steps", "4", "--save-dir", "runs/bench-scaling-2"),
        cwd=tmp_path,
    )
    watchdog = threading.Timer(90, process.kill)
    watchdog.start()
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "2 devices" in line:  # one device is measured by now
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=90)[0]
    watchdog.cancel()
    watchdog.join()
    assert process.returncode == 130, "".join(lines) + rest
    document = json.loads((tmp_path / "runs/bench-scaling-2/report.json").read_text())
    assert document["partial"] is True
    assert [row["ranks"] for row in document["rows"]] == [1]
    assert run_cli("runs").code == 0, "a folder that is no run is passed over"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("step", "no-such-task"), "no-such-task"),
        (("step", TOY, "--devices", "gpu:7"), "gpu:7"),
        (("step", TOY, "--devices", "cpu", "--precisions", "fp8"), "fp8"),
        (("step", TOY, "--devices", "cpu", "--steps", "1"), "show nothing"),
        (("scaling", TOY, "--devices", "cpu"), "nothing scales"),
        (("comm", "--devices", "cpu"), "there is only one rank"),
        (("comm", "--devices", "cpu,cpu", "--save-dir", "/dev/null/here"), "/dev/null "),
        (("scaling", TOY, "--devices", "cpu,cpu", "--strategies", "ddp,all"), "'all'"),
        (("loader", TOY, "--devices", "cpu", "--workers", "two"), "numbers"),
        (("lr", TOY, "--devices", "cpu", "--min-lr", "1", "--max-lr", "0.1"), "cannot grow"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    from lockstep.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_json", [False, True])
def test_a_report_that_cannot_be_written_is_printed(
    as_json: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = tmp_path / "file"
    place.write_text("")
    report = BenchReport("comm", "cpu, cpu", {}, verdict="it took hours")
    with pytest.raises(StorageError, match="not a folder"):
        deliver(report, place, write=write_report, show=print_report, as_json=as_json)
    assert "it took hours" in capsys.readouterr().out


def test_ranks_from_outside_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="starts the ranks itself"):
        Subject(Toy, ONE)


class Torn(Toy):
    """The toy, a sample of which cannot be read."""

    def datasets(self) -> lockstep.Datasets:
        given = super().datasets()
        return lockstep.Datasets(TornItems(given.train), given.val)


class TornItems(torch.utils.data.Dataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if index % 2:
            raise ValueError(f"row {index} is torn")
        return self.items[index]


@pytest.mark.slow
def test_samples_that_cannot_be_read_are_left_out_where_a_run_leaves_them_out() -> None:
    settings = {**ONE, "data": {"on_bad_row": "skip"}}
    rows = bench_step(Subject(Torn, settings), steps=2, warm_up=1).rows
    assert [row["status"] for row in rows] == ["ok"]
    assert bench_loader(Subject(Torn, settings), workers=(0,), seconds=0.2).rows
