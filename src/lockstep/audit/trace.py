"""Records of a run as objects: passes over data, optimizer steps with their micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]


@dataclass
class Pass:
    """One walk over a loader; ``batches`` are indices of each, ``None`` where unknown."""

    number: int
    about: Record
    batches: list[list[int] | None] = field(default_factory=list)
    is_done: bool = False
    trains: bool = False
    backwards: int = 0
    evaluates: bool = False
    losses: list[Record] = field(default_factory=list)
    calls: list[Record] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether all batches were read."""
        return self.is_done or len(self.batches) == self.about["batches"]

    @property
    def line(self) -> str | None:
        """The line that makes the loader, else the one that reads it."""
        line: str | None = self.about["made"] or self.about["site"]
        return line

    @property
    def indices(self) -> list[int] | None:
        """All indices in order; ``None``: some are unknown."""
        if any(batch is None for batch in self.batches):
            return None
        return [index for batch in self.batches for index in batch or ()]


@dataclass
class Step:
    """One optimizer step: its record, its micro-batches (backward, local gradients), and events before it."""

    record: Record = field(default_factory=dict)
    micro_batches: list[tuple[Record, Record | None]] = field(default_factory=list)
    forwards: list[Record] = field(default_factory=list)
    bare: list[Record] = field(default_factory=list)
    clips: list[Record] = field(default_factory=list)
    look: Record | None = None
    samples: list[int] | None = field(default_factory=list)

    @property
    def number(self) -> int:
        return int(self.record["step"])


@dataclass
class RankTrace:
    """Everything that one rank did."""

    records: Sequence[Record]
    draws: Sequence[Record]
    passes: list[Pass] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["t"] == kind]

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended as Python processes end."""
        return bool(self.records) and self.records[-1]["t"] == "end"


@dataclass
class RunTrace:
    """One run of the script on all its ranks; ``aborted`` are those that a signal ended after the script."""

    ranks: list[RankTrace]
    aborted: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def first(self) -> RankTrace:
        return self.ranks[0]

    @property
    def has_one_optimizer(self) -> bool:
        return len({step.record["optimizer"] for step in self.first.steps}) < 2

    @property
    def has_groups(self) -> bool:
        """Whether a rank calls collectives within a smaller group."""
        return any(call.get("group") for rank in self.ranks for call in rank.of("call"))

    def passes(self, *, training: bool) -> list[list[Pass]]:
        """Passes that train, or evaluate, in order: one of each rank."""
        chosen = [
            [walk for walk in rank.passes if (walk.trains if training else walk.evaluates)] for rank in self.ranks
        ]
        return [list(group) for group in zip(*chosen, strict=False)]

    def aligned_steps(self) -> list[list[Step]]:
        """The steps that all ranks have taken: one of each rank."""
        return [list(group) for group in zip(*(rank.steps for rank in self.ranks), strict=False)]

    @property
    def is_sharded(self) -> bool:
        """Whether ranks may have different parameters by design: shards, or calls within smaller groups."""
        return self.has_groups or any(record["code"] == "sharded" for rank in self.ranks for record in rank.of("limit"))


def read_rank(records: Sequence[Record], worker_records: Iterable[Record]) -> RankTrace:
    """Group the records of a rank."""
    draws = [record for record in (*records, *worker_records) if record["t"] == "draw"]
    trace = RankTrace(records, draws)
    passes: dict[int, Pass] = {}
    current: Pass | None = None
    window = Step()
    for record in records:
        match record["t"]:
            case "pass":
                passes[record["pass"]] = Pass(record["pass"], record)
            case "batch":
                current = passes[record["pass"]]
                current.batches.append(record["i"])
                current.evaluates = current.evaluates or not record["grad"]
            case "done":
                passes[record["pass"]].is_done = True
            case "inference":
                passes[record["pass"]].evaluates = True
            case "eval" if current is not None:
                current.evaluates = True
                current.losses.append(record)
            case "call" if current is not None:
                current.calls.append(record)
            case "forward":
                window.forwards.append(record)
            case "bare":
                window.bare.append(record)
            case "clip":
                window.clips.append(record)
            case "backward":
                walk = passes.get(record["pass"])
                if walk is not None:
                    walk.trains = True
                    walk.backwards += 1
                batch = walk.batches[walk.backwards - 1] if walk and walk.backwards <= len(walk.batches) else None
                window.samples = None if window.samples is None or batch is None else [*window.samples, *batch]
                window.micro_batches.append((record, None))
            case "local" if window.micro_batches:
                window.micro_batches[-1] = (window.micro_batches[-1][0], record)
            case "look":
                window.look = record
            case "step":
                window.record = record
                trace.steps.append(window)
                window = Step()
    for walk in passes.values():
        walk.evaluates = walk.evaluates and not walk.trains
    trace.passes = list(passes.values())
    return trace


def counts_of(passes: Iterable[Pass]) -> Counter[int] | None:
    """Count how often each sample was read by all ranks; ``None``: unknown."""
    indices = [walk.indices for walk in passes]
    return None if None in indices else Counter(index for of_pass in indices for index in of_pass or ())
