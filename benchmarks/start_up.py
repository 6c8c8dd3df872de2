"""How long one waits for ``lockstep --help``, ``import lockstep``, and the first step of HAR; what a rank holds then.

    python benchmarks/start_up.py [--rounds 5] [--json FILE]

Medians of wall and processor seconds over fresh processes, in turn. A first step comes after the run folder is
written and a first evaluation is done. ``after import torch``: in one process, from the end of that import. ``of
lockstep train``: from the command's start to the step of rank 0, whose own processor time and resident memory they are.
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

#: A task in a file, whose rank 0 writes down how it stands after the first step.
TASK = """
import json, os, resource, time
from pathlib import Path
from lockstep.tasks.har import HarTask

class First(HarTask):
    def hooks(self):
        return [(self.tell, 1)]

    def tell(self, result, model):
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
        if os.environ.get("RANK", "0") == "0":
            Path("first.json").write_text(json.dumps([time.time(), time.process_time(), memory]))
"""
AFTER_TORCH = """
import json, time
from pathlib import Path
import torch
Path("before.json").write_text(json.dumps([time.time(), time.process_time()]))
import lockstep
lockstep.train("task.py:First", {
    "save_dir": "run", "hardware": {"selected_devices": ["cpu"]},
    "training": {"max_steps": 1, "threads": 1}, "telemetry": {"progress": "silent"},
})
"""
#: The same task as one writes it by hand, for torchrun.
BY_HAND = """
import json, os, resource, time
from pathlib import Path
import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from lockstep.tasks.har import HarTask

distributed.init_process_group("gloo")
torch.manual_seed(0)
task = HarTask()
data, model = task.datasets(), DistributedDataParallel(task.model())
train = val = TensorDataset(*data.val.__getitems__(np.arange(len(data.val))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.eval()
with torch.no_grad():
    for inputs, labels in DataLoader(val, 256, sampler=DistributedSampler(val)):
        nn.functional.cross_entropy(model(inputs), labels)
model.train()
inputs, labels = next(iter(DataLoader(train, 32, sampler=DistributedSampler(train))))
nn.functional.cross_entropy(model(inputs), labels).backward()
optimizer.step()
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
if distributed.get_rank() == 0:
    Path("first.json").write_text(json.dumps([time.time(), time.process_time(), memory]))
distributed.destroy_process_group()
"""
TRAIN = (
    *("-m", "lockstep", "train", "task.py:First", "--save-dir", "run", "--max-steps", "1"),
    *("--set", "training.threads=1", "--set", "telemetry.progress=silent", "--devices"),
)

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

Measured = dict[str, float]


def command(*arguments: str) -> Measured:
    """A whole process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall_s": wall, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def first_step(*arguments: str) -> Measured:
    """Until the first step; from the process's start, unless it says in ``before.json`` from when."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(TASK, encoding="utf-8")
        (folder / "by_hand.py").write_text(BY_HAND, encoding="utf-8")
        (folder / "before.json").write_text(json.dumps([time.time(), 0.0]), encoding="utf-8")
        subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, check=True)
        before, first = (json.loads((folder / file).read_text()) for file in ("before.json", "first.json"))
    return {"wall_s": first[0] - before[0], "cpu_s": first[1] - before[1], "memory_mib": first[2]}


CASES = {
    "lockstep --help": lambda: command("-m", "lockstep", "--help"),
    "import lockstep": lambda: command("-c", "import lockstep"),
    "import torch": lambda: command("-c", "import torch"),
    "first step of HAR after import torch": lambda: first_step("-c", AFTER_TORCH),
    "first step of lockstep train, cpu": lambda: first_step(*TRAIN, "cpu"),
    "first step of lockstep train, cpu,cpu": lambda: first_step(*TRAIN, "cpu,cpu"),
    "first step by hand, torchrun with 2 ranks": lambda: first_step(*TORCHRUN, "by_hand.py"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = header()
    found: dict[str, list[Measured]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, measure in CASES.items():
            found[name].append(measure())
    for name, rounds in found.items():
        medians = {key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]}
        report[name] = medians
        memory = f"{medians['memory_mib']:7.0f} MiB" if "memory_mib" in medians else ""
        print(f"{name:42} {medians['wall_s']:7.3f} s on the wall {medians['cpu_s']:7.3f} s of the processor {memory}")
    write_json(options.json, report)


if __name__ == "__main__":
    main()
