"""``lockstep top``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunsDir, find, flag, print_json, verb
from lockstep.errors import UsageError
from lockstep.telemetry.console import drawn, duration, is_terminal, number, print_table, rich_console, say

EPILOGUE = """\
Without RUN: only this machine's devices. Quit with Ctrl-C; it ends with the run. In a pipe it prints once.
Shares of GPUs and CPU are of the last second, memory is in GB (1e9 bytes). `own` is how long a rank works on a step
before it waits for the others."""

State = dict[str, Any]
RANK_COLUMNS = ("rank", "step", "own", "input wait", "memory", "peak", "")


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
            print_json(look())
        elif once or not is_terminal(sys.stdout):
            for position, (columns, rows) in enumerate(_tables(look())):
                if position:
                    say("", sys.stdout)
                print_table(columns, rows, sys.stdout)
        else:
            _watch(look, interval)
    return 0


@contextlib.contextmanager
def _looking(ref: str | None, runs_dir: Path) -> Iterator[Callable[[], State]]:
    """Make a function that returns the current state: of a run, or of this machine's devices."""
    if ref is not None:
        from lockstep.rundir.summary import live_state

        run = find(ref, runs_dir)
        yield lambda: live_state(run)
        return
    from lockstep.hardware.monitor import SystemSource

    with SystemSource() as source:
        time.sleep(0.2)  # CPU use is a mean since the previous sample
        yield lambda: {"run": None, "nodes": [source.sample()]}


def _watch(look: Callable[[], State], interval: float) -> None:
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.progress_bar import ProgressBar

    from lockstep.rundir.folder import LIVE

    with Live(console=rich_console(sys.stdout), auto_refresh=False, screen=False) as live:
        while True:
            state = look()
            run = state["run"]
            parts: list[RenderableType] = [drawn(columns, rows) for columns, rows in _tables(state)]
            if run and run["total_steps"]:
                parts.insert(1, ProgressBar(run["total_steps"], run["step"]))
            live.update(Group(*parts), refresh=True)
            if run is not None and run["status"] not in LIVE:
                return
            time.sleep(interval)


def _tables(state: State) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Return the tables of the run, its ranks, GPUs and hosts that have rows, each as (columns, rows)."""
    run = state["run"]
    nodes = state["nodes"]
    gpus = ("device", "name", "use", "memory", "power", "chip", "clock", "throttled by")
    tables = [
        (("", ""), _of_run(run) if run else []),
        (RANK_COLUMNS, rank_rows(run) if run else []),
        (gpus, [_of_gpu(gpu, node["host"], len(nodes) > 1) for node in nodes for gpu in node["devices"]]),
        (("host", "cpu", "memory", ""), [_of_host(node) for node in nodes]),
    ]
    return [(columns, rows) for columns, rows in tables if rows]


def _of_run(run: State) -> list[tuple[str, ...]]:
    logged = run["logged"] or {}
    step = run["step"]
    total = run["total_steps"]
    left = run["seconds_left"]
    progress = [] if step is None else [f"step {step}/{total} ({step / total:.0%})" if total else f"step {step}"]
    progress += [f"epoch {logged['epoch']}"] if "epoch" in logged else []
    progress += [f"{duration(left)} left"] if left is not None else []
    rows = [
        ("run", " ".join(filter(None, (run["id"], run["name"])))),
        ("task", run["task"]),
        ("status", run["status"]),
        ("devices", ", ".join(run["devices"])),
        ("progress", ", ".join(progress)),
        *((name, number(logged[name])) for name in ("loss", "grad_norm") if logged.get(name) is not None),
        ("lr", _text(logged.get("lr"), ".3g")),
        ("samples/s", _text(logged.get("samples_per_s"), ",.0f")),
        *((f"best {name}", number(value)) for name, value in run["best_metric"].items()),
        ("error", (run["error"] or "").strip().rpartition("\n")[2]),
    ]
    return [(name, value) for name, value in rows if value]


def rank_rows(state: State) -> list[tuple[str, ...]]:
    """Return the rows of :data:`RANK_COLUMNS`; ``state``: a row of ``ranks.jsonl``."""
    return [
        (
            f"rank {rank['rank']}",
            *(_text(rank.get(name), ",.1f", "ms", factor=1000) for name in ("step_s", "own_s", "wait_s")),
            *(_text(rank.get(name), ".1f", "GB") for name in ("memory_gb", "peak_gb")),
            "slow: the other ranks wait for it" if rank["rank"] == state.get("slow_rank") else "",
        )
        for rank in state["ranks"]
    ]


def _of_gpu(gpu: State, host: State, several: bool) -> tuple[str, ...]:
    return (
        f"{host.get('name', '?')} {gpu['id']}" if several else gpu["id"],
        gpu.get("name") or "",
        _text(gpu.get("utilisation"), ".0%"),
        _text(gpu.get("memory_gb"), ".1f", "GB", gpu.get("memory_total_gb")),
        _text(gpu.get("power_w"), ".0f", "W", gpu.get("power_limit_w")),
        _text(gpu.get("temperature_c"), ".0f", "°C"),
        _text(gpu.get("sm_clock_mhz"), ".0f", "MHz"),
        ", ".join(gpu.get("throttled") or ()),
    )


def _of_host(node: State) -> tuple[str, ...]:
    host = node["host"]
    memory = _text(host.get("memory_gb"), ".1f", "GB", host.get("memory_total_gb"))
    note = "" if node["devices"] else node.get("note", "")
    return host.get("name", ""), _text(host.get("cpu"), ".0%"), memory, note


def _text(value: float | None, form: str, unit: str = "", limit: float | None = None, factor: float = 1) -> str:
    """Format memory as ``71.2/80.0 GB``; empty where the value is not known."""
    if value is None:
        return ""
    text = f"{value * factor:{form}}" + (f"/{limit:{form}}" if limit is not None else "")
    return f"{text} {unit}".strip()
