"""Records of a run: passes over data, and optimizer steps with their micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

#: A record of the observer: ``kind``, ``rank``, ``step``, ``loader_pass``, ``site``, and values of its kind.
Record = Mapping[str, Any]


class Records(list[Record]):
    """Records by rank, those of a rank in order."""

    def of(self, kind: str) -> Records:
        return Records(record for record in self if record["kind"] == kind)

    def by(self, key: str) -> dict[Any, Records]:
        groups: dict[Any, Records] = {}
        for record in self:
            groups.setdefault(record[key], Records()).append(record)
        return groups


class Pass:
    """One pass of a rank over a loader, which ``about`` describes. Unknown indices are ``None``."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.about = records.of("pass")[0]
        self.batches: list[list[int] | None] = [record["indices"] for record in records.of("batch")]
        self.indices = None if None in self.batches else list(chain.from_iterable(filter(None, self.batches)))
        length = self.about["batches"]
        #: Whether all batches were read; if their number is unknown, whether the observer has not ended the pass.
        self.is_whole = not records.of("cut") if length is None else len(self.batches) == length
        self.draws = Records(sorted(records.of("draw"), key=lambda draw: (draw["worker"] or 0, draw["fetch"])))
        self.trains = bool(records.of("backward"))
        #: The line that makes the loader, else the one that reads it.
        self.line: str | None = self.about["made"] or self.about["site"]


class Run:
    """One run of the script.

    Attributes:
        ranks: records of each rank.
        passes: passes of each rank over data.
        training, evaluations: passes that train, and others, in order: one of each rank.
        steps: records of each optimizer step that all ranks have taken.
        is_sharded: whether ranks may have different parameters by design: shards, or calls within smaller groups.
    """

    def __init__(self, size: int, records: Records) -> None:
        self.size = size
        self.records = records
        self.ranks = [Records(record for record in records if record["rank"] == rank) for rank in range(size)]
        self.passes = [
            [Pass(group) for group in rank.by("loader_pass").values() if group.of("pass")] for rank in self.ranks
        ]
        self.training = self._passes_of_all(trains=True)
        self.evaluations = self._passes_of_all(trains=False)
        self.steps = [step for step in records.by("step").values() if len(step.of("step")) == size]
        self.has_one_optimizer = len({step["optimizer"] for step in records.of("step")}) < 2
        self.is_sharded = bool(records.of("sharded")) or any(call["in_group"] for call in records.of("call"))
        self.uses_lightning = bool(records.of("lightning"))

    def _passes_of_all(self, *, trains: bool) -> list[tuple[Pass, ...]]:
        chosen = [[walk for walk in passes if walk.trains == trains and walk.batches] for passes in self.passes]
        return list(zip(*chosen, strict=False))
