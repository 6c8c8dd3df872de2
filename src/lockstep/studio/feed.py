"""The live data of one run: its streams, epochs and summary. One feed per run, shared by all tabs that watch it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, RunFolderError
from lockstep.studio.columns import Columns, pack
from lockstep.studio.home import modified_ns
from lockstep.studio.index import RunIndex
from lockstep.studio.tailing import Tail
from lockstep.telemetry.rundir import RunDir

#: How often state and epochs are checked; streams are read at every poll.
_STATE_S = 0.5
#: Chunks read in one poll of a long file.
_CHUNKS = 4
STREAMS = ("steps", "evaluations", "ranks", "system")


class Feed:
    """Reads a run's files when :meth:`poll` is called, from one thread at a time."""

    def __init__(self, run: RunDir, index: RunIndex, name: str) -> None:
        self.name = name
        self.summary: dict[str, Any] = {}
        self.epochs: list[dict[str, Any]] = []
        self.gone = False
        #: Counts of changes, to know what each tab has seen.
        self.summary_version = 0
        self.epochs_version = 0
        self.tails: dict[str, Tail] = {}
        self.previews: dict[str, Columns] = {}
        self.lock = threading.Lock()
        self._run = run
        self._index = index
        self._looked = -_STATE_S
        self._attempts: dict[int, int] = {}
        self._attempts_stamp = 0
        self._epochs_stamp = (-1, -1)
        self._frames: dict[tuple[Any, ...], bytes] = {}

    @property
    def behind(self) -> bool:
        """Whether a file is longer than what has been read of it."""
        return any(tail.behind for tail in self.tails.values())

    def poll(self) -> bool:
        """Read the files; return whether anything changed."""
        with self.lock:
            self._frames.clear()
            now = time.monotonic()
            changed = self._notice_attempts()
            if now - self._looked >= _STATE_S:
                self._looked = now
                changed |= self._look()
                if any(tail.behind and not tail.columns.rows for tail in self.tails.values()):
                    return True  # the preview first
            for name, tail in list(self.tails.items()):
                for _ in range(_CHUNKS):
                    changed |= tail.poll()
                    if not tail.behind:
                        changed |= self.previews.pop(name, None) is not None
                        break
            return changed

    def streams(self, wanted: tuple[str, ...]) -> list[str]:
        """Names of the streams that there are, of the ``wanted`` kinds."""
        return [name for name in self.tails if name.partition("-")[0] in wanted or name in wanted]

    def history(self, stream: str, points: int) -> tuple[bytes, tuple[int, int]]:
        """A frame of all rows, and the cursor (generation, rows) that follows it."""
        preview = self.previews.get(stream)
        columns = preview or self.tails[stream].columns
        # The cursor of a preview matches no generation, so the complete history follows.
        cursor = (-1, 0) if preview else (columns.generation, columns.rows)
        key = ("history", stream, cursor, points)
        if key not in self._frames:
            self._frames[key] = self._frame("history", stream, columns, 0, columns.rows, points, preview=bool(preview))
        return self._frames[key], cursor

    def delta(self, stream: str, start: int) -> bytes:
        """A frame of the rows from ``start`` on, which are at most :data:`FULL_ROWS`."""
        columns = self.tails[stream].columns
        key = ("delta", stream, columns.generation, start)
        if key not in self._frames:
            self._frames[key] = self._frame("delta", stream, columns, start, columns.rows)
        return self._frames[key]

    def range(self, stream: str, low: float | None, high: float | None, points: int, request: Any) -> bytes:
        """A frame of the rows with ``low`` ≤ x ≤ ``high``."""
        columns = self.tails[stream].columns
        return self._frame("range", stream, columns, *columns.between(low, high), points, request=request)

    def _frame(
        self, kind: str, stream: str, columns: Columns, start: int, end: int, points: int | None = None, **more: Any
    ) -> bytes:
        part, thin = columns.part(start, end, points)
        header = {
            "kind": kind,
            "run": self.name,
            "stream": stream,
            "x": columns.x,
            "generation": columns.generation,
            "start": start,
            "rows": end - start,
            "total": columns.rows,
            "downsampled": thin,
            "preview": False,
            "cut": columns.cut,
        }
        return pack(header | more, part)

    def _look(self) -> bool:
        """Check for new streams, state and epochs; return whether state or epochs changed."""
        for name, path, x in self._find():
            if name not in self.tails:
                self.tails[name] = Tail(path, x)
                self._begin(name)
        try:
            version, summary = self._index.version(self.name)
        except LockstepError as error:
            gone, self.gone = self.gone, error.code == "RUN_NOT_FOUND"
            return gone != self.gone
        changed = version != self.summary_version
        self.summary, self.summary_version = summary, version
        stamp = (modified_ns(self._run.metrics_file), self._attempts_stamp)
        if stamp != self._epochs_stamp:
            self._epochs_stamp = stamp
            try:
                self.epochs = self._run.epochs()
            except RunFolderError:
                self.epochs = []
            self.epochs_version += 1
            changed = True
        return changed

    def _find(self) -> Iterator[tuple[str, Path, str]]:
        yield "steps", self._run.steps_file, "step"
        for file in (self._run.evaluations_file, self._run.ranks_file):
            if file.exists():
                yield file.stem, file, "step"
        for file in sorted(self._run.path.glob("system-*.jsonl"))[:64]:
            yield file.stem, file, "time"

    def _notice_attempts(self) -> bool:
        """A new attempt supersedes rows: read the streams again."""
        stamp = modified_ns(self._run.attempts)
        if stamp == self._attempts_stamp:
            return False
        self._attempts_stamp = stamp
        attempts = self._run.resumed_from()
        if attempts == self._attempts:
            return False
        self._attempts = attempts
        for name in self.tails:
            self._begin(name)
        return True

    def _begin(self, name: str) -> None:
        tail = self.tails[name]
        tail.restart(self._attempts)
        preview = tail.sample()
        if preview is not None and preview.rows:
            self.previews[name] = preview
            tail.behind = True
