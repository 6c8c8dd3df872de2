"""Reduce values that a module logs on several ranks, after agreeing on their names (private names of Lightning)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor, distributed

from lockstep._compat.torchmetrics import mark_updated
from lockstep.errors import CollectiveError, TaskError

_SAME_NAMES = (
    "log the same names in the same order on every rank; or with on_step=False, on_epoch=True: names may then differ"
)
_OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": Tensor.mean,
    "avg": Tensor.mean,
    "sum": Tensor.sum,
    "max": Tensor.amax,
    "min": Tensor.amin,
}


def agree_on_names(trainer: Trainer) -> None:
    """Let the ranks of ``trainer`` agree on the names of logged values before they reduce them."""
    connector: Any = trainer._logger_connector
    connector.__class__ = AgreedConnector
    connector.batches = 0
    connector.names = []
    connector.has_logged = False
    connector.group = None
    connector.mixed = torch.zeros((), dtype=torch.bool, device=trainer.strategy.root_device)
    training = trainer.fit_loop.epoch_loop
    loops: list[Any] = [training, training.val_loop, trainer.validate_loop, trainer.test_loop]
    for loop in loops:
        loop._results = AgreedResults(loop._results.training, connector)


def end_names(trainer: Trainer) -> None:
    """Let the ranks of ``trainer`` agree that they have logged the same names in this step. Collective."""
    connector = trainer._logger_connector
    if isinstance(connector, AgreedConnector):
        connector.end_names()


def evaluation_samplers(trainer: Trainer) -> list[Any]:
    """Return the batch samplers of the evaluation that runs now, one for each loader."""
    combined = trainer._evaluation_loop._combined_loader
    return [] if combined is None else [getattr(loader, "batch_sampler", None) for loader in combined.flattened]


class NamedReduce:
    """Reduces a value of shape () over ranks, and refuses values of another name.

    In an evaluation batch that not every rank has, the value is this rank's: the others cannot take part.
    """

    def __init__(self, name: str, connector: AgreedConnector) -> None:
        self._name = name
        self._connector = connector

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedReduce) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __call__(self, value: Tensor, *, reduce_op: str, group: Any = None) -> Tensor:
        connector = self._connector
        if connector.is_alone:
            return value
        connector.names.append(self._name)
        values = connector.exchange(self._name, value.to(connector.trainer.strategy.root_device), group)
        reduced = _OPERATIONS[reduce_op](values)
        # The mean of whole numbers may be a fraction.
        return reduced.to(value.device, value.dtype if value.is_floating_point() else reduced.dtype)


class AgreedConnector(_LoggerConnector):
    """Reduces an epoch's values after the ranks have agreed on their names.

    Attributes:
        batches: of the evaluation loader that is read now, the one in progress included.
        mixed: whether values of different names have met.
        names: reduced since the last agreement of ranks; ``has_logged``: there were some.
        group: of all ranks, for tensors on the CPU as well.
    """

    batches: int
    mixed: Tensor
    names: list[str]
    has_logged: bool
    group: Any

    @property
    def is_alone(self) -> bool:
        """Whether other ranks lack the evaluation batch in progress."""
        if not self.batches or not self.trainer.evaluating:
            return False
        samplers = evaluation_samplers(self.trainer)
        results = self.trainer._results
        index = None if results is None else results.dataloader_idx
        samplers = samplers if index is None else [samplers[index]]
        return any(self.batches > getattr(sampler, "rounds", self.batches) for sampler in samplers)

    def exchange(self, name: str, value: Tensor, group: Any = None) -> Tensor:
        """Return the values of all ranks, by rank, of a value of shape () that this rank calls ``name``. Collective.

        Raises:
            CollectiveError: other ranks did not take part.
        """
        if group is None and self.group is None:
            backend = "gloo" if self.mixed.device.type == "cpu" else "cpu:gloo,cuda:nccl"
            strategy: Any = self.trainer.strategy
            self.group = distributed.new_group(backend=backend, timeout=strategy._timeout)
        group = self.group if group is None else group
        mark = float(int.from_bytes(blake2b(name.encode(), digest_size=6).digest()))
        named = torch.tensor([mark, 0.0], dtype=torch.float64).to(value.device)
        named[1] = value
        rows = [torch.empty_like(named) for _ in range(distributed.get_world_size(group))]
        try:
            distributed.all_gather(rows, named, group)
        except RuntimeError as error:
            logged = ", ".join(self.names) or "nothing"
            raise CollectiveError(
                "the other ranks did not log the values of this one with self.log(…, sync_dist=True)",
                why=f"in this step it has logged {logged}; a value that is logged on_step is reduced at once",
                fix=_SAME_NAMES,
            ) from error
        marks, values = torch.stack(rows).unbind(1)
        mixed = (marks != mark).any()
        if value.is_cuda:
            self.mixed |= mixed  # read at the end of the epoch, since the GPU would be waited for
        elif mixed:
            self.mixed.fill_(True)
            self.check()
        return values

    def end_names(self) -> None:
        """Agree that this step has the same names on all ranks, before other exchanges. Collective.

        A rank that logs nothing takes part in the first batch of an epoch.
        """
        if self.is_alone or not (self.names or self.has_logged or self.batches <= 1):
            return
        self.has_logged = self.has_logged or bool(self.names)
        self.exchange(f"names: {self.names}", torch.zeros((), dtype=torch.float64))
        self.names.clear()

    def check(self) -> None:
        """Raise :class:`TaskError` where names differ; ranks then have made the same exchanges. Collective."""
        if self.mixed:
            ranks: list[Any] = [None] * self.trainer.world_size
            distributed.all_gather_object(ranks, self.names, self.group)
            names = "; ".join(f"rank {rank} {', '.join(names) or 'nothing'}" for rank, names in enumerate(ranks))
            raise TaskError(
                "self.log(…, sync_dist=True) was called with different names on each rank in one step",
                why=f"so far {names}. A value that is logged on_step is reduced at once",
                fix=_SAME_NAMES,
            )

    def on_batch_end(self) -> None:
        self.end_names()
        super().on_batch_end()

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        self.batches += 1
        self.names.clear()
        super().on_batch_start(batch, dataloader_idx)

    def epoch_end_reached(self) -> None:
        self.batches = 0
        super().epoch_end_reached()
        self._agree()

    def on_epoch_end(self) -> None:
        self._agree()
        super().on_epoch_end()

    def _agree(self) -> None:
        """Reduce the same names in the same order on all ranks; a rank without one adds nothing to it. Collective."""
        self.check()
        results = self.trainer._results
        assert isinstance(results, AgreedResults)
        logged = results.pending()
        ranks: list[Any] = [None] * self.trainer.world_size
        distributed.all_gather_object(ranks, logged)
        if all(list(names) == list(logged) for names in ranks):
            return
        for names in ranks:
            for key in names.keys() - results.pending().keys():
                results.join(key, names[key])
        for key in sorted(results.pending()):
            results._get_cache(results[key], on_step=False)


class AgreedResults(_ResultCollection):
    """The values that a loop's hooks log, each reduced under its name."""

    def __init__(self, training: bool, connector: AgreedConnector) -> None:
        super().__init__(training)
        self._connector = connector

    def log(self, fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        kwargs["sync_dist_fn"] = NamedReduce(name, self._connector)
        super().log(fx, name, *args, **kwargs)

    def pending(self) -> dict[str, dict[str, Any]]:
        """Describe the epoch's values that ranks have still to reduce, by key."""
        pending = {}
        for key, metric in self.valid_items():
            meta = metric.meta
            sync = metric.meta.sync
            reduces = not metric.is_tensor or (sync.should and not sync.rank_zero_only and sync.group is None)
            if meta.on_epoch and metric._computed is None and reduces:
                settings = {part.name: getattr(meta, part.name) for part in fields(meta) if part.name != "_sync"}
                settings["reduce_fx"] = meta.reduce_fx.__name__
                pending[key] = {"settings": settings, "op": sync.op, "is_tensor": metric.is_tensor}
        return pending

    def join(self, key: str, described: dict[str, Any]) -> None:
        """Take part in a value that other ranks have logged, with nothing to add."""
        trainer = self._connector.trainer
        is_tensor = described["is_tensor"]
        meta = _Metadata(**described["settings"])
        reduce = NamedReduce(meta.name, self._connector)
        meta.sync = _Sync(fn=reduce, _should=is_tensor, _op=described["op"])
        metric = _ResultMetric(meta, is_tensor)
        if not is_tensor:
            metric.value = attrgetter(str(meta.metric_attribute))(trainer.lightning_module)
            mark_updated(metric.value)
        mark_updated(metric)
        self[key] = metric.to(trainer.strategy.root_device)
