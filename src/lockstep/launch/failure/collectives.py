"""What NCCL's flight recorder wrote when a collective timed out: which ranks are missing in which collective.

Each rank's file is a pickle of plain values (torch/csrc/distributed/c10d/FlightRecorder.hpp): ``entries``, the last
collectives that it has enqueued, each with its process group, its number there, its name, sizes, state and caller.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.telemetry.rundir import NCCL_DUMP


class Call(NamedTuple):
    """A collective as one rank has called it. ``state``: ``scheduled``, ``started`` or ``completed``."""

    number: int
    name: str
    sizes: str
    state: str
    caller: str

    @property
    def text(self) -> str:
        return f"{self.name} of {self.sizes}"


class _PlainValues(pickle.Unpickler):
    """Numbers, texts and containers of them; a file that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


def read_dumps(logs: Path) -> dict[int, dict[str, list[Call]]]:
    """The calls of each rank by process group, in their order; files that cannot be read are left out."""
    found: dict[int, dict[str, list[Call]]] = {}
    for path in logs.glob(f"{NCCL_DUMP}*"):
        rank = path.name.removeprefix(NCCL_DUMP)
        if not rank.isdecimal():
            continue
        try:
            with path.open("rb") as file:
                entries = _PlainValues(file).load()["entries"]
            groups = found.setdefault(int(rank), {})
            for entry in entries:
                if not entry.get("is_p2p"):
                    groups.setdefault(entry["process_group"][0], []).append(_call(entry))
        except Exception:  # a rank may have been killed while it wrote
            continue
    return found


def _call(entry: Mapping[str, Any]) -> Call:
    name = str(entry["profiling_name"]).removeprefix("nccl:")
    sizes = ", ".join("×".join(map(str, size)) or "1" for size in entry.get("input_sizes", ())[:3])
    frames = [frame for frame in entry.get("frames", ()) if "/torch/" not in frame["filename"]]
    caller = f"{frames[0]['filename']}:{frames[0]['line']}" if frames else ""
    return Call(int(entry["collective_seq_id"]), name, sizes or "nothing", str(entry["state"]), caller)


def missing_ranks(logs: Path) -> str:
    """What the files say, by process group; empty where there are none, or all collectives are complete."""
    dumps = read_dumps(logs)
    groups = sorted({group for calls in dumps.values() for group in calls})
    lines = [
        line for group in groups for line in _in_group({rank: calls.get(group, []) for rank, calls in dumps.items()})
    ]
    return "\n".join(["NCCL's flight recorder:", *(f"  {line}" for line in lines)]) if lines else ""


def _in_group(ranks: Mapping[int, Sequence[Call]]) -> list[str]:
    ranks = {rank: calls for rank, calls in ranks.items() if calls}
    waiting = {rank: call for rank, calls in ranks.items() for call in calls if call.state != "completed"}
    if not waiting:
        return []
    number = min(call.number for calls in ranks.values() for call in calls if call.state != "completed")
    at = {rank: call for rank, calls in ranks.items() for call in calls if call.number == number}
    absent = sorted(rank for rank in ranks if rank not in at and max(call.number for call in ranks[rank]) < number)
    lines = []
    by_call: dict[str, list[int]] = {}
    for rank in sorted(at):
        by_call.setdefault(at[rank].text, []).append(rank)
    for text, several in by_call.items():
        caller = at[several[0]].caller
        lines.append(f"{_ranks(several)} called {text} (number {number}){f' at {caller}' if caller else ''}")
    for rank in absent:
        last = max(ranks[rank], key=lambda call: call.number)
        lines.append(f"rank {rank} has not called number {number}; its last is {last.text} (number {last.number})")
    if len(by_call) > 1:
        lines.append("the ranks called different collectives: code that depends on the rank, or on data of one rank")
    elif not absent:
        lines.append("all ranks called it: the connection between them, or a GPU, does not continue")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
