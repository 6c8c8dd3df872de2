"""Install all observers in a process that has imported torch."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

from lockstep.audit.observer.collectives import CollectiveObserver
from lockstep.audit.observer.files import FileObserver
from lockstep.audit.observer.record import Patches, Recorder, script_line
from lockstep.audit.observer.steps import StepObserver


def install(folder: str, rank: int, most_steps: int) -> Patches:
    """Observe this process as ``rank``, with records in ``folder``; :meth:`Patches.undo` of the result ends it."""
    recorder = Recorder(folder, rank)
    patches = Patches(recorder)
    StepObserver(recorder, patches, most_steps)
    CollectiveObserver(recorder, patches)
    FileObserver(recorder, patches)

    def refused(original: Callable[..., Any]) -> Callable[..., Any]:
        def start_processes(*args: Any, **kwargs: Any) -> Any:
            recorder.write({"t": "spawn", "site": script_line()})
            raise SystemExit("lockstep audit: the script starts its ranks itself")

        return start_processes

    for name in ("spawn", "start_processes"):
        patches.replace(torch.multiprocessing, name, refused)

    def end() -> None:
        if not recorder.is_child:
            recorder.write({"t": "end"})

    atexit.register(end)
    patches.on_undo(lambda: atexit.unregister(end))
    return patches
