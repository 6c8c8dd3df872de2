"""One optimizer of a session: the sums of its backward calls, their reduction over ranks, and its step."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep._compat import torch as _compat
from lockstep._compat.torch import differ, foreach_mul_, guard_step, versions
from lockstep.data.requests import BatchRequest
from lockstep.engine.optim.averages import Averages
from lockstep.engine.optim.optimizers import check_embeddings
from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.step import Update
from lockstep.engine.rank_context import RankContext
from lockstep.engine.session.prepared import PreparedModels, parameters_of
from lockstep.engine.strategies.exact import LaneSums
from lockstep.engine.strategies.reducers import (
    BUCKET_BYTES,
    Alone,
    Flags,
    GradientBuckets,
    Reduced,
    Reducer,
    announce_change,
    step_sums,
)
from lockstep.engine.trained import TrainedParameters
from lockstep.errors import TaskError, UnsupportedError

if TYPE_CHECKING:
    from lockstep.engine.session.sharding import Shards


class _Call(NamedTuple):
    """A backward call: its sums on this rank, and whether it gave the optimizer's parameters a gradient here."""

    total: Tensor | float
    count: Tensor | float  # type: ignore[assignment]  # hides tuple.count()
    touched: bool


#: Gradients of parameters, and their versions.
_Gradients = tuple[list[Tensor | None], list[int]]
_NONE: _Gradients = [], []


class SharedPrecision(Precision):
    """One loss scale for all optimizers: a backward pass may be stepped by several. It changes between windows only."""

    _found: tuple[Tensor, Tensor | None] | None = None

    def update(self, found_inf: Tensor, counted: Tensor | None = None) -> None:
        infinite = found_inf.clone()
        if self._found is not None:
            infinite = torch.maximum(infinite, self._found[0].to(infinite.device))
            counted = None
        self._found = infinite, counted

    def settle(self) -> None:
        """Update the scale at the end of a window."""
        if self._found is not None:
            super().update(*self._found)
            self._found = None


class SessionOptimizer:
    """Adds up what backward calls leave in the gradients of ``optimizer``, and applies it.

    A step's gradient is Σ totals / Σ counts, over ranks and micro-batches, of the calls since the step before that
    reached this optimizer's parameters on any rank.

    ``group`` is of all ranks, for gradients alone; ``None`` on one rank, where lanes are summed, and of ``shards``,
    whose backward passes reduce their gradients.
    """

    def __init__(
        self,
        name: str,
        rank: RankContext,
        prepared: PreparedModels,
        precision: SharedPrecision,
        group: dist.ProcessGroup | None,
        shards: Shards | None,
    ) -> None:
        self.name = name
        self.optimizer = prepared.optimizers[name]
        self._rank = rank
        self._device = rank.device
        optimizer = self.optimizer
        self._group = group
        self._divided = None if shards is None else shards.of(optimizer)
        self._reducer: Reducer = Alone() if shards is None else step_sums(rank.device, float(rank.collectives.size))
        self._scheduler = prepared.scheduler_of(optimizer)
        self._max_norm = rank.config.training.max_grad_norm
        self._parameters = parameters_of(optimizer)
        in_optimizer = set(map(id, self._parameters))
        named = {name: p for name, p in prepared.container().named_parameters() if id(p) in in_optimizer}
        self._trainable = TrainedParameters(named, None if self._divided is None else "fsdp")
        rates = prepared.rates(optimizer, named)
        self.update = Update(named, optimizer, rates, precision, self._max_norm, self._divided)
        #: The calls since the step before; the first ones are of earlier micro-batches of the window.
        self.calls: list[_Call] = []
        self._earlier = 0
        #: The window of the first one.
        self._window = -1
        #: Gradients before and after the last one, as :meth:`_gradients` gives them.
        self._before = _NONE
        self._after = _NONE
        #: The newest backward call of a micro-batch.
        self._newest = 0
        #: The last backward call before a step.
        self._last = 0
        #: The optimizer whose step has used the gradients of parameters that both have, and not those of all of them.
        self.used_by: str | None = None
        #: Sums whose gradients are divided already.
        self.held: Reduced | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._buckets: GradientBuckets | None = None
        #: Whether the buckets are of parameters that are not all trained now, or not the only ones.
        self._buckets_are_stale = False
        self._lanes: LaneSums | None = None
        self._has_reduced = False
        self._applies = False
        #: The scheduler's position after the step before.
        self._scheduled: int | None = None
        self._unguard = guard_step(optimizer, self._refuse_own_step)
        self._follow()
        if group is not None:
            self._make_buckets(group)

    def _refuse_own_step(self, *_: Any) -> None:
        if not self._applies:
            raise TaskError(
                f"{self.name}.step() was called by the loop",
                why="its gradients are sums of this rank alone, neither reduced nor divided by their count",
                fix=f"call session.step({self.name}) in its place; it clears the gradients, too",
            )

    def _follow(self) -> None:
        """Sum the gradients of the parameters that are trained now."""
        self._trainable.follow()
        self._trained = self._trainable.trained
        if self._rank.plan.reproducibility == "exact":
            self._lanes = LaneSums(self._trained, None, self._device, self._rank.world)
        if self._buckets is not None:
            self._buckets_are_stale = [*map(id, self._trained)] != [*map(id, self._buckets.parameters)]

    def _make_buckets(self, group: dist.ProcessGroup) -> None:
        """Reduce the parameters that are trained now."""
        self._unhook()
        cap = self._rank.config.distributed.bucket_cap_mb
        cap_bytes = 0 if self._rank.plan.one_message else int(cap * 2**20) if cap else BUCKET_BYTES
        self._reducer = self._buckets = GradientBuckets(self._trained, self._device, group, cap_bytes=cap_bytes)
        self._buckets_are_stale = False
        if self._buckets.overlaps:
            self._hooks = [p.register_post_accumulate_grad_hook(self._buckets.ready) for p in self._trained]

    def _renew_buckets(self, buckets: GradientBuckets) -> None:
        """Reduce the parameters that are trained now, if those of all ranks are. Collective."""
        gradients = [parameter.grad for parameter in buckets.parameters]
        for parameter in buckets.parameters:
            parameter.grad = None
        announce_change(buckets)
        for parameter, gradient in zip(buckets.parameters, gradients, strict=True):
            parameter.grad = gradient
        assert self._group is not None
        self._make_buckets(self._group)

    def _gradients(self) -> _Gradients:
        """Return the gradients, and the number of writes to each."""
        return versions([p.grad for p in self._trained])

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def close(self) -> None:
        """Leave the optimizer as it was."""
        self._unhook()
        self._unguard()

    # Backward calls.

    def begin_window(self) -> None:
        """Begin a window. Raises :class:`UnsupportedError`: the optimizer has other parameters."""
        now = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if now != len(self._parameters):
            raise UnsupportedError(
                f"the parameters of {self.name} changed after prepare()",
                why=f"it had {len(self._parameters)}, now {now}: new ones are reduced over ranks by no one",
                fix="make all parameter groups before session.prepare(); freeze and unfreeze with requires_grad_()",
            )
        self._earlier = 0
        self._has_reduced = False
        if not any(call.touched for call in self.calls):
            self._forget()

    def before_backward(self, window: int, call: int, *, last: bool) -> None:
        """Before the backward call number ``call`` of a micro-batch, from 1; ``last``: that of the window.

        The first one follows parameters that were frozen or unfrozen.

        Raises:
            UnsupportedError: these are divided. TaskError: the loop has changed gradients.
        """
        if self.calls:
            self.notice_clearing()
        if not self.calls:
            self._window = window
            if self._trainable.have_changed():
                self._follow()
                self._forget()
        self._before = self._gradients()
        self._newest = call
        if self._buckets is not None:
            self._buckets.discard()  # another call follows after all: the sum is made again
            if last and call == self._last and not self._buckets_are_stale:
                self._buckets.arm()

    def after_backward(
        self, window: int, total: Tensor | float, count: Tensor | float, flags: Callable[[], Flags]
    ) -> None:
        """Note a backward call. Raises :class:`TaskError`: it has added to gradients of another window."""
        self._after = self._gradients()
        touched = differ(self._before, self._after)
        self._before = _NONE
        if touched and self.held:
            raise TaskError(
                f"backward() added to the mean gradient that reduce({self.name}) has made",
                why="that of all ranks would be added to that of this rank",
                fix=f"call {self.name}.zero_grad() between reduce() and backward()",
            )
        if touched and self.calls and self._window != window:
            raise TaskError(
                f"backward() added to gradients of {self.name} that are left from an earlier batch",
                why="they have been used by no step, so this step would use them as well",
                fix=f"call {self.name}.zero_grad() before, or backward(..., models=[...]) for the models that the loss "
                "is for; to accumulate over batches, use session.batches(..., accumulate=N)",
            )
        self.calls.append(_Call(total, count, touched))
        if self._buckets is not None and self._buckets.is_armed:
            self._add_calls(flags())
            self._buckets.send()

    def begin_pass(self) -> None:
        """Begin a second pass over the micro-batches of the window. Raises :class:`UnsupportedError`: a sum is open."""
        if self._lanes is None:
            return
        self.notice_clearing()
        if not self.held and any(call.touched for call in self.calls):
            raise UnsupportedError(
                f"again() was called with gradients of {self.name} that no step has used, and the run is exact",
                why="each lane is computed alone, and its parts in two passes would be summed in another order",
                fix=f"call step({self.name}) before it, or backward() in one of the two passes only",
            )
        self._lanes.begin()
        self._has_reduced = False

    def end_micro_batch(self, request: BatchRequest) -> None:
        """End a micro-batch: that of ``request``, after which other ones or the window's step follow."""
        if self._lanes is not None:
            self._lanes.add(*self._local())
            self._lanes.end(request)
        self._earlier = len(self.calls)

    def notice_clearing(self) -> None:
        """Forget the calls whose gradients the loop has cleared since: set to ``None``, or to zero."""
        if not any(call.touched for call in self._of_lane()):
            return
        now = self._gradients()
        if not differ(self._after, now):
            return
        # A reduced gradient is zero on all ranks, or on none.
        if any(gradient is not None and bool(gradient.any()) for gradient in now[0]):
            pairs = zip(*self._after, *now, strict=False)  # others may be trained now
            changed = [new for old, written, new, count in pairs if new is not old or count != written]
            if not self.held and any(new is not None and bool(new.any()) for new in changed):
                raise TaskError(
                    f"gradients of {self.name} were changed between backward() and step()",
                    why="they are sums of this rank and of this part of the batch, which may have been sent already",
                    fix=f"change them where session.reduce({self.name}) has returned True: there they are those of the "
                    f"whole batch. Then call session.step({self.name})",
                )
            self._after = now
            return
        if any(call.touched for call in self.calls[: self._earlier]):
            raise TaskError(
                f"gradients of {self.name} were cleared in the middle of a step",
                why="those of its earlier micro-batches are lost: a step has several, by accumulate, batch_size or "
                "reproducibility: exact",
                fix=f"remove {self.name}.zero_grad(): session.step() clears gradients when it has used them",
            )
        self._forget()

    def check_ready(self) -> None:
        """Raise :class:`TaskError` where a step would have no gradient, or a part of one."""
        self.notice_clearing()
        if not self.calls:
            raise TaskError(
                f"step({self.name}) without a backward() before it",
                why="there is no gradient of this batch: backward() was not called, or the gradients were used or "
                "cleared after it",
                fix="call session.backward(total, count) before session.step(optimizer), and no optimizer.zero_grad() "
                "between them",
            )
        if self.used_by is not None:
            raise TaskError(
                f"step({self.name}) has gradients of which step({self.used_by}) has used a part",
                why="the two share parameters, and the rest is of an earlier loss",
                fix=f"call {self.name}.zero_grad() before the backward() of its loss, or backward(..., models=...)",
            )

    def share(self, name: str) -> None:
        """Note that ``name`` was stepped, which has parameters of this optimizer."""
        self.notice_clearing()
        if any(call.touched for call in self.calls):
            self.used_by = name

    def _forget(self) -> None:
        self.calls = []
        self._earlier = 0
        self.held = None
        self._after = _NONE
        self.used_by = None
        if self._buckets is not None:
            self._buckets.discard()
        if self._lanes is not None:
            self._lanes.begin()

    def _of_lane(self) -> list[_Call]:
        """Return the calls whose gradients are in ``p.grad``."""
        return self.calls if self._lanes is None else self.calls[self._earlier :]

    def _local(self) -> tuple[Any, Any]:
        """Sums of total and count over the calls that touched the parameters here; of this lane, if there are any."""
        calls = [call for call in self._of_lane() if call.touched]
        return sum(call.total for call in calls), sum(call.count for call in calls)

    # Reduction and step.

    def _add_calls(self, flags: Flags) -> None:
        self._reducer.begin(flags)
        for call in self.calls:
            if call.touched:
                self._reducer.add(call.total, call.count)

    def reduce(self, flags: Flags, request: BatchRequest, step: int) -> Reduced:
        """Sum gradients and numbers over ranks and micro-batches, the last of which is ``request``. Collective."""
        self._last = self._newest
        if self._lanes is not None:
            if self._has_reduced:
                raise UnsupportedError(
                    f"{self.name} takes a second step on a batch, and the run is exact",
                    why="each lane is computed alone, and its part of the first step is gone",
                    fix="compute its loss in `for batch in session.again():`, or use reproducibility: fast",
                )
            self._has_reduced = True
            self.end_micro_batch(request)
            return self._lanes.reduced(step, flags)
        if self._buckets is not None and self._buckets_are_stale:
            self._renew_buckets(self._buckets)
        buckets = self._buckets
        if buckets is None or not buckets.is_launched:
            self._add_calls(flags)
        reduced = self._reducer.reduced(step)
        is_uneven = buckets is not None and buckets.is_uneven
        return reduced._replace(count=self._count_anywhere()) if is_uneven else reduced

    def _count_anywhere(self) -> float:
        """Sum the counts of the calls that reached the parameters on any rank. Collective."""
        everyone = self._rank.collectives.all_gather([(float(call.count), call.touched) for call in self.calls])
        calls = zip(*everyone, strict=True)
        return sum(sum(c for c, _ in ranks) for ranks in calls if any(touched for _, touched in ranks))

    def hold(self, sums: Reduced) -> None:
        """Divide the reduced gradients now; the step applies them as they are."""
        if count := float(sums.count):
            gradients = [p.grad for p in self._trained if p.grad is not None]
            gradients = gradients if self._divided is None else self._divided.local(gradients)
            foreach_mul_(gradients, sums.divisor / (self.update.precision.seed_value() * count))
            self._after = self._gradients()
        # All of the window is in the sum, so that it may be cleared.
        self._earlier = 0
        self.held = sums

    def apply(self, sums: Reduced, step: int, max_norm: float | None, *, want_norm: bool) -> None:
        """Divide, clip, and step optimizer and scheduler, unless the gradient is not finite; then clear it."""
        self.update.max_norm = self._max_norm if max_norm is None else max_norm
        scheduler = self._scheduler
        if scheduler is not None and self._scheduled not in (None, scheduler.last_epoch):
            raise TaskError(
                "a prepared scheduler was stepped by the loop, too",
                why="session.step() steps it after the optimizer",
                fix="remove scheduler.step(); give one that steps by epoch to "
                "session.checkpoint(scheduler=...) instead of prepare()",
            )
        count = sums.count
        divisor = sums.divisor
        if self.held and count:  # they are divided
            count = 1.0 / self.update.precision.seed_value()
            divisor = 1.0
        self._applies = True
        try:
            self.update.apply(step, count, divisor, want_norm=want_norm)
        finally:
            self._applies = False
        self._scheduled = None if scheduler is None else scheduler.last_epoch
        for parameter in self._parameters:
            parameter.grad = None
        self._forget()


def build_steppers(
    rank: RankContext,
    prepared: PreparedModels,
    precision: SharedPrecision,
    shards: Shards | None,
) -> dict[str, SessionOptimizer]:
    """Return them by name. Collective. Raises :class:`UnsupportedError`: an embedding that several ranks cannot train.

    The first one's update has the averages of all models.
    """
    module = prepared.container()
    several = rank.collectives.size > 1
    exact = rank.plan.reproducibility == "exact"
    check_embeddings(module, reduced=several or exact)
    by_buckets = several and not exact and shards is None
    group = None
    if by_buckets:
        timeout = timedelta(seconds=rank.config.distributed.timeout_s)
        group = dist.new_group(backend=rank.plan.placement["backend"], timeout=timeout)
    steppers = {name: SessionOptimizer(name, rank, prepared, precision, group, shards) for name in prepared.optimizers}
    averages = Averages(rank.config.averaging, module, rank.plan.total_steps)
    next(iter(steppers.values())).update.averages = averages
    return steppers


def backward(
    total: Tensor, precision: Precision, inputs: Any, *, retain_graph: bool, create_graph: bool, counts: bool
) -> Tensor | float:
    """Run the backward pass of ``total``, whose gradients are zeros unless it ``counts``.

    Args:
        total: shape ().
        inputs: the parameters that get gradients; ``None``: all.
        retain_graph: as of ``torch.autograd.backward``; so is ``create_graph``.

    Returns:
        The value of ``total``, not read on a GPU.
    """
    seed = precision.seed().to(total.dtype)
    seed = seed if counts else torch.zeros_like(seed)
    if inputs is None and not (retain_graph or create_graph) and type(total) is Tensor:
        _compat.backward(total, seed)
    else:
        torch.autograd.backward(total, seed, inputs=inputs, retain_graph=retain_graph, create_graph=create_graph)
    return total.item() if total.device.type == "cpu" else total.detach()
