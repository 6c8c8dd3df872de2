"""``PerformanceProfiler``: the measurements of ``lockstep bench`` from Python, as profilers of training are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.api.settings import mapping_of
from lockstep.config import RunConfig
from lockstep.engine.task import Task
from lockstep.lab.bench.batch_size import bench_batch_size
from lockstep.lab.bench.report import BenchReport, write_report
from lockstep.lab.bench.step import bench_step
from lockstep.lab.bench.trials import Subject


class PerformanceProfiler:
    """Forward and backward time, memory, the largest batch, and mixed precision against single, of a task.

    Measures training steps of the engine, in separate processes.

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
        self._subject = Subject(task, mapping_of(config, {}))
        self._steps = steps
        self._warm_up = warm_up
        self.reports: list[BenchReport] = []

    def profile_step(self) -> dict[str, Any]:
        """Return the median step and its parts in ms (means), samples/s and peak memory, with the settings as given."""
        return self._step_rows(None)[0]

    def find_batch_sizes(self, max_batch: int | None = None, memory_limit: int | None = None) -> dict[str, Any]:
        """Find the largest batch size per device; returns every size that was tried, up to out of memory.

        ``memory_limit``: bytes that each CPU rank may allocate in addition to its memory at the start.
        """
        report = self._keep(bench_batch_size(self._subject, max_batch=max_batch, memory_limit=memory_limit))
        results = report.extra
        return {"largest": results.get("largest", 0), "tried": report.rows, "proposed": results.get("proposed")}

    def compare_amp(self, precision: str = "bf16-mixed") -> dict[str, Any]:
        """Compare steps in ``precision`` with single precision."""
        rows = {row["precision"]: row for row in self._step_rows(("32", precision))}
        off = rows["32"]
        on = rows[precision]
        comparison: dict[str, Any] = {"off": off, "on": on}
        if off["status"] == on["status"] == "ok":
            comparison["speed_up"] = on["samples_per_s"] / off["samples_per_s"]
            comparison["memory_ratio"] = on["memory_mb"] / off["memory_mb"]
        return comparison

    def save(self, folder: Path | str) -> list[Path]:
        """Write every report so far below ``folder``; returns the files."""
        places = enumerate(self.reports, start=1)
        return [file for n, report in places for file in write_report(report, Path(folder) / f"{n}-{report.kind}")]

    def _step_rows(self, precisions: Sequence[str] | None) -> list[dict[str, Any]]:
        """Measure steps; return rows with their parts as ``forward_ms``, ``backward_ms`` and so on."""
        report = bench_step(self._subject, steps=self._steps, warm_up=self._warm_up, precisions=precisions)
        rows = self._keep(report).rows
        return [{**row, **{f"{part}_ms": ms for part, ms in row.get("parts_ms", {}).items()}} for row in rows]

    def _keep(self, report: BenchReport) -> BenchReport:
        """Keep the report. Raises :class:`KeyboardInterrupt` if it was stopped."""
        self.reports.append(report)
        if report.partial:
            raise KeyboardInterrupt
        return report
