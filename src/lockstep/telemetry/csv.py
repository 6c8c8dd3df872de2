"""``logs/metrics.csv``: every logged number, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from lockstep.events import Event, RunStarted
from lockstep.telemetry.files import write_text
from lockstep.telemetry.scalars import named_scalars


class CsvSink:
    """A line an event, a column a name (:func:`~lockstep.telemetry.scalars.named_scalars`), empty where it has none.

    Args:
        file: a resumed run appends to it, after removing superseded rows.
    """

    name = "CSV"

    def __init__(self, file: Path) -> None:
        self._file = file
        self._columns = ["step"]

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            kept = [row for row in self._read() if event.step and int(row["step"]) <= event.step]
            self._columns = list(kept[0]) if kept else ["step"]
            self._rewrite(kept)
        step, values = named_scalars(event)
        if not values:
            return
        row = {"step": str(step), **{name: repr(value) for name, value in values.items()}}
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self._read()
            self._columns += new
            self._rewrite([*rows, row])
            return
        with self._file.open("r+", encoding="utf-8", newline="") as file:  # a file that was removed is not made again
            file.seek(0, io.SEEK_END)
            self._writer(file).writerow(row)

    def close(self) -> None:
        pass

    def _read(self) -> list[dict[str, str]]:
        if not self._file.exists():
            return []
        with self._file.open(encoding="utf-8", newline="") as file:
            # The last line may be torn: a writer was killed.
            return [row for row in csv.DictReader(file) if row["step"].isdigit() and None not in row.values()]

    def _rewrite(self, rows: Sequence[dict[str, str]]) -> None:
        """The whole file, with the columns that there are now."""
        text = io.StringIO(newline="")
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(rows)
        write_text(self._file, text.getvalue(), durable=False)

    def _writer(self, file: io.TextIOBase | io.StringIO) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
