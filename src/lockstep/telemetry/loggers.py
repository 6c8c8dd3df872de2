"""The loggers of a run: TensorBoard, Weights & Biases and MLflow; the last two send in the background.

:data:`LOGGERS` has them by the setting that asks for each. A run's numbers are called ``val_loss`` in its rows,
``val/loss`` in every logger.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlparse
from urllib.request import url2pathname

from lockstep.config import RunConfig
from lockstep.errors import ConfigError
from lockstep.events import (
    EpochEnded,
    Evaluated,
    Event,
    PictureDrawn,
    RanksLogged,
    RunEnded,
    RunStarted,
    Sink,
    StepLogged,
)
from lockstep.rundir.files import flattened, plain
from lockstep.rundir.folder import RunDir

if TYPE_CHECKING:
    import wandb
    from mlflow import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

_log = logging.getLogger(__name__)
#: How long the end of a run waits for a logger.
CLOSE_TIMEOUT_S = 20.0
#: Events that may wait for it: a server that does not answer must not fill the memory of a long run.
MAX_WAITING = 10_000


class BackgroundSink:
    """Passes events on to ``sink`` in a daemon thread, in order.

    What ``sink`` raises ends the thread and is raised by the next :meth:`emit` or by :meth:`close`; so is a
    :class:`TimeoutError` where :data:`MAX_WAITING` events wait, or the last are not passed on ``close_timeout_s``
    seconds after :meth:`close`: then the thread is left behind.
    """

    def __init__(self, sink: Logger, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self.name = sink.name
        self._sink = sink
        self._close_timeout_s = close_timeout_s
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def emit(self, event: Event) -> None:
        self._raise()
        if self._events.qsize() >= MAX_WAITING:
            raise TimeoutError(f"{MAX_WAITING:,} events wait for it")
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"lockstep-{self.name}", daemon=True)
            thread.start()  # raises at a limit of threads
            self._thread = thread
        self._events.put(event)

    def close(self) -> None:
        if self._thread is None:
            return
        self._events.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"it had not finished {self._close_timeout_s:g} s after the run's end")
        self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._sink.emit(event)
            self._sink.close()
        except Exception as error:  # any library's failure; raised by the next `emit`
            self._error = error
            with contextlib.suppress(Exception):
                self._sink.close()


class Logger:
    """Receives the numbers of a run by name, and its pictures."""

    name: str
    _open = False

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.start(event)
            self._open = True
        if not self._open:
            return
        step, values = named_scalars(event)
        if values:
            self.log(step, values)
        if isinstance(event, PictureDrawn) and importlib.util.find_spec("PIL") is not None:  # which encodes them
            self.picture(event)
        if isinstance(event, RunEnded):
            self._open = False
            self.end(event)

    def close(self) -> None:
        if self._open:
            self._open = False
            self.end(None)

    def start(self, event: RunStarted) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def picture(self, event: PictureDrawn) -> None: ...

    def end(self, event: RunEnded | None) -> None:
        """End the logger; ``None``: the run failed without an end."""


class TensorBoardSink(Logger):
    """Event files in ``folder``; a resumed run adds one, which hides superseded steps."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter

    def start(self, event: RunStarted) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(self._folder), purge_step=event.step + 1, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, event: PictureDrawn) -> None:
        form = "HW" if event.pixels.ndim == 2 else "HWC"
        self._writer.add_image(event.name, event.pixels, event.step, dataformats=form)

    def end(self, event: RunEnded | None) -> None:
        self._writer.close()


def wandb_mode(config: RunConfig) -> str:
    """Return the mode of W&B: the setting, or for ``auto`` the variable ``WANDB_MODE``."""
    mode = config.telemetry.wandb_mode
    return os.environ.get("WANDB_MODE") or "online" if mode == "auto" else mode


class WandbSink(Logger):
    """Scalars over ``step``; settings and the plan's decisions as the run's config; results in its summary.

    Every attempt of a run has the id ``run_id`` there too, so a resumed run continues it. Files of W&B go to
    ``folder/wandb``.
    """

    name = "W&B"

    def __init__(self, folder: Path, run_id: str, config: RunConfig) -> None:
        self._folder = folder
        self._run_id = run_id
        self._config = config
        self._run: wandb.Run

    def start(self, event: RunStarted) -> None:
        import wandb

        mode: Any = wandb_mode(self._config)
        # Silent: else a terminal would be asked for an API key in mid-run. W&B's time-out is longer than a short run.
        quiet = wandb.Settings(silent=True, console="off", init_timeout=CLOSE_TIMEOUT_S)
        wandb.setup(quiet)
        self._run = wandb.init(
            project=self._config.telemetry.wandb_project,
            id=self._run_id,
            name=self._config.name or self._run_id,
            dir=str(self._folder),
            mode=mode,
            resume="allow" if mode == "online" else None,
            config={**self._config.model_dump(mode="json"), "plan": plan_values(event.plan)},
            settings=quiet,
        )
        # Not W&B's step, which cannot go back: a resumed run repeats steps after its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def picture(self, event: PictureDrawn) -> None:
        import wandb

        self._run.log({"step": event.step, event.name: wandb.Image(event.pixels)})

    def end(self, event: RunEnded | None) -> None:
        if event is not None:
            self._run.summary.update({**plain(event.final_metrics), "status": event.status})
            if event.best_epoch is not None:
                best = {f"best_{name}": value for name, value in plain(event.best_metric).items()}
                self._run.summary.update({"best_epoch": event.best_epoch, **best})
        self._run.finish(exit_code=int(event is None or event.status == "failed"))


#: Limits of MLflow's REST API ("Log Batch") and of its parameters' values in older servers.
_PARAMS_A_CALL = 100
_VALUE_LENGTH = 500
_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_RUN_TAG = "lockstep.run"


class MlflowSink(Logger):
    """Scalars over the optimizer step; settings and the plan's decisions as parameters.

    All attempts of run ``run_id`` go to one run there, which a tag finds again. Without ``telemetry.mlflow_uri`` and
    ``MLFLOW_TRACKING_URI``, files go to ``folder/mlruns``. The active run and the tracking URI of the caller stay.
    A folder of files names where its pictures go: any other place than ``folder`` gets none.
    """

    name = "MLflow"

    def __init__(self, folder: Path, run_id: str, config: RunConfig) -> None:
        uri = config.telemetry.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._uri = uri or (folder / "mlruns").as_uri()
        self._folder = None if uri else folder.resolve()
        self._run_id = run_id
        self._config = config
        self._client: MlflowClient
        self._there = ""
        self._takes_pictures = True

    def start(self, event: RunStarted) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        with _file_store_allowed(self._uri):
            client = self._client = MlflowClient(tracking_uri=self._uri)
        name = self._config.telemetry.mlflow_experiment
        experiment = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
        earlier = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{self._run_id}'", max_results=1)
        tags = {_RUN_TAG: self._run_id}
        run_name = self._config.name or self._run_id
        info = (earlier[0] if earlier else client.create_run(experiment_id, run_name=run_name, tags=tags)).info
        self._there = info.run_id
        if self._folder is not None and not _is_below(info.artifact_uri, self._folder):
            self._takes_pictures = False
            _log.warning("MLflow's files in the run folder send pictures to %s: they are left out", info.artifact_uri)
        if earlier:
            client.update_run(self._there, status="RUNNING")
            return
        settings = flattened({**self._config.model_dump(mode="json"), "plan": plan_values(event.plan)})
        parameters = [Param(_allowed(key), str(value)[:_VALUE_LENGTH]) for key, value in settings.items()]
        for start in range(0, len(parameters), _PARAMS_A_CALL):
            client.log_batch(self._there, params=parameters[start : start + _PARAMS_A_CALL])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [Metric(_allowed(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._there, metrics=metrics)

    def picture(self, event: PictureDrawn) -> None:
        if self._takes_pictures:
            file = f"pictures/{event.name}-epoch-{event.epoch:04d}.png"
            self._client.log_image(self._there, event.pixels, artifact_file=file)

    def end(self, event: RunEnded | None) -> None:
        self._client.set_terminated(self._there, "FAILED" if event is None else _STATUS.get(event.status, "FAILED"))


def _is_below(uri: str, folder: Path) -> bool:
    """Return whether ``uri`` is that of a file in ``folder``."""
    parts = urlparse(uri)
    return parts.scheme in {"", "file"} and Path(url2pathname(parts.path)).resolve().is_relative_to(folder)


def _allowed(name: str) -> str:
    """Replace characters other than those of MLflow's names: letters, digits, and ``_-. :/``."""
    return re.sub(r"[^\w\-. :/]", "_", name)


@contextmanager
def _file_store_allowed(uri: str) -> Iterator[None]:
    """Allow MLflow 3 a store of plain files, which ``uri`` names and which it opens only on demand."""
    variable = "MLFLOW_ALLOW_FILE_STORE"
    sets_variable = urlparse(uri).scheme in {"", "file"} and variable not in os.environ
    try:
        os.environ |= {variable: "true"} if sets_variable else {}
        yield
    finally:
        if sets_variable:
            del os.environ[variable]


#: How each logger is made, by its setting of ``telemetry``, which has the name of its package.
LOGGERS: Mapping[str, Callable[[RunDir, RunConfig], Sink]] = {
    "tensorboard": lambda run, _: TensorBoardSink(run.logs),
    "wandb": lambda run, config: BackgroundSink(WandbSink(run.logs, run.read().id, config)),
    "mlflow": lambda run, config: BackgroundSink(MlflowSink(run.logs, run.read().id, config)),
}


def _off(logger: str) -> str | bool:
    return "off" if logger == "tensorboard" else False


#: Settings of ``telemetry`` with which a run reports to its folder alone.
QUIET: Mapping[str, Any] = {
    **{name: _off(name) for name in LOGGERS},
    **{"progress": "silent", "system_metrics": False, "profile": None},
}


def loggers(run_dir: RunDir, config: RunConfig) -> list[Sink]:
    """Make the loggers that ``config`` asks for. Raises :class:`ConfigError` for one that is not installed."""
    return [build(run_dir, config) for name, build in LOGGERS.items() if is_wanted(name, config)]


def is_wanted(logger: str, config: RunConfig) -> bool:
    """Return whether ``config`` asks for it; ``auto`` means when it is installed. Raises :class:`ConfigError`."""
    setting = getattr(config.telemetry, logger)
    if setting == _off(logger):
        return False
    installed = importlib.util.find_spec(logger) is not None
    if not installed and setting != "auto":
        raise ConfigError(
            f"telemetry.{logger} is on, but {logger} is not installed",
            fix=f"pip install 'lockstep-train[{logger}]', or set telemetry.{logger}={str(_off(logger)).lower()}",
        )
    return installed


_SPLIT = re.compile(r"(train|val|test)[/_](.+)|valid(?:ation)?[/_](.+)", re.DOTALL)
Value = TypeVar("Value")


def row_name(name: str) -> str:
    """Normalise a user's name for rows, reports and loggers: ``val/acc`` or ``valid_acc`` to ``val_acc``."""
    row = _SPLIT.fullmatch(name)
    if row is None:
        return name
    return f"val_{row[3]}" if row[1] is None else f"{row[1]}_{row[2]}"


def monitored(row: Mapping[str, Value], monitor: str) -> tuple[str, Value] | None:
    """Find the value of ``monitor``, and its name: as logged, as in rows, or of the first of several loaders."""
    name = row_name(monitor)
    names = (monitor, name, f"{name}/dataloader_idx_0")
    return next(((candidate, row[candidate]) for candidate in names if candidate in row), None)


def as_row(values: Mapping[str, Value], *, taken: Container[str] = ()) -> dict[str, Value]:
    """Rename ``values`` by :func:`row_name`; a value keeps its name if another has the new one, or it is ``taken``."""
    row: dict[str, Value] = {}
    for name, value in values.items():
        new = row_name(name)
        row[name if new in taken or new in row or new in values else new] = value
    return row


def named_scalars(event: Event) -> tuple[int, dict[str, float]]:
    """Return an event's optimizer step and its numbers by name; ``(0, {})`` when it has none.

    ``train/``, ``val/`` and ``test/`` hold losses and metrics, ``train_epoch/`` the means of epochs,
    ``throughput/`` the speed, ``ranks/`` the extremes over ranks.
    """
    match event:
        case StepLogged():
            speed = ("samples_per_s", "data_wait_share", "items_per_s", "mfu")
            values: dict[str, float | None] = {"lr": event.lr}
            values |= {f"train/{name}": getattr(event, name) for name in ("loss", "grad_norm")}
            values |= {f"throughput/{name}": getattr(event, name) for name in speed}
            values |= {f"train/{name}": value for name, value in event.scalars.items()}
            return event.step, {name: value for name, value in values.items() if value is not None}
        case RanksLogged():
            extremes = {"ranks/peak_gb_max": max(rank.peak_gb for rank in event.ranks)}
            if own_times_s := [rank.own_s for rank in event.ranks if rank.own_s is not None]:
                extremes |= {"ranks/own_s_min": min(own_times_s), "ranks/own_s_max": max(own_times_s)}
            return event.step, extremes
        case EpochEnded():
            return event.step, {"epoch": event.epoch, **_by_split(event.row, train="train_epoch")}
        case Evaluated():
            return event.step, _by_split(event.metrics)
        case RunEnded():
            return event.step, _by_split(event.final_metrics, only="test")
        case _:
            return 0, {}


def _by_split(values: Mapping[str, float], *, train: str = "train", only: str | None = None) -> dict[str, float]:
    """Rename ``val_loss`` → ``val/loss``; names of no split are left out."""
    folders = {"train": train, "val": "val", "test": "test"}
    result = {}
    for key, value in values.items():
        split, underscore, name = key.partition("_")
        if underscore and split in folders and only in (None, split):
            result[f"{folders[split]}/{name}"] = value
    return result


def plan_values(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the plan's decisions by title; ``plan``: of ``Plan.as_dict()``."""
    return {decision["title"]: decision["shown"] for decision in plan.get("decisions", {}).values()}
