"""``lockstep bench``: one subcommand for each kind of measurement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group

from lockstep.cli.output import AsJson, deliver, flag, progress, report_folder
from lockstep.cli.settings import (
    NO_SETTINGS,
    Flags,
    Settings,
    TaskName,
    numbers,
    to_mapping,
)
from lockstep.launch.process.signals import held_back
from lockstep.strategies import find_strategy

if TYPE_CHECKING:
    from lockstep.lab.bench.report import BenchReport
    from lockstep.lab.bench.trials import Subject

EPILOGUE = """\
Examples:
  lockstep bench step har --devices cpu --batch-size 128
  lockstep bench step har --devices gpu:0 --precisions all --compile
  lockstep bench loader har --devices gpu:0
  lockstep bench comm --devices cpu,cpu
  lockstep bench scaling har --devices cpu,cpu
  lockstep bench scaling har --devices gpu:0,gpu:1 --strategies ddp,dp
  lockstep bench batch-size har --devices gpu:0 --global-batch-size 1024
  lockstep bench lr har --devices cpu

Measured in separate processes, on the loop that `train` uses, with the flags
of `train`. The report goes to --save-dir (default:
runs/bench-<kind>-<id>): report.json, report.md and, with matplotlib, a
picture. Ctrl-C keeps the rows measured so far. docs/bench.md explains the figures."""

bench = App(name="bench", usage="Usage: lockstep bench {step,loader,comm,scaling,batch-size,lr} [OPTIONS]")
bench.help_epilogue = EPILOGUE

_MEASUREMENT = Group("Measurement", sort_key=0)
_flag = partial(flag, group=_MEASUREMENT)

Steps = Annotated[int, _flag("Measured optimizer steps of each case. Default: 30.")]
WarmUp = Annotated[int, _flag("Steps before them that do not count. Default: 5.")]


@bench.command(sort_key=0)
def step(
    task: TaskName = None,
    /,
    *,
    steps: Steps = 30,
    warm_up: WarmUp = 5,
    precisions: Annotated[
        str | None,
        _flag(
            "Which to compare: 32, tf32, bf16-mixed, bf16-true, 16-mixed, or all. Default: the configured one.",
            "NAME,...",
        ),
    ] = None,
    compile: Annotated[bool, _flag("Measure with torch.compile, too. Default: off.")] = False,
    settings: Flags = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Show where the time and memory of a training step go."""
    subject, done = _asked("step", settings, task, as_json)
    from lockstep.lab.bench.step import FORMATS, bench_step

    names = FORMATS if precisions == "all" else tuple(_names(precisions)) if precisions else None
    return done(
        bench_step(
            subject,
            steps=steps,
            warm_up=warm_up,
            precisions=names,
            compile=compile,
            say=progress,
        )
    )


@bench.command(sort_key=1)
def loader(
    task: TaskName = None,
    /,
    *,
    workers: Annotated[
        str | None, _flag("Numbers of workers to compare. Default: 0, 1, 2, 4, ... up to the cores.", "N,...")
    ] = None,
    seconds: Annotated[float, _flag("How long to load with each of them. Default: 2.")] = 2.0,
    settings: Flags = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Compare numbers of loader workers with the demand of the training step."""
    subject, done = _asked("loader", settings, task, as_json)
    from lockstep.lab.bench.loader import bench_loader

    counts = None if workers is None else sorted(numbers("--workers", workers, "0,2,4"))
    return done(bench_loader(subject, workers=counts, seconds=seconds, say=progress))


@bench.command(sort_key=2)
def comm(
    *,
    max_mb: Annotated[int, _flag("The largest message, in MB (2^20 bytes). Default: 64.")] = 64,
    settings: Flags = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Measure collectives and links between the chosen devices."""
    _, mapping = to_mapping(settings, "har")  # no task takes part
    folder = report_folder(mapping, "bench-comm")
    with held_back():
        from lockstep.lab.bench.comm import bench_comm

    return finish(bench_comm(mapping, max_bytes=max_mb << 20, say=progress), folder, as_json)


@bench.command(sort_key=3)
def scaling(
    task: TaskName = None,
    /,
    *,
    strategies: Annotated[str, _flag("Which to compare, such as ddp,fsdp. Default: ddp.", "NAME,...")] = "ddp",
    weak: Annotated[bool, _flag("Only with the batch of each device held. Default: both.")] = False,
    strong: Annotated[bool, _flag("Only with the global batch held. Default: both.")] = False,
    repeats: Annotated[int, _flag("How often each point is measured, in turns with the others. Default: 3.")] = 3,
    steps: Steps = 30,
    warm_up: WarmUp = 5,
    settings: Flags = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Measure 1, 2, ... all of the chosen devices."""
    from lockstep.lab.bench.scaling import Mode, bench_scaling

    modes: tuple[Mode, ...] = ("weak", "strong")
    if weak != strong:
        modes = ("weak",) if weak else ("strong",)
    subject, done = _asked("scaling", settings, task, as_json)
    names = [find_strategy(name).name for name in _names(strategies)]
    return done(
        bench_scaling(
            subject, strategies=names, modes=modes, steps=steps, warm_up=warm_up, repeats=repeats, say=progress
        )
    )


@bench.command(sort_key=4)
def batch_size(
    task: TaskName = None,
    /,
    *,
    max_batch: Annotated[
        int | None, _flag("Largest batch to try. Default: the share of a device of the data set.")
    ] = None,
    memory_limit: Annotated[
        int | None,
        _flag(
            "MB (10^6 bytes) that each CPU rank may allocate for the training. Default: 80 % of the free memory, "
            "shared by the ranks."
        ),
    ] = None,
    settings: Flags = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Find the largest batch size per device, in trial processes."""
    subject, done = _asked("batch-size", settings, task, as_json)
    from lockstep.lab.bench.batch_size import bench_batch_size

    limit = None if memory_limit is None else memory_limit * 1_000_000
    return done(bench_batch_size(subject, max_batch=max_batch, memory_limit=limit, say=progress))


@bench.command(sort_key=5)
def lr(
    task: TaskName = None,
    /,
    *,
    steps: Annotated[int, _flag("Steps from the lowest rate to the highest. Default: 100.")] = 100,
    min_lr: Annotated[float, _flag("The first rate. Default: 1e-6.")] = 1e-6,
    max_lr: Annotated[float, _flag("The last rate. Default: 10.")] = 10.0,
    settings: Flags = NO_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Find a learning rate by a range test."""
    subject, done = _asked("lr", settings, task, as_json)
    from lockstep.lab.bench.lr import bench_lr

    return done(bench_lr(subject, steps=steps, first=min_lr, last=max_lr, say=progress))


def _asked(kind: str, settings: Settings, task: str | None, as_json: bool) -> tuple[Subject, Callable[[Any], int]]:
    """Return the measured task, and a function that writes and prints the report and returns the exit code."""
    name, mapping = to_mapping(settings, task)
    folder = report_folder(mapping, f"bench-{kind}")
    with held_back():  # a signal in the middle of importing torch would abort the interpreter
        from lockstep.lab.bench.trials import Subject
    return Subject(name, mapping), partial(finish, folder=folder, as_json=as_json)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def finish(report: BenchReport, folder: Path, as_json: bool) -> int:
    from lockstep.lab.bench.report import print_report, write_report

    return deliver(report, folder, write=write_report, show=print_report, as_json=as_json)
