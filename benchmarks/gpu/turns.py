"""Loops of one process that take turns in blocks of steps on one device, so that neighbours can be compared.

A side is a function that trains and calls ``tick()`` after each step. It runs in a thread that waits unless it
has its turn; Lockstep's own loop runs in the main thread and gives turns from a hook of its task.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable

import torch


class Ended(BaseException):
    """Raised in a side's ``tick()`` when no more turns follow."""


def finish() -> None:
    """Wait for the steps; not for copies on other streams, which nothing has to wait for."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def own_graphs() -> None:
    """Let this thread replay CUDA graphs of compiled code: before torch 2.13 only the one that has imported them can.

    Called when the main thread, which comes first, has imported them.
    """
    from torch._inductor import cudagraph_trees as trees

    if not hasattr(trees.local, "tree_manager_containers"):
        trees.local.tree_manager_containers, trees.local.tree_manager_locks = {}, defaultdict(threading.Lock)
        for name in ("tree_manager_containers", "tree_manager_locks"):
            torch._C._stash_obj_in_tls(name, getattr(trees.local, name))  # for the threads of its backward passes


class Side(threading.Thread):
    """One loop. ``error``: how it failed, if it did."""

    def __init__(
        self, name: str, train: Callable[[Callable[[], None]], None], block: int, device: torch.device
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._train, self._block, self._device = train, block, device
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._steps, self._ends, self._began, self._seconds = 0, False, 0.0, 0.0
        self.error: str | None = None
        self.start()

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own
        self._wait()
        try:
            if self._device.type == "cuda":
                own_graphs()
            if not self._ends:
                self._train(self.tick)
                self.error = "it has ended before the others"
        except Ended:
            pass
        except Exception:
            self.error = traceback.format_exc()
        self._done.release()

    def tick(self) -> None:
        """A step is done."""
        self._steps += 1
        if self._steps % self._block == 0:
            finish()
            self._seconds = time.perf_counter() - self._began
            self._done.release()
            self._wait()
            if self._ends:
                raise Ended

    def _wait(self) -> None:
        self._go.acquire()
        self._began = time.perf_counter()

    def block(self) -> float | None:
        """Seconds a step of its next block; ``None`` once it has failed."""
        if self.error is None:
            self._go.release()
            self._done.acquire()
        return None if self.error else self._seconds / self._block

    def close(self) -> None:
        if self.error is None:
            self._ends = True
            self._go.release()
        self.join(30)


class Turns:
    """Called by Lockstep's loop after each of its blocks: times it, and lets each side run one.

    ``warm_up``: rounds that are not counted, in which things are compiled. ``counted``: called after each other one.
    """

    counted: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, sides: dict[str, Callable[[Callable[[], None]], None]], block: int, warm_up: int, device: torch.device
    ) -> None:
        self._block, self._warm_up = block, warm_up
        self.sides = {name: Side(name, train, block, device) for name, train in sides.items()}
        self.seconds: dict[str, list[float]] = {name: [] for name in ("lockstep", *sides)}
        self._rounds, self._began = 0, 0.0

    def __call__(self) -> None:
        finish()
        own = (time.perf_counter() - self._began) / self._block
        found = {"lockstep": own, **{name: side.block() for name, side in self.sides.items()}}
        if self._rounds >= self._warm_up:
            for name, seconds in found.items():
                if seconds is not None:
                    self.seconds[name].append(seconds)
            self.counted()
        self._rounds += 1
        finish()
        self._began = time.perf_counter()

    def close(self) -> None:
        for side in self.sides.values():
            side.close()
