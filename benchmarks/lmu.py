"""Forward and backward of an LMU layer, beside a loop over steps and the dense products alone.

    python benchmarks/lmu.py [--rounds 7] [--steps 500 1000] [--threads 1 2] [--json FILE] [--markdown FILE]

Batch 16, input 512, hidden 512, memory 256, θ 1000, float32; gradients of the input and of all parameters. The
candidates take turns in one process, so that whatever slows the machine slows them all, and ratios are taken within a
round. With other work on the machine, ratios with one thread mean most.

floor           tanh(W_x x + W_m m) for a memory m that is given
layer           LMU
ragged          the same with lengths from half of the steps to all of them
loop            the cell, step by step over ``x.unbind(1)``

``--device cuda`` measures on a GPU; the threads have no influence there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from report import header, ratios, write_json
from torch import Tensor, nn

from lockstep.recipes.speech.lmu import LMU

BATCH, INPUT, HIDDEN, MEMORY, THETA = 16, 512, 512, 256, 1000.0
#: (slower, faster): how many times the second is faster than the first.
PAIRS = [("loop", "layer")]


class Baselines(nn.Module):
    """The straightforward ways, with the parameters of an LMU."""

    def __init__(self, layer: LMU, steps: int) -> None:
        super().__init__()
        self.layer = layer
        self.a, self.b = layer.transition[0, :, :MEMORY], layer.transition[0, :, MEMORY]
        self.m = torch.randn(BATCH, steps, MEMORY, device=layer.W_x.device, requires_grad=True)

    def floor(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.layer.W_x) + F.linear(self.m, self.layer.W_m))

    def loop(self, x: Tensor) -> Tensor:
        layer, h, m, outputs = self.layer, x.new_zeros(BATCH, HIDDEN), x.new_zeros(BATCH, MEMORY), []
        e_x, e_h, e_m, b = layer.e_x[None], layer.e_h[None], layer.e_m[None], self.b[:, None]
        for step in x.unbind(1):
            u = F.linear(step, e_x) + F.linear(h, e_h) + F.linear(m, e_m)
            m = F.linear(m, self.a) + F.linear(u, b)
            h = torch.tanh(F.linear(step, layer.W_x) + F.linear(h, layer.W_h) + F.linear(m, layer.W_m))
            outputs.append(h)
        return torch.stack(outputs, 1)


def candidates(steps: int, device: str) -> tuple[dict[str, Callable[[Tensor], Tensor]], list[Tensor]]:
    """By name, and whatever gradients go to."""
    torch.manual_seed(0)
    with torch.device(device):
        layer = LMU(INPUT, HIDDEN, MEMORY, THETA)
        lengths = torch.linspace(steps // 2, steps, BATCH).long()
    baselines = Baselines(layer, steps)
    by_name: dict[str, Callable[[Tensor], Tensor]] = {
        "floor": baselines.floor,
        "layer": layer,
        "ragged": lambda x: layer(x, lengths),
        "loop": baselines.loop,
    }
    return by_name, [*layer.parameters(), baselines.m]


def saved_bytes(run: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """What the forward pass keeps for the backward pass, each memory block once; parameters and constants included."""
    blocks: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        blocks[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = run(x)
    assert output.requires_grad  # and everything that is kept is alive until here
    return sum(blocks.values())


def seconds(run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, leaves: list[Tensor]) -> float:
    for leaf in [x, *leaves]:
        leaf.grad = None
    wait: Callable[[], Any] = torch.cuda.synchronize if x.is_cuda else lambda: None
    wait()
    started = time.perf_counter()
    run(x).backward(grad)
    wait()
    return time.perf_counter() - started


def measure(steps: int, threads: int, rounds: int, device: str) -> dict[str, Any]:
    torch.set_num_threads(threads)
    by_name, leaves = candidates(steps, device)
    x = torch.randn(BATCH, steps, INPUT, device=device, requires_grad=True)
    grad = torch.randn(BATCH, steps, HIDDEN, device=device)
    times: dict[str, list[float]] = {name: [] for name in by_name}
    for turn in range(rounds + 1):
        for name, run in by_name.items():
            taken = seconds(run, x, grad, leaves)
            if turn:  # the first round warms up
                times[name].append(taken)
    return {
        "steps": steps,
        "threads": threads,
        "ms_per_step": {name: round(statistics.median(taken) / steps * 1e3, 4) for name, taken in times.items()},
        "to_floor": {name: ratios(taken, times["floor"]) for name, taken in times.items()},
        "times_faster": {f"{fast} than {slow}": ratios(times[slow], times[fast]) for slow, fast in PAIRS},
        "megabytes_kept": {name: round(saved_bytes(run, x) / 1e6, 1) for name, run in by_name.items()},
    }


def table(result: dict[str, Any]) -> str:
    def spread(entry: dict[str, Any]) -> str:
        return "{:.2f} ({:.2f}–{:.2f})".format(entry["ratio"], *entry["ratio_quartiles"])

    threads = f"{result['threads']} thread{'s' * (result['threads'] > 1)}"
    lines = [
        f"{result['steps']} steps, {threads}:",
        "",
        "| | ms a step | × floor (quartiles) | MB kept |",
        "| --- " * 4 + "|",
    ]
    for name, ms in result["ms_per_step"].items():
        lines.append(f"| {name} | {ms:.3f} | {spread(result['to_floor'][name])} | {result['megabytes_kept'][name]} |")
    lines += ["", "| | times faster (quartiles) |", "| --- | --- |"]
    lines += [f"| {pair} | {spread(entry)} |" for pair, entry in result["times_faster"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, nargs="+", default=[500, 1000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {**header(), "device": options.device, "rounds": options.rounds}
    if options.device.startswith("cuda"):
        report["device"] = torch.cuda.get_device_name(options.device)
    report["load_average_before"] = round(os.getloadavg()[0], 2)
    results = []
    for threads in options.threads:
        for steps in options.steps:
            results.append(measure(steps, threads, options.rounds, options.device))
            print(table(results[-1]), end="\n\n", flush=True)
    report["load_average_after"] = round(os.getloadavg()[0], 2)
    write_json(options.json, {**report, "results": results})
    if options.markdown:
        head = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in report.items())
        options.markdown.write_text("\n\n".join([head, *map(table, results)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
