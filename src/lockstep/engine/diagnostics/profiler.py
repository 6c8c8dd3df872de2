"""``--profile A:B``: some steps under torch's profiler."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, record_function

from lockstep.engine.distributed.staging import finish
from lockstep.engine.rank_context import RankContext
from lockstep.errors import StorageError, many
from lockstep.rundir.files import write_json, write_text
from lockstep.rundir.heartbeat import Activity, pulse

#: Operators in the table for people; the JSON has all of them.
TABLE_ROWS = 40
T = TypeVar("T")


@contextmanager
def profiled(rank: RankContext, steps: Iterator[T], step: int) -> Iterator[Iterator[T]]:
    """Yield an iterator over ``steps``, those after ``step``, that records the steps of ``telemetry.profile``.

    Writes ``rank-<r>.trace.json.gz`` (for Perfetto or chrome://tracing), ``rank-<r>.txt`` and ``rank-<r>.json`` into
    ``profile/`` of the run after the last of them, or where the run ends before. What runs between these steps
    (logging, an evaluation) is in the trace too.
    """
    settings = rank.config.telemetry
    if not settings.profile:
        yield steps
        return
    remark = partial(rank.note, "profile")
    first, last = map(int, str(settings.profile).split(":"))
    missing_ranks = ", ".join(str(number) for number in settings.profile_ranks if number >= rank.world.size)
    if missing_ranks:
        remark(
            f"telemetry.profile_ranks names {missing_ranks}, but the run has {many(rank.world.size, 'rank')}, counted "
            "from 0."
        )
    if step >= last:
        remark(f"Steps {first} to {last} are not profiled: the run resumes at step {step}.")
    if rank.world.rank not in settings.profile_ranks or step >= last:
        yield steps
        return
    with contextlib.closing(_recorded(rank, steps, max(first, step + 1), last, step)) as recorded:
        yield recorded


def _recorded(rank: RankContext, steps: Iterator[T], first: int, last: int, step: int) -> Generator[T, None, None]:
    profiler: profile | None = None
    remark = partial(rank.note, "profile")
    try:
        while step < last:
            step += 1
            profiler = _started(rank.device) if step == first else profiler
            with record_function(f"step {step}") if profiler else contextlib.nullcontext():
                result = next(steps, None)
            if result is None:
                return
            yield result
        ended = profiler
        profiler = None
        remark(f"The profile of steps {first} to {last} {_written(ended, rank)}.")
        yield from steps
    finally:
        if profiler is not None:
            remark(f"The run ended before step {last}: the profile until then {_written(profiler, rank)}.")
        elif step < first:
            remark(f"The run ended before step {first}: there is no profile.")


def _started(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    finish(device)  # work of earlier steps is not to be in the trace
    with _quiet_library():
        profiler = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
        profiler.start()
    return profiler


def _written(profiler: profile | None, rank: RankContext) -> str:
    """Return where the files are, or why there are none. A failed profile does not end a run."""
    assert profiler is not None
    folder = rank.run_dir.profile
    name = f"rank-{rank.world.rank}"
    order = "self_device_time_total" if rank.device.type == "cuda" else "self_cpu_time_total"
    with pulse.during(Activity.WRITING_PROFILE):
        finish(rank.device)
        profiler.stop()
        try:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
            averages = profiler.key_averages()
            write_text(folder / f"{name}.txt", averages.table(sort_by=order, row_limit=TABLE_ROWS) + "\n")
            write_json(folder / f"{name}.json", {"rank": rank.world.rank, "operators": operators(averages, order)})
        except (OSError, StorageError) as error:
            return f"could not be written: {error}"
    return f"is in {folder}"


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Silence Kineto, which reads its level when first started, and prints at each start and stop at any below."""
    variable = "KINETO_LOG_LEVEL"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = "6"  # silent
    try:
        yield
    finally:
        del os.environ[variable]


def operators(averages: EventList, order: str) -> list[dict[str, Any]]:
    """List operators, the costliest first: calls, times in µs, bytes that each allocated less those it released."""
    return [
        {
            "name": event.key,
            "calls": event.count,
            "self_cpu_us": event.self_cpu_time_total,
            "cpu_us": event.cpu_time_total,
            "self_device_us": event.self_device_time_total,
            "device_us": event.device_time_total,
            "self_cpu_bytes": event.self_cpu_memory_usage,
            "self_device_bytes": event.self_device_memory_usage,
        }
        for event in sorted(averages, key=lambda event: -getattr(event, order))
    ]
