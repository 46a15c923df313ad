"""Single values in a page: other people's text with nothing hidden in it, and moments in UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from markupsafe import Markup, escape

from outbox.runtime.text import in_utc

#: Characters that may be unseen, such as NUL and changes of direction; `isprintable` decides.
_UNSAFE = re.compile(r"[^\x20-\x7e]")


def visible(text: object) -> Markup:
    """Return other people's text as one value of a page, as HTML; a direction of its own ends with it."""
    return Markup("<bdi>{}</bdi>").format(marked(str(text)))


def marked(text: str, *, besides: str = "") -> Markup:
    r"""Return text as HTML, with each character that no reader would see as a marked `\u202e`.

    Args:
        text: of somebody else.
        besides: characters that stay as they are, such as line ends.
    """

    def each(found: re.Match[str]) -> str:
        character = found[0]
        seen = character.isprintable() or character in besides
        return character if seen else f'<span class="control">{_escape(character)}</span>'

    # Of what stands in the place of a character, nothing but digits comes from outside.
    return Markup(_UNSAFE.sub(each, str(escape(text))))  # noqa: S704


def plain(text: object) -> str:
    r"""Return other people's text for an attribute: as `visible`, but without tags."""
    return _UNSAFE.sub(lambda found: found[0] if found[0].isprintable() else _escape(found[0]), str(text))


def in_words(value: object) -> str:
    """Return a value of a decision for people: a list with commas, a number without a needless fraction."""
    if isinstance(value, list):
        return ", ".join(map(in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def moment(at: datetime | None) -> Markup:
    """Return a moment as HTML; None: a dash."""
    if at is None:
        return Markup("–")  # noqa: RUF001  # a dash
    date, clock = in_utc(at).split(" ", 1)
    # The date is never cut in two; between both there is a line end where a table needs the room.
    shown = Markup('<time datetime="{}"><span>{}</span> <span>{}</span></time>')
    return shown.format(at.astimezone(UTC).isoformat(), date, clock)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
