"""Records of a run as objects: passes over data, and optimizer steps with their micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

#: A record of the observer: ``kind``, ``step``, ``loader_pass``, ``site``, and values of its kind.
Record = Mapping[str, Any]


@dataclass
class Trace:
    """Records in order; ``about`` is the one that describes all of them."""

    records: list[Record]
    about: Record = field(default_factory=dict)

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]


class Pass(Trace):
    """One pass over a loader."""

    @cached_property
    def batches(self) -> list[list[int] | None]:
        """Indices of each batch; ``None``: unknown."""
        return [record["indices"] for record in self.of("batch")]

    @cached_property
    def indices(self) -> list[int] | None:
        """All indices in order; ``None``: some are unknown."""
        return None if None in self.batches else [index for batch in self.batches for index in batch or ()]

    @cached_property
    def is_whole(self) -> bool:
        return bool(self.of("done")) or len(self.batches) == self.about["batches"]

    @cached_property
    def trains(self) -> bool:
        return bool(self.of("backward"))

    @property
    def line(self) -> str | None:
        """The line that makes the loader, else the one that reads it."""
        return self.about["made"] or self.about["site"] or None


class Step(Trace):
    """The records from one optimizer step to the next; ``about`` is the step's."""

    @property
    def number(self) -> int:
        return int(self.about["step"])

    @property
    def applied(self) -> Record | None:
        """The gradients that the optimizer applied; ``None``: they were not recorded."""
        return next(iter(self.of("applied")), None)

    @property
    def samples(self) -> list[int] | None:
        """Indices of the samples of all backward passes; ``None``: some are unknown."""
        batches = [record["samples"] for record in self.of("backward")]
        return None if None in batches else [index for batch in batches for index in batch]


class RankTrace(Trace):
    """Everything that one rank did."""

    def __init__(self, records: Sequence[Record], worker_records: Iterable[Record]) -> None:
        super().__init__(list(records))
        by_number = {record["loader_pass"]: Pass([], record) for record in self.of("pass")}
        for record in records:
            if record["loader_pass"] in by_number:
                by_number[record["loader_pass"]].records.append(record)
        self.passes = list(by_number.values())
        windows = [list(window) for _, window in groupby(records, key=lambda record: record["step"])]
        self.steps = [Step(window, record) for window in windows for record in window if record["kind"] == "step"]
        #: Random numbers of samples, those of loader workers too.
        self.draws = [*self.of("draw"), *Trace(list(worker_records)).of("draw")]
        self.has_ended = bool(self.of("end"))


@dataclass
class RunTrace:
    """One run of the script on all its ranks."""

    ranks: list[RankTrace]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def first(self) -> RankTrace:
        return self.ranks[0]

    @property
    def has_one_optimizer(self) -> bool:
        return len({step.about["optimizer"] for step in self.first.steps}) < 2

    @property
    def is_sharded(self) -> bool:
        """Whether ranks may have different parameters by design: shards, or calls within smaller groups."""
        return any(rank.of("sharded") or any(call["in_group"] for call in rank.of("call")) for rank in self.ranks)

    @property
    def uses_lightning(self) -> bool:
        return bool(self.first.of("lightning"))

    def passes(self, *, training: bool) -> list[list[Pass]]:
        """Passes that train, or evaluate, in order: one of each rank."""
        chosen = [[walk for walk in rank.passes if walk.trains == training and walk.batches] for rank in self.ranks]
        return [list(group) for group in zip(*chosen, strict=False)]

    def aligned_steps(self) -> list[list[Step]]:
        """The steps that all ranks have taken: one of each rank."""
        return [list(group) for group in zip(*(rank.steps for rank in self.ranks), strict=False)]
