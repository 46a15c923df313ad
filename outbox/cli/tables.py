"""Tables that show the same at any width: what does not fit is folded, or shown one field a line, and never cut off."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

#: The least widths of a column that is folded, and of a text in the last column.
_NARROWEST = 12
_NARROWEST_TEXT = 24


def table_lines(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    whole: Sequence[str] = (),
    width: int | None = None,
) -> list[str]:
    """Lay out rows in aligned columns; return the lines.

    `width`: the columns of the terminal; None: each row has one line, as wide as it needs. `numbers`: the headers of
    columns that are aligned right. They are never folded, nor are those in `whole`, whose cells people copy from the
    screen. If the width is too small, long cells are folded over several lines. Or a text in the last column stands
    below its row. Or every field has a line of its own.
    """
    natural = [max(shown_width(text) for text in column) for column in zip(headers, *rows, strict=True)]
    right = [header in numbers for header in headers]
    fixed = [header in numbers or header in whole for header in headers]
    if width is None:
        return list(_lines([headers, *rows], natural, right, gap=2))
    for gap in (2, 1):
        if sum(natural) + gap * (len(natural) - 1) <= width:
            return _ruled(headers, rows, natural, right, gap)
    if natural[-1] > _NARROWEST_TEXT:
        widths = _fitted(headers[:-1], natural[:-1], fixed, width - 1)
        if widths is not None and width - sum(widths) - len(widths) < min(natural[-1], _NARROWEST_TEXT):
            return _ruled_with_texts(headers, rows, widths, right, width)
    fitted = _fitted(headers, natural, fixed, width)
    return _records(headers, rows, width) if fitted is None else _ruled(headers, rows, fitted, right, 1)


def shown_width(text: str) -> int:
    """Return how many columns a text takes on a terminal: letters of East Asia take two, accents none."""
    if text.isascii():
        return len(text)
    return sum(map(_width, text))


def folded(text: str, width: int) -> list[str]:
    """Split a text into lines of at most this width: at blanks if there are any, else anywhere."""
    lines: list[str] = []
    line, used = "", 0
    for letter in text:
        if used + _width(letter) > width:
            if letter == " ":
                lines.append(line.rstrip())
                line, used = "", 0
                continue
            head, _, tail = line.rpartition(" ")
            whole = bool(head.strip())
            lines.append(head.rstrip() if whole else line)
            line = tail if whole else ""
            used = shown_width(line)
        line += letter
        used += _width(letter)
    return [*lines, line] if line or not lines else lines


def _width(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _fitted(headers: Sequence[str], natural: Sequence[int], fixed: Sequence[bool], width: int) -> list[int] | None:
    """Return widths that fit, with the widest columns made narrower; None if they would be too narrow to read."""
    least = [
        each if stays else min(each, max(_NARROWEST, shown_width(header)))
        for header, each, stays in zip(headers, natural, fixed, strict=False)
    ]
    widths, left = list(natural), width - (len(natural) - 1)
    while sum(widths) > left:
        column = max(range(len(widths)), key=lambda each: widths[each] - least[each])
        if widths[column] <= least[column]:
            return None
        widths[column] -= 1
    return widths


def _ruled(
    headers: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool], gap: int
) -> list[str]:
    rule = "─" * (sum(widths) + gap * (len(widths) - 1))
    return [*_lines([headers], widths, right, gap), rule, *_lines(rows, widths, right, gap)]


def _ruled_with_texts(
    headers: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool], width: int
) -> list[str]:
    lines = [*_lines([headers[:-1]], widths, right, 1), f"  {headers[-1]}", "─" * width]
    for row in rows:
        lines += _lines([row[:-1]], widths, right, 1)
        lines += [f"  {line}" for line in folded(row[-1], width - 2) if line]
    return lines


def _lines(rows: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool], gap: int) -> Iterator[str]:
    for row in rows:
        cells = [folded(text, width) for text, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            aligned = [
                " " * (width - shown_width(part)) + part if fixed else part + " " * (width - shown_width(part))
                for part, width, fixed in zip(parts, widths, right, strict=False)
            ]
            yield (" " * gap).join(aligned).rstrip()


def _records(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return one line for each field, and an empty line between two rows."""
    names = max(map(shown_width, headers)) + 2
    lines: list[str] = []
    for row in rows:
        lines += [""] if lines else []
        for header, text in zip(headers, row, strict=True):
            first, *rest = folded(text, max(_NARROWEST, width - names))
            lines += [f"{header:{names}}{first}".rstrip(), *(f"{'':{names}}{line}" for line in rest)]
    return lines
