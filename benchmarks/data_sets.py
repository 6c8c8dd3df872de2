"""Data sets as users bring them: a step of Lockstep's default against a hand-written loop with its best DataLoader.

::

    pip install -c constraints.txt -e '.[peers]'
    python benchmarks/data_sets.py --out benchmarks/results
    python benchmarks/data_sets.py --datasets tensors,class --ranks 1 --rounds 20

hand0, hand1, hand2   the hand-written loop; its DataLoader has that many workers
lockstep              ``lockstep.train`` with its defaults
lockstep0, lockstep1, lockstep2  the same with that many loader processes: the best one is Lockstep's best

All train the MLP with 561 inputs, batch 32, one thread, and take turns in blocks of steps as in ``peers.py``. Ratios
are between blocks of one round; what is reported is the median over rounds. ``--quick`` runs two short rounds.
Data sets that need a package which is not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from pace.catalogue import DATASETS, present
from pace.pacer import started
from report import header, opening, publish, ratios, spread

SIDES = {"hand0": 0, "hand1": 1, "hand2": 2, "lockstep": None, "lockstep0": 0, "lockstep1": 1, "lockstep2": 2}


def contest(dataset: str, ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """A row: µs a step of all sides, and the ratios of Lockstep's default to the best of the others."""
    settings = {"model": "mlp", "ranks": ranks, "clip": True, "steps": steps, "rounds": rounds, "dataset": dataset}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with started([*SIDES], settings | {"device": "cpu"}, SIDES) as contestants:
        for turn in range(rounds):
            first = turn % len(SIDES)
            for side in ([*SIDES] * 2)[first : first + len(SIDES)]:
                seconds[side].append(contestants[side].block().wall)
    middle = {side: statistics.median(found) for side, found in seconds.items()}
    by_hand = min(("hand0", "hand1", "hand2"), key=lambda side: middle[side])
    own = min(("lockstep0", "lockstep1", "lockstep2"), key=lambda side: middle[side])
    return {
        **{"dataset": dataset, "ranks": ranks},
        "us_per_step": {side: round(value * 1e6, 1) for side, value in middle.items()},
        "best_by_hand": by_hand,
        "to_hand": ratios(seconds["lockstep"], seconds[by_hand]),
        "to_own_best": ratios(seconds["lockstep"], seconds[own]),
    }


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        *opening("Data sets", report),
        "µs a step, medians; the default's step in steps of the best hand-written loop, and of Lockstep's best: median "
        "of ratios (quartiles). Below 1 Lockstep is faster.",
        "",
        f"| data set | ranks | {' | '.join(SIDES)} | against the best by hand | against its own best |",
        "| --- |" + " --- |" * (len(SIDES) + 3),
    ]
    for row in report["rows"]:
        cells = [f"{row['us_per_step'][side]:.0f}" for side in SIDES]
        cells += [spread(row[key]) for key in ("to_hand", "to_own_best")]
        lines.append(f"| {row['dataset']} | {row['ranks']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="timed steps of a block, a multiple of 50")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    options = parser.parse_args()
    report = {**header(), "command": " ".join(["python", *sys.argv]), "rows": []}
    for ranks in map(int, options.ranks.split(",")):
        for dataset in present(options.datasets.split(",")):
            row = contest(dataset, ranks, 2 if options.quick else options.rounds, options.steps)
            report["rows"].append(row)
            print(json.dumps(row), file=sys.stderr)
    publish(report, "datasets", table(report), options.out)


if __name__ == "__main__":
    main()
