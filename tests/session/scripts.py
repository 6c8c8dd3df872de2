"""Scripts with a session, and how tests run them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import commands
from tests.gloo import ROOT, clean_environment

CLASSIFIER = """
import sys, time
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(123, 6, generator=generator)
labels = (inputs.sum(1) > 0).long()
train_set, val_set = TensorDataset(inputs[:83], labels[:83]), TensorDataset(inputs[83:], labels[83:])
pause = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0

settings = {"telemetry.log_interval": 1, "telemetry.record_samples": True, "checkpoint.monitor": "val_accuracy"}
session = lockstep.Session(global_batch_size=16, seed=3, config=settings)
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
average = torch.optim.swa_utils.AveragedModel(model)
session.checkpoint(average=average)
for epoch in session.epochs(3):
    for x, y in session.batches(train_set):
        session.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
        if session.step(optimizer, max_norm=1.0):
            average.update_parameters(model)
        time.sleep(pause)
    rows = right = 0
    for logits, y in session.evaluate(val_set, lambda batch: (model(batch[0]), batch[1]), batch_size=7):
        right, rows = right + (logits.argmax(1) == y).sum().item(), rows + len(y)
    assert rows == 40
    session.log(accuracy=right / rows)
session.print("weights", *(f"{p.detach().double().sum().item():.7f}" for p in model.parameters()))
session.print("average", f"{sum(p.detach().double().abs().sum().item() for p in average.parameters()):.7f}")
"""


def environment() -> dict[str, str]:
    return clean_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")


def start(*command: str, cwd: Path) -> subprocess.Popen[str]:
    """``python *command``, in a process group of its own."""
    return commands.start(*command, cwd=cwd, env=environment(), script=True)


def run(*command: str, cwd: Path, code: int = 0) -> str:
    """Its output; standard error, if ``code`` is another one than 0."""
    return finish(start(*command, cwd=cwd), code)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """As :func:`run`."""
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, out + err
    return err if code else out


def numbers(output: str, word: str) -> list[float]:
    """Those on the line that begins with ``word``."""
    line = next(line for line in output.splitlines() if line.startswith(word + " "))
    return [float(number) for number in line.split()[1:]]
