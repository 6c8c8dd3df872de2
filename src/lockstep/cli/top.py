"""``lockstep top``."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunsDir, find, flag, print_json, verb
from lockstep.errors import UsageError
from lockstep.telemetry.tables import drawn, is_terminal, print_table, rich_console, say

if TYPE_CHECKING:
    from rich.console import RenderableType

EPILOGUE = """\
Without RUN: only this machine's devices. Quit with q or Ctrl-C; it ends with the run. In a pipe it prints once.
Shares of GPUs and CPU are of the last second, memory is in GB (1e9 bytes). `own` is how long a rank works on a step
before it waits for the others."""

State = dict[str, Any]


@verb("[RUN] [OPTIONS]", EPILOGUE)
def top(
    run: Annotated[str | None, flag("The run: its folder, id, the beginning of its id, or `last`.", name="run")] = None,
    /,
    *,
    once: Annotated[bool, flag("Print the current state and exit.")] = False,
    as_json: AsJson = False,
    interval: Annotated[float, flag("Seconds between updates. Default: 1.")] = 1.0,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> int:
    if not 0.1 <= interval <= 3600:
        raise UsageError(f"--interval {interval:g} is not between 0.1 and 3600 seconds")
    with contextlib.suppress(KeyboardInterrupt), _looking(run, runs_dir) as look:
        if as_json:
            print_json(look(), sys.stdout)
        elif once or not is_terminal(sys.stdout):
            _print(look(), sys.stdout)
        else:
            _watch(look, interval)
    return 0


@contextlib.contextmanager
def _looking(ref: str | None, runs_dir: Path) -> Iterator[Callable[[], State]]:
    """A function that returns the current state: of a run, or of this machine's devices."""
    if ref is not None:
        from lockstep.telemetry.summary import live_state

        run = find(ref, runs_dir)
        yield lambda: live_state(run)
        return
    from lockstep.hardware.monitor import SystemSource

    with SystemSource() as source:
        time.sleep(0.2)  # CPU use is a mean since the previous sample
        yield lambda: {"run": None, "nodes": [source.sample()]}


def _watch(look: Callable[[], State], interval: float) -> None:
    from rich.live import Live

    from lockstep.telemetry.records import LIVE

    with _single_keys() as pressed, Live(console=rich_console(sys.stdout), auto_refresh=False, screen=False) as live:
        while True:
            state = look()
            live.update(_view(state), refresh=True)
            run = state["run"]
            over = run is not None and run["status"] not in LIVE
            if over or pressed(interval) in {"q", "Q"}:
                return


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a number of seconds or for a key, and returns the key."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return (os.read(descriptor, 1) or b"q").decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _view(state: State) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar

    parts: list[RenderableType] = [drawn(columns, rows) for columns, rows in _tables(state)]
    run = state["run"]
    if run and run["total_steps"]:
        parts.insert(1, ProgressBar(run["total_steps"], run["step"]))
    return Group(*parts)


def _print(state: State, stream: TextIO) -> None:
    for position, (columns, rows) in enumerate(_tables(state)):
        if position:
            say("", stream)
        print_table(columns, rows, stream)


Table = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]


def _tables(state: State) -> list[Table]:
    """Tables as (columns, rows): the run, its ranks, GPUs, hosts; empty ones are left out."""
    run, nodes = state["run"], state["nodes"]
    found = [
        _run_table(run) if run else None,
        _ranks_table(run) if run else None,
        _gpus_table(nodes),
        _hosts_table(nodes),
    ]
    return [table for table in found if table and table[1]]


def _run_table(run: State) -> Table:
    from lockstep.telemetry.console import duration, number

    logged = run["logged"] or {}
    step, total, left = run["step"], run["total_steps"], run["seconds_left"]
    progress = "" if step is None else f"step {step}/{total}" if total else f"step {step}"
    progress += f" ({step / total:.0%})" if total and step is not None else ""
    progress += f", epoch {logged['epoch']}" if "epoch" in logged else ""
    progress += f", {duration(left)} left" if left is not None else ""
    rows = [
        ("run", " ".join(filter(None, (run["id"], run["name"])))),
        ("task", run["task"]),
        ("status", run["status"]),
        ("devices", ", ".join(run["devices"])),
        ("progress", progress),
        *((name, number(logged[name])) for name in ("loss", "grad_norm") if logged.get(name) is not None),
        *([("lr", f"{logged['lr']:.3g}")] if logged.get("lr") is not None else []),
        *([("samples/s", f"{logged['samples_per_s']:,.0f}")] if logged.get("samples_per_s") is not None else []),
        *((f"best {name}", number(value)) for name, value in run["best_metric"].items()),
        ("error", (run["error"] or "").strip().splitlines()[-1] if run["error"] else ""),
    ]
    return ("", ""), [(name, value) for name, value in rows if value]


def _ranks_table(run: State) -> Table:
    rows = [
        (
            f"rank {rank['rank']}",
            _milliseconds(rank.get("step_s")),
            _milliseconds(rank.get("own_s")),
            _milliseconds(rank.get("wait_s")),
            _memory(rank.get("memory_gb"), None),
            _memory(rank.get("peak_gb"), None),
            "slow: the other ranks wait for it" if rank["rank"] == run["slow_rank"] else "",
        )
        for rank in run["ranks"]
    ]
    return ("rank", "step", "own", "input wait", "memory", "peak", ""), rows


def _gpus_table(nodes: Sequence[State]) -> Table:
    rows = [
        (
            gpu["id"] if len(nodes) == 1 else f"{node['host'].get('name', '?')} {gpu['id']}",
            gpu.get("name") or "",
            _share(gpu.get("utilisation")),
            _memory(gpu.get("memory_gb"), gpu.get("memory_total_gb")),
            _of(gpu.get("power_w"), gpu.get("power_limit_w"), "W"),
            _of(gpu.get("temperature_c"), None, "°C"),
            _of(gpu.get("sm_clock_mhz"), None, "MHz"),
            ", ".join(gpu.get("throttled") or ()),
        )
        for node in nodes
        for gpu in node["devices"]
    ]
    return ("device", "name", "use", "memory", "power", "chip", "clock", "throttled by"), rows


def _hosts_table(nodes: Sequence[State]) -> Table:
    rows = [
        (
            node["host"].get("name", ""),
            _share(node["host"].get("cpu")),
            _memory(node["host"].get("memory_gb"), node["host"].get("memory_total_gb")),
            node.get("note", "") if not node["devices"] else "",
        )
        for node in nodes
    ]
    return ("host", "cpu", "memory", ""), rows


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:,.1f} ms"


def _memory(used: float | None, total: float | None) -> str:
    return _of(used, total, "GB", ".1f")


def _of(value: float | None, limit: float | None, unit: str, form: str = ".0f") -> str:
    if value is None:
        return ""
    return f"{value:{form}} {unit}" if limit is None else f"{value:{form}}/{limit:{form}} {unit}"
