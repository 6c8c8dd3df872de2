"""Sinks that keep a run's record: the run folder's files, and TensorBoard's events when it is installed.

Only rank 0 has sinks. :func:`standard_sinks` puts together what every run has.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lockstep.config import RunConfig
from lockstep.errors import ConfigError
from lockstep.events import EpochEnded, Evaluated, Event, Fanout, RunEnded, RunStarted, Sink, StepLogged
from lockstep.telemetry.console import ConsoleSink
from lockstep.telemetry.rundir import RunDir, utc_now, write_json
from lockstep.telemetry.upload import Uploader, UploadSink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

RESULTS_FILE = "training_results.json"


def standard_sinks(run_dir: RunDir, config: RunConfig, stream: TextIO) -> Fanout:
    """The sinks of a run: its folder (essential); console, TensorBoard and upload (switched off if they fail).

    Raises:
        ConfigError: ``telemetry.tensorboard`` is ``on`` and TensorBoard is not installed; ``telemetry.upload_to``
            is no target that fsspec knows.
    """
    mode = config.telemetry.progress
    optional: list[Sink] = [] if mode == "silent" else [ConsoleSink(stream, mode)]
    if tensorboard_wanted(config.telemetry.tensorboard):
        optional.append(TensorBoardSink(run_dir.logs))
    if config.telemetry.upload_to is not None:
        uploader = Uploader(run_dir.path, config.telemetry.upload_to)
        optional.append(UploadSink(uploader, every_epochs=config.telemetry.upload_every_epochs))
    return Fanout(essential=[RunFolderSink(run_dir)], optional=optional)


def tensorboard_wanted(setting: str) -> bool:
    """Whether to write TensorBoard files: ``auto`` means when it is installed."""
    installed = importlib.util.find_spec("tensorboard") is not None
    if setting == "on" and not installed:
        raise ConfigError(
            "telemetry.tensorboard is on, but TensorBoard is not installed",
            fix="pip install 'lockstep-train[tensorboard]', or set telemetry.tensorboard=auto",
        )
    return installed and setting != "off"


class RunFolderSink:
    """Writes ``run.json``, ``metrics.json``, ``steps.jsonl`` and ``training_results.json``.

    A sink of the *essential* kind: what it cannot write raises :class:`~lockstep.errors.StorageError`.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run = run_dir
        self._rows: list[dict[str, Any]] = []
        self._earlier_s = 0.0

    def emit(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start(event)
            case StepLogged():
                self._run.append_step(step_row(event))
            case EpochEnded():
                self._epoch(event)
            case RunEnded():
                self._end(event)
            case _:
                pass

    def close(self) -> None:
        pass

    def _start(self, event: RunStarted) -> None:
        # Epochs that ended after the checkpoint that this attempt goes on from are run again.
        self._rows = [row for row in self._run.epochs() if row.get("step", 0) <= event.step]
        self._earlier_s = sum(row.get("duration_s") or 0.0 for row in self._rows)
        self._run.write_epochs(self._rows)
        started_at = self._run.read().started_at or utc_now()
        self._run.update(status="running", started_at=started_at, completed_at=None, error=None, final_metrics={})

    def _epoch(self, event: EpochEnded) -> None:
        row = {"epoch": event.epoch, **event.row, "step": event.step, "attempt": event.attempt}
        self._rows = [*(kept for kept in self._rows if kept["epoch"] != event.epoch), row]
        self._run.write_epochs(self._rows)
        if event.improved:
            best = {key: value for key, value in event.row.items() if key.startswith("val_")}
            self._run.update(best_epoch=event.epoch, best_metric=best)

    def _end(self, event: RunEnded) -> None:
        results = training_results(self._rows, event, self._run.config(), self._earlier_s)
        write_json(self._run.path / RESULTS_FILE, results)
        best = {} if event.best_epoch is None else {"best_epoch": event.best_epoch, "best_metric": event.best_metric}
        self._run.update(
            status=event.status,
            completed_at=utc_now(),
            final_metrics=event.final_metrics,
            error=event.error,
            **best,
        )


def step_row(event: StepLogged) -> dict[str, Any]:
    """A line of ``steps.jsonl``. Units: ``lr`` per step, ``samples_per_s`` over all ranks, shares from 0 to 1."""
    return {
        "attempt": event.attempt,
        "step": event.step,
        "epoch": event.epoch,
        "samples_seen": event.samples_seen,
        "loss": event.loss,
        "lr": event.lr,
        "grad_norm": event.grad_norm,
        "samples_per_s": event.samples_per_s,
        "data_wait_share": event.data_wait_share,
        "skipped_steps": event.skipped_steps,
        "scalars": event.scalars,
    }


def training_results(
    rows: Sequence[Mapping[str, Any]], event: RunEnded, config: RunConfig, earlier_s: float
) -> dict[str, Any]:
    """What document 001's ``training_results.json`` holds, derived from the same rows as all else.

    ``best_<metric>`` are the values at the best epoch, ``test_<metric>`` those of the test set; ``accuracy``
    is spelled ``acc``, as that format does. ``history`` maps each name to its value per epoch.
    ``earlier_s``: seconds that earlier attempts spent on epochs that still count.
    """
    best_row = next((row for row in rows if row["epoch"] == event.best_epoch), {})
    best = {key: value for key, value in best_row.items() if key.startswith("val_")} | dict(event.best_metric)
    test = {key: value for key, value in event.final_metrics.items() if key.startswith("test_")}
    names = list(dict.fromkeys(key for row in rows for key in row))
    return {
        **{f"best_{_short(key)}": value for key, value in best.items()},
        "best_epoch": event.best_epoch,
        **{_short(key): value for key, value in test.items()},
        "total_time_minutes": (earlier_s + event.duration_s) / 60,
        "history": {_short(name): [row.get(name) for row in rows] for name in names},
        "config": config.model_dump(mode="json"),
    }


class TensorBoardSink:
    """Scalars for TensorBoard: ``train/``, ``val/``, ``test/``, ``lr`` and ``throughput/`` over the optimizer step.

    Args:
        folder: where the event files go; a resumed run adds one, which hides what it supersedes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def emit(self, event: Event) -> None:
        match event:
            case RunStarted():
                from torch.utils.tensorboard import SummaryWriter

                purge = event.step + 1 if event.step else None
                self._writer = SummaryWriter(log_dir=str(self._folder), purge_step=purge)
            case StepLogged():
                self._add(event.step, {"train/loss": event.loss, "train/grad_norm": event.grad_norm, "lr": event.lr})
                self._add(event.step, {f"throughput/{name}": getattr(event, name) for name in _SPEEDS})
                self._add(event.step, {f"train/{name}": value for name, value in event.scalars.items()})
            case EpochEnded():
                self._add(event.step, {"epoch": event.epoch})
                self._add(event.step, _by_split(event.row, train="train_epoch"))
                self._flush()
            case Evaluated():
                self._add(event.step, _by_split(event.metrics))
            case RunEnded():
                self._add(event.step, _by_split(event.final_metrics, only="test"))
                self._flush()
            case _:
                pass

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, values: Mapping[str, float | None]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()


_SPEEDS = ("samples_per_s", "data_wait_share")


def _by_split(values: Mapping[str, float], *, train: str = "train", only: str | None = None) -> dict[str, float]:
    """``val_loss`` → ``val/loss``; what belongs to no split is left out."""
    folders = {"train": train, "val": "val", "test": "test"}
    result = {}
    for key, value in values.items():
        split, underscore, name = key.partition("_")
        if underscore and split in folders and only in (None, split):
            result[f"{folders[split]}/{name}"] = value
    return result


def _short(name: str) -> str:
    return name.removesuffix("uracy") if name.endswith("accuracy") else name
