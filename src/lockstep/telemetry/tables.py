"""Tables, drawn on a terminal, plain aligned text elsewhere, never truncated in a pipe; and figures as files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    """Print ``rows`` under the headings ``columns`` (texts, one per column; all empty: no heading)."""
    if not is_terminal(stream):
        say("\n".join(aligned([columns, *rows] if any(columns) else rows)), stream)
        return
    rich_console(stream).print(drawn(columns, rows))


def drawn(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for position, column in enumerate(columns):
        # The first column is never truncated; long texts at the end of a row are wrapped.
        table.add_column(column, overflow="fold", no_wrap=position == 0, style="bold" if position == 0 else None)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns two blanks apart."""
    widths = [max(len(row[position]) for row in rows) for position in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def say(text: str, stream: TextIO) -> None:
    """Print ``text``; characters that the stream cannot encode become question marks."""
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no such method; a closed stream
        return False


def rich_console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, emoji=False)


def print_styled(console: Console, text: str, style: str) -> None:
    """One line of ``text`` as it is: no markup in it, no wrapping, the style on it alone."""
    from rich.text import Text

    console.print(Text(text, style=style), soft_wrap=True)


def save_figure(figure: Figure, file: Path, *, dpi: int = 120) -> Path:
    """Write a matplotlib figure to ``file`` as a PNG. Raises :class:`~lockstep.errors.StorageError`."""
    from lockstep.telemetry.files import write_bytes

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=dpi)
    write_bytes(file, png.getvalue())
    return file
