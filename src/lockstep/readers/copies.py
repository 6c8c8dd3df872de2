"""Rows of files through Hugging Face `datasets`: copied once into its memory-mapped files, or as a stream."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import datasets
from datasets.exceptions import DatasetGenerationError

from lockstep.errors import DataError, LockstepError

_log = logging.getLogger(__name__)


class Source(Protocol):
    """Files with rows: ``tables(number)`` reads those of a file as Arrow tables."""

    files: list[str]
    suffixes: tuple[str, ...]

    def tables(self, number: int) -> Iterator[Any]: ...


class _Builder(datasets.ArrowBasedBuilder):  # type: ignore[misc, unused-ignore]
    """What `datasets` asks of a file format."""

    def __init__(self, source: Source, folder: Path) -> None:
        self._source = source
        super().__init__(cache_dir=str(folder), dataset_name="rows")

    def _info(self) -> Any:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[Any]:
        numbers = [*range(len(self._source.files))]
        return [datasets.SplitGenerator(name="train", gen_kwargs={"numbers": numbers})]

    def _generate_tables(self, numbers: list[int]) -> Iterator[tuple[tuple[int, int], Any]]:
        rows = 0
        for number in numbers:
            try:
                for part, table in enumerate(self._source.tables(number)):
                    # The metadata of a table of `datasets` has types of `datasets`; the file's types stay.
                    plain = table.replace_schema_metadata(None)
                    datasets.Features.from_arrow_schema(plain.schema)
                    rows += len(plain)
                    yield (number, part), plain
            except LockstepError:
                raise
            except Exception as error:  # of pyarrow, tarfile, csv or a file system
                raise DataError(
                    f"{self._source.files[number]} cannot be read as {self._source.suffixes[0]}",
                    why=f"{type(error).__name__}: {error}",
                    fix="write it again, or leave it out",
                ) from error
        if not rows:
            raise DataError(
                f"the {len(self._source.files)} files have no sample",
                why=self._source.files[0],
                fix="check what wrote them",
            )


def copied(source: Source, folder: Path) -> Any:
    """Return the rows of ``source`` as a map-style data set of Arrow tables, whose files are in ``folder``.

    Raises:
        DataError: a file cannot be read, or the copy cannot be written.
    """
    if not folder.exists():
        _log.warning("the rows of %d files are copied once, to %s", len(source.files), folder)
    try:
        with _quiet():
            builder = _Builder(source, folder)
            builder.download_and_prepare()
            return builder.as_dataset("train").with_format("arrow")
    except (DatasetGenerationError, OSError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, LockstepError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from None
        raise DataError(
            f"the rows of {source.files[0]} cannot be copied to {folder}",
            why=f"{type(error).__name__}: {error.__cause__ or error}",
            fix="check the disk, or set LOCKSTEP_CACHE to a folder with room",
        ) from error


def streamed(source: Source, folder: Path) -> Any:
    """Return the rows of ``source`` as an iterable data set of Arrow tables, read from the files themselves."""
    return _Builder(source, folder).as_streaming_dataset("train").with_format("arrow")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show the progress bars of `datasets` in terminals only."""
    silences = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if silences:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if silences:
            datasets.enable_progress_bars()
