"""What people see: a bar on a real terminal, plain lines in a pipe, one summary in both."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from lockstep.events import CheckpointSaved, EpochEnded, Evaluated, Event, Note, RunEnded, RunStarted, StepLogged
from lockstep.telemetry.console import ConsoleSink, duration, number, resolve_mode

PLAN: dict[str, Any] = {
    "task": {"name": "har"},
    "epochs": 2,
    "decisions": {
        "strategy": {"title": "strategy", "shown": "ddp", "reason": "two devices were named"},
        "global_batch": {"title": "global batch", "shown": "64", "reason": "32 × 2 ranks × 1, " + "as asked for, " * 9},
    },
    "notes": [{"key": "lr_not_scaled", "text": "linear scaling would set the learning rate to 0.002"}],
}

SPEED = {"samples_per_s": 800.0, "duration_s": 8.0}
RUN: list[Event] = [
    RunStarted(Path("runs/run-0123abcd"), 1, 0, 200, PLAN),
    StepLogged(1, 50, 1, 3200, 2.5, 1e-3, 0.75, 812.4, 0.02, 0, {"entropy": 0.5}),
    Evaluated(1, 1, 50, {"val_loss": 1.25}, False),
    Note("remark", "the loss [bold]jumped", "warning"),
    CheckpointSaved(100, Path("checkpoints/step-00000100"), True),
    EpochEnded(1, 1, 100, {"epoch": 1, "train_loss": 2.0, "val_accuracy": 0.61, **SPEED}, True),
    StepLogged(1, 150, 2, 9600, 1.5, 5e-4, None, 810.0, 0.02, 3, {}),
    EpochEnded(1, 2, 200, {"epoch": 2, "train_loss": 1.0, "val_accuracy": 0.6, **SPEED}, False),
    RunEnded(
        "completed", 200, {"val_accuracy": 0.6, "test_accuracy": 0.8125, "lr": 1e-6}, 1, {"val_accuracy": 0.61}, 3725.0
    ),
]

SCRIPT = """
import sys
from tests_of_console import RUN
from lockstep.telemetry.console import ConsoleSink
sink = ConsoleSink(sys.stdout, *sys.argv[1:])
for event in RUN:
    sink.emit(event)
    print("somebody else's line") if type(event).__name__ == "Evaluated" else None
sink.close()
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10
        return self.now


def shown(mode: Any = "auto", events: list[Event] = RUN) -> str:
    stream = io.StringIO()
    sink = ConsoleSink(stream, mode, clock=Clock())
    for event in events:
        sink.emit(event)
    sink.close()
    return stream.getvalue()


def on_a_terminal(
    tmp_path: Path, *, columns: int = 100, term: str = "xterm-256color", mode: str = "auto", script: str = SCRIPT
) -> str:
    """What a program that shows ``RUN`` (or does something else) writes to a real pseudo-terminal."""
    (tmp_path / "tests_of_console.py").write_bytes(Path(__file__).read_bytes())
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": term, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, mode],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            chunk = os.read(controller, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(controller)
    assert process.wait(timeout=30) == 0, output.decode()
    return output.decode()


def visible(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def test_the_loss_of_steps_of_two_epochs_names_them() -> None:
    losses = [line.split("  ")[2] for line in shown("plain").splitlines() if "  lr " in line]
    assert losses == ["loss 2.5000", "loss of steps 51-150 1.5000"]


def test_plain_lines_hold_everything_and_no_escapes() -> None:
    text = shown()
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "har → runs/run-0123abcd"
    assert (
        "epoch 1  step 50/200  loss 2.5000  lr 0.001  grad_norm 0.7500  812 samples/s  30.0 s left  entropy 0.5000"
        in lines
    )
    assert "step 50  val_loss 1.2500" in lines
    assert "warning: the loss [bold]jumped" in lines
    assert "epoch 1/2  train_loss 2.0000  val_accuracy 0.6100  800 samples/s  8.0 s  best so far" in lines
    assert any(line.startswith("epoch 2  step 150/200") and line.endswith("3 steps skipped") for line in lines)


def test_the_plan_is_shown_with_its_reasons_and_notes_uncut() -> None:
    text = shown()
    assert re.search(r"^strategy +ddp +two devices were named$", text, re.M)
    assert PLAN["decisions"]["global_batch"]["reason"].strip() in text
    assert "note: linear scaling would set the learning rate to 0.002" in text


def test_one_summary_at_the_end() -> None:
    text = shown()
    assert text.count("summary") == 1
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in text[text.index("summary") :].splitlines()[1:])
    assert rows == {
        "status": "completed",
        "steps": "200",
        "best epoch": "1",
        "best val_accuracy": "0.6100",
        "test_accuracy": "0.8125",
        "time": "1:02:05",
        "samples/s": "800",
        "run folder": "runs/run-0123abcd",
    }


def test_off_shows_warnings_and_the_end_only() -> None:
    text = shown("off")
    assert "warning: the loss" in text and "summary" in text
    assert "epoch 1/2" not in text and "note:" not in text and "strategy" not in text


def test_a_note_is_shown_once() -> None:
    note = Note(**PLAN["notes"][0])
    assert shown(events=[RUN[0], note, note]).count("linear scaling") == 1


def test_a_resumed_attempt_says_where_it_goes_on() -> None:
    assert "har, attempt 2 from step 50 → runs/r" in shown(events=[RunStarted(Path("runs/r"), 2, 50, 200, PLAN)])


def test_the_remaining_time_counts_from_where_the_attempt_began() -> None:
    started = RunStarted(Path("r"), 2, 100, 200, {})
    # One reading of the clock, 10 s, for 50 steps; as many are to go.
    assert "10.0 s left" in shown(events=[started, StepLogged(2, 150, 1, 1, 1.0, 1.0, None, 1.0, 0.0, 0)])


def test_the_rate_of_what_the_loss_counts_is_shown_where_it_is_not_samples() -> None:
    event = StepLogged(1, 50, 1, 1, 1.0, 1.0, None, 800.0, 0.0, 0, items_per_s=51_200.0)
    assert "800 samples/s (51,200 loss items/s)" in shown(events=[RUN[0], event])


def test_a_stream_without_the_characters_gets_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleSink(stream).emit(RUN[0])
    assert "har ? runs/run-0123abcd" in raw.getvalue().decode("ascii")


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    output = on_a_terminal(tmp_path)
    text = visible(output)
    assert "50/200" in text and "150/200" in text
    assert "812 samples/s" in text and "loss 2.5000" in text and "lr 0.001" in text and "left" in text
    assert "warning: the loss [bold]jumped" in text
    assert "somebody else's line\r\n" in text
    assert text.count("summary") == 1
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1, "the cursor is hidden once and given back"
    assert text.index("summary") > text.rindex("150/200"), "the bar is gone before the summary"


def test_a_narrow_terminal_still_shows_step_and_loss(tmp_path: Path) -> None:
    text = visible(on_a_terminal(tmp_path, columns=70))
    assert "50/200" in text and "812 samples/s" in text and "loss 2.5" in text
    assert "runs/run-0123abcd" in text


MOVING = """
import sys, threading
from pathlib import Path
from lockstep.events import RunStarted
from lockstep.telemetry.console import ConsoleSink
step, looks, drawn = 0, 0, threading.Event()

def position():
    global looks
    looks += step == 123
    if looks == 2:  # the look before has been drawn
        drawn.set()
    return step

sink = ConsoleSink(sys.stdout)
sink.emit(RunStarted(Path("r"), 1, 0, 200, {"epochs": 2}, position))
step = 123
assert drawn.wait(60)
sink.close()
for thread in set(threading.enumerate()) - {threading.main_thread()}:
    thread.join(60)  # that of the bar ends
    assert not thread.is_alive()
"""


def test_the_bar_moves_between_events(tmp_path: Path) -> None:
    text = visible(on_a_terminal(tmp_path, script=MOVING))
    assert "123/200" in text
    assert "left" in text[text.index("123/200") :], "the remaining time moves with it"


def test_plain_lines_when_asked_for_or_when_the_terminal_is_dumb(tmp_path: Path) -> None:
    assert "\x1b[?25l" not in on_a_terminal(tmp_path, mode="plain")
    assert "epoch 1  step 50/200" in on_a_terminal(tmp_path, term="dumb")


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "tests_of_console.py").write_bytes(Path(__file__).read_bytes())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert "\x1b" not in result.stdout and "epoch 1  step 50/200" in result.stdout


def test_a_closed_stream_is_an_error_once_and_leaves_no_bar() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, "bar")
    sink.emit(RUN[0])
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        sink.emit(RUN[3])
    sink.close()


@pytest.mark.parametrize(
    ("task", "status", "told"),
    [("har", "stopped", True), ("har", "completed", False), ("__main__:Mine", "stopped", False)],
)
def test_a_stopped_run_says_how_to_go_on(task: str, status: str, told: bool) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, "off")
    sink.emit(RunStarted(Path("runs/mine"), 1, 0, 200, {"task": {"name": task}}))
    sink.emit(RunEnded(status, 50, {}, None, {}, 3.0))
    assert ("lockstep resume runs/mine" in stream.getvalue()) == told


def test_an_evaluation_between_epochs_says_when_it_is_the_best() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, "plain")
    for step, improved in ((20, True), (40, False)):
        sink.emit(Evaluated(1, 1, step, {"val_loss": 0.5}, improved))
    assert stream.getvalue().splitlines() == ["step 20  val_loss 0.5000  best so far", "step 40  val_loss 0.5000"]


def test_modes() -> None:
    assert resolve_mode("auto", io.StringIO()) == "plain"
    assert resolve_mode("bar", io.StringIO()) == "bar"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.8125, "0.8125"),
        (12345.678, "12346"),
        (1234567.0, "1.235e+06"),
        (1e-5, "1e-05"),
        (float("nan"), "nan"),
        (-2.5, "-2.5000"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (59.0, "59.0 s"), (61.2, "1:01"), (3725, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
