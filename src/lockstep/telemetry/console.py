"""The terminal's view of a run: the plan, one progress bar or plain lines, one summary; and tables of any command.

Elsewhere tables are plain aligned text, never truncated in a pipe; figures are files.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from lockstep.errors import many, printable
from lockstep.events import EpochEnded, Evaluated, Event, Note, Restarted, RunEnded, RunStarted, StepLogged

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

    from lockstep.telemetry.bar import RunBar

ProgressMode = Literal["auto", "bar", "plain", "off"]

#: Blanks, the slash of ``step/total``, and the shortest bar that still says something.
_BAR_ROOM = 12
_TABLE_OMITS = frozenset({"epoch", "step", "attempt", "lr", "samples_per_s", "duration_s"})


class ConsoleSink:
    """Shows a run on ``stream``.

    Args:
        mode: ``bar`` draws a progress bar, ``plain`` writes a line per log interval and epoch, ``off`` shows
            warnings and the end only; ``auto`` is a bar on a terminal, plain lines elsewhere.
        clock: seconds from any fixed point, for the remaining time.
    """

    def __init__(
        self, stream: TextIO, mode: ProgressMode = "auto", *, clock: Callable[[], float] | None = None
    ) -> None:
        from lockstep.rundir.heartbeat import running_s

        self._stream = stream
        self._mode = resolve_mode(mode, stream)
        self._clock = clock = clock or running_s
        self._bar: RunBar | None = None
        self._started: RunStarted | None = None
        self._began = clock()
        self._samples = (0.0, 0.0)  # seconds and samples of finished epochs, for the mean speed
        self._newest: StepLogged | None = None  # shown beside the bar
        self._loss_label = ""
        self._noted: set[str] = set()
        self._logged_step = 0
        self._crosses_epochs = False  # of the interval that the next line is about

    def emit(self, event: Event) -> None:
        try:
            self._show(event)
        except Exception:
            # A sink that fails is not closed by its owner: restore the terminal.
            self.close()
            raise

    def close(self) -> None:
        """Take the bar away; the stream is the caller's."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()
            self._bar = None

    def _show(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start(event)
            case StepLogged():
                self._show_step(event)
            case EpochEnded():
                self._crosses_epochs = True
                seconds = event.row.get("duration_s", 0.0)
                speed = event.row.get("samples_per_s", 0.0)
                self._samples = (self._samples[0] + seconds, self._samples[1] + seconds * speed)
                if self._mode != "off":
                    self._line(epoch_line(event, self._started.plan.get("epochs") if self._started else None))
            case Evaluated() if self._mode != "off":
                self._line(_joined(f"step {event.step}", metrics_text(event.metrics), _best(event)))
            case Note():
                self._note(event)
            case Restarted():
                self._line(f"warning: {event}", style="yellow")
            case RunEnded():
                self._end(event)
            case _:
                pass

    def _show_step(self, event: StepLogged) -> None:
        # The mean of all steps since the last line: not of the epoch that stands beside it.
        steps = f" of steps {self._logged_step + 1}-{event.step}" if self._crosses_epochs else ""
        self._logged_step = event.step
        self._crosses_epochs = False
        if self._bar is not None:
            self._newest = event
            self._loss_label = f"loss{steps}"
            self._bar.show(event.step)
        elif self._mode == "plain":
            total = self._started.total if self._started else 0
            self._line(step_line(event, total, self._seconds_left(event.step), f"loss{steps}"))

    def _start(self, event: RunStarted) -> None:
        self._started = event
        self._logged_step = event.step
        self._crosses_epochs = False
        self._began = self._clock()
        self._newest = None
        if self._mode != "off":
            attempt = f", attempt {event.attempt} from step {event.step}" if event.attempt > 1 else ""
            self._line(f"{event.plan.get('task', {}).get('name', '')}{attempt} → {event.run_dir}")
            print_plan(event.plan, self._stream)
            for note in event.plan.get("notes", ()):
                self._note(Note(key=note["key"], text=note["text"], level=note.get("level", "info")))
        if self._mode == "bar":
            from lockstep.telemetry.bar import RunBar

            console = rich_console(self._stream)
            self._bar = RunBar(console, event, lambda step: self._bar_texts(step, console.width))

    def _note(self, note: Note) -> None:
        if note.text in self._noted:
            return
        self._noted.add(note.text)
        if note.level == "warning":
            self._line(f"warning: {note.text}", style="yellow")
        elif self._mode != "off":
            self._line(f"note: {note.text}", style="dim")

    def _end(self, event: RunEnded) -> None:
        self.close()
        seconds, samples = self._samples
        omitted = _TABLE_OMITS | event.best_metric.keys()
        rows = {
            "status": event.status,
            "steps": str(event.step),
            "best epoch": value_text(event.best_epoch),
            **{f"best {name}": number(value) for name, value in event.best_metric.items()},
            **{name: number(value) for name, value in event.final_metrics.items() if name not in omitted},
            "time": duration(event.duration_s),
            "samples/s": f"{samples / seconds:,.0f}" if seconds > 0 else "",
        }
        if self._started is not None:
            rows["run folder"] = str(self._started.run_dir)
            # A run of a script can only be resumed by that script.
            made = self._started.plan.get("task", {}).get("name", "").startswith(("__main__:", "lockstep.engine."))
            if event.status == "stopped" and not made:
                rows["resume with"] = f"lockstep resume {shlex.quote(rows['run folder'])}"
        print_table(("summary", ""), [row for row in rows.items() if row[1]], self._stream)

    def _line(self, text: str, style: str = "") -> None:
        if self._bar is not None:
            print_styled(self._bar.console, text, style)
        elif style and is_terminal(self._stream):
            print_styled(rich_console(self._stream), text, style)
        else:
            say(text, self._stream)

    def _bar_texts(self, step: int, width: int) -> tuple[str, str]:
        """Return the texts on the left and on the right of the bar, as many values as fit."""
        newest = self._newest
        seconds_left = self._seconds_left(step)
        left = [] if seconds_left is None else [f"{duration(seconds_left)} left"]
        if newest is None or self._started is None:
            return "starting", "".join(left)
        label = epoch_label(newest.epoch, self._started.plan.get("epochs"))
        loss = [] if newest.loss is None else [f"{self._loss_label} {number(newest.loss)}"]
        parts = [_rates(newest), *loss, *left, f"lr {newest.lr:.2g}"]
        room = width - len(label) - len(str(self._started.total)) * 2 - _BAR_ROOM
        while len(parts) > 1 and len("  ".join(parts)) > room:
            parts.pop()
        return label, "  ".join(parts)

    def _seconds_left(self, step: int) -> float | None:
        from lockstep.rundir.heartbeat import seconds_left

        first, total = (self._started.step, self._started.total) if self._started else (0, 0)
        return seconds_left(step - first, self._clock() - self._began, total - step)


def resolve_mode(mode: ProgressMode, stream: TextIO) -> ProgressMode:
    """Resolve ``auto``: a bar on a terminal that can move its cursor, plain lines elsewhere."""
    if mode != "auto":
        return mode
    moves = is_terminal(stream) and os.environ.get("TERM", "") not in {"", "dumb"}
    return "bar" if moves else "plain"


# Texts.


def print_plan(plan: Mapping[str, Any], stream: TextIO) -> None:
    """Print the plan's decisions with their reasons; ``plan`` as ``Plan.as_dict()`` gives it."""
    rows = [(each["title"], each["shown"], each["reason"]) for each in plan.get("decisions", {}).values()]
    if rows:
        print_table(("plan", "", "why"), rows, stream)


def step_line(event: StepLogged, total: int, seconds_left: float | None, loss_label: str = "loss") -> str:
    of_total = f"/{total}" if event.step <= total else ""  # a session may have loops that its plan did not know
    return _joined(
        f"epoch {event.epoch}  step {event.step}{of_total}",
        "" if event.loss is None else f"{loss_label} {number(event.loss)}",
        f"lr {event.lr:.3g}",
        "" if event.grad_norm is None else f"grad_norm {number(event.grad_norm)}",
        _rates(event),
        "" if seconds_left is None else f"{duration(seconds_left)} left",
        *(f"{name} {number(value)}" for name, value in event.scalars.items()),
        f"{many(event.skipped_steps, 'step')} skipped" if event.skipped_steps else "",
    )


def epoch_line(event: EpochEnded, epochs: int | None) -> str:
    row = event.row
    return _joined(
        epoch_label(event.epoch, epochs),
        metrics_text(row),
        f"{row['samples_per_s']:,.0f} samples/s" if "samples_per_s" in row else "",
        duration(row["duration_s"]) if "duration_s" in row else "",
        _best(event),
    )


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _best(event: EpochEnded | Evaluated) -> str:
    return "best so far" if event.improved else ""


def _rates(event: StepLogged) -> str:
    items = "" if event.items_per_s is None else f" ({event.items_per_s:,.0f} loss items/s)"
    items += "" if event.mfu is None else f", MFU {event.mfu:.1%}"
    return f"{event.samples_per_s:,.0f} samples/s{items}"


def epoch_label(epoch: int, epochs: int | None) -> str:
    return f"epoch {epoch}/{epochs}" if epochs else f"epoch {epoch}"


def metrics_text(values: Mapping[str, float]) -> str:
    return _joined(*(f"{name} {number(value)}" for name, value in values.items() if name not in _TABLE_OMITS))


def number(value: float) -> str:
    """Format with four significant digits, four decimals or as a whole number, whichever reads better."""
    if not math.isfinite(value):
        return str(value)
    form = ".4f" if 0.001 <= abs(value) < 1000 or value == 0 else ".0f" if 1000 <= abs(value) < 1e6 else ".4g"
    return f"{value:{form}}"


def value_text(value: object) -> str:
    """Format a value for a table."""
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """Format seconds as ``12.3 s``, ``4:05``, ``1:04:05``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    """Print ``rows`` under the headings ``columns`` (texts, one per column; all empty: no heading)."""
    if not is_terminal(stream):
        say("\n".join(aligned([columns, *rows] if any(columns) else rows)), stream)
        return
    rich_console(stream).print(drawn(columns, rows))


def drawn(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for position, column in enumerate(columns):
        # The first column is never truncated; long texts at the end of a row are wrapped.
        table.add_column(column, overflow="fold", no_wrap=position == 0, style="bold" if position == 0 else None)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns two blanks apart."""
    widths = [max(len(row[position]) for row in rows) for position in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def say(text: str, stream: TextIO, *, styled: str = "") -> None:
    """Print ``text`` without control characters; characters that the stream cannot encode become question marks.

    ``styled``: what stands before it, with its escape sequences.
    """
    text = styled + printable(text)
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no such method; a closed stream
        return False


def rich_console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, emoji=False)


def print_styled(console: Console, text: str, style: str) -> None:
    """Print one line of ``text`` as it is: no markup in it, no wrapping, the style on it alone."""
    from rich.text import Text

    console.print(Text(printable(text), style=style), soft_wrap=True)


def save_figure(figure: Figure, file: Path, *, dpi: int = 120) -> Path:
    """Write a matplotlib figure to ``file`` as a PNG. Raises :class:`~lockstep.errors.StorageError`."""
    from lockstep.rundir.files import write_bytes

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=dpi)
    write_bytes(file, png.getvalue())
    return file
