"""Runs that nobody trained, for the page to show."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lockstep.config import resolve
from lockstep.rundir.files import write_json
from lockstep.rundir.folder import RunDir
from lockstep.telemetry.sinks import encode_png, encode_wav
from tests.studio.serving import Address


def runs_of(address: Address) -> Path:
    return Path(address.get("/api/studio")["runs_dir"])


def make_run(folder: Path, name: str, status: str, steps: int = 40, **record: object) -> RunDir:
    config = resolve({"name": name, "task": {"name": "har"}, "training": {"epochs": 4}})
    run_id = f"run-{len(name):04x}{len(status):04x}"
    run = RunDir.create(folder / run_id, config, run_id=run_id, command=["lockstep", "train", "har"])
    with run.steps_file.open("w") as file:
        for step in range(1, steps + 1):
            row = {"attempt": 1, "step": step, "epoch": 1 + step // 11, "loss": 2 / step, "lr": 1e-3}
            file.write(json.dumps({**row, "samples_per_s": 9.5, "data_wait_share": 0.1, "grad_norm": 1.0}) + "\n")
    run.write_epochs(
        [{"attempt": 1, "epoch": n, "step": 10 * n, "train_loss": 2 / n, "val_loss": 3 / n} for n in (1, 2)]
    )
    run.update(status=status, **record)
    write_json(run.path / "tables.json", {"test_confusion": [[4, 1], [2, 4]], "class_names": ["walk", "sit"]})
    confused = {"0,1": [[8, "walk/h.png"]], "1,0": [[3, "sit/d.png"], [7, "sit/<b>.png"]]}
    write_json(run.path / "confused.json", confused)
    run.pictures.mkdir()
    for epoch in (1, 2):
        picture = np.full((4, 8), 100 * epoch, np.uint8)
        (run.pictures / f"samples-epoch-{epoch:04d}.png").write_bytes(encode_png(picture))
    run.audio.mkdir()
    (run.audio / "on.wav").write_bytes(encode_wav(np.zeros(16_000, np.float32), 16_000))
    said = ({"text": "sample: to be"}, {"text": "said: 'on'  heard: 'oh'", "audio": "on.wav"})
    rows = ({"attempt": 1, "step": 10 * n, "epoch": n, "remarks": [said[n - 1]]} for n in (1, 2))
    run.remarks_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return run


def add_sample(run: RunDir, second: int, power_w: float) -> None:
    """What the monitor of a node with eleven GPUs writes."""
    devices = [
        {"id": f"gpu:{index}", "utilisation": 0.9, "memory_gb": 60.0 + index, "power_w": power_w + index}
        for index in range(11)
    ]
    with (run.path / "system-node7.jsonl").open("a") as file:
        host = {"name": "node7", "cpu": 0.5, "memory_gb": 20.0}
        file.write(json.dumps({"time": 1.7e9 + second, "host": host, "devices": devices}) + "\n")
