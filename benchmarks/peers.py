"""The loop against its peers: one model, data, optimizer and batch through seven loops that take turns.

::

    pip install -c constraints.txt -e '.[peers]'
    python benchmarks/peers.py --out benchmarks/results
    python benchmarks/peers.py --models text,images --ranks 1,2 --rounds 40 --steps 50   # all models unless named

floor        batches lie ready in memory, fused optimizer, clipping when the others clip; nothing else
hand         the hand-written loop: DataLoader, fused optimizer, ``loss.item()`` every 50 steps; on two ranks with DDP
lockstep     ``lockstep.train`` with its defaults: loss and count, log every 50 steps, heartbeat, monitor
fabric, accelerate, lightning, transformers   as their guides write it; the loss is logged every 50 steps

Every loop is a process of its own (two on two ranks), with one thread, that lives for the whole contest and stands
still while another one runs its block of steps (``pace/pacer.py``). A ratio is taken between blocks of one round; what
is reported is the median over rounds, with quartiles. Blocks are short and many, since on a shared machine the same
steps of the same process take up to 1.8 times as long a second later. Set-up, the ends of epochs and evaluation are
not timed.

``--quick`` runs two short rounds, to see that all of it works. ``--device gpu:0`` runs on a GPU (one rank).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pace.pacer import Clocks, started
from pace.workload import MODELS
from report import header, publish, ratios, spread

#: The loops, and the package that each needs.
SIDES = {
    "floor": "torch",
    "hand": "torch",
    "lockstep": "lockstep",
    "fabric": "lightning",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "transformers": "transformers",
}
TITLES = {
    "mlp": "MLP 561-128-6",
    "cnn": "HAR's CNN",
    "transformer": "small transformer",
    "text": "language model (`text`)",
    "images": "small ResNet (`images`)",
}


def contest(sides: Sequence[str], settings: dict[str, Any]) -> dict[str, Any]:
    """One row of the table: every loop's time a step, and its ratio to the floor and to Lockstep."""
    seconds: dict[str, list[Clocks]] = {side: [] for side in sides}
    with started(sides, settings) as contestants:
        for turn in range(settings["rounds"]):
            first = turn % len(sides)  # whoever comes after a slow one finds cold caches: everybody does in turn
            for side in (*sides[first:], *sides[:first]):
                seconds[side].append(contestants[side].block())
    row: dict[str, Any] = {key: settings[key] for key in ("model", "ranks", "clip", "batch", "device")}
    for side, found in seconds.items():
        row[side] = {
            "us_per_step": _median_us(clocks.wall for clocks in found),
            "thread_us_per_step": _median_us(clocks.thread for clocks in found),
            "process_us_per_step": _median_us(clocks.process for clocks in found),
        }
        for base in ("floor", "lockstep"):
            for clock, suffix in (("wall", ""), ("thread", "_thread")):
                pairs = [[getattr(clocks, clock) for clocks in those] for those in (found, seconds[base])]
                row[side][f"to_{base}{suffix}"] = ratios(*pairs)
    return row


def _median_us(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def clippings(wanted: str, model: str, ranks: int) -> list[bool]:
    """With clipping, without, or without too where the loop weighs most."""
    if wanted != "both":
        return [wanted == "on"]
    return [True, False] if (model, ranks) == ("mlp", 1) else [True]


def present(sides: Sequence[str]) -> list[str]:
    """Those whose package is installed; the others are named."""
    here = [side for side in sides if find_spec(SIDES[side])]
    for side in set(sides) - set(here):
        print(f"{side} is left out: {SIDES[side]} is not installed (pip install -e '.[peers]')", file=sys.stderr)
    return here


def versions() -> dict[str, str]:
    found = {}
    for name in ("lockstep-train", "torch", "lightning", "accelerate", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def title(row: dict[str, Any]) -> str:
    ranks = "1 device" if row["ranks"] == 1 else f"{row['ranks']} ranks"
    return f"{TITLES[row['model']]}, {ranks}" + ("" if row["clip"] else ", no clipping")


def table(report: dict[str, Any]) -> str:
    """Markdown: a loop's µs a step, and how many times Lockstep's step that is."""
    sides = [side for side in SIDES if any(side in row for row in report["rows"])]
    lines = [
        f"# Against the peers, {report['date']}",
        "",
        f"{report['machine']}; {', '.join(f'{name} {number}' for name, number in report['versions'].items())}; "
        f"load {report['load_before']} before. `{report['command']}`",
        "",
        "µs a step, and in brackets how many times a step of Lockstep's in the same round that is: median (quartiles).",
        "",
        "| | " + " | ".join(sides) + " | Lockstep against the floor |",
        "| --- |" + " --- |" * (len(sides) + 1),
    ]
    for row in report["rows"]:
        cells = [f"{row[side]['us_per_step']:.0f} [{spread(row[side]['to_lockstep'])}]" for side in sides]
        lines.append(f"| {title(row)} | {' | '.join(cells)} | {spread(row['lockstep']['to_floor'])} |")
    return "\n".join(lines) + "\n"


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars: a step of each loop, in steps of Lockstep's."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = report["rows"]
    figure, axes = pyplot.subplots(
        len(rows), 1, figsize=(7, 0.6 + 1.7 * len(rows)), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, row in zip(axes[:, 0], rows, strict=True):
        sides = [side for side in SIDES if side in row][::-1]
        found = [row[side]["to_lockstep"] for side in sides]
        values = [entry["ratio"] for entry in found]
        spread = [[v - e["ratio_quartiles"][0] for v, e in zip(values, found, strict=True)]]
        spread += [[e["ratio_quartiles"][1] - v for v, e in zip(values, found, strict=True)]]
        colors = ["tab:orange" if side == "lockstep" else "tab:gray" for side in sides]
        bars = axis.barh(sides, values, xerr=spread, color=colors)
        axis.bar_label(bars, [f"{value:.2f}" for value in values], padding=4)
        axis.margins(x=0.1)  # room for the labels
        axis.set_title(title(row), fontsize=10, loc="left")
        axis.axvline(1, color="tab:orange", linewidth=0.8)
    axes[-1, 0].set_xlabel("time a step, in steps of Lockstep's (median, quartiles)")
    figure.suptitle(f"{report['machine']}, torch {report['torch']}, {report['date']}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--clip", choices=("on", "off", "both"), default="both", help="off: the MLP on one device only")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50, help="timed steps of a block, a multiple of 50")
    parser.add_argument("--device", default="cpu", help="cpu, or gpu:0 with --ranks 1")
    parser.add_argument("--quick", action="store_true", help="two rounds of 50 steps")
    parser.add_argument("--out", type=Path, help="folder for JSON, Markdown and PNG")
    options = parser.parse_args(argv)
    if options.steps % 50 or options.steps < 50:
        parser.error("--steps must be a multiple of 50")
    if options.quick:
        options.rounds, options.steps = 2, 50
    return options


def main() -> None:
    options = parse()
    sides = present(options.sides.split(","))
    if not {"floor", "lockstep"} <= set(sides):
        raise SystemExit("ratios need both floor and lockstep among --sides")
    report = {**header(), "versions": versions(), "command": " ".join(["python", *sys.argv]), "rows": []}
    for ranks in map(int, options.ranks.split(",")):
        for model in options.models.split(","):
            for clip in clippings(options.clip, model, ranks):
                settings = {"model": model, "ranks": ranks, "clip": clip, "steps": options.steps}
                settings |= {"rounds": options.rounds, "batch": 32, "device": options.device}
                report["rows"].append(contest(sides, settings))
                print(json.dumps(report["rows"][-1]), file=sys.stderr)
    name = "peers" if options.device == "cpu" else "peers-gpu"
    publish(report, name, table(report), options.out)
    if options.out and find_spec("matplotlib"):
        draw(report, options.out / f"{report['date']}-{name}.png")


if __name__ == "__main__":
    main()
