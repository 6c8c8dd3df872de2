"""Where the time of a step goes: every moment belongs to exactly one part, so the parts add up to the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.engine.diagnostics.stragglers import between, moment
from lockstep.engine.distributed.staging import finish
from lockstep.engine.optim.step import Update
from lockstep.engine.task import Loss, Task

#: Parts of a step. ``other``: what the host does in between.
PARTS = ("data", "forward", "backward", "communication", "optimizer", "other")
_NEXT_STEP = "next step"


class Stopwatch:
    """Notes when which part begins. On a GPU the notes are events on its stream.

    So what the host does while the GPU is still busy costs nothing there, and waiting counts only where the GPU
    has run out of work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []

    def enter(self, part: str) -> None:
        """From now on time belongs to ``part``."""
        self._marks.append((part, moment(self._device)))

    def next_step(self) -> None:
        """A step ends here, and the next one begins."""
        self.enter(_NEXT_STEP)

    def steps(self) -> list[dict[str, float]]:
        """Seconds of each part, for every step between two calls of :meth:`next_step`."""
        finish(self._device)
        found: list[dict[str, float]] = []
        for (part, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False):
            if part == _NEXT_STEP:
                found.append(dict.fromkeys(PARTS, 0.0))
            if found:
                found[-1]["other" if part == _NEXT_STEP else part] += between(start, stop)
        return found


class TimedUpdate:
    """An update whose :meth:`apply` counts as ``optimizer``."""

    def __init__(self, update: Update, watch: Stopwatch) -> None:
        self._update, self._watch = update, watch

    @property
    def lr(self) -> float:
        return self._update.lr

    def apply(self, *arguments: Any, **more: Any) -> None:
        self._watch.enter("optimizer")
        self._update.apply(*arguments, **more)
        self._watch.enter("other")


def timed_batches(batches: Iterator[Any], watch: Stopwatch) -> Iterator[Any]:
    """``batches``; waiting for one counts as ``data``."""
    while True:
        watch.enter("data")
        try:
            batch = next(batches)
        except StopIteration:
            return
        watch.enter("other")
        yield batch


def time_loss(task: Task, watch: Stopwatch) -> None:
    """``task.loss`` counts as ``forward``, and what follows it as ``backward``. Before the strategy is made."""
    loss: Callable[[nn.Module, Any], Loss] = type(task).loss.__get__(task)

    def timed(model: nn.Module, batch: Any) -> Loss:
        watch.enter("forward")
        result = loss(model, batch)
        watch.enter("backward")
        return result

    task.loss = timed  # type: ignore[method-assign]


class LastGradient:
    """With the last gradient that a rank computes, ``communication`` begins: what of it no computation hides.

    Which parameter is the last one is learned in the first steps; from :meth:`settle` on only that one is watched.
    """

    def __init__(self, model: nn.Module, watch: Stopwatch) -> None:
        self._watch = watch
        self._parameters: Mapping[int, nn.Parameter] = {id(p): p for p in model.parameters() if p.requires_grad}
        self._last: int | None = None
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, key))
            for key, parameter in self._parameters.items()
        ]

    def _note(self, key: int, _: Tensor) -> None:
        self._last = key

    def settle(self) -> None:
        self.close()
        if self._last is not None:
            last = self._parameters[self._last]
            self._handles = [last.register_post_accumulate_grad_hook(self._begin_communication)]

    def _begin_communication(self, _: Tensor) -> None:
        self._watch.enter("communication")

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
