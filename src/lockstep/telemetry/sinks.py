"""What keeps a run's record: sinks of events on rank 0 (folder, mirror, console, loggers), the load of each node."""

from __future__ import annotations

import contextlib
import hashlib
import io
import struct
import wave
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lockstep import events
from lockstep.config import RunConfig
from lockstep.errors import StorageError, TaskError
from lockstep.hardware.monitor import INTERVAL_S, Monitor, SystemSource
from lockstep.rundir.files import JsonLines, make_folders, write_bytes, write_json
from lockstep.rundir.folder import RunDir, utc_now
from lockstep.rundir.mirror import MirrorSink, check_mirror
from lockstep.telemetry.console import ConsoleSink
from lockstep.telemetry.loggers import LOGGERS, is_wanted, loggers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RESULTS_FILE = "training_results.json"


def standard_sinks(run_dir: RunDir, config: RunConfig, stream: TextIO) -> events.Fanout:
    """Make the sinks of a run: folder and mirror (essential); console, its log, loggers (off after a failure)."""
    mode = config.telemetry.progress
    optional: list[events.Sink] = [] if mode == "silent" else [ConsoleSink(stream, mode), RunLogSink(run_dir.logs)]
    essential: list[events.Sink] = [RunFolderSink(run_dir, config)]
    if config.storage.mirror is not None:
        essential.append(MirrorSink(run_dir, config.storage.mirror, wait_s=config.storage.mirror_wait_s))
    return events.Fanout(essential=essential, optional=[*optional, *loggers(run_dir, config)])


def check_sinks(config: RunConfig, folder: Path | None) -> None:
    """Raise :class:`LockstepError` unless the loggers and the mirror that ``config`` asks for can be used.

    ``folder``: the run's; ``None`` when its name is still to be chosen.
    """
    for name in LOGGERS:
        is_wanted(name, config)
    if config.storage.mirror is not None:
        check_mirror(config.storage.mirror, folder)


@contextmanager
def monitored(
    folder: Path, devices: Iterable[str], *, node: int = 0, interval_s: float = INTERVAL_S
) -> Iterator[Monitor]:
    """Sample this node into ``system-<node>.jsonl`` while the body runs: the host, and GPUs among ``devices``."""
    lines = JsonLines(folder / f"system-{node}.jsonl")

    def write(sample: Mapping[str, Any]) -> None:
        with contextlib.suppress(StorageError):  # the run's record reports a full disk
            lines.append(sample)

    with Monitor(SystemSource(devices), write, interval_s=interval_s) as monitor:
        yield monitor


class RunLogSink:
    """Appends a console's plain lines to ``logs/run.log``, whatever the terminal shows."""

    name = "run.log"

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._stack = contextlib.ExitStack()
        self._console: ConsoleSink | None = None

    def emit(self, event: events.Event) -> None:
        if self._console is None:
            make_folders(self._logs)
            stream = self._stack.enter_context((self._logs / self.name).open("a", encoding="utf-8"))
            self._console = ConsoleSink(stream, "plain")
        self._console.emit(event)

    def close(self) -> None:
        self._stack.close()


#: Ranks in a row of ``ranks.jsonl``: 200 bytes each, at every log interval.
LOGGED_RANKS = 1024


class RunFolderSink:
    """Writes the run folder's files. Raises :class:`~lockstep.errors.StorageError`."""

    def __init__(self, run_dir: RunDir, config: RunConfig) -> None:
        self._run = run_dir
        self._config = config
        self._ranks = JsonLines(run_dir.ranks_file)
        self._evaluations = JsonLines(run_dir.evaluations_file)
        self._remarks = JsonLines(run_dir.remarks_file)
        self._rows: list[dict[str, Any]] = []

    def emit(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self._start(event)
            case events.StepLogged():
                self._run.append_step(step_row(event))
            case events.RanksLogged():
                self._ranks.append(asdict(replace(event, ranks=event.ranks[:LOGGED_RANKS])))
            case events.EpochEnded():
                row = {"epoch": event.epoch, **event.row, "step": event.step, "attempt": event.attempt}
                row |= _samples(event) | ({} if event.is_complete else {"complete": False})
                self._rows = [*(earlier for earlier in self._rows if earlier["epoch"] != event.epoch), row]
                self._run.write_epochs(self._rows)
                self._keep_best(event, event.row)
            case events.Evaluated():
                position = _place(event) | _samples(event)
                self._evaluations.append({**position, "improved": event.improved, **event.metrics})
                self._keep_best(event, event.metrics)
            case events.PictureDrawn():
                make_folders(self._run.pictures)
                file = self._run.pictures / f"{event.name}-epoch-{event.epoch:04d}.png"
                write_bytes(file, encode_png(event.pixels), durable=False)
            case events.Remarked():
                self._remarks.append({**_place(event), "remarks": [self._remark(rank) for rank in event.remarks]})
            case events.Restarted():
                self._run.update(restarts=[*self._run.read().restarts, {**asdict(event), "at": utc_now()}])
            case events.RunEnded():
                self._end(event)
            case _:
                pass

    def close(self) -> None:
        pass

    def _start(self, event: events.RunStarted) -> None:
        # Epochs after the checkpoint of this attempt are run again; unusable rows of a damaged file are dropped.
        self._rows = [row for row in self._run.epochs() if _is_whole(row) and row.get("step", 0) <= event.step]
        self._run.write_epochs(self._rows)
        drawn = max((row["epoch"] for row in self._rows), default=0) + 1
        for file in self._run.pictures.glob("*-epoch-*.png"):
            if int(file.stem.rpartition("-")[2]) > drawn:
                file.unlink(missing_ok=True)
        started_at = self._run.read().started_at or utc_now()
        self._run.update(status="running", started_at=started_at, completed_at=None, error=None, final_metrics={})

    def _remark(self, remark: str | events.Sound) -> dict[str, str]:
        """Return a line, and the file of its recording: one for all evaluations that heard the same."""
        if isinstance(remark, str):
            return {"text": remark}
        content = encode_wav(remark.samples, remark.rate_hz)
        file = self._run.audio / f"{hashlib.sha256(content).hexdigest()[:16]}.wav"
        if not file.exists():
            make_folders(self._run.audio)
            write_bytes(file, content, durable=False)
        return {"text": remark.text, "audio": file.name}

    def _keep_best(self, event: events.EpochEnded | events.Evaluated, metrics: Mapping[str, float]) -> None:
        if event.improved:
            best = {key: value for key, value in metrics.items() if key.startswith("val_")}
            self._run.update(best_epoch=event.epoch, best_metric=best)

    def _end(self, event: events.RunEnded) -> None:
        results = training_results(self._rows, event, self._config)
        write_json(self._run.path / RESULTS_FILE, results)
        best = self._run.read() if event.best_epoch is None else event
        self._run.update(
            status=event.status,
            completed_at=utc_now(),
            final_metrics=event.final_metrics,
            error=event.error,
            best_epoch=best.best_epoch,
            best_metric=best.best_metric,
        )


def _place(event: events.OfEpoch) -> dict[str, int]:
    return {"attempt": event.attempt, "step": event.step, "epoch": event.epoch}


def _samples(event: events.EpochEnded | events.Evaluated) -> dict[str, int]:
    return {} if event.samples_seen is None else {"samples_seen": event.samples_seen}


def _is_whole(row: Mapping[str, Any]) -> bool:
    """Return whether a row of ``metrics.json`` names its epoch, and its step and duration are numbers."""
    numbers = (row.get("step", 0), row.get("duration_s") or 0.0)
    return isinstance(row.get("epoch"), int) and all(isinstance(number, int | float) for number in numbers)


def check_picture(name: str, pixels: Any) -> None:
    """Raise :class:`TaskError` when ``pixels`` are no picture, or ``name`` cannot be that of a file."""
    kind = str(getattr(pixels, "dtype", type(pixels).__name__))
    shape = tuple(getattr(pixels, "shape", ()))
    has_shape = 0 not in shape and (len(shape) == 2 or (len(shape) == 3 and shape[2] == 3))
    if kind != "uint8" or not has_shape or not name.isidentifier():
        raise TaskError(
            f"the task's picture {name!r} cannot be written",
            why=f"it is {kind} of shape {shape}",
            fix="return {'a_name': array} from pictures(): uint8, of shape (height, width) or (height, width, 3)",
        )


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode pixels, grey (height, width) or red, green and blue (height, width, 3), as PNG (W3C, third edition)."""
    import numpy as np

    height, width = pixels.shape[:2]
    colour_type = 0 if pixels.ndim == 2 else 2
    lines = np.insert(pixels.reshape(height, -1), 0, 0, axis=1)  # each begins with the type of its filter: none
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0),
        b"IDAT": zlib.compress(lines.tobytes()),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )


def encode_wav(samples: npt.NDArray[np.float32], rate_hz: int) -> bytes:
    """Encode samples from -1 to 1, shape [samples], as WAV of 16 bits, one channel, clipped."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes((samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return content.getvalue()


def step_row(event: events.StepLogged) -> dict[str, Any]:
    """Return a line of ``steps.jsonl``."""
    row = {field.name: getattr(event, field.name) for field in fields(event)}
    return {name: value for name, value in row.items() if value is not None or name not in ("items_per_s", "mfu")}


def training_results(rows: Sequence[Mapping[str, Any]], event: events.RunEnded, config: RunConfig) -> dict[str, Any]:
    """Return the content of ``training_results.json``, derived from the same rows as all else.

    ``best_<metric>`` are the values at the best epoch, ``test_<metric>`` those of the test set; ``accuracy``
    is spelled ``acc``, as that format does. ``history`` maps each name to its value per epoch.
    """
    best_row = next((row for row in rows if row["epoch"] == event.best_epoch), {})
    best = {key: value for key, value in best_row.items() if key.startswith("val_")} | dict(event.best_metric)
    test = {key: value for key, value in event.final_metrics.items() if key.startswith("test_")}
    names = list(dict.fromkeys(key for row in rows for key in row))
    return {
        **{f"best_{_metric_label(key)}": value for key, value in best.items()},
        "best_epoch": event.best_epoch,
        **{_metric_label(key): value for key, value in test.items()},
        "total_time_minutes": event.duration_s / 60,
        "history": {_metric_label(name): [row.get(name) for row in rows] for name in names},
        "config": config.model_dump(mode="json"),
    }


def _metric_label(name: str) -> str:
    """Shorten ``accuracy`` at the end of a metric's name to ``acc``."""
    return name.removesuffix("uracy") if name.endswith("accuracy") else name
