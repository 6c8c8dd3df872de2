"""One process whose forward and backward pass are a CUDA graph (``training.cuda_graphs``), and so is its update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep._compat.torch import tree_leaves, tree_map
from lockstep.data.reader import Unreadable
from lockstep.data.requests import Window
from lockstep.engine.optim.recording import Recording
from lockstep.engine.rank_context import states_of_generators
from lockstep.engine.strategies.base import Flags, Reduced, Replica, Strategy

#: Steps of a shape before it is recorded: libraries choose their kernels and allocate workspaces in the first ones.
WARM_UP = 3
#: Shapes that are recorded; each graph keeps the memory of a step.
MOST_GRAPHS = 4
#: Batches of more shapes than these are not worth recording.
MOST_SHAPES = 16


class _Graph(NamedTuple):
    """A recording, the batch that it reads, its parameters with a gradient, and the count if it is a number.

    ``gradients``: of the step before the recording, until they have been compared.
    """

    recording: Recording
    batch: Any
    trained: list[nn.Parameter]
    number: list[float]
    gradients: list[Tensor]

    def replay(self, batch: Any) -> tuple[Tensor, Tensor | float]:
        """Sum of the loss and its count for ``batch``; gradients are where the recording has them."""
        for kept, value in zip(tree_leaves(self.batch), tree_leaves(batch), strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(value, non_blocking=True)
        total, *others = self.recording.replay()
        gradients = others[len(others) - len(self.trained) :]
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        return total, self.number[0] if self.number else others[0].clone()


class GraphedStrategy(Strategy):
    """As ``single``. A batch of a shape that has been seen often enough is computed by replaying its graph.

    The first replay is compared with the step that Python computes. Where they differ, or nothing can be recorded,
    ``note`` is called with a text for the user, and the run continues without graphs.
    """

    def __init__(self, replica: Replica, note: Callable[[str], object]) -> None:
        super().__init__(replica)
        self._note, self._is_off = note, False
        self._seen, self._recorded = Counter[Any](), dict[Any, _Graph]()

    def _adapt(self) -> None:
        super()._adapt()
        self._recorded.clear()

    def _reduced_gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        run = super()._reduced_gradients
        if self._is_off or len(window.requests) != 1:
            return run(window, batches, step, flags)
        given = next(batches)
        if isinstance(given, Unreadable):
            return run(window, iter([given]), step, flags)
        batch = self._arrived(given)
        key = _shape(batch)
        self._seen[key] += 1
        if len(self._seen) > MOST_SHAPES:
            self._end(step, f"batches have more than {MOST_SHAPES} shapes")
        if key in self._recorded:
            self._buffers.rewind()
            self.draws(step, self._rank)
            total, count = self._recorded[key].replay(batch)
            return Reduced(total.clone(), count, 1.0, flags)
        records = self._seen[key] > WARM_UP and len(self._recorded) < MOST_GRAPHS
        before = self._copied_buffers() if records else []
        found = run(window, iter([batch]), step, flags)
        if not records:
            return found
        try:
            self._recorded[key] = graph = self._record(batch)
            differs = self._differs(graph, batch, step, before, found.total)
        except Exception as error:
            differs = f"recording failed ({[*str(error).splitlines(), type(error).__name__][0]})"
        if differs:
            self._end(step, differs)
            self._clear()
            self._put_buffers(before)
            return run(window, iter([batch]), step, flags)
        return found

    def _end(self, step: int, why: str) -> None:
        self._is_off = True
        self._recorded.clear()
        self._note(f"training.cuda_graphs is off from step {step + 1} on: {why}.")

    def _record(self, batch: Any) -> _Graph:
        """Record the step that Python has computed: its gradients are still there."""
        kept, count = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch), list[float]()
        trained = [parameter for parameter in self._parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]

        def drawn() -> Any:
            # Whose numbers a recording keeps: Python's, NumPy's, and torch's where the GPU has another generator.
            return states_of_generators()[: 2 if self._device.type == "cpu" else 3]

        def body() -> list[Tensor]:
            self._clear()
            before = drawn()
            total, items = self._computed(kept)
            if drawn() != before:
                raise RuntimeError("the loss draws random numbers on the host, which replays would repeat")
            self._backward(total)
            count[:] = [] if isinstance(items, Tensor) else [items]
            counted = [items.detach()] if isinstance(items, Tensor) else []
            return [total.detach(), *counted, *(p.grad for p in trained if p.grad is not None)]

        return _Graph(Recording(body, self._device), kept, trained, count, gradients)

    def _differs(self, graph: _Graph, batch: Any, step: int, before: list[tuple[Tensor, Tensor]], total: Tensor) -> str:
        """Replay the step that Python has computed: what is not the same, or nothing. Its results stay."""
        after = self._copied_buffers()
        if [tensor.data_ptr() for tensor, _ in after] != [tensor.data_ptr() for tensor, _ in before]:
            return "a buffer was replaced, which a replay would not see"
        self._put_buffers(before)
        self._buffers.rewind()
        self.draws(step, self._rank)
        again = graph.replay(batch)[0]
        pairs = [(again, total), *after, *zip((p.grad for p in graph.trained), graph.gradients, strict=True)]
        graph.gradients.clear()
        return "" if all(_close(*pair) for pair in pairs) else "a replay computed something else than the step itself"

    def _copied_buffers(self) -> list[tuple[Tensor, Tensor]]:
        return [(tensor, tensor.clone()) for tensor in self.module.buffers()]

    def _put_buffers(self, copied: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, value in copied:
            tensor.copy_(value)


def _shape(batch: Any) -> Any:
    """What a recording of ``batch`` holds for: shapes and types of its tensors, and everything else in it."""
    leaves = tree_leaves(batch)
    return tuple((t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else repr(t) for t in leaves)


def _close(found: Tensor | None, wanted: Tensor) -> bool:
    """Whether they are equal to what the order of sums changes, in any precision."""
    if found is None or not wanted.numel():
        return found is not None
    found, wanted = found.float(), wanted.float()
    return bool((found - wanted).abs().max() <= 1e-2 * wanted.abs().max())
