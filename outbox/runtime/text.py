"""Text for people: other people's text in one line, lengths of time, numbers of things."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_MOST_TEXT = 500
_NUMBER = re.compile(r"\d+")


def one_line(text: object, most: int = _MOST_TEXT) -> str:
    """Return other people's text as one line, safe for a terminal and for a log; cut if long."""
    line = " ".join(str(text).split())
    if len(line) > most:
        line = f"{line[: most - 1]}…"
    return line if line.isprintable() else "".join(each if each.isprintable() else "\ufffd" for each in line)


def without_numbers(error: str | None) -> str:
    """Return what errors have in common that differ in ids, sizes and times alone."""
    return _NUMBER.sub("#", error or "")


def age(seconds: float) -> str:
    """Return a length of time for people to read, such as "42 s" or "1.5 h"."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds)} s"


def in_utc(moment: datetime) -> str:
    """Return a moment for people to read, such as "2026-01-31 12:00:07 UTC"."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def counted(number: object, noun: str, verbs: tuple[str, str] | None = None) -> str:
    """Return "1 message", "2 messages" or "~10000 messages", followed by one of the `verbs` ("waits", "wait").

    `number` may be a count that marks an estimate.
    """
    one = str(number) == "1"
    said = f"{number} {noun}{'' if one else 's'}"
    return said if verbs is None else f"{said} {verbs[0 if one else 1]}"


def labelled(label: str, name: str, text: str) -> str:
    """Return `label: text`, with a common subscription's name only once. `name`: the name at the end of the label."""
    if not label.endswith(name):
        return f"{label}: {text}"
    where = label.removesuffix(name).rstrip()
    if text.startswith((f"{name}: ", f"{name} ")):
        return f"{where} {text}".lstrip()
    if text.startswith((f"subscription {name!r}", f"subscription {name}: ", f"subscription {name} ")):
        return f"{where}: {text}" if where else text
    return f"{label}: {text}"


def without_server(error: str, destination: str) -> str:
    """Return a sender's error without the server's name, if `destination`, shown beside it, has the same name."""
    scheme, separator, rest = destination.partition("://")
    server = f"{scheme}{separator}{rest.partition('/')[0]}"
    return error.replace(f"{server}: ", "") if separator else error


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}".removesuffix(".0")
