"""What the benchmarks' reports have in common: the machine, and ratios of measurements taken in turn."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch


def header() -> dict[str, Any]:
    """Date, machine, torch and the load before the benchmark began, as every result begins."""
    return {
        "date": date.today().isoformat(),
        "machine": machine(),
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def machine() -> str:
    """``AMD EPYC, 2 cores``: the processor's name where the system tells it, and the cores of this process."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def ratios(values: Sequence[float], bases: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of ``values[i] / bases[i]``: neighbours in time share the machine's other load."""
    found = sorted(value / base for value, base in zip(values, bases, strict=True))
    quarter = len(found) // 4
    return {
        "ratio": round(statistics.median(found), 3),
        "ratio_quartiles": [round(found[quarter], 3), round(found[-1 - quarter], 3)],
    }


def opening(title: str, report: dict[str, Any]) -> list[str]:
    """The first lines of a report in Markdown: what, when, where and by which command."""
    where = f"{report['machine']}, torch {report['torch']}, load {report['load_before']} before."
    return [f"# {title}, {report['date']}", "", f"{where} `{report['command']}`", ""]


def spread(found: dict[str, Any]) -> str:
    """What :func:`ratios` has found: ``0.90 (0.85–0.97)``."""
    low, high = found["ratio_quartiles"]
    return f"{found['ratio']:.2f} ({low:.2f}–{high:.2f})"


def publish(report: dict[str, Any], name: str, text: str, folder: Path | None) -> None:
    """Print ``text``, and write it and the report to ``folder``, if there is one, as ``<date>-<name>``."""
    print(text)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{report['date']}-{name}.json", report)
        (folder / f"{report['date']}-{name}.md").write_text(text, encoding="utf-8")


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:  # at once: this process may be ended at any time
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
