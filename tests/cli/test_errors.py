"""Bad input: one clear error with a fix, exit code 2, nothing written, no traceback."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.errors import LockstepError, RunError, UsageError
from tests.conftest import RunCli, cli_environment

CASES: list[tuple[list[str], list[str]]] = [
    (["trian"], ["unknown command", "trian", "fix: did you mean", "train"]),
    (["status", "run"], ["unknown command", "status", "`lockstep --help` lists"]),
    (["--foo"], ["--foo", "fix:", "lockstep --help"]),
    (["train", "har", "--epoch", "3"], ["--epoch", "fix: did you mean --epochs?"]),
    (["train", "har", "--epochs", "many"], ["--epochs", "many", "whole number"]),
    (["train", "har", "--epochs", "1.5"], ["--epochs", "1.5", "whole number"]),
    (["train", "har", "--lr", "fast"], ["--lr", "fast", "a number"]),
    (["train", "har", "--devices", "mps"], ["mps", "fix: ", "write cpu"]),
    (["train", "har", "--epochs"], ["--epochs", "requires an argument"]),
    (["train", "har", "--precision", "16"], ["16-mixed"]),
    (["train", "har", "--strategy", "ddpp"], ["--strategy", "ddpp", "ddp"]),
    (["train", "har", "two"], ["unexpected argument", "two"]),
    (["train", "har", "--set", "epochs"], ["--set", "section.key=value", "fix:"]),
    (["train", "har", "--set", "training.epoch=1"], ["unknown key training.epoch", "did you mean training.epochs?"]),
    (["train", "har", "--batch-size", "0"], ["training.batch_size"]),
    (["train", "har", "--lr", "nan"], ["optimizer.lr", "finite"]),
    (["train", "har", "--lr", "-1"], ["optimizer.lr"]),
    (["train", "har", "--gpu-ids", "0", "--devices", "cpu"], ["--gpu-ids", "--devices", "contradict"]),
    (["train", "har", "--config", "missing.yaml"], ["missing.yaml", "--config"]),
    (["plan", "har", "--no-amp", "--precision", "16-mixed"], ["--no-amp", "contradict"]),
    (["train"], ["no task was named", "lockstep train har"]),
    (["show", "run-00000000"], ["no run 'run-00000000'", "lockstep runs"]),
    (["show"], ["RUN", "lockstep show --help"]),
    (["resume", "last"], ["no run 'last'"]),
    (["resume", "last", "--set", "x"], ["--set"]),
    (["resume", "last", "--", "--epochs", "8"], ["--epochs stands behind", "without `--`"]),
    (["stop", "./here"], ["here"]),
    (["evaluate", "last", "--checkpoint", "newest"], ["--checkpoint", "best, last"]),
    (["evaluate", "last", "--split", "train"], ["--split", "test", "val"]),
    (["export", "last"], ["no run 'last'"]),
]


@pytest.mark.parametrize(
    ("arguments", "words"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert "fix: " in output.err
    assert "Traceback" not in output.err and "\x1b" not in output.err
    assert [word for word in words if word not in output.err] == []
    assert list(tmp_path.iterdir()) == []


def test_the_exit_code_reaches_the_shell(run_cli: RunCli, tmp_path: Path) -> None:
    result = run_cli("train", "har", "--epoch", "3")
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(r"error: .*--epoch\nfix: .*--epochs\b.*\n", result.err)
    assert list(tmp_path.iterdir()) == []


def test_a_removed_working_folder_is_refused(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = 'cd "$0" && rmdir "$0" && exec "$1" -m lockstep train har --devices cpu'
    done = subprocess.run(
        ["sh", "-c", command, gone, sys.executable], env=cli_environment(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert re.match(r"error: .*folder.*\nwhy: .*\nfix: ", done.stderr)


def test_too_little_memory_for_torch_is_one_error(tmp_path: Path) -> None:
    command = 'ulimit -v 400000; exec "$0" -m lockstep train har --devices cpu'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], cwd=tmp_path, env=cli_environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "out of memory" in done.stderr and "fix: " in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_thread_that_cannot_start_is_one_error(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "import threading\nfrom lockstep.tasks.har import HarTask\n\nclass Task(HarTask):\n    def model(self):\n"
        "        threading.stack_size(1 << 47)  # more than there are addresses\n        return super().model()\n"
    )
    for devices in ("cpu", "cpu,cpu"):
        result = run_cli("train", "task.py:Task", "--devices", devices, "--save-dir", devices, "--max-steps", "1")
        assert result.code == 1
        assert result.err.count("error: ") == 1 and "RuntimeError: can't start new thread" in result.err, result.err
        assert "ulimit -u" in result.err.partition("fix: ")[2]
        assert "cannot join" not in result.err


@pytest.mark.parametrize("name", ["matplotlibrc", "wandb/settings"])
def test_a_run_folder_configures_no_library(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["version"]) == 0
    (tmp_path / "run.json").write_text("{}")
    assert main(["version"]) == 2


def test_other_ranks_say_it_in_one_line(run_cli: RunCli) -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    result = run_cli("train", "har", "--lr", "-1", env=environment)
    assert result.code == 2
    assert result.err.startswith("rank 1: error: optimizer.lr") and result.err.count("\n") == 1


@pytest.mark.parametrize(("error", "code"), [(UsageError("no", why="because", fix="do"), 2), (RunError("broke"), 1)])
def test_errors_of_ours_have_no_traceback(
    error: LockstepError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("lockstep.rundir.summary.summaries", fail)
    assert main(["runs"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_errors_that_nobody_expected_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.rundir.summary.summaries", None)  # no code of a user's takes part
    with pytest.raises(TypeError):
        main(["runs"])


def test_an_interrupt_is_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("lockstep.rundir.summary.summaries", interrupt)
    assert main(["runs"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "lockstep", "version"],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=cli_environment(),
        cwd=tmp_path,
        timeout=60,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (0, b"")


def test_an_error_is_coloured_on_a_terminal_only(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    environment = cli_environment(TERM="xterm")
    environment.pop("NO_COLOR")
    command = [sys.executable, "-m", "lockstep", "show", "nothing"]
    process = subprocess.run(
        command, stderr=terminal, stdout=subprocess.PIPE, env=environment, cwd=tmp_path, timeout=60
    )
    os.close(terminal)
    output = os.read(controller, 65536).decode()
    os.close(controller)
    assert process.returncode == 2
    assert output.startswith("\x1b[1;31merror:\x1b[0m there is no run 'nothing'")


@pytest.mark.parametrize("arguments", [["train", "--help"], ["version", "--json"]])
def test_a_full_disk_under_the_output_is_one_error(arguments: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *arguments],
            env=cli_environment(),
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "error: cannot write standard output")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["train", "har", "--devices", "2"], "cpu,cpu two CPU ranks"),
        (["train", "har", "--set", "training.gradient_clip_val=1"], "did you mean training.max_grad_norm"),
        (["train", "har", "--set", "trainer.max_epochs=1"], "did you mean training"),
        (["train", "har", "--set", "logging.wandb=true"], "did you mean telemetry"),
        (["train", "har", "--device", "cpu"], "did you mean --devices?"),
        (["train", "har", "--compile"], "use --set training.compile=true"),
        (["train", "har", "--gradient-accumulation-steps", "2"], "use --set training.accumulate=VALUE"),
        (["train", "har", "--gpu-ids", "0", "1"], "write a list with commas: --gpu-ids 0,1"),
    ],
)
def test_what_other_trainers_call_it_is_answered_with_our_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], fix: str
) -> None:
    assert main(arguments) == 2
    assert f"fix: {fix}" in capsys.readouterr().err.replace("name each device: --devices gpu:2 is one GPU, ", "")
