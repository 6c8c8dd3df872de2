"""A run as an object: its results, and what can be done with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from lockstep.api.settings import Settings, mapping_of
from lockstep.config import RunConfig, merge
from lockstep.rundir.folder import RunDir
from lockstep.rundir.remote import is_url
from lockstep.rundir.summary import find_run

if TYPE_CHECKING:
    from torch import nn

    from lockstep.engine.state import RunResult
    from lockstep.engine.task import Task
    from lockstep.planning import Plan


class Run:
    """A run, by its folder, its id, the beginning of its id, ``last``, or the URL of its mirror.

    ``lockstep.train`` and ``lockstep.fit`` return one. Its values are read from the run folder, so that those of a run
    in progress change. Those of a mirror are of the moment at which this object was made.

    Args:
        run: which one.
        runs_dir: the folder in which ids and ``last`` are looked up, and to which :meth:`resume` fetches a mirror.

    Raises:
        RunFolderError: there is no such run, or several.
    """

    #: Of a mirror; its copy is ``_dir``.
    _url: str | None = None

    def __init__(self, run: str | Path = "last", *, runs_dir: str | Path = "runs") -> None:
        self._dir = find_run(str(run), Path(runs_dir))
        self._url = str(run) if is_url(str(run)) else None
        self._runs_dir = Path(runs_dir)
        self._task: Task | type[Task] | None = None
        self._result: RunResult | None = None

    @classmethod
    def _ended(cls, result: RunResult, task: Task | type[Task] | str | None) -> Run:
        """Return the run of an attempt that has ended in this process."""
        run = cls.__new__(cls)
        run._dir = RunDir(result.run_dir)
        run._task = None if isinstance(task, str) else task
        run._result = result
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r}, status={self.status!r})"

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self._dir.path

    @property
    def id(self) -> str:
        """The run's id, such as ``run-1a2b3c4d``."""
        return self._dir.read().id

    @property
    def status(self) -> str:
        """``pending``, ``running``, ``completed``, ``failed``, ``stopped`` or ``lost`` (its process has gone)."""
        return self._result.status if self._result else self._dir.status()

    @property
    def exit_code(self) -> int:
        """Exit code of the attempt that this process made; of a run that was opened, 0 if it has completed, else 1."""
        return self._result.exit_code if self._result else int(self.status != "completed")

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        if self._result:
            return self._result.step
        beat = self._dir.progress()
        return beat.step if beat else 0

    @property
    def metrics(self) -> dict[str, float]:
        """The best epoch's validation metrics (``val_…``) and, of a completed run, its test metrics (``test_…``)."""
        best = self.best_epoch
        final = self._result.metrics if self._result else self._dir.read().final_metrics
        row = next((row for row in self.history if row.get("epoch") == best), {})
        validation = {name: value for name, value in row.items() if name.startswith("val_")}
        return {**validation, **final}

    @property
    def best_epoch(self) -> int | None:
        """The epoch with the best value of the monitored metric, from 1; ``None`` without an evaluation."""
        return self._result.best_epoch if self._result else self._dir.read().best_epoch

    @property
    def best_metric(self) -> dict[str, float]:
        """The monitored metric and its best value."""
        return dict(self._result.best_metric if self._result else self._dir.read().best_metric)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row an epoch: its losses, metrics, rates and times. ``pandas.DataFrame(run.history)`` is a table."""
        return self._dir.epochs()

    @property
    def steps(self) -> list[dict[str, Any]]:
        """One row every ``log_interval`` optimizer steps."""
        return self._dir.steps()

    @property
    def config(self) -> RunConfig:
        """Every setting of the newest attempt."""
        return self._dir.config()

    @property
    def plan(self) -> Plan:
        """The newest attempt's plan. Raises :class:`RunFolderError` if the run ended before it had one."""
        from lockstep.api.finished.reopen import plan_of

        return plan_of(self._dir)

    def resume(
        self,
        task: Task | type[Task] | None = None,
        config: RunConfig | Mapping[str, Any] | None = None,
        *,
        rescale_batch: bool = False,
        accept_data: bool = False,
        **settings: Unpack[Settings],
    ) -> Run:
        """Train on from the latest valid checkpoint, on the same or different devices; returns when the run has ended.

        A run resumed in mid-epoch sees exactly the remaining samples. The global batch stays the same.

        Args:
            task: for a run whose task was made in a script: the same object or class. A run that this process has
                started remembers it.
            config: settings to change, as for :func:`lockstep.train`; so are the other keywords.
            rescale_batch: keep the batch per device instead of the global batch.
            accept_data: resume even if the training data are not those of the checkpoint, if equally many.

        Raises:
            RunFolderError: the run is still running, or ``task`` is missing. CheckpointError: no checkpoint is valid.
        """
        from lockstep.launch import api as launch
        from lockstep.launch.run_claim import run_at
        from lockstep.launch.session.script import resume_session

        overrides = mapping_of(config, settings)
        if self._url is not None:
            overrides = merge({"storage": {"mirror": self._url}}, overrides)
            self._dir = run_at(self._url, self._runs_dir)
            self._url = None
        if resume_session(self._dir, overrides, None) is not None:
            self._result = None
            return self
        self._task = task or self._task
        self._result = launch.resume(
            self._dir, task=self._task, overrides=overrides, rescale_batch=rescale_batch, accept_data=accept_data
        )
        return self

    def evaluate(
        self,
        data: Any = None,
        *,
        split: str = "test",
        devices: str | None = None,
        checkpoint: str | int = "best",
        task: Task | type[Task] | None = None,
    ) -> dict[str, Any]:
        """Compute metrics of a checkpoint, such as ``{"test_loss": 0.3}``: the same on any number of devices.

        Args:
            data: ``train``, ``val`` or ``test`` of the run; a file, for a task with ``evaluation_data``; or a data set
                with samples as those of ``Task.datasets()``, such as a frame. ``None``: ``split``.
            split: the same by its name.
            devices: device names, separated by commas; default: the first of the run.
            checkpoint: ``best``, ``last`` or a step.
            task: as for :meth:`resume`.
        """
        from lockstep.api.finished.evaluation import evaluate

        self._fetch(checkpoint)
        source = split if data is None else data
        result = evaluate(self._dir, source, devices=devices, checkpoint=checkpoint, task=task or self._task)
        return dict(result["metrics"])

    def predict(
        self,
        data: Any = None,
        out: str | Path | None = None,
        *,
        loss: bool = False,
        devices: str | None = None,
        checkpoint: str | int = "best",
        task: Task | type[Task] | None = None,
    ) -> Any:
        """Predict each sample, in the order of ``data``: a frame of pandas.

        Its columns are ``index``, those of ``Task.predict``, and ``file``, if the data set has ``names``.

        Example::

            run.predict("val", loss=True).nlargest(10, "loss")  # the ten worst

        Args:
            data: as for :meth:`evaluate`; files are for a task with ``prediction_data``. ``None``: ``test``; of a
                ``LightningModule``, ``predict``, which is its ``predict_dataloader()``.
            out: write this file in place of the frame, and return its path; ends in .csv, .jsonl or .parquet.
            loss: add a column with the loss of each sample.
            devices: as for :meth:`evaluate`; so are ``checkpoint`` and ``task``.

        Raises:
            UnsupportedError: pandas is not installed, and ``out`` is missing.
        """
        from lockstep.api.finished import predict

        self._fetch(checkpoint)
        request = predict.PredictionRequest(data=data, devices=devices, checkpoint=checkpoint, with_loss=loss)
        if out is None:
            return predict.frame_of(self._dir, request, task or self._task)
        predict.predict(self._dir, request, Path(out), task=task or self._task)
        return Path(out)

    @property
    def tables(self) -> dict[str, Any]:
        """Metrics of the test that are no single number, such as a confusion matrix, as nested lists; by name."""
        return self._dir.tables()

    def export(
        self,
        out: str | Path,
        *,
        checkpoint: str | int = "best",
        program: bool | None = None,
        task: Task | type[Task] | None = None,
    ) -> Path:
        """Write weights (safetensors), a ``torch.export`` program and an example that loads them; returns ``out``.

        Args:
            out: a new or empty folder.
            checkpoint: ``best``, ``last`` or a step.
            program: whether to write the program; ``None``: where the task permits it.
            task: as for :meth:`resume`.

        Raises:
            RunFolderError: ``out`` is not empty. UnsupportedError: torch cannot export the model.
        """
        from lockstep.api.finished.export import export

        self._fetch(checkpoint)
        export(self._dir, Path(out), checkpoint=checkpoint, program=program, task=task or self._task)
        return Path(out)

    def load_model(self, checkpoint: str | int = "best", *, task: Task | type[Task] | None = None) -> nn.Module:
        """Load the model with the weights of a checkpoint, on the CPU, in evaluation mode.

        Args:
            checkpoint: ``best``, ``last`` or a step.
            task: as for :meth:`resume`.

        Raises:
            CheckpointError: there is no such checkpoint, or it is corrupt.
        """
        from lockstep.api.finished.reopen import load_model

        self._fetch(checkpoint)
        return load_model(self._dir, checkpoint, task=task or self._task)[1]

    def _fetch(self, checkpoint: str | int) -> None:
        """Fetch the weights of a checkpoint, if this is the copy of a mirror."""
        if self._url is not None:
            from lockstep.api.finished.reopen import fetch_weights

            fetch_weights(self._url, self._dir, checkpoint)

    def stop(self, timeout: float = 60.0) -> str:
        """Stop a run in progress after saving a checkpoint; returns its status.

        Raises:
            RunFolderError: it is not running on this host, or has not ended after ``timeout`` seconds.
        """
        from lockstep.launch import api as launch

        return launch.stop(self._dir, timeout)
