"""``PerformanceProfiler``: the measurements of ``lockstep bench`` from Python, as profilers of training are used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.bench.batch_size import bench_batch_size
from lockstep.bench.report import BenchReport, write_report
from lockstep.bench.step import bench_step
from lockstep.bench.trials import Subject
from lockstep.config import RunConfig
from lockstep.engine.task import Task


class PerformanceProfiler:
    """Forward and backward time, memory, the largest batch, and mixed precision against single, of a task.

    Everything is measured on the engine's own training steps, in processes of their own.

    ::

        profiler = PerformanceProfiler("har", {"hardware": {"selected_devices": ["gpu:0"]}})
        profiler.profile_step()["forward_ms"]
        profiler.compare_amp()["speed_up"]
        profiler.save("profile")

    Args:
        task: an object, a class, or a name as on the command line.
        config: as for :func:`lockstep.train`.
        steps, warm_up: of each measurement.
    """

    def __init__(
        self,
        task: Task | type[Task] | str,
        config: RunConfig | Mapping[str, Any] | None = None,
        *,
        steps: int = 30,
        warm_up: int = 5,
    ) -> None:
        given = config.model_dump(exclude_unset=True, mode="json") if isinstance(config, RunConfig) else config or {}
        self._subject = Subject(task, given)
        self._steps, self._warm_up = steps, warm_up
        self.reports: list[BenchReport] = []

    def profile_step(self) -> dict[str, Any]:
        """The median step and its parts in ms (means), samples/s and peak memory, with the settings as given."""
        return _flat(self._measured()[0])

    def find_batch_sizes(self, max_batch: int | None = None, memory_limit: int | None = None) -> dict[str, Any]:
        """The largest batch size per device, and every one that was tried, up to out of memory.

        Args:
            max_batch, memory_limit: as for :func:`lockstep.bench.batch_size.bench_batch_size`.
        """
        report = self._keep(bench_batch_size(self._subject, max_batch=max_batch, memory_limit=memory_limit))
        return {
            "largest": report.extra.get("largest", 0),
            "tried": report.rows,
            "proposed": report.extra.get("proposed"),
        }

    def compare_amp(self, precision: str | None = None) -> dict[str, Any]:
        """Steps in ``precision`` against single precision: both, and how many times faster the first is.

        Args:
            precision: ``None``: bf16-mixed.
        """
        amp = precision or "bf16-mixed"
        rows = {row["precision"]: row for row in self._measured(precisions=("32", amp))}
        off, on = rows["32"], rows[amp]
        found: dict[str, Any] = {"off": _flat(off), "on": _flat(on)}
        if off["status"] == on["status"] == "ok":
            found["speed_up"] = on["samples_per_s"] / off["samples_per_s"]
            found["memory_ratio"] = on["memory_mb"] / off["memory_mb"]
        return found

    def save(self, folder: Path | str) -> list[Path]:
        """Write every report so far below ``folder``; the files written."""
        places = enumerate(self.reports, start=1)
        return [file for n, report in places for file in write_report(report, Path(folder) / f"{n}-{report.kind}")]

    def _measured(self, **more: Any) -> list[dict[str, Any]]:
        report = bench_step(self._subject, steps=self._steps, warm_up=self._warm_up, **more)
        return self._keep(report).rows

    def _keep(self, report: BenchReport) -> BenchReport:
        """Raises :class:`KeyboardInterrupt` where it was stopped."""
        self.reports.append(report)
        if report.partial:
            raise KeyboardInterrupt
        return report


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with its parts beside the rest: ``forward_ms``, ``backward_ms`` and so on."""
    parts = {f"{name}_ms": value for name, value in (row.get("parts_ms") or {}).items()}
    return {**{key: value for key, value in row.items() if key != "parts_ms"}, **parts}
