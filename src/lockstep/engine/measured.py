"""Choices that all ranks measure together before the first step: the layout of convolutions, and where arrays are.

Forward and backward passes of real batches are timed with one choice and the other in turns, and the ranks agree on the
slowest rank's times. Weights, buffers, generators and data are as before afterwards.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lockstep._compat.torch import buffers_of
from lockstep.data.loader import make_loader
from lockstep.data.reader import Unreadable
from lockstep.data.requests import Source
from lockstep.engine.distributed.staging import arrival, finish
from lockstep.engine.evaluate import evaluating, modes_kept, train_mode
from lockstep.engine.inspection import trial_of
from lockstep.engine.optim.precision import autocast
from lockstep.engine.rank_context import RankContext, generators_kept
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import bare
from lockstep.engine.training_data import array_bytes, fits_device, training_source, walk
from lockstep.planning import Decision, Plan
from lockstep.planning.plan import DATA_DEVICE, LAYOUT

#: Steps of each way that are not timed: libraries choose their kernels in them.
WARM_UP = 2
#: Turns of each way, about how long all of them take together in seconds, and steps of a turn at most.
TURNS, BUDGET_S, MOST_STEPS = 5, 0.3, 20
#: A layout is changed for this part of a step; data are kept on the device unless the host is faster by it.
GAIN = 0.03

Steps = Callable[[int], None]


def settled(rank: RankContext, task: Task, model: nn.Module, datasets: Datasets) -> Plan:
    """The plan with what was to be measured; a keeper writes it to the run folder. Collective.

    ``model``, which is on the rank's device, gets the layout that was chosen.
    """
    plan, found = rank.plan, list[Decision]()
    trial = _Trial(rank, task, model, datasets)
    with trial.without_trace():
        if LAYOUT in plan.to_measure:
            found.append(trial.layout(plan.decisions[LAYOUT]))
        if DATA_DEVICE in plan.to_measure:
            found.append(trial.data_device(plan.decisions[DATA_DEVICE]))
    plan = plan.settled(*found)
    if rank.is_keeper:
        rank.run_dir.keep_plan(plan.as_dict(), rank.attempt)
    return plan


class _Trial:
    """Steps of a rank without a reduction and an update, on a copy of the task."""

    def __init__(self, rank: RankContext, task: Task, model: nn.Module, datasets: Datasets) -> None:
        self._rank, self._plan, self._device = rank, rank.plan, rank.device
        self._task, self._model = trial_of(task), model
        self._source = training_source(task, datasets, rank.plan)
        windows = islice(walk(rank.plan, rank.world), MOST_STEPS)
        self._requests = [each for window in windows for each in window.requests if each.size and not each.ghost]
        self._arrived = arrival(rank.device)

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """Generators, buffers and modes of the model, and the task's context, are as before afterwards."""
        kept = [(layer, dict(buffers_of(layer))) for layer in self._model.modules() if buffers_of(layer)]
        with generators_kept(), modes_kept(self._model):
            for layer, buffers in kept:
                buffers_of(layer).update({name: None if old is None else old.clone() for name, old in buffers.items()})
            train_mode(self._model)
            self._task.context.is_training = True
            try:
                yield
            finally:
                self._task.context.is_training = False
                for layer, buffers in kept:
                    buffers_of(layer).clear()
                    buffers_of(layer).update(buffers)

    def layout(self, pending: Decision) -> Decision:
        """Measure with the weights as the model has them, and in channels_last; they stay in what is chosen."""
        layers = [m for m in self._model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
        weights = [layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter)]
        layouts = [[weight.data for weight in weights], list[Tensor]()]
        layouts[1] = [data.contiguous(memory_format=torch.channels_last) for data in layouts[0]]
        batch = list[Any]()

        def put(on: int) -> None:
            for weight, data in zip(weights, layouts[on], strict=True):
                weight.data = data

        def steps(on: int, number: int) -> None:
            put(on)
            batch[:] = batch or [self._arrived(self._source.batch(self._requests[0]))]
            for _ in range(number):
                self._step(batch[0])

        def evaluate() -> None:  # which may need rows that are contiguous, too
            put(1)
            with evaluating(self._model), torch.no_grad(), self._autocast():
                self._task.evaluate(bare(self._model), _readable(batch[0]))

        times = self._compared([partial(steps, 0), partial(steps, 1)], evaluate)
        better = not isinstance(times, str) and times[1] < (1 - GAIN) * times[0]
        put(int(better))
        reason = f"not measured: {times}"
        if not isinstance(times, str):
            reason = f"measured: a step takes {_ms(times[1])} in channels_last, {_ms(times[0])} as the model has it"
        return replace(pending, value=better, shown="channels_last" if better else "as the model has it", reason=reason)

    def data_device(self, pending: Decision) -> Decision:
        """Measure with batches from host memory, and from arrays on the device."""
        source, size = self._source, f"{array_bytes(self._source.dataset) / 1e6:.0f} MB"
        where = "host"
        if self._rank.collectives.any(not fits_device(source, self._device, self._plan)):
            reason = f"{size} are more than a fifth of the device's free memory"
        else:
            near = replace(source, dataset=source.dataset.to(self._device))
            with contextlib.ExitStack() as ending:
                times = self._compared([self._loaded(each, ending) for each in (source, near)])
            reason = f"not measured: {times}"
            if not isinstance(times, str):
                where = "gpu" if times[1] <= (1 + GAIN) * times[0] else "host"
                host, device = _ms(times[0]), _ms(times[1])
                reason = f"measured: a step takes {device} with {size} on the device, {host} from host memory"
        return replace(pending, value=where, shown=where, reason=reason)

    def _loaded(self, source: Source, ending: contextlib.ExitStack) -> Steps:
        """Steps with batches of ``source`` as the run loads them."""
        plan, rank = self._plan, self._rank.world.rank
        loader = make_loader(source, cycle(self._requests), plan.loader, rank, largest=plan.batch.batch_size)
        ending.callback(loader.close)

        def steps(number: int) -> None:
            for _ in range(number):
                self._step(self._arrived(next(loader)))

        return steps

    def _compared(self, ways: Sequence[Steps], check: Callable[[], None] = lambda: None) -> tuple[float, ...] | str:
        """Seconds of a step each way, on the slowest rank; or why a rank cannot take them. Collective."""
        error, once = "" if self._requests else "a rank has no samples", 0.0
        try:
            for steps in ways if not error else ():
                steps(WARM_UP)
                once += self._timed(steps, 1)
            if not error:
                check()
        except torch.OutOfMemoryError:
            raise
        except Exception as failed:  # where it is the task's own, the first step raises it again
            error = " ".join(str(failed).split())[:120] or type(failed).__name__
        found = self._rank.collectives.all_gather((error, once))
        if any(error for error, _ in found):
            return next(error for error, _ in found if error)
        slowest = max(once for _, once in found)
        number = max(1, min(MOST_STEPS, int(BUDGET_S / TURNS / max(slowest, 1e-9))))
        turns = [[self._timed(steps, number) / number for steps in ways] for _ in range(TURNS)]
        return self._rank.collectives.max(*map(median, zip(*turns, strict=True)))

    def _timed(self, steps: Steps, number: int) -> float:
        finish(self._device)
        before = time.perf_counter()
        steps(number)
        finish(self._device)
        return time.perf_counter() - before

    def _step(self, batch: Any) -> None:
        with self._autocast():
            total, _ = self._task.loss(bare(self._model), _readable(batch))
        total.sum().backward()
        for parameter in self._model.parameters():
            parameter.grad = None

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return autocast(self._plan.placement["precision"], self._device)


def _readable(batch: Any) -> Any:
    return batch.stand_in if isinstance(batch, Unreadable) else batch


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
