"""Measure steps, input, communication, scaling, batch sizes and learning rates of a task."""

from lockstep.lab.bench.profiler import PerformanceProfiler
from lockstep.lab.bench.report import BenchReport, print_report, write_report

__all__ = ["BenchReport", "PerformanceProfiler", "print_report", "write_report"]
