"""Tables as text: as wide as the terminal, and one line a row in a pipe. No cell is cut."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import click


class Alarm(str):
    """A cell about something that a person has to do; a terminal shows the cell in red."""

    __slots__ = ()


def table_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = (), width: int | None = None
) -> list[str]:
    """Lay out rows in aligned columns; return the lines.

    `numbers`: the headers of columns that are aligned right. `width`: the columns of the terminal; None: each row has
    one line. Where a row is too wide for the terminal, its last cell stands on a line below. Where the other cells are
    too wide as well, each cell has a line of its own.
    """
    widths = [max(map(shown_width, column)) for column in zip(headers, *rows, strict=True)]

    def line(cells: Sequence[str], gap: int = 1) -> str:
        columns = zip(cells, widths, headers, strict=False)
        return (" " * gap).join(_aligned(cell, size, right=name in numbers) for cell, size, name in columns).rstrip()

    if width is None:
        return [line(row, 2) for row in (headers, *rows)]
    for gap in (2, 1):
        whole = sum(widths) + gap * (len(widths) - 1)
        if whole <= width:
            return [line(headers, gap), "─" * whole, *(line(row, gap) for row in rows)]
    if sum(widths[:-1]) + len(widths) - 2 <= width:
        body = [text for row in rows for text in (line(row[:-1]), f"  {row[-1]}") if text.strip()]
        return [line(headers[:-1]), f"  {headers[-1]}", "─" * width, *body]
    names = max(map(len, headers)) + 2
    fields = [[f"{name:{names}}{cell}".rstrip() for name, cell in zip(headers, row, strict=True)] for row in rows]
    return [text for row in fields for text in (*row, "")][:-1]


def shown_width(text: str) -> int:
    """Return how many columns a text takes on a terminal: letters of East Asia take two, accents none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)


def _aligned(cell: str, width: int, *, right: bool) -> str:
    shown = click.style(cell, fg="red", bold=True) if isinstance(cell, Alarm) else cell
    blanks = " " * (width - shown_width(cell))
    return blanks + shown if right else shown + blanks
