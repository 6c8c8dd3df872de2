"""From what ranks leave to the one block that people read."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.errors import CheckpointError, CollectiveError, DataError, LockstepError, RankFailed
from lockstep.launch.failure import causes, records
from lockstep.launch.failure import report as failure
from lockstep.launch.failure.causes import KEYS, find_cause, is_lost_peer
from lockstep.launch.process.rank_log import MARK, last_lines, log_file
from lockstep.rundir.files import write_json
from lockstep.rundir.folder import RunDir
from tests.gloo import ROOT
from tests.toys import Toy


class Impatient(Toy):
    """Somebody interrupts it twice in the third step."""

    def loss(self, model: Any, batch: Any) -> Any:
        if self.context.is_training and self.context.step >= 2:
            raise KeyboardInterrupt
        return super().loss(model, batch)


LOST_PEER = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:12345"


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def ended(rank: int, code: int, at: float = 0.0, *, by_launcher: bool = False) -> records.RankEnd:
    return records.RankEnd(rank=rank, pid=100 + rank, exit_code=code, time=at, ended_by_launcher=by_launcher)


def write_launcher(run_dir: RunDir, *ends: records.RankEnd, ranks: int = 0, **content: Any) -> None:
    """What the launcher leaves: ``ends`` of ranks that have recorded none, and its own file."""
    records.record_ends(run_dir.logs, ends)
    write_json(run_dir.logs / records.LAUNCHER_FILE, {"ranks": ranks or len(ends), **content})


def report_of(run_dir: RunDir) -> failure.FailureReport:
    report = failure.read_failure(run_dir)
    assert report is not None
    return report


def test_no_failure(run_dir: RunDir) -> None:
    assert failure.read_failure(run_dir) is None
    write_launcher(run_dir, ranks=3)
    assert failure.read_failure(run_dir) is None


def test_the_first_in_time_is_the_cause(run_dir: RunDir) -> None:
    for rank in (2, 0, 1):
        records.record(run_dir.logs, rank, caught(ValueError(f"number {rank}")))
    write_launcher(run_dir, *(ended(rank, 1) for rank in range(3)))
    report = report_of(run_dir)
    assert report.what == "rank 2 of 3 failed: ValueError: number 2"
    assert "2 other ranks ended because of it or after it (ranks 0, 1)." in report.format()
    write_launcher(run_dir, *(ended(rank, 1) for rank in range(4)))
    report = report_of(run_dir)
    assert report.what == "rank 3 of 4 ended with exit code 1 without reporting an error"


def test_what_fails_after_all_ranks_stood_still_is_a_consequence(run_dir: RunDir) -> None:
    hang = caught(RankFailed("rank 0 has made no progress for 60 s", why="it is blocked there"))
    write_launcher(run_dir, ended(2, -6, time.time() - 0.2), ranks=3)
    records.record(run_dir.logs, 1, caught(ValueError("the connection is lost")))
    records.record(run_dir.logs, 0, hang, hung_s=60.0)
    report = report_of(run_dir)
    assert (report.what, report.why) == ("rank 0 has made no progress for 60 s", "it is blocked there")
    assert [end.rank for end in report.others] == [2, 1]
    write_launcher(run_dir, ended(3, -9, time.time() - 61.0), ranks=4)
    assert report_of(run_dir).what == "rank 3 of 4 was killed by signal 9 (SIGKILL)"


def test_a_rank_that_missed_another_tells_more_than_a_lost_connection_and_less_than_an_own_error(
    run_dir: RunDir,
) -> None:
    records.record(run_dir.logs, 0, caught(RuntimeError(LOST_PEER)))
    records.record(run_dir.logs, 1, caught(CollectiveError("rank 2 did not reach barrier", why="last in sum")))
    write_launcher(run_dir, ended(0, 1), ended(1, 1), ranks=3)
    report = report_of(run_dir)
    assert report.what == "rank 1 of 3 failed: lockstep.errors.CollectiveError: rank 2 did not reach barrier"
    assert report.why == "last in sum"
    assert report.format().count("why: last in sum") == 1
    records.record(run_dir.logs, 2, caught(ValueError("its own")))
    write_launcher(run_dir, ended(0, 1), ended(1, 1), ended(2, 1))
    assert report_of(run_dir).what == "rank 2 of 3 failed: ValueError: its own"


def test_a_lost_peer_is_never_first_if_there_is_another_cause(run_dir: RunDir) -> None:
    records.record(run_dir.logs, 0, caught(RuntimeError(LOST_PEER)))
    write_launcher(run_dir, ended(0, 1))
    report = report_of(run_dir)
    assert report.first is not None
    assert report.first.rank == 0
    assert report.cause is not None
    assert report.cause.key == "lost-peer"
    records.record(run_dir.logs, 1, caught(KeyError("x")))
    report = report_of(run_dir)
    assert report.first is not None
    assert report.first.rank == 1


def test_a_rank_killed_by_the_launcher_is_never_first(run_dir: RunDir) -> None:
    write_launcher(run_dir, ended(0, -9, 1.0, by_launcher=True), ended(1, -11, 2.0))
    report = report_of(run_dir)
    assert report.what == "rank 1 of 2 was killed by signal 11 (SIGSEGV)"
    assert report.format().count("fix: ") == 1


def test_an_error_of_lockstep_speaks_for_itself(run_dir: RunDir) -> None:
    records.record(run_dir.logs, 0, caught(CheckpointError("it is torn", why="a byte is missing", fix="take another")))
    error = report_of(run_dir).as_error()
    assert type(error) is CheckpointError
    assert str(error) == "it is torn\nwhy: a byte is missing\nfix: take another"


def test_the_error_of_a_report_is_its_block(run_dir: RunDir) -> None:
    records.record(run_dir.logs, 1, caught(OSError(28, "No space left on device")))
    error = report_of(run_dir).as_error()
    assert type(error) is RankFailed
    assert str(error) == report_of(run_dir).format()
    cause = report_of(run_dir).cause
    assert cause is not None
    assert (cause.key, error.why, error.fix) == ("disk-full", cause.title, cause.advice)


def test_a_failed_launcher(run_dir: RunDir) -> None:
    trace = "Traceback (most recent call last):\n  File ...\nImportError: no torch"
    write_launcher(run_dir, error=trace)
    block = report_of(run_dir).format()
    assert block.startswith("ImportError: no torch\n  Traceback")


@pytest.mark.processes
def test_an_interrupted_run_does_not_get_the_failure_of_an_earlier_attempt(tmp_path: Path) -> None:
    settings = {"save_dir": str(tmp_path / "run"), "checkpoint": {"every_steps": 1}, "training": {"max_steps": 4}}
    with pytest.raises(KeyboardInterrupt):
        lockstep.train(Impatient, settings)
    run = RunDir.open(tmp_path / "run")
    assert run.read().error == "interrupted without a checkpoint"
    write_launcher(run, ended(1, -9), ranks=2)
    with pytest.raises(KeyboardInterrupt):
        lockstep.train(Impatient, settings, resume=True)
    assert run.read().error == "interrupted without a checkpoint"


def test_clearing_forgets_an_earlier_start(run_dir: RunDir) -> None:
    records.record(run_dir.logs, 5, caught(ValueError("old")))
    write_launcher(run_dir, ended(5, 1))
    records.clear(run_dir.logs)
    assert failure.read_failure(run_dir) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ranks", "rank", "exit_code", "x"]), inner)
    ),
    max_leaves=6,
)


@given(content=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_broken_files_are_no_failure_of_ours(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    run.logs.mkdir()
    (run.logs / records.LAUNCHER_FILE).write_bytes(content)
    (run.logs / "rank-0.error.json").write_bytes(content)
    report = failure.read_failure(run)
    assert report is None or report.format()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", ()),
        ("a\nb\n\nc\n", ("a", "b", "c")),
        (f"old\n{MARK}process 1 begins\nnew\n", ("new",)),
        (f"{MARK}process 1 begins\nnew\n{MARK}rank 0 failed\nTraceback\n", ("new",)),
        (f"{MARK}process 1 begins\nx\n{MARK}rank 0 failed\nTraceback\n{MARK}process 2 begins\ny\n", ("y",)),
        (" 10%\r 20%\r 30%\ndone\n", (" 30%", "done")),
        ("\n".join(map(str, range(100))), tuple(map(str, range(90, 100)))),
    ],
)
def test_last_lines(tmp_path: Path, content: str, expected: tuple[str, ...]) -> None:
    log_file(tmp_path, 0).write_text(content)
    assert last_lines(log_file(tmp_path, 0)) == expected


def test_a_crash_in_native_code_keeps_its_words_and_the_innermost_calls(tmp_path: Path) -> None:
    """As gloo writes it where ranks gather different sizes, with the stacks that Python adds."""
    calls = [f'  File "task.py", line {line} in loss' for line in range(30)]
    words = "  what():  [enforce fail] op.preamble.length <= op.nbytes. 84 vs 78. Received data size doesn't match"
    stacks = ["Fatal Python error: Aborted", "", "Thread 0x1 (most recent call first):", "  File watch", ""]
    lines = ["before", "terminate called", words, *stacks, "Thread 0x2 (most recent call first):", *calls, "Extension"]
    log_file(tmp_path, 0).write_text("\n".join(lines))
    found = last_lines(log_file(tmp_path, 0))
    assert found[:5] == (*lines[:4], "Thread 0x2 (most recent call first):") and calls[0] in found
    cause = find_cause("\n".join(found), "SIGABRT")
    assert cause is not None and cause.key == "uneven-sizes"


def test_last_lines_of_no_log(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", "gpu-memory"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)",
            "memory",
        ),
        ("MemoryError: ", "memory"),
        ("RuntimeError: std::bad_alloc", "memory"),
        ("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. ", "loader-worker"),
        ("RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly", "loader-worker"),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
            "workers are out of shared memory. Please try to raise your shared memory limit.",
            "shared-memory",
        ),
        ("OSError: [Errno 28] No space left on device: '/x'", "disk-full"),
        ("OSError: [Errno 24] Too many open files", "open-files"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "threads"),
        ("RuntimeError: Resource temporarily unavailable", "threads"),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", "device-assert"),
        ("RuntimeError: Expected to have finished reduction in the prior iteration", "unused-parameters"),
        (
            "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss",
            "unused-parameters",
        ),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x4 and 5x3)", "shapes"),
        (
            "RuntimeError: Given groups=1, weight of size [4, 3, 3, 3], expected input[2, 1, 8, 8] to have 3 channels, "
            "but got 1 channels instead",
            "shapes",
        ),
        ("ValueError: expected 4D input (got 2D input)", "shapes"),
        ("ValueError: Target size (torch.Size([2])) must be the same as input size (torch.Size([2, 1]))", "shapes"),
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float", "dtypes"),
        ("IndexError: Target 2 is out of bounds.", "labels"),
        ("IndexError: index out of range in self", "labels"),
        ("ValueError: Default process group has not been initialized, please make sure to call it.", "own-group"),
        (f"RuntimeError: {LOST_PEER}", "lost-peer"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error", "nccl"),
    ],
)
def test_known_causes(text: str, key: str) -> None:
    cause = find_cause(text)
    assert cause is not None
    assert cause.key == key
    assert cause.advice


def test_every_known_cause_has_a_title_and_a_fix() -> None:
    assert all(cause.title and cause.advice for cause in (*causes._ALL, causes.OOM_KILLED))


def test_a_kill_while_the_kernel_killed_for_memory_is_told_as_that(run_dir: RunDir) -> None:
    write_launcher(run_dir, ended(0, -9), oom_kills=1)
    assert report_of(run_dir).cause == causes.OOM_KILLED


def test_a_failure_is_told_where_the_run_folder_is_gone(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shutil.rmtree(run_dir.path)
    records.record(run_dir.logs, 1, caught(ValueError("the folder is gone")))
    assert report_of(run_dir).what == "rank 1 of 1 failed: ValueError: the folder is gone"
    records.clear(run_dir.logs)
    assert failure.read_failure(run_dir) is None
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_cause_is_not_guessed() -> None:
    assert find_cause("ValueError: the cat sat on the keyboard") is None


def test_a_download_that_breaks_off_is_no_lost_peer() -> None:
    assert not is_lost_peer("ConnectionResetError", "[Errno 104] Connection reset by peer")
    assert not is_lost_peer("urllib.error.URLError", "<urlopen error [Errno 111] Connection refused>")
    assert is_lost_peer(
        "torch.distributed.DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed"
    )


def test_exit_codes_of_errors() -> None:
    errors: list[BaseException] = [LockstepError("x"), DataError("x"), SystemExit(7), SystemExit("text"), ValueError()]
    assert [records.exit_code_of(error) for error in errors] == [1, 2, 7, 1, 1]


def test_every_cause_has_a_section() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^### (.+)$", page, re.M))
    assert set(KEYS) <= headings
