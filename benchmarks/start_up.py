"""How long one waits: ``lockstep --help``, ``import lockstep``, and HAR's first step after ``import torch``.

    python benchmarks/start_up.py [--rounds 5] [--json FILE]

Medians of wall and processor seconds over fresh processes, in turn. The first step is after a first evaluation, for
which torchmetrics is imported, and with it SciPy and Matplotlib where they are installed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import header, write_json

FIRST_STEP = """
import json, time
import torch
wall, cpu = time.perf_counter(), time.process_time()
import lockstep
from lockstep.tasks.har.task import HarTask
class First(HarTask):
    def hooks(self):
        return [(self.tell, 1)]
    def tell(self, result, model):
        if result.step == 1:
            print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)
lockstep.train(First, {
    "save_dir": "run", "hardware": {"selected_devices": ["cpu"]},
    "training": {"max_steps": 1, "threads": 1}, "telemetry": {"progress": "silent"},
})
"""


def command(*arguments: str) -> tuple[float, float]:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_step() -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_STEP], cwd=folder, capture_output=True, text=True, check=True
        )
    wall, cpu = json.loads(done.stdout.splitlines()[0])
    return wall, cpu


CASES = {
    "lockstep --help": lambda: command("-m", "lockstep", "--help"),
    "import lockstep": lambda: command("-c", "import lockstep"),
    "import torch": lambda: command("-c", "import torch"),
    "first step of HAR after import torch": first_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = header()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, measure in CASES.items():
            times[name].append(measure())
    for name, pairs in times.items():
        wall, cpu = (round(statistics.median(values), 3) for values in zip(*pairs, strict=True))
        report[name] = {"wall_s": wall, "cpu_s": cpu}
        print(f"{name:44} {wall:7.3f} s on the wall {cpu:7.3f} s of the processor")
    write_json(options.json, report)


if __name__ == "__main__":
    main()
