"""What NCCL's flight recorder wrote when a collective timed out: which ranks are missing in which collective.

Each rank's file is a pickle of plain values (torch/csrc/distributed/c10d/FlightRecorder.hpp): ``entries``, the last
collectives that it has enqueued, each with its process group, its number there, its name, sizes, state and caller.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.rundir.folder import NCCL_DUMP


class Call(NamedTuple):
    """A collective as one rank has called it. ``text``: its name and sizes."""

    number: int
    text: str
    is_complete: bool
    caller: str


class _PlainValues(pickle.Unpickler):
    """Numbers, texts and containers of them; a file that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


def missing_ranks(logs: Path) -> str:
    """What the files say, by process group; empty where there are none, or all collectives are complete."""
    groups: dict[str, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for path in logs.glob(f"{NCCL_DUMP}*"):
        rank = path.name.removeprefix(NCCL_DUMP)
        try:
            with path.open("rb") as file:
                entries = _PlainValues(file).load()["entries"]
            calls = [(entry["process_group"][0], _call(entry)) for entry in entries if not entry.get("is_p2p")]
            for group, call in calls:
                groups[group][int(rank)].append(call)
        except Exception:  # a rank may have been killed while it wrote
            continue
    lines = [f"  {line}" for _, ranks in sorted(groups.items()) for line in _in_group(ranks)]
    return "\n".join(["NCCL's flight recorder:", *lines]) if lines else ""


def _call(entry: Mapping[str, Any]) -> Call:
    name = str(entry["profiling_name"]).removeprefix("nccl:")
    sizes = ", ".join("×".join(map(str, size)) or "1" for size in entry.get("input_sizes", ())[:3])
    frames = [frame for frame in entry.get("frames", ()) if "/torch/" not in frame["filename"]]
    caller = f" at {frames[0]['filename']}:{frames[0]['line']}" if frames else ""
    return Call(
        int(entry["collective_seq_id"]), f"{name} of {sizes or 'nothing'}", entry["state"] == "completed", caller
    )


def _in_group(ranks: Mapping[int, Sequence[Call]]) -> list[str]:
    waiting = [call.number for calls in ranks.values() for call in calls if not call.is_complete]
    if not waiting:
        return []
    number = min(waiting)
    by_call: dict[str, list[Call]] = defaultdict(list)
    callers: dict[str, list[int]] = defaultdict(list)
    absent = []
    for rank, calls in sorted(ranks.items()):
        last = max(calls)
        for call in calls:
            if call.number == number:
                by_call[call.text].append(call)
                callers[call.text].append(rank)
        if last.number < number:
            absent.append(f"rank {rank} has not called number {number}; its last is {last.text} (number {last.number})")
    lines = [
        f"{_ranks(callers[text])} called {text} (number {number}){calls[0].caller}" for text, calls in by_call.items()
    ]
    if len(by_call) > 1:
        absent.append("the ranks called different collectives: code that depends on the rank, or on data of one rank")
    elif not absent:
        absent.append("all ranks called it: the connection between them, or a GPU, does not continue")
    return lines + absent


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
