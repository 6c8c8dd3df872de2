"""Fixtures for every test: leak checks, the command line in a process of its own, markers."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Before torch is imported anywhere: one thread a process, so that ranks and workers share few cores well.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from tests import leaks
from tests.commands import start
from tests.gloo import ROOT, clean_environment


def pytest_configure(config: pytest.Config) -> None:
    # What tests train is not for the user's own list of known tasks; workers share this with their parent.
    os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp(prefix="lockstep-tests-"))
    leaks.mark_descendants()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup: commands would inherit it, and go on
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # A busy machine is not a failure.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("lockstep", deadline=None, print_blob=True, suppress_health_check=slow)
    hypothesis.settings.load_profile("lockstep")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _starts_processes(item):
            item.add_marker(pytest.mark.processes)
    # The longest tests first: were they last, all test processes but one would wait for them.
    items.sort(key=lambda item: (item.path.parent != ROOT / "tests", item.get_closest_marker("processes") is None))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    for item in marked:  # what torch warns of depends on the card: of TF32 that is off, for one
        item.add_marker(pytest.mark.filterwarnings("default"))
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


#: What a test module imports to start processes, and the fixtures that do.
STARTERS = {
    *("run_ranks", "run_on_ranks", "Caller", "run_cli", "subprocess", "multiprocessing", "start", "serving", "Lab"),
    "lightning",
}
STARTING_PARTS = {
    "api",
    "bench",
    "benchmarks",
    "browser",
    "compat/test_lightning.py",
    "dist",
    "e2e",
    "examples",
    "fuzz",
    "gpu",
    "lightning",
    "report",
    "session",
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make check` does not import what it would leave out: Lightning and playwright take seconds."""
    return True if _is_starting(collection_path) and "not processes" in config.getoption("markexpr") else None


def _is_starting(path: Path) -> bool:
    """Whether a file of tests or its folder is in ``STARTING_PARTS``."""
    if not path.is_relative_to(ROOT / "tests"):
        return False
    part = path.relative_to(ROOT / "tests")
    return not STARTING_PARTS.isdisjoint({part.as_posix(), *part.parts[:1]})


def _starts_processes(item: pytest.Item) -> bool:
    names = {*vars(item.module), *item.fixturenames}  # type: ignore[attr-defined]
    return _is_starting(item.path) or bool(names & STARTERS)


def _has_gpu() -> bool:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        return bool(pynvml.nvmlDeviceGetCount() > 0)
    finally:
        pynvml.nvmlShutdown()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves processes, threads, signal handlers, variables or torch switches changed."""
    before = leaks.take_snapshot()
    yield
    found = leaks.find_leaks(before)
    if found:
        pytest.fail("the test leaks:\n  " + "\n  ".join(found), pytrace=False)


@dataclass(frozen=True)
class CliResult:
    """How a command ended."""

    code: int
    out: str
    err: str


RunCli = Callable[..., CliResult]


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCli:
    """``run_cli("train", "har", …)`` runs ``python -m lockstep train har …`` and waits for its end.

    Keywords: ``cwd`` (default: the test's temporary folder), ``env`` (changes to the environment),
    ``stdin`` (text), ``timeout_s``, ``fresh`` and ``lightning`` (see
    :func:`tests.commands.start`). A command that takes longer is killed
    with all its processes.
    """

    def run(
        *args: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdin: str | None = None,
        timeout_s: float = 90.0,
        **how: bool,
    ) -> CliResult:
        process = start(
            *("-m", "lockstep", *args),
            cwd=cwd or tmp_path,
            env=cli_environment(**(env or {})),
            stdin=stdin or "",
            **how,
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            command = " ".join(["lockstep", *map(str, args)])
            pytest.fail(f"`{command}` took longer than {timeout_s} s\n{out}\n{err}", pytrace=False)
        return CliResult(process.returncode, out, err)

    return run


def cli_environment(**changes: str) -> dict[str, str]:
    """What a command sees: no launcher's variables, no colours, a fixed width."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return clean_environment(**{"PYTHONPATH": path, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120", **changes})
