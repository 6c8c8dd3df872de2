"""Measured, not claimed: steps, input, communication, scaling, batch sizes and learning rates of a task."""

from lockstep.bench.profiler import PerformanceProfiler
from lockstep.bench.report import BenchReport, print_report, write_report

__all__ = ["BenchReport", "PerformanceProfiler", "print_report", "write_report"]
