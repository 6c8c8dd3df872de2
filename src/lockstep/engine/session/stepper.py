"""One optimizer of a session: the sums of its backward calls, their reduction over ranks, and its step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep._compat.torch import differ, foreach_mul_, guard_step, versions
from lockstep.data.requests import Request
from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.optim.optimizers import check_sparse
from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.step import Update
from lockstep.engine.rank_context import RankContext
from lockstep.engine.session.prepared import Owned, Prepared, parameters_of
from lockstep.engine.strategies.base import Flags
from lockstep.engine.strategies.ddp import BUCKET_BYTES, GradientBuckets, pack, unpack
from lockstep.engine.strategies.exact import LaneSums
from lockstep.engine.strategies.partition import Divided
from lockstep.engine.task import Scheduler
from lockstep.errors import TaskError, UnsupportedError

#: In the tail of the last bucket: what ``pack`` gives, then calls that touched, its square, and unused gradients.
NUMBERS = len(pack(0.0, 0.0, Flags())) + 3


class Sums(NamedTuple):
    """Of an optimizer's backward calls, over all ranks. ``flags``: ``None`` where they were not read."""

    total: Tensor | float
    count: Tensor | float  # type: ignore[assignment]  # hides tuple.count()
    flags: Flags | None


class _Call(NamedTuple):
    """A backward call: its sums on this rank, and whether it gave the optimizer's parameters a gradient here."""

    total: Tensor | float
    count: Tensor | float  # type: ignore[assignment]
    touched: bool


#: Gradients of parameters, and their versions.
_Gradients = tuple[list[Tensor | None], list[int]]
_NONE: _Gradients = [], []


class SharedPrecision(Precision):
    """One loss scale for all optimizers: a backward pass may be stepped by several. It changes between windows only."""

    _found: tuple[Tensor, Tensor | None] | None = None

    def update(self, found_inf: Tensor, counted: Tensor | None = None) -> None:
        found = found_inf.clone()
        if self._found is not None:
            found, counted = torch.maximum(found, self._found[0].to(found.device)), None
        self._found = found, counted

    def settle(self) -> None:
        """The window is over."""
        if self._found is not None:
            super().update(*self._found)
            self._found = None


class Stepper:
    """Adds up what backward calls leave in the gradients of ``optimizer``, and applies it.

    A step's gradient is Σ totals / Σ counts, over ranks and micro-batches, of the calls since the step before that
    reached this optimizer's parameters on any rank.

    Args:
        group: of all ranks, for gradients alone; ``None`` on one rank, where lanes are summed
            (``reproducibility: exact``), and of ``divided`` models.
        look: as for :class:`GradientBuckets`.
        divided: the models, where each rank has a part of them, so that each backward pass has reduced its gradients.
        scheduler: stepped after the optimizer.
    """

    def __init__(
        self,
        name: str,
        rank: RankContext,
        models: nn.Module,
        optimizer: Optimizer,
        precision: SharedPrecision,
        group: dist.ProcessGroup | None,
        look: Callable[[], None],
        *,
        divided: Divided | None,
        scheduler: Scheduler | None,
    ) -> None:
        self.name, self.optimizer, self._rank, self._device = name, optimizer, rank, rank.device
        self._group, self._look, self._divided, self._scheduler = group, look, divided, scheduler
        self._max_norm = rank.config.training.max_grad_norm
        self.update = Update(Owned(models, optimizer), optimizer, None, precision, self._max_norm, divided, scheduler)
        #: What the backward passes of a divided model have divided gradients by.
        self._divisor = 1.0 if divided is None else float(rank.collectives.size)
        self._calls: list[_Call] = []
        #: The optimizer whose step has used the gradients of parameters that both have, and not those of all of them.
        self.used_by: str | None = None
        #: How many of them are of earlier micro-batches of the window.
        self._earlier = 0
        self._has_reduced = False
        #: Sums whose gradients are divided already.
        self.held: Sums | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._buckets: GradientBuckets | None = None
        self._lanes: LaneSums | None = None
        self._window, self._reads = -1, False
        #: Which backward call of a window was the last one before the step, as far as is known.
        self._last_call = 0
        self._now = 0
        self._at: int | None = None
        self._applies = False
        self._unguard = guard_step(optimizer, self._refuse_own_step)
        #: Gradients before and after the last backward call, as :meth:`_gradients` gives them.
        self._before, self._after = _NONE, _NONE
        self._follow()

    def _refuse_own_step(self, *_: Any) -> None:
        if not self._applies:
            raise TaskError(
                f"{self.name}.step() was called by the loop",
                why="its gradients are sums of this rank alone, neither reduced nor divided by their count",
                fix=f"call session.step({self.name}) in its place; it clears the gradients, too",
            )

    def _follow(self) -> None:
        """Hook the parameters that are trained now."""
        self._unhook()
        self._parameters = parameters_of(self.optimizer)
        self._requires_grad = [p.requires_grad for p in self._parameters]
        self._trained = [p for p in self._parameters if p.requires_grad]
        if self._rank.plan.reproducibility == "exact":
            self._lanes = lane_sums(self._rank, self._trained)
        if self._group is not None:
            cap = self._rank.config.distributed.bucket_cap_mb
            cap_bytes = 0 if self._rank.plan.one_message else int(cap * 2**20) if cap else BUCKET_BYTES
            how: dict[str, Any] = {"numbers": NUMBERS, "cap_bytes": cap_bytes, "look": self._look}
            self._buckets = GradientBuckets(self._trained, self._device, self._group, **how)
            if self._buckets.overlaps:
                self._hooks = [p.register_post_accumulate_grad_hook(self._buckets.ready) for p in self._trained]

    def _gradients(self) -> _Gradients:
        """The gradients there are, and how often each has been written to."""
        return versions([p.grad for p in self._trained])

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def close(self) -> None:
        """Leave the optimizer as it was."""
        self._unhook()
        self._unguard()

    def begin_window(self) -> None:
        """Before a window: follow parameters that were frozen or unfrozen.

        Raises:
            UnsupportedError: the optimizer has other parameters than before.
        """
        now = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if now != len(self._parameters):
            raise UnsupportedError(
                f"the parameters of {self.name} changed after prepare()",
                why=f"it had {len(self._parameters)}, now {now}: new ones are reduced over ranks by no one",
                fix="make all parameter groups before session.prepare(); freeze and unfreeze with requires_grad_()",
            )
        if [p.requires_grad for p in self._parameters] != self._requires_grad:
            if self._divided is not None:
                raise UnsupportedError(
                    f"parameters of {self.name} were frozen or unfrozen in the loop",
                    why="strategy fsdp has divided them as they were at the first batch",
                    fix="call requires_grad_() before the loop, or use --strategy ddp",
                )
            self._follow()
        self._earlier, self._has_reduced = 0, False
        if not any(call.touched for call in self._calls):
            self._forget()

    def before_backward(self, window: int, call: int, *, last: bool) -> None:
        """Before the backward call number ``call`` of this micro-batch, counted from 1.

        Args:
            last: it is the last micro-batch of its window.

        Raises:
            TaskError: gradients are left over from another window.
        """
        if self._calls:
            self.notice_clearing()
        if self._buckets is not None and self._buckets.is_launched:
            self._buckets.discard()  # another call follows after all: the sum is made again
        self._now = call
        self._window = self._window if self._calls else window
        self._before = self._gradients()
        if self._buckets is not None and last and call == self._last_call:
            self._buckets.arm()

    def after_backward(
        self, window: int, total: Tensor | float, count: Tensor | float, flags: Callable[[], Flags]
    ) -> None:
        self._after = self._gradients()
        touched = differ(self._before, self._after)
        self._before = _NONE
        if touched and self.held:
            raise TaskError(
                f"backward() added to the mean gradient that reduce({self.name}) has made",
                why="that of all ranks would be added to that of this rank",
                fix=f"call {self.name}.zero_grad() between reduce() and backward()",
            )
        if touched and self._calls and self._window != window:
            raise TaskError(
                f"backward() added to gradients of {self.name} that are left from an earlier batch",
                why="they have been used by no step, so this step would use them as well",
                fix=f"call {self.name}.zero_grad() before, or backward(..., models=[...]) for the models that the loss "
                "is for; to accumulate over batches, use session.batches(..., accumulate=N)",
            )
        self._calls.append(_Call(total, count, touched))
        if self._buckets is not None and self._buckets.is_armed:
            self._buckets.launch(self._numbers(flags()))

    @property
    def is_pending(self) -> bool:
        return bool(self._calls)

    def notice_clearing(self) -> None:
        """Forget the calls whose gradients the loop has cleared since: set to ``None``, or to zero."""
        if not any(call.touched for call in self._of_lane()):
            return
        now = self._gradients()
        if not differ(self._after, now):
            return
        # A reduced gradient is zero on all ranks, or on none.
        if any(gradient is not None and bool(gradient.any()) for gradient in now[0]):
            self._after = now
        else:
            self._drop()

    def share(self, name: str) -> None:
        """``name`` was stepped, which has parameters of this optimizer."""
        self.notice_clearing()
        if any(call.touched for call in self._calls):
            self.used_by = name

    def _drop(self) -> None:
        """The loop has cleared the gradients. Raises :class:`TaskError`: other micro-batches' among them."""
        if any(call.touched for call in self._calls[: self._earlier]):
            raise TaskError(
                f"gradients of {self.name} were cleared in the middle of a step",
                why="those of its earlier micro-batches are lost: a step has several, by accumulate, batch_size or "
                "reproducibility: exact",
                fix=f"remove {self.name}.zero_grad(): session.step() clears gradients when it has used them",
            )
        self._forget()

    def end_micro_batch(self, request: Request) -> None:
        """The body has run for ``request``, which is not the last one of the window, or the window's step follows."""
        if self._lanes is not None:
            self._lanes.end(request, *self._local())
        self._earlier = len(self._calls)

    def _forget(self) -> None:
        self._calls, self._earlier, self.held, self._after, self.used_by = [], 0, None, _NONE, None
        if self._buckets is not None:
            self._buckets.discard()
        if self._lanes is not None:
            self._lanes.begin()

    def _of_lane(self) -> list[_Call]:
        """The calls whose gradients are in ``p.grad``."""
        return self._calls if self._lanes is None else self._calls[self._earlier :]

    def _local(self) -> tuple[Any, Any]:
        """Sums of total and count over the calls that touched the parameters here; of this lane, if there are any."""
        calls = [call for call in self._of_lane() if call.touched]
        return sum(call.total for call in calls), sum(call.count for call in calls)

    def _numbers(self, flags: Flags) -> list[Any]:
        touched = float(sum(call.touched for call in self._calls))
        unused = float(touched > 0 and any(p.grad is None for p in self._trained))
        total, count = self._local()
        count = count.double() if isinstance(count, Tensor) else count
        return [*pack(total, count, flags), touched, touched * touched, unused]

    def reduce(self, flags: Flags, request: Request, *, reads: bool) -> Sums:
        """Sum gradients and numbers over ranks and micro-batches. Collective.

        Args:
            request: the last micro-batch of the window.
            reads: whether the flags are read, which waits for a GPU.
        """
        self._last_call = self._now
        if self._lanes is not None:
            return self._reduce_lanes(self._lanes, flags, request, reads=reads)
        if self._divided is not None:
            sent = torch.zeros(2 + len(flags), dtype=torch.float64, device=self._device)
            for place, number in enumerate((*self._local(), *flags)):
                sent[place] = number
            dist.all_reduce(sent)
            return self._read(sent, reads=reads)
        if self._buckets is None:
            return Sums(*self._local(), flags)
        return self._reduce_buckets(self._buckets, flags, reads=reads)

    def _reduce_buckets(self, buckets: GradientBuckets, flags: Flags, *, reads: bool) -> Sums:
        if not buckets.is_launched:
            buckets.launch(self._numbers(flags))
        used = [p.grad is not None for p in self._trained]
        tail = buckets.wait()
        if not (reads or self._reads or self._device.type == "cpu"):
            # Zeros stand in for a gradient that no rank has, until numbers are read again.
            total, count, _ = unpack(tail[:-3].double())
            return Sums(total, count, None)
        *numbers, touched, squares, unused = tail.tolist()
        if unused:
            self._reads = True
            buckets.leave_out(used)
        total, count, agreed = unpack(numbers)
        if self._rank.collectives.size * squares != touched**2:
            count = self._count_anywhere()
        return Sums(total, count, agreed)

    def _reduce_lanes(self, lanes: LaneSums, flags: Flags, request: Request, *, reads: bool) -> Sums:
        if self._has_reduced:
            raise UnsupportedError(
                f"{self.name} takes a second step on a batch, and the run is exact",
                why="each lane is computed alone, and its part of the first step is gone",
                fix="use reproducibility: fast",
            )
        self._has_reduced = True
        self.end_micro_batch(request)
        return self._read(lanes.take(lanes.total(*flags)), reads=reads)

    def _read(self, numbers: Tensor, *, reads: bool) -> Sums:
        """Total, count and flags, where that does not wait for a GPU, or ``reads`` is set."""
        if not reads and self._device.type != "cpu":
            return Sums(numbers[0], numbers[1], None)
        total, count, *agreed = numbers.tolist()
        return Sums(total, count, Flags(*agreed))

    def _count_anywhere(self) -> float:
        """The count of calls that reached the parameters on some ranks only. Collective."""
        everyone = self._rank.collectives.all_gather([(float(call.count), call.touched) for call in self._calls])
        calls = zip(*everyone, strict=True)
        return sum(sum(c for c, _ in ranks) for ranks in calls if any(touched for _, touched in ranks))

    def apply(self, sums: Sums, step: int, max_norm: float | None, *, want_norm: bool) -> None:
        """Divide, clip, and step optimizer and scheduler, unless the gradient is not finite; then clear it."""
        self.update.max_norm = self._max_norm if max_norm is None else max_norm
        scheduler = None if self._scheduler is None else self._scheduler.scheduler
        if scheduler is not None and self._at not in (None, scheduler.last_epoch):
            raise TaskError(
                "a prepared scheduler was stepped by the loop, too",
                why="session.step() steps it after the optimizer",
                fix="remove scheduler.step(); give one that steps by epoch to "
                "session.checkpoint(scheduler=...) instead of prepare()",
            )
        self._applies = True
        try:
            self.update.apply(step, sums.count, 1.0 if self.held else self._divisor, want_norm=want_norm)
        finally:
            self._applies = False
        self._at = None if scheduler is None else scheduler.last_epoch
        self.clear()

    def hold(self, sums: Sums) -> None:
        """Divide the reduced gradients now; the step applies them as they are."""
        count = float(sums.count)
        if count:
            factor = self._divisor / (self.update.precision.seed_value() * count)
            gradients = [p.grad for p in self._trained if p.grad is not None]
            foreach_mul_(gradients if self._divided is None else self._divided.local(gradients), factor)
            self._after = self._gradients()
        self._earlier = 0  # all of the window is in the sum, so that it may be cleared
        self.held = sums._replace(count=1.0 / self.update.precision.seed_value()) if count else sums

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._forget()


def lane_sums(rank: RankContext, parameters: Sequence[nn.Parameter], buffers: Buffers | None = None) -> LaneSums:
    """The sums over lanes of ``reproducibility: exact``."""
    return LaneSums(parameters, buffers, rank.device, rank.world)


def build_steppers(
    rank: RankContext,
    prepared: Prepared,
    module: nn.Module,
    precision: SharedPrecision,
    look: Callable[[], None],
    divided: Callable[[Optimizer], Divided] | None,
) -> dict[str, Stepper]:
    """By the names of the optimizers. Collective.

    Args:
        divided: the part of divided models that an optimizer trains; ``None``: each rank has whole models.

    Raises:
        TaskError: a scheduler that steps by a metric. UnsupportedError: sparse gradients on several ranks.
    """
    several, exact = rank.collectives.size > 1, rank.plan.reproducibility == "exact"
    check_sparse(module, reduced=several or exact)
    by_buckets = several and not exact and divided is None
    group = dist.new_group(backend=rank.plan.placement["backend"]) if by_buckets else None
    schedulers: dict[int, Scheduler] = {}
    for name, scheduler in prepared.schedulers.items():
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TaskError(
                f"{name} is a ReduceLROnPlateau, which steps by a metric",
                fix="step it in the loop, and give it to session.checkpoint(scheduler=...) instead of prepare()",
            )
        schedulers[id(scheduler.optimizer)] = Scheduler(scheduler, "step")
    return {
        name: Stepper(
            name,
            rank,
            module,
            optimizer,
            precision,
            group,
            look,
            divided=None if divided is None else divided(optimizer),
            scheduler=schedulers.get(id(optimizer)),
        )
        for name, optimizer in prepared.optimizers.items()
    }
