"""The progress bar of a run, below all other lines of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lockstep.events import RunStarted

#: Drawing takes about half a millisecond, so a bar costs a run some 0.2 %.
_DRAWS_PER_S = 4


class RunBar(Progress):
    """Shows the run's step counter, which rich's thread reads.

    ``texts``: those on the left and on the right of the bar, of a step.
    """

    def __init__(self, console: Console, started: RunStarted, texts: Callable[[int], tuple[str, str]]) -> None:
        self._started = started
        self._texts = texts
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            refresh_per_second=_DRAWS_PER_S,
            transient=True,
            expand=True,
        )
        self._run = self.add_task("", total=started.total_steps, completed=started.step, status="")
        self.start()

    def show(self, step: int) -> None:
        self.update(self._run, completed=step, refresh=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Bring the bar up to date; called at each refresh."""
        for task in self.tasks:
            position = self._started.position
            step = int(task.completed) if position is None else position()
            label, status = self._texts(step)
            self.update(task.id, total=self._started.total, completed=step, description=label, status=status)
        return super().get_renderables()
