"""Weights & Biases: a run there for each run here, online or in files for a later ``wandb sync``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.config import RunConfig
from lockstep.events import Event, PictureDrawn, RunEnded, RunStarted
from lockstep.telemetry.background import CLOSE_TIMEOUT_S
from lockstep.telemetry.files import plain
from lockstep.telemetry.pictures import loggers_take_pictures
from lockstep.telemetry.scalars import named_scalars, plan_values

if TYPE_CHECKING:
    import wandb


class WandbSink:
    """Scalars over ``step``; settings and the plan's decisions as the run's config; results in its summary.

    Every attempt of a run has the run's id, so a resumed run continues there.

    Args:
        folder: W&B's own files go to ``folder/wandb``.
        run_id: of the run here; the id there too.
    """

    name = "W&B"

    def __init__(
        self, folder: Path, run_id: str, config: RunConfig, *, project: str, mode: Literal["online", "offline"]
    ) -> None:
        self._folder, self._run_id, self._config = folder, run_id, config
        self._project, self._mode = project, mode
        self._run: wandb.Run | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        if self._run is None:
            return
        step, values = named_scalars(event)
        if values:
            self._run.log({"step": step, **values})
        if isinstance(event, PictureDrawn) and loggers_take_pictures():
            import wandb

            self._run.log({"step": event.step, event.name: wandb.Image(event.pixels)})
        if isinstance(event, RunEnded):
            self._run.summary.update({**plain(event.final_metrics), "status": event.status})
            if event.best_epoch is not None:
                best = {f"best_{name}": value for name, value in plain(event.best_metric).items()}
                self._run.summary.update({"best_epoch": event.best_epoch, **best})
            self._finish(failed=event.status == "failed")

    def close(self) -> None:
        self._finish(failed=True)

    def _start(self, event: RunStarted) -> None:
        import wandb

        # Silent: else a terminal would be asked for an API key in mid-run. Its own patience outlasts a short run.
        quiet = wandb.Settings(silent=True, console="off", init_timeout=CLOSE_TIMEOUT_S)
        wandb.setup(quiet)
        self._run = wandb.init(
            project=self._project,
            id=self._run_id,
            name=self._config.name or self._run_id,
            dir=str(self._folder),
            mode=self._mode,
            resume="allow" if self._mode == "online" else None,
            config={**self._config.model_dump(mode="json"), "plan": plan_values(event.plan)},
            settings=quiet,
        )
        # Not W&B's own step, which cannot go back: a resumed run repeats what came after its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def _finish(self, *, failed: bool) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=int(failed))
