"""Are forecasts right? Published scaling efficiency against the forecast from stated inputs.

.venv/bin/python benchmarks/forecast.py --out benchmarks/results/forecast-published.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import report

from lockstep.lab.forecast.collectives import LEVELS, Cluster, Level, cluster_of
from lockstep.lab.forecast.scaling import Setting, Step, predict, with_error_bars


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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = published()
    for row in rows:
        parts = ", ".join(f"{name} {value:.1f}" for name, value in row["parts_ms"].items())
        print(f"{row['case']}: published {row['published']:.0%}, predicted {row['predicted']:.0%} "
              f"({row['low']:.0%} to {row['high']:.0%}); ms: {parts}")  # fmt: skip
    report.write_json(options.out, {**report.header(), "rows": rows})


if __name__ == "__main__":
    main()
