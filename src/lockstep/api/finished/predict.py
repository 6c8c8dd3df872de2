"""``lockstep predict``: the predictions of a checkpoint for a data set, in a file, in the order of the data."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.api.finished.evaluation import SPLITS, evaluation_on, source_of
from lockstep.api.finished.ranks import compute
from lockstep.api.finished.reopen import find_step
from lockstep.engine.predict import Row
from lockstep.engine.reopened import Reopened
from lockstep.engine.runner import runner_of
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, DataError, RunFolderError, UnsupportedError
from lockstep.launch.run_claim import task_again
from lockstep.rundir.files import plain, read_jsonl
from lockstep.rundir.folder import RunDir

#: Rows that are converted at a time.
_ROWS = 10_000


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """What to predict.

    Args:
        data: ``train``, ``val`` or ``test`` of the run; a file or folder for the task's ``prediction_data``; or a data
            set, whose predictions need a name for their file. ``None``: ``test``; of a ``LightningModule``,
            ``predict``: the data of ``predict_dataloader()``.
        devices: as ``--devices``; ``None``: the first one of the run.
        checkpoint: ``best``, ``last`` or a step.
        with_loss: add a column ``loss``: that of each sample.
    """

    data: Any = None
    devices: str | None = None
    checkpoint: str | int = "best"
    with_loss: bool = False


def predict(
    run: RunDir,
    request: PredictionRequest,
    out: Path | None = None,
    *,
    folder: Path | None = None,
    task: Task | type[Task] | None = None,
) -> dict[str, Any]:
    """Write a row for each sample: byte-equal on any number of ranks.

    Args:
        out: ends in ``.csv``, ``.jsonl`` or ``.parquet``; ``None``: ``predictions-<data>.csv`` in ``folder``.
        folder: ``None``: the run folder.
        task: the run's task; ``None``: made from its settings.
    """
    built = task_again(run, run.config(), task)
    runner = runner_of(built)
    data = runner.predicted_split if request.data is None else request.data
    split, source = source_of(data, (*SPLITS, runner.predicted_split))
    if isinstance(source, Path) and not source.exists():
        raise DataError(f"there is no {data}", fix=f"name a file or folder of data, or {', '.join(SPLITS)}")
    assert out is not None or source is None or isinstance(source, Path), "a data set has no name for a file"
    out = (out or (folder or run.path) / f"predictions-{split if source is None else source.stem}.csv").resolve()
    _check_format(out)
    step = find_step(run, request.checkpoint)
    evaluation = evaluation_on(run, request.devices, split, step, source, whole=True)
    evaluation = replace(evaluation, out=out, with_loss=request.with_loss)
    runner.check_prediction(evaluation)
    plan = evaluation.plan
    if plan.placement["accelerator"] == "cpu":  # sums depend on the number of threads
        threads = replace(plan.decisions["threads"], value=1, shown="1", reason="the same sums on any ranks")
        plan = plan.model_copy(update={"decisions": {**plan.decisions, "threads": threads}})
        evaluation = replace(evaluation, plan=plan)
    try:
        rows = compute(_write, evaluation, built)["rows"]
        _partial(out).replace(out)
    finally:
        _partial(out).unlink(missing_ok=True)
    return {"run": run.read().id, "data": str(data), "step": step, "rows": rows, "out": str(out)}


def frame_of(run: RunDir, request: PredictionRequest, task: Task | type[Task] | None) -> Any:
    """Convert the rows of :func:`predict` to a frame of pandas. Raises :class:`UnsupportedError`: not installed."""
    try:
        import pandas
    except ImportError:
        fix = "pip install pandas, or write a file: run.predict(data, out='predictions.csv')"
        raise UnsupportedError("pandas, which makes the frame, is not installed", fix=fix) from None
    with TemporaryDirectory(prefix="lockstep-predict-") as folder:
        file = Path(folder, "predictions.jsonl")
        predict(run, request, file, task=task)
        return pandas.DataFrame(read_jsonl(file, max_bytes=file.stat().st_size + 1))


def _check_format(out: Path) -> None:
    if out.suffix not in _WRITERS:
        raise ConfigError(f"{out.name} is not a format of predictions", fix="end it in .csv, .jsonl or .parquet")
    if out.suffix == ".parquet":
        _arrow()
    if not out.parent.is_dir():
        raise RunFolderError(f"there is no folder {out.parent}", fix="make it, or choose another --out")


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _write(reopened: Reopened) -> dict[str, Any]:
    """Write the rows to ``OUT.partial``, on rank 0. Collective."""
    out = reopened.evaluation.out
    assert out is not None
    written = 0

    def rows() -> Iterator[Row]:
        nonlocal written
        for batch in chain.from_iterable(runner_of(reopened.task).predictions(reopened)):
            written += len(batch)
            yield from batch

    if reopened.collectives.is_main:
        _WRITERS[out.suffix](rows(), _partial(out))
    else:
        for _ in rows():
            pass
    return {"rows": written}


def _write_jsonl(rows: Iterator[Row], out: Path) -> None:
    """Write a line for each row. Numbers that are not finite become null: JSON has none."""
    with out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(plain(row)) + "\n" for row in rows)


def _write_csv(rows: Iterator[Row], out: Path) -> None:
    first = next(rows, {})
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(first), lineterminator="\n")
        if first:
            writer.writeheader()
        for row in chain([first] if first else [], rows):
            writer.writerow({k: json.dumps(plain(v)) if isinstance(v, (list, dict)) else v for k, v in row.items()})


def _write_parquet(rows: Iterator[Row], out: Path) -> None:
    arrow, parquet = _arrow()
    first = arrow.Table.from_pylist(list(islice(rows, _ROWS)))
    with parquet.ParquetWriter(out, first.schema) as writer:
        writer.write_table(first)
        while more := list(islice(rows, _ROWS)):
            writer.write_table(arrow.Table.from_pylist(more, schema=first.schema))


_WRITERS = {".csv": _write_csv, ".jsonl": _write_jsonl, ".parquet": _write_parquet}


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UnsupportedError(
            "pyarrow, which writes Parquet, is not installed",
            fix="pip install 'lockstep-train[data]', or end --out in .csv or .jsonl",
        ) from None
    return pyarrow, parquet
