"""Workloads of one GPU: Lockstep against a bare compiled loop, and other trainers, in turn on the same card.

::

    python benchmarks/gpu_workloads.py gpt2 --device gpu:0 --json gpt2.json
    python benchmarks/gpu_workloads.py har_cnn --device cpu --quick     # tiny, to see that it works
    python benchmarks/gpu_workloads.py exact | checkpoint | forecast    # see below

gpt2, vit, resnet50, har_cnn, mlp, lmu_tiny, lmu_base   a contest (``gpu/catalogue.py``): all loops take turns in one
           process, in blocks of steps (``gpu/turns.py``). Lockstep is ``lockstep.train`` with log, heartbeat and
           monitor; the bare loop is compiled in the same mode and has its batches ready on the card. Ratios are
           between blocks of a round: median and quartiles.
har30      30 epochs of the built-in HAR task, validation and checkpoints included
exact      ``reproducibility: exact`` against ``fast``, on the device and with two ranks on it; equal hashes of weights
checkpoint 1.5 billion parameters with AdamW (18 GB): how long a step waits for a checkpoint, and how much slower steps
           are while it is written
forecast   what ``lockstep memory`` and ``lockstep forecast`` predict for the workloads, against what was measured

Data are generated. ``--quick`` takes small models and few steps. ``--seconds`` bounds a contest.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from gpu.catalogue import SPECS, WARM_UP, Spec, spec_of
from gpu.sides import sides_of
from gpu.tasks import Plain, Workload
from gpu.turns import Turns, finish
from report import header, ratios, write_json

import lockstep

TASK = str(Path(__file__).resolve().parent / "gpu" / "tasks.py") + ":Workload"


def torch_device(name: str) -> torch.device:
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", int(name[4:]))


def settings(folder: str, devices: list[str], **training: Any) -> dict[str, Any]:
    """Of every run here: no warm-up of the rate, no bar, nothing else changed."""
    return {
        "save_dir": f"{folder}/run",
        "hardware": {"selected_devices": devices},
        "training": {"epochs": 1, "max_grad_norm": 1.0, "on_oom": "fail", **training},
        "optimizer": {"lr": 3e-4},
        "scheduler": {"name": "constant", "warmup_steps": 0},
        "telemetry": {"progress": "off", "tensorboard": "off"},
        "launch": {"hang_timeout_s": 600.0},
    }


@contextlib.contextmanager
def scratch(options: argparse.Namespace) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        yield folder


def contest(options: argparse.Namespace) -> dict[str, Any]:
    spec = spec_of(options.workload, quick=options.quick, batch=options.batch)
    device = torch_device(options.device)
    sides, left_out = sides_of(spec, device)
    if options.sides is not None:
        sides = {name: sides[name] for name in sides if name in options.sides.split(",")}
    turns = Turns(sides, spec.block, WARM_UP, device)
    task = Workload(Workload.Config(kind=options.workload, quick=options.quick, batch=options.batch))
    task.after_block, task.every = turns, spec.block
    report: dict[str, Any] = {"title": spec.title, "batch": spec.batch, "unit": spec.unit, "precision": spec.precision}
    report |= {"compile": spec.mode, "published": spec.published, "goal": spec.goal, "left_out": left_out}
    turns.counted = lambda: keep(options, report | rows_of(turns, spec))  # type: ignore[method-assign]
    with scratch(options) as folder:
        config = settings(folder, [options.device], batch_size=spec.batch, compile=spec.mode is not None)
        config["training"] |= {"max_time_s": options.seconds, "max_steps": spec.block * (spec.rounds + WARM_UP)}
        config["training"] |= {"compile_mode": spec.mode} if spec.mode else {}
        config["hardware"]["precision"] = spec.precision
        config["optimizer"] |= {"name": spec.optimizer, "momentum": 0.9}
        config["telemetry"]["log_interval"] = spec.block
        try:
            run = lockstep.train(task, config)
        finally:
            turns.close()
        plan = json.loads((Path(run.run_dir) / "plan.json").read_text())
        if device.type == "cuda":
            report["peak_gb_of_all"] = torch.cuda.max_memory_allocated(device) / 1e9
    report["decisions"] = {key: value["value"] for key, value in plan["decisions"].items()}
    return report | rows_of(turns, spec)


def rows_of(turns: Turns, spec: Spec) -> dict[str, Any]:
    """What the rounds so far have shown of each side."""
    sides: dict[str, Any] = {}
    own = turns.seconds["lockstep"]
    for name, seconds in turns.seconds.items():
        error = turns.sides[name].error if name in turns.sides else None
        if error or not seconds or not own:
            sides[name] = {"error": (error or "no round was finished")[-2000:]}
            continue
        middle = statistics.median(seconds)
        row = {"ms_per_step": round(middle * 1e3, 3), "per_s": round(spec.batch * spec.items / middle)}
        number = min(len(seconds), len(own))
        sides[name] = {**row, "to_lockstep": ratios(seconds[:number], own[:number])}
    return {"rounds": len(own), "sides": sides}


def keep(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write what is known so far: whoever runs this may end it at any time."""
    detail = {} if "sides" in report else {"detail": detail_of(report)}
    write_json(options.json, {**options.start, **report, **detail})


def har30(options: argparse.Namespace) -> dict[str, Any]:
    with scratch(options) as folder:
        config = settings(folder, [options.device], batch_size=64)
        config["training"] |= {"epochs": 30, "early_stopping_patience": 0}
        config["training"] |= {"max_steps": 3} if options.quick else {}
        seconds = []
        for number in range(1 if options.quick else 3):
            started = time.perf_counter()
            run = lockstep.train("har", {**config, "save_dir": f"{folder}/{number}"})
            finish()
            seconds.append(time.perf_counter() - started)
    return {
        **{"title": "HAR, 30 epochs of the built-in task", "goal": "5 s"},
        **{"steps": run.step, "seconds": [round(value, 2) for value in seconds]},
        "metrics": dict(run.metrics),
    }


def step_time(options: argparse.Namespace, config: dict[str, Any], task: dict[str, Any]) -> tuple[float, str]:
    """Seconds of a step, as the run's rows have them, and a hash of the weights at its end."""
    with scratch(options) as folder:
        run = lockstep.train(TASK, {**config, "save_dir": f"{folder}/run", "task": task})
        rows = [json.loads(line) for line in (Path(run.run_dir) / "steps.jsonl").read_text().splitlines()]
        digest = hashlib.sha256()
        for _, tensor in sorted(lockstep.Run(run.run_dir).load_model("last").state_dict().items()):
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    batch = config["training"]["global_batch_size"]
    return statistics.median(batch / row["samples_per_s"] for row in rows[1:]), digest.hexdigest()[:16]


def exact(options: argparse.Namespace) -> dict[str, Any]:
    """Fast and exact in turn, the same global batch on one rank and on two that share the device."""
    found: dict[str, Any] = {}
    batch = 8 if options.quick else 64
    # Two ranks on one card exchange half a gigabyte a step of GPT-2 over the host.
    sizes = {"mlp": (6, 1)} if options.quick else {"har_cnn": (40, 2), "gpt2": (12, 1)}
    for kind, (steps, rounds) in sizes.items():
        times: dict[str, list[float]] = {}
        hashes: set[str] = set()
        for _ in range(rounds):
            for mode, ranks in product(("fast", "exact"), (1, 2)):
                training = {"global_batch_size": batch, "batch_size": batch // ranks, "reproducibility": mode}
                if mode == "fast" and kind == "gpt2":
                    training["batch_size"] = batch // 8  # as exact mode's lanes
                config = settings("", [options.device] * ranks, epochs=100, max_steps=steps, **training)
                config["telemetry"]["log_interval"] = max(2, steps // 8)
                config["distributed"] = {"sync_batchnorm": "off"} if mode == "fast" else {}
                seconds, digest = step_time(options, config, {"kind": kind, "quick": options.quick})
                times.setdefault(f"{mode}, {ranks}", []).append(seconds)
                hashes |= {digest} if mode == "exact" else set()
        found[kind] = {
            "ms_per_step": {name: round(statistics.median(values) * 1e3, 2) for name, values in times.items()},
            "exact_to_fast": {ranks: ratios(times[f"exact, {ranks}"], times[f"fast, {ranks}"]) for ranks in (1, 2)},
            "equal_hashes": len(hashes) == 1,
        }
        keep(options, {"title": "Exact against fast", "models": found})
    failed = [kind for kind, row in found.items() if not row["equal_hashes"]]
    return {
        **{"title": "Exact against fast", "goal": "at most 1.10 times fast, equal hashes", "models": found},
        **({"error": f"exact: weights differ between one rank and two: {', '.join(failed)}"} if failed else {}),
    }


def checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    """Stamps are taken when a step's loss begins, and the device has done what came before, the pause included."""
    every, saves, accumulate = (4, 2, 1) if options.quick else (50, 2, 4)  # a step has to be longer than the copy
    stamps: list[float] = []
    calls = 0

    def stamp() -> None:
        nonlocal calls
        calls += 1
        if (calls - 1) % accumulate == 0:
            finish()
            stamps.append(time.perf_counter())

    with scratch(options) as folder:
        sizes = {"batch_size": 32 if options.quick else 8192, "accumulate": accumulate}
        config = settings(folder, [options.device], **sizes, max_steps=every * saves + 4)
        config["checkpoint"] = {"every_steps": every, "keep_last": 1}
        config["telemetry"]["log_interval"] = 10**6
        config["data"] = {"device": "host" if options.device == "cpu" else "gpu"}  # no loss but those of steps
        task = Plain(Plain.Config(wide=True, quick=options.quick))
        task.at_loss = stamp  # type: ignore[method-assign]
        lockstep.train(task, config)
        parameters = sum(p.numel() for p in task.model().parameters()) if options.quick else 22 * (8192**2 + 8192)
    steps = [later - now for now, later in pairwise(stamps)]  # steps[i] is step i + 1, and the save after it
    # The first save allocates its memory.
    with_save = [steps[k - 1] for k in range(every, len(steps) + 1, every)]
    usual = statistics.median(steps[: every - 2])
    others = [s for place, s in enumerate(steps[every:]) if (place + 1 + every) % every][:20]
    return {
        **{"title": "Checkpoint of 1.5 B parameters with AdamW", "goal": "pause ≤ 5 ms, step ≤ 1.02 times"},
        **{"parameters": parameters, "gb": round(parameters * 12 / 1e9, 2), "ms_per_step": round(usual * 1e3, 2)},
        "first_pause_ms": round((with_save[0] - usual) * 1e3, 2),
        "pause_ms": [round((seconds - usual) * 1e3, 2) for seconds in with_save[1:]],
        "step_while_writing": round(statistics.median(others) / usual, 3),
    }


def forecast(options: argparse.Namespace) -> dict[str, Any]:
    """Predicted and measured, of eager steps: a compiled model has other activations than those that are counted."""
    from lockstep.hardware import detect_devices
    from lockstep.lab.bench.step import bench_step
    from lockstep.lab.bench.trials import Subject
    from lockstep.lab.forecast.memory import estimate_memory
    from lockstep.lab.forecast.project import Wish
    from lockstep.lab.forecast.project import forecast as forecast_speed

    names = {device.id: device.name for device in detect_devices()}
    rows: dict[str, Any] = {}
    for kind in ("mlp",) if options.quick else ("gpt2", "vit", "resnet50", "har_cnn", "mlp", "lmu_base"):
        spec = spec_of(kind, quick=options.quick)
        subject = Subject(
            TASK,
            {
                "task": {"kind": kind, "quick": options.quick},
                "hardware": {"selected_devices": [options.device], "precision": spec.precision},
                "training": {"batch_size": min(spec.batch, 16 if kind == "gpt2" else 128)},
                "optimizer": {"name": spec.optimizer},
            },
        )
        row: dict[str, Any] = {}
        try:
            predicted = next(iter(estimate_memory(subject)["strategies"].values()))["total"]
            (measured,) = bench_step(subject, steps=4 if options.quick else 20, warm_up=2).rows
            row = {key: measured.get(key) for key in ("step_ms", "memory_mb", "tflops", "peak_share", "reason")}
            row["memory_predicted_mb"] = round(predicted / 1e6, 1)
            if options.device != "cpu":
                (speed,) = forecast_speed(subject, Wish(gpus=(1,), gpu=names[options.device])).rows
                row["step_predicted_ms"] = round(speed["step_ms"], 3)
        except lockstep.LockstepError as error:
            row["error"] = str(error)
        for name, unit in (("memory", "mb"), ("step", "ms")):
            if row.get(f"{name}_predicted_{unit}") and row.get(f"{name}_{unit}"):
                row[f"{name}_ratio"] = round(row[f"{name}_predicted_{unit}"] / row[f"{name}_{unit}"], 3)
        rows[kind] = row
        keep(options, {"title": "Forecasts", "workloads": rows})
    return {"title": "Forecasts", "goal": "memory within 10 %, step time within 15 %", "workloads": rows}


MODES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    **dict.fromkeys(SPECS, contest),
    **{"har30": har30, "exact": exact, "checkpoint": checkpoint, "forecast": forecast},
}


def detail_of(report: dict[str, Any]) -> str:
    """The figures that the goal is about, on one line."""
    found = [f"{key} {report[key]}" for key in ("seconds", "pause_ms", "step_while_writing") if key in report]
    for name, row in report.get("models", {}).items():
        ratios_of = " and ".join(str(value["ratio"]) for value in row["exact_to_fast"].values())
        found.append(f"{name}: {ratios_of} times fast, hashes {'equal' if row['equal_hashes'] else 'differ'}")
    for name, row in report.get("workloads", {}).items():
        known = [f"{key} {row[key]}" for key in ("memory_ratio", "step_ratio", "error") if key in row]
        found.append(f"{name}: {', '.join(known)}")
    return "; ".join(found)


def text_of(report: dict[str, Any]) -> str:
    """Markdown of one workload."""
    lines = [f"**{report['title']}**. Goal: {report.get('goal') or 'none'}.", ""]
    if report.get("published"):
        lines += [f"Published: {report['published']}.", ""]
    if "sides" in report:
        lines += [f"| | ms a step | {report['unit']}/s | time relative to Lockstep |", "| --- | --- | --- | --- |"]
        for name, row in report["sides"].items():
            if "error" in row:
                lines.append(f"| {name} | failed: {row['error'].strip().splitlines()[-1][:150]} | | |")
                continue
            low, high = row["to_lockstep"]["ratio_quartiles"]
            ratio = f"{row['to_lockstep']['ratio']:.2f} ({low:.2f}–{high:.2f})"
            lines.append(f"| {name} | {row['ms_per_step']:.2f} | {row['per_s']:,} | {ratio} |")
        lines += [f"\n{', '.join(report['left_out'])}"] if report["left_out"] else []
    else:
        rest = {key: value for key, value in report.items() if key not in ("title", "goal", *header())}
        lines.append(f"```json\n{json.dumps(rest, indent=1, default=str)[:4000]}\n```")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=MODES)
    parser.add_argument("--device", default="gpu:0", help="gpu:N or cpu")
    parser.add_argument("--quick", action="store_true", help="small models and few steps")
    parser.add_argument("--batch", type=int, help="another batch size; default: the workload's")
    parser.add_argument("--sides", help="comma-separated, of those of the workload; default: all that are installed")
    parser.add_argument("--seconds", type=float, help="end a contest after this time")
    parser.add_argument("--folder", type=Path, help="for runs and checkpoints; default: the system's temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # As Lockstep does where it is the first that uses the GPU; here the other loops are.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    options.start = {**header(), "command": " ".join(["python", *sys.argv]), "device": options.device}
    if options.device != "cpu":
        options.start["gpu"] = torch.cuda.get_device_name(torch_device(options.device))
    try:
        report = MODES[options.workload](options)
    except (torch.OutOfMemoryError, lockstep.LockstepError) as error:
        if getattr(error, "code", "OUT_OF_MEMORY") != "OUT_OF_MEMORY":
            raise
        batch = (options.batch or SPECS[options.workload].batch) // 2 if options.workload in SPECS else 0
        if batch < 1:
            raise
        print(f"out of memory: again with batch {batch}", flush=True)
        os.execv(sys.executable, [sys.executable, *_without(sys.argv, "--batch"), "--batch", str(batch)])
    keep(options, report)
    print(text_of(report))
    raise SystemExit(1 if "error" in report or "error" in report.get("sides", {}).get("bare", {}) else 0)


def _without(arguments: list[str], name: str) -> list[str]:
    if name not in arguments:
        return arguments
    place = arguments.index(name)
    return [*arguments[:place], *arguments[place + 2 :]]


if __name__ == "__main__":
    main()
