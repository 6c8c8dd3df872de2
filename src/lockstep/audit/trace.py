"""Records of a run: passes over data, and optimizer steps with their micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, takewhile
from typing import Any

#: A record of the observer: ``kind``, ``rank``, ``step``, ``loader_pass``, ``site``, and values of its kind.
Record = Mapping[str, Any]


class Records(list[Record]):
    """Records in the order of ranks; those of a rank in the order of time."""

    def of(self, kind: str) -> Records:
        return Records(record for record in self if record["kind"] == kind)

    def by(self, key: str) -> dict[Any, Records]:
        groups: dict[Any, Records] = {}
        for record in self:
            groups.setdefault(record[key], Records()).append(record)
        return groups


class Pass:
    """One pass of a rank over a loader.

    Attributes:
        about: the record of its begin, which describes the loader.
        line: the line that makes the loader.
        batches: indices of each batch; ``None``: unknown.
        is_whole: whether all batches were read; if their number is unknown, whether the observer has not ended it.
        indices: those of all batches, if they are known and all were read.
        trains: whether it has backward passes.
        draws: random states of its first samples, by worker.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.about = records.of("pass")[0]
        self.line: str | None = self.about["made"]
        self.batches: list[list[int] | None] = [record["indices"] for record in records.of("batch")]
        length = self.about["batches"]
        self.is_whole = not records.of("cut") if length is None else len(self.batches) == length
        is_known = self.is_whole and None not in self.batches
        self.indices = list(chain.from_iterable(filter(None, self.batches))) if is_known else None
        self.trains = bool(records.of("backward"))
        self.draws = Records(sorted(records.of("draw"), key=lambda draw: (draw["worker"] or 0, draw["fetch"])))


class Run:
    """One run of the script.

    Attributes:
        ranks: records of each rank.
        passes: passes of each rank over data.
        training, evaluations: passes that train, and others, in order: one of each rank.
        steps: records of each optimizer step that all ranks have taken, while they are in the same pass.
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
        common_steps = [step for step in records.by("step").values() if len(step.of("step")) == size]
        self.steps = list(takewhile(lambda step: len(step.of("step").by("loader_pass")) == 1, common_steps))
        self.has_one_optimizer = len({step["optimizer"] for step in records.of("step")}) < 2
        self.is_sharded = any(record.get("is_sharded") or record.get("in_group") for record in records)
        self.uses_lightning = bool(records.of("lightning"))

    def _passes_of_all(self, *, trains: bool) -> list[tuple[Pass, ...]]:
        chosen = [
            [data_pass for data_pass in passes if data_pass.trains == trains and data_pass.batches]
            for passes in self.passes
        ]
        return list(zip(*chosen, strict=False))
