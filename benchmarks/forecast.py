"""Are forecasts right? Ranks of this machine predicted from one, and published scaling from stated inputs.

    .venv/bin/python benchmarks/forecast.py ranks --rounds 5 --out benchmarks/results/forecast-ranks.json
    .venv/bin/python benchmarks/forecast.py published

``ranks``: in each round, within seconds of each other and in the same processes: one rank's steps by itself, all
ranks' steps without a word to each other and with some short messages in the forward, an all-reduce of several sizes,
and the real thing, DDP or FSDP among all ranks. The forecast sees the rest.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
import torch

from lockstep.lab.bench.comm import fit_alpha_beta, measure_message
from lockstep.lab.bench.measure import summarise
from lockstep.lab.bench.timing import on_site
from lockstep.lab.bench.trials import Case, Subject, TrialRank, new_trials
from lockstep.lab.forecast.collectives import LEVELS, Cluster, Level, cluster_of, measured_cluster
from lockstep.lab.forecast.footprint import Footprint, blocking_messages
from lockstep.lab.forecast.measured import (
    cases,
    contention,
    jitter,
    meeting,
    step_of,
    take_turn,
    timed_steps,
)
from lockstep.lab.forecast.memory import Counting
from lockstep.lab.forecast.scaling import Setting, Step, predict, with_error_bars
from lockstep.planning.resolve import resolve_reduction

SIZES = (4096, 65_536, 1 << 20, 4 << 20)
_MLP = {"task": {"model": "mlp", "hidden": [1024, 1024]}, "training": {"batch_size": 256}}
_SPEECH = {"training": {"batch_size": 32}}
#: Name, task, strategy, settings: some bound by computation, one with many parameters for its work.
SUBJECTS = (
    ("har cnn, batch 64", "har", "ddp", {"training": {"batch_size": 64}}),
    ("har cnn, batch 128", "har", "ddp", {"training": {"batch_size": 128}}),
    ("har cnn, batch 128", "har", "fsdp", {"training": {"batch_size": 128}}),
    ("har mlp 1024-1024, batch 256", "har", "ddp", _MLP),
    ("har mlp 1024-1024, batch 256", "har", "fsdp", _MLP),
    ("speech tiny, batch 32", "speech", "ddp", _SPEECH),
    ("speech tiny, batch 32", "speech", "fsdp", _SPEECH),
)


def round_of_measurements(rank: TrialRank, together: Case, alone: Case, rounds: int) -> None:
    """On a rank: what the forecast needs, and what it is compared with, in turns."""
    with on_site(rank, together.config, together.plan) as site:
        for number in range(rounds):
            turn = take_turn(site, alone, synced=together.plan.sync_batchnorm)
            messages = [measure_message(site.collectives, "all_reduce", size, site.device) for size in SIZES]
            parts = site.collectives.all_gather(timed_steps(site, together))
            real = summarise(parts, together.plan.batch.global_batch)
            rank.report({"round": number, "alone": turn, "messages": messages, "real": real})


def predict_ranks(
    rows: list[dict[str, Any]], ranks: int, counted: Footprint, setting: Setting, alike: bool
) -> list[dict[str, Any]]:
    """Predicted against measured milliseconds, by round; ``counted`` and ``setting``: what needs no measuring.

    How steps differ and what a message in mid-step costs is told by all rounds, the rest by its own.
    """
    turns = [row["alone"] for row in rows]
    differ = jitter(turns, alike)
    waits = setting.blocking > 0 or setting.strategy == "fsdp"
    found = []
    for row in rows:
        fit = fit_alpha_beta([m["bytes"] for m in row["messages"]], [m["latency_us"] / 1e6 for m in row["messages"]])
        step = replace(step_of(counted, [row["alone"]], None, alike=alike), jitter_s=differ)
        setting = replace(
            setting,
            cluster=measured_cluster(fit.alpha_s, fit.beta_s_per_byte, ranks, max(0.1, fit.error)),
            contention={ranks: contention([row["alone"]], ranks, waits)},
            meeting_s=meeting(turns, ranks, fit.alpha_s / 2),
        )
        bars = with_error_bars(step, ranks, setting)
        real = row["real"]
        found.append(
            {
                "one_ms": step.seconds * 1e3,
                "contention": setting.contention[ranks],
                "meeting_ms": setting.meeting_s * 1e3,
                "predicted_ms": bars["step_ms"],
                "predicted_parts_ms": bars["parts_ms"],
                "measured_ms": real["mean_ms"],
                "ratio": bars["step_ms"] / real["mean_ms"],
            }
        )
    return found


def ranks_of_this_machine(counts: list[int], rounds: int, steps: int) -> list[dict[str, Any]]:
    results = []
    for name, task, strategy, settings in SUBJECTS:
        for ranks in counts:
            subject = Subject(task, {**settings, "hardware": {"selected_devices": ["cpu"] * ranks}})
            base, counting = subject.base, Counting(subject)
            together, alone = cases(subject, ["cpu"] * ranks, counting.size, steps, strategy)
            with new_trials() as trials:
                outcome = trials.run_case(round_of_measurements, together, alone, rounds, task=base.task)
            if outcome.ended != "done":
                raise SystemExit(f"{name}, {ranks} ranks: {outcome.ended} ({outcome.error})")
            joint = bool(resolve_reduction(base.config.distributed, base.facts.joint_bytes, on_cpu=True).value)
            counted = counting.footprint(counting.size, True)
            setting = Setting(
                cluster_of("25gbe", ranks),
                strategy=strategy,
                overlap=0.0,
                blocking=blocking_messages(base.task, base.config),
                joint=strategy == "ddp" and joint,
            )
            found = predict_ranks(outcome.rows, ranks, counted, setting, base.plan.order.bucketed)
            ratios = [row["ratio"] for row in found]
            ratio = statistics.median(ratios)
            results.append({"subject": name, "strategy": strategy, "ranks": ranks, "ratio": ratio, "rounds": found})
            print(f"{name}, {strategy}, {ranks} ranks: predicted / measured {ratio:.2f} "
                  f"({min(ratios):.2f} to {max(ratios):.2f} of {len(found)} rounds)")  # fmt: skip
            for row in found:
                print("   ", {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    return results


def evenly(parameters: int, layers: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """``layers`` equal fp32 gradients that become ready at equal distances."""
    return (4 * parameters // layers,) * layers, tuple((place + 1) / layers for place in range(layers))


def vgg16() -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Layer by layer from the last to the first: parameters, and each layer's share of the backward by its FLOPs.

    Simonyan and Zisserman 2015, configuration D: three dense layers hold 124 of 138 million parameters and take less
    than 1 % of the arithmetic.
    """
    widths = ((64, 2, 224), (128, 2, 112), (256, 3, 56), (512, 3, 28), (512, 3, 14))
    layers, channels = [], 3
    for width, repeats, side in widths:
        for _ in range(repeats):
            weights = 9 * channels * width
            layers.append((weights, weights * side * side))
            channels = width
    layers += [(weights, weights) for weights in (512 * 49 * 4096, 4096 * 4096, 4096 * 1000)]
    layers.reverse()
    whole, done, ready = sum(flops for _, flops in layers), 0, []
    for _, flops in layers:
        done += flops
        ready.append(done / whole)
    return tuple(4 * weights for weights, _ in layers), tuple(ready)


def step_from_rate(rate: float, batch: int, shape: tuple[tuple[int, ...], tuple[float, ...]], **more: Any) -> Step:
    """A step of ``batch`` samples at ``rate`` samples a second: a third forward, two thirds backward."""
    whole = batch / rate
    return Step(batch, whole / 3, 2 * whole / 3, 0.0, *shape, **more)


def published() -> list[dict[str, Any]]:
    """Published efficiencies against the forecast from stated inputs. None of the inputs is fitted to the result."""
    four_pcie = Cluster(4, LEVELS["pcie"], LEVELS["25gbe"])
    fifty = Level("50 Gb/s Ethernet", (8e-6, 20e-6, 40e-6), (3.8e9, 5.2e9, 5.8e9), "twice 25 Gb/s")

    # Spread of steps: 2 % of a step, as is usual for GPUs that do the same work.
    def cnn(rate: float, batch: int, shape: tuple[tuple[int, ...], tuple[float, ...]]) -> Step:
        return step_from_rate(rate, batch, shape, jitter_s=0.02 * batch / rate, spread=0.1)

    resnet50, resnet101, inception = evenly(25_557_032, 161), evenly(44_549_160, 314), evenly(23_834_568, 190)
    llama_blocks = (*(4 * 218_112_000,) * 32, 4 * 1_050_939_392)
    tokens = 2 * 8192
    llama = Step(
        batch_size=tokens,
        forward_s=tokens / 5762 / 3,
        backward_s=2 * tokens / 5762 / 3,
        optimizer_s=0.0,
        gradients=llama_blocks,
        ready=tuple((place + 1) / 33 for place in range(33)),
        blocks=llama_blocks,
        jitter_s=0.005 * tokens / 5762,
        spread=0.05,
    )
    table = [
        ("ResNet-50, 8 → 256 P100, 50 Gb/s (Goyal 2017)", cnn(195, 32, resnet50),
         Setting(Cluster(8, LEVELS["nvlink"], fifty)), 8, 256, 0.90),
        ("ResNet-101, 512 P100, 25 Gb/s (Horovod)", cnn(110, 64, resnet101),
         Setting(four_pcie), 1, 512, 0.90),
        ("Inception V3, 512 P100, 25 Gb/s (Horovod)", cnn(142, 64, inception),
         Setting(four_pcie), 1, 512, 0.90),
        ("VGG-16, 512 P100, 25 Gb/s (Horovod)", cnn(154, 64, vgg16()), Setting(four_pcie), 1, 512, 0.68),
        ("Llama 3.1 8B, fsdp, 8 → 128 H100, 400 Gb/s (torchtitan)", llama,
         Setting(cluster_of("nvlink,ib400", 8), strategy="fsdp", shrink=0.5), 8, 128, 0.973),
    ]  # fmt: skip
    rows = []
    for name, step, setting, base, gpus, truth in table:
        reference = predict(step, base, setting).efficiency
        bars = with_error_bars(step, gpus, setting)
        rows.append(
            {
                "case": name,
                "published": truth,
                "predicted": bars["efficiency"] / reference,
                "low": bars["efficiency_low"] / reference,
                "high": min(1.0, bars["efficiency_high"] / reference),
                "parts_ms": bars["parts_ms"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ranks", "published"])
    parser.add_argument("--counts", default="2,3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "published":
        rows = published()
        for row in rows:
            parts = ", ".join(f"{name} {value:.1f}" for name, value in row["parts_ms"].items())
            print(f"{row['case']}: published {row['published']:.0%}, predicted {row['predicted']:.0%} "
                  f"({row['low']:.0%} to {row['high']:.0%}); ms: {parts}")  # fmt: skip
    else:
        rows = ranks_of_this_machine([int(count) for count in given.counts.split(",")], given.rounds, given.steps)
    report.write_json(given.out, {**report.header(), "rows": rows})


if __name__ == "__main__":
    main()
