"""MLflow: a run there for each run here, on a server or in local files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from lockstep.config import RunConfig
from lockstep.events import Event, PictureDrawn, RunEnded, RunStarted
from lockstep.telemetry.pictures import loggers_take_pictures
from lockstep.telemetry.scalars import flattened, named_scalars, plan_values

if TYPE_CHECKING:
    from mlflow import MlflowClient

#: Limits of MLflow's REST API ("Log Batch") and of its parameters' values in older servers.
_PARAMS_A_CALL, _VALUE_LENGTH = 100, 500
_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_RUN_TAG = "lockstep.run"


class MlflowSink:
    """Scalars over the optimizer step; settings and the plan's decisions as parameters.

    All attempts of a run go to one run there, which a tag finds again. Uses a separate client: neither the
    active run nor the tracking URI of the caller changes.

    Args:
        uri: of the server or store; ``None`` takes ``MLFLOW_TRACKING_URI``, else files in ``folder/mlruns``.
        run_id: of the run here.
    """

    name = "MLflow"

    def __init__(self, folder: Path, run_id: str, config: RunConfig, *, uri: str | None, experiment: str) -> None:
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").as_uri()
        self._run_id, self._config, self._experiment = run_id, config, experiment
        self._client: MlflowClient | None = None
        self._there = ""

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        if self._client is None:
            return
        step, values = named_scalars(event)
        if values:
            self._log(self._client, step, values)
        if isinstance(event, PictureDrawn) and loggers_take_pictures():
            file = f"pictures/{event.name}-epoch-{event.epoch:04d}.png"
            self._client.log_image(self._there, event.pixels, artifact_file=file)
        if isinstance(event, RunEnded):
            self._end(_STATUS.get(event.status, "FAILED"))

    def close(self) -> None:
        self._end("FAILED")

    def _start(self, event: RunStarted) -> None:
        from mlflow import MlflowClient

        with _files_allowed(self._uri):
            client = MlflowClient(tracking_uri=self._uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        earlier = client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{self._run_id}'", max_results=1)
        if earlier:
            self._there = earlier[0].info.run_id
            client.update_run(self._there, status="RUNNING")
        else:
            name = self._config.name or self._run_id
            self._there = client.create_run(experiment, run_name=name, tags={_RUN_TAG: self._run_id}).info.run_id
            self._log_parameters(client, event.plan)
        self._client = client

    def _log_parameters(self, client: MlflowClient, plan: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        settings = flattened({**self._config.model_dump(mode="json"), "plan": plan_values(plan)})
        parameters = [Param(_allowed(key), str(value)[:_VALUE_LENGTH]) for key, value in settings.items()]
        for start in range(0, len(parameters), _PARAMS_A_CALL):
            client.log_batch(self._there, params=parameters[start : start + _PARAMS_A_CALL])

    def _log(self, client: MlflowClient, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [Metric(_allowed(name), float(value), now, step) for name, value in values.items()]
        client.log_batch(self._there, metrics=metrics)

    def _end(self, status: str) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._there, status)


def _allowed(name: str) -> str:
    """MLflow's names have letters, digits, and ``_-. :/``."""
    return re.sub(r"[^\w\-. :/]", "_", name)


@contextmanager
def _files_allowed(uri: str) -> Iterator[None]:
    """MLflow 3 opens a store of plain files only on demand; whoever names one, demands it."""
    variable = "MLFLOW_ALLOW_FILE_STORE"
    if urlparse(uri).scheme not in {"", "file"} or variable in os.environ:
        yield
        return
    os.environ[variable] = "true"
    try:
        yield
    finally:
        del os.environ[variable]
