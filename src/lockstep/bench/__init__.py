"""Measured, not claimed: steps, input, communication, scaling, batch sizes and learning rates of a task."""

from lockstep.bench.profiler import PerformanceProfiler
from lockstep.bench.report import print_report, write_report
from lockstep.bench.results import BenchReport

__all__ = ["BenchReport", "PerformanceProfiler", "print_report", "write_report"]
