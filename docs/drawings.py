"""Draws docs/drawings/*.svg from Lockstep's own functions and measured results: ``python docs/drawings.py``.

A test compares the files with what this script would draw. Colours follow the reader's light or dark mode.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

import torch

from lockstep.data.order import Order
from lockstep.engine.strategies.pipeline import schedule
from lockstep.planning.batch import BatchPlan, parts
from lockstep.rundir.folder import surviving

HERE = Path(__file__).parent
FOLDER = HERE / "drawings"
RESULTS = HERE.parent / "benchmarks" / "results"
#: Of steps and ranks: distinguishable without colour vision (Okabe and Ito, 2008), with text of both modes on them.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7")
STYLE = "svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#d7dce2}}"


class Svg:
    """A drawing in a user space of ``width`` × ``height``."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="13"><title>{escape(title)}</title><style>{STYLE}</style>'
        ]

    def text(
        self, x: float, y: float, text: object, *, anchor: str = "start", size: int = 13, bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight} fill="currentColor">'
            f"{escape(str(text))}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str = "", *, dashed: bool = False) -> None:
        fill = f'fill="{colour}" fill-opacity="0.55"' if colour else 'fill="none"'
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" {fill} '
            f'stroke="currentColor" stroke-opacity="0.5"{dash}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, arrow: bool = False, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="currentColor" stroke-opacity="0.7"{dash}/>'
        )
        if arrow:
            tip = f"{x2:g},{y2:g} {x2 - 7:g},{y2 - 4:g} {x2 - 7:g},{y2 + 4:g}"
            self._parts.append(f'<polygon points="{tip}" fill="currentColor" fill-opacity="0.7"/>')

    def finish(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def order() -> str:
    """The order of an epoch of 22 samples, cut into steps of 8, for one, two and three ranks."""
    samples, global_batch, seed, cell = 22, 8, 42, 30
    epoch = [int(index) for index in Order(samples, seed).slice(0, 0, samples)]
    svg = Svg(770, 250, "One order of samples, cut into steps and shared by ranks")
    svg.text(0, 18, f"order = f(seed {seed}, epoch 1, position)", bold=True)
    for row, ranks in enumerate((1, 2, 3)):
        plan = BatchPlan(samples=samples, global_batch=global_batch, batch_size=global_batch, accumulate=1, ranks=ranks)
        y = 48 + 68 * row
        svg.text(0, y + 20, f"{ranks} rank{'s' * (ranks > 1)}")
        position, step = 0, 0
        while (window := plan.window(position)) is not None:
            start, stop = window
            for rank, spans in enumerate(plan.split(stop - start)):
                for first, last in spans:
                    for place in range(start + first, start + last):
                        x = 70 + place * cell + 14 * step
                        svg.box(x, y, cell - 2, cell - 2, COLOURS[rank])
                        svg.text(x + cell / 2 - 1, y + 19, epoch[place], anchor="middle", size=12)
                    svg.text(
                        70 + (start + (first + last) / 2) * cell + 14 * step,
                        y + 46,
                        f"rank {rank}",
                        anchor="middle",
                        size=11,
                    )
            if row == 0:
                svg.text(
                    70 + (start + stop) / 2 * cell + 14 * step, y - 8, f"step {step + 1}", anchor="middle", size=12
                )
            position, step = stop, step + 1
    return svg.finish()


def weights() -> str:
    """What each of five samples weighs in a gradient: means of two ranks' means, and sum over count."""
    shares = (3, 2)
    svg = Svg(640, 210, "The weight of each sample in the gradient")
    names = ("mean of the ranks' means", "sum of losses / count")
    for row, name in enumerate(names):
        y = 30 + 92 * row
        svg.text(0, y + 28, name, bold=True)
        place = 0
        for rank, count in enumerate(shares):
            weight = 1 / len(shares) / count if row == 0 else 1 / sum(shares)
            for _ in range(count):
                height = 200 * weight
                svg.box(210 + 80 * place, y + 52 - height, 66, height, COLOURS[rank])
                svg.text(243 + 80 * place, y + 48, f"{weight:.3f}", anchor="middle", size=12)
                svg.text(243 + 80 * place, y + 68, f"rank {rank}", anchor="middle", size=11)
                place += 1
    return svg.finish()


def lanes() -> str:
    """Eight lanes, the tree that sums them, and which rank computes which part of it."""
    count, samples = 8, 30
    svg = Svg(760, 300, "Eight lanes are summed along one tree on any number of ranks")
    for row, ranks in enumerate((1, 2, 4)):
        left = 255 * row
        svg.text(left + 120, 16, f"{ranks} rank{'s' * (ranks > 1)}", anchor="middle", bold=True)
        level = [(left + 15 + 30 * lane, lane * ranks // count) for lane in range(count)]
        for lane, ((x, rank), (start, stop)) in enumerate(zip(level, parts(samples, count), strict=True)):
            svg.box(x - 12, 232, 24, 24, COLOURS[rank])
            svg.text(x, 249, stop - start, anchor="middle", size=12)
            svg.text(x, 270, lane, anchor="middle", size=10)
        y = 232
        while len(level) > 1:
            above = []
            for (x1, one), (x2, other) in zip(level[::2], level[1::2], strict=True):
                x = (x1 + x2) / 2
                svg.line(x1, y, x, y - 44)
                svg.line(x2, y, x, y - 44, dashed=one != other)
                svg.box(x - 9, y - 58, 18, 16, COLOURS[one])
                above.append((x, one))
            level, y = above, y - 58
    svg.text(
        0,
        292,
        "Numbers in the boxes: samples of a lane. Dashed: sent between ranks. Every addition has the same operands.",
        size=12,
    )
    return svg.finish()


def flow() -> str:
    """From the configuration to the readers of a run."""
    stages = (
        ("config", "what is wanted"),
        ("placement", "which devices"),
        ("plan", "every decision"),
        ("launch", "processes"),
        ("loop", "one step"),
        ("events", "what happened"),
        ("run folder", "the record"),
    )
    svg = Svg(790, 120, "The data flow of a run")
    for place, (name, meaning) in enumerate(stages):
        x = 4 + 113 * place
        svg.box(x, 10, 92, 44, COLOURS[1 if name == "plan" else 2 if name == "run folder" else 0])
        svg.text(x + 46, 29, name, anchor="middle", bold=True)
        svg.text(x + 46, 46, meaning, anchor="middle", size=11)
        if place:
            svg.line(x - 21, 32, x, 32, arrow=True)
    for place, reader in enumerate(("terminal", "studio", "reports", "your scripts")):
        svg.text(690 - 110 * place, 106, reader, anchor="middle", size=12)
        svg.line(728, 54, 690 - 110 * place, 92)
    return svg.finish()


def attempts() -> str:
    """Rows of three attempts of one run, and those that readers see."""
    resumed, ends = {1: 0, 2: 30, 3: 50}, {1: 40, 2: 60, 3: 80}
    every = 10
    rows = [
        {"attempt": attempt, "step": step}
        for attempt, first in resumed.items()
        for step in range(first + every, ends[attempt] + 1, every)
    ]
    kept = surviving(rows, resumed)
    svg = Svg(720, 205, "Attempts of a run and the rows that count")
    for attempt in resumed:
        y = 22 + 38 * (attempt - 1)
        svg.text(0, y + 18, f"attempt {attempt}", bold=True)
        for row in (row for row in rows if row["attempt"] == attempt):
            x = 90 + 7 * row["step"]
            svg.box(x, y, 60, 26, COLOURS[attempt - 1] if row in kept else "", dashed=row not in kept)
            svg.text(x + 30, y + 18, row["step"], anchor="middle", size=12)
    svg.text(0, 170, "readers see", bold=True)
    for row in kept:
        svg.box(90 + 7 * row["step"], 152, 60, 26, COLOURS[row["attempt"] - 1])
        svg.text(120 + 7 * row["step"], 170, row["step"], anchor="middle", size=12)
    svg.text(90, 198, "Dashed: steps after the checkpoint of step 30 or 50. A later attempt repeated them.", size=12)
    return svg.finish()


def failure() -> str:
    """What is repeated after a rank was killed at step 47, with a checkpoint every 20 steps."""
    killed, every, end = 47, 20, 80
    back = killed // every * every
    svg = Svg(720, 170, "A rank is killed and the ranks restart from the latest valid checkpoint")
    scale, left = 7.4, 80
    for rank in range(2):
        y = 26 + 34 * rank
        svg.text(0, y + 16, f"rank {rank}", bold=True)
        svg.box(left, y, back * scale, 22, COLOURS[0])
        svg.box(left + back * scale, y, (killed - back) * scale, 22, dashed=True)
    svg.text(left + (back + killed) / 2 * scale, 18, f"{killed - back} steps are repeated", anchor="middle", size=12)
    svg.text(left + killed * scale + 6, 76, "rank 1 is killed", size=12)
    for rank in range(2):
        y = 96 + 26 * rank
        svg.box(left + back * scale, y, (end - back) * scale, 22, COLOURS[2])
        svg.text(0, y + 16, f"rank {rank}, restarted", bold=True)
    for step in range(every, end + 1, every):
        svg.line(left + step * scale, 22, left + step * scale, 148, dashed=True)
        svg.text(left + step * scale, 164, f"checkpoint {step}", anchor="middle", size=11)
    return svg.finish()


def forecasts() -> str:
    """Published scaling efficiency beside its forecast, from the results of benchmarks/forecast.py."""
    rows = json.loads((RESULTS / "2026-11-21-forecast-published.json").read_text(encoding="utf-8"))["rows"]
    svg = Svg(720, 40 * len(rows) + 62, "Published efficiency and forecast")
    left, width = 340, 340
    scale: Callable[[float], float] = lambda share: left + width * (share - 0.5) / 0.5  # noqa: E731
    for place, row in enumerate(rows):
        y = 30 + 40 * place
        svg.text(0, y + 4, row["case"].partition(" (")[0], size=12)
        svg.line(scale(row["low"]), y, scale(row["high"]), y)
        for end in (row["low"], row["high"]):
            svg.line(scale(end), y - 5, scale(end), y + 5)
        svg.box(scale(row["predicted"]) - 4, y - 6, 8, 12, COLOURS[0])
        svg.box(scale(row["published"]) - 3, y - 12, 6, 24, COLOURS[1])
    y = 40 * len(rows) + 18
    svg.line(left, y, left + width, y)
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        svg.text(scale(share), y + 16, f"{share:.0%}", anchor="middle", size=11)
    svg.box(left, y + 28, 8, 12, COLOURS[0])
    svg.text(left + 14, y + 39, "forecast, with error bars", size=12)
    svg.box(left + 180, y + 28, 6, 12, COLOURS[1])
    svg.text(left + 192, y + 39, "published", size=12)
    return svg.finish()


def processes() -> str:
    """Who starts whom, and who ends with whom, for two ranks."""
    svg = Svg(720, 170, "The processes of a run")
    names = (("your command", 0, 60), ("launcher", 200, 60), ("rank 0", 400, 20), ("rank 1", 400, 100))
    places = {name: (x, y) for name, x, y in names}
    for name, (x, y) in places.items():
        svg.box(x, y, 120, 36, COLOURS[0 if name.startswith("rank") else 1])
        svg.text(x + 60, y + 23, name, anchor="middle", bold=True)
    for one, other in (*pairwise(("your command", "launcher", "rank 0")), ("launcher", "rank 1")):
        (x1, y1), (x2, y2) = places[one], places[other]
        svg.line(x1 + 120, y1 + 18, x2, y2 + 18, arrow=True)
    for y in (20, 100):
        svg.box(600, y, 110, 36, COLOURS[2])
        svg.text(655, y + 23, "loader workers", anchor="middle", size=12)
        svg.line(520, y + 18, 600, y + 18, arrow=True)
    svg.text(
        0,
        162,
        "An arrow starts a process, and watches it. A process ends when the one at the start of its arrow does.",
        size=12,
    )
    return svg.finish()


def data_flow(title: str, columns: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Draw one step on two devices, from left to right.

    Args:
        columns: a caption for each stage of the step, and what each device does in it: "" for nothing. A single text
            is one operation of both devices, which exchange data in it.
    """
    width, gap, row_height = 104, 14, 62
    svg = Svg(76 + len(columns) * (width + gap), 168, title)
    for device in range(2):
        svg.text(0, 56 + row_height * device, f"device {device}", bold=True)
    for number, (caption, texts) in enumerate(columns):
        x = 76 + number * (width + gap)
        svg.text(x + width / 2, 16, caption, anchor="middle", size=12, bold=True)
        if number:
            svg.line(x - gap, 83, x, 83, arrow=True)
        height = 36 if len(texts) == 2 else 36 + row_height
        for device, text in enumerate(texts):
            y = 32 + row_height * device
            svg.box(
                x, y, width, height, COLOURS[2] if len(texts) == 1 else COLOURS[device] if text else "", dashed=not text
            )
            svg.text(x + width / 2, y + height / 2 + 4, text, anchor="middle", size=11)
    return svg.finish()


def _samples(spans: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"samples {first}–{last - 1}" for first, last in spans)


def dp() -> str:
    """One step of `dp`: one process, and a copy of the model on each device."""
    halves = torch.arange(8).chunk(2)
    parts_of_batch = [_samples([(int(half[0]), int(half[-1]) + 1)]) for half in halves]
    return data_flow(
        "DataParallel: one process, device 0 keeps the model",
        (
            ("scatter", parts_of_batch),
            ("broadcast", ("weights to all",)),
            ("forward", ("outputs", "outputs")),
            ("gather, loss", ("loss of all", "")),
            ("backward", ("gradients", "gradients")),
            ("sum", ("gradients on 0",)),
            ("optimizer step", ("all parameters", "")),
        ),
    )


def ddp() -> str:
    """One step of `ddp`: a process for each device."""
    plan = BatchPlan(samples=8, global_batch=8, batch_size=4, accumulate=1, ranks=2)
    return data_flow(
        "DistributedDataParallel: each process keeps the model",
        (
            ("input", [_samples(spans) for spans in plan.split(8)]),
            ("forward", ("sum of losses", "sum of losses")),
            ("backward", ("gradients", "gradients")),
            ("all-reduce", ("gradients, count",)),
            ("optimizer step", ("all parameters", "all parameters")),
        ),
    )


def fsdp() -> str:
    """One step of `fsdp`, for a block with eight rows of weights."""
    plan = BatchPlan(samples=8, global_batch=8, batch_size=4, accumulate=1, ranks=2)
    rows = [f"rows {int(shard[0])}–{int(shard[-1])}" for shard in torch.arange(8).chunk(2)]
    return data_flow(
        "FSDP: each process keeps a part of each block's parameters",
        (
            ("input", [_samples(spans) for spans in plan.split(8)]),
            ("all-gather", ("rows of a block",)),
            ("forward", ("rows freed after", "rows freed after")),
            ("all-gather", ("rows of a block",)),
            ("backward", ("gradients", "gradients")),
            ("reduce-scatter", ("gradients, count",)),
            ("optimizer step", rows),
        ),
    )


def pipeline() -> str:
    """One step of `pipeline` on two devices with four micro-batches, in the order of the schedule `1f1b`."""
    devices = 2
    micro_batches = 4
    cell = 58
    waiting = [schedule("1f1b", rank=device, ranks=devices, micro_batches=micro_batches) for device in range(devices)]
    ends: dict[tuple[int, bool, int], int] = {}
    svg = Svg(780, 168, "Pipeline: each device keeps some layers, and sees all samples")
    free_at = [0] * devices
    while any(waiting):
        for device, actions in enumerate(waiting):
            while actions:
                is_forward, index = actions[0]
                before = (device - 1, True, index) if is_forward else (device + 1, False, index)
                if 0 <= before[0] < devices and before not in ends:
                    break
                start = max(free_at[device], ends.get(before, 0))
                free_at[device] = ends[device, is_forward, index] = start + 1
                del actions[0]
                x = 76 + cell * start
                svg.box(x, 32 + 62 * device, cell - 4, 36, COLOURS[index])
                label = f"{'forward' if is_forward else 'back'} {index}"
                svg.text(x + cell / 2 - 2, 54 + 62 * device, label, anchor="middle", size=10)
    for device in range(devices):
        svg.text(0, 56 + 62 * device, f"device {device}", bold=True)
        svg.box(76 + cell * max(free_at), 32 + 62 * device, 104, 36, COLOURS[2])
        svg.text(128 + cell * max(free_at), 54 + 62 * device, f"step, layers of {device}", anchor="middle", size=11)
    svg.text(76, 16, "activations go down, their gradients come back up", size=12)
    return svg.finish()


DRAWINGS: dict[str, Callable[[], str]] = {
    f"{function.__name__}.svg": function
    for function in (order, weights, lanes, flow, attempts, failure, forecasts, processes, dp, ddp, fsdp, pipeline)
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(f"written: {FOLDER / name}")
