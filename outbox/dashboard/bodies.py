"""Bodies of messages for people to read: as text, as JSON with every number as it was written, or as hex."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from outbox.dashboard.values import marked

Kind = Literal["empty", "text", "json", "hex"]

#: So many bytes of a body are shown.
MOST_BYTES = 64 * 1024
#: Bytes that are text have at most this share of control characters.
_MOST_CONTROL = 0.1
#: JSON that is nested deeper is not indented further, or a small body would become a page of blanks.
_DEEPEST = 16
#: What a charset may be called; other names are taken for UTF-8. Python knows some whose decoding takes minutes.
_CHARSETS = {"iso-8859-1": "latin-1", "latin1": "latin-1", "windows-1252": "cp1252", "utf-16": "utf-16"}
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([\w.:-]+)", re.IGNORECASE)
_WORD = re.compile(
    r"""\s*("[^"\\]*(?:\\.[^"\\]*)*" | -?\d[\d.eE+-]* | true | false | null | [{}\[\]:,])\s*""",
    re.VERBOSE | re.DOTALL,
)
_LINE_ENDS = "\n\t"
_A_LINE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBody:
    """A body as a page shows it.

    Attributes:
        kind: `json` is text with line ends and blanks added between its tokens.
        text: HTML for a `pre`.
        size: of the whole body, in bytes.
        cut: only the first 64 KiB are shown.
        note: kind and size in words.
    """

    kind: Kind
    text: Markup
    size: int
    cut: bool
    note: str


def shown(body: bytes, content_type: str | None = None, headers: Mapping[str, str] | None = None) -> ShownBody:
    """Return a body for people: JSON and text where the bytes are such, else hex; at most 64 KiB of it.

    Args:
        body: the bytes as they were written.
        content_type: as the message says; JSON without one is known by its first character.
        headers: of the message. A compressed body stays compressed, because a small one may be huge.
    """
    packed = next((v for k, v in (headers or {}).items() if k.lower() == "content-encoding" and v != "identity"), None)
    part, cut = body[:MOST_BYTES], len(body) > MOST_BYTES
    text = None if packed else _decoded(part, content_type or "", cut=cut)
    json_text = None if text is None else _indented(text, content_type, cut=cut)
    kind: Kind
    if not body:
        kind, said, html = "empty", "empty", Markup("")
    elif json_text is not None:
        kind, said, html = "json", "JSON, indented", marked(json_text, besides=_LINE_ENDS)
    elif text is not None:
        kind, said, html = "text", "text", marked(text, besides=_LINE_ENDS)
    else:
        kind, said, html = "hex", "bytes", Markup("{}").format(_hex(part))
        said += f", packed with {packed}" if packed else ""
    size = _size(len(body))
    note = said if not body else f"{said}, the first {_size(MOST_BYTES)} of {size}" if cut else f"{said}, {size}"
    return ShownBody(kind=kind, text=html, size=len(body), cut=cut, note=note)


def _decoded(part: bytes, content_type: str, *, cut: bool) -> str | None:
    """Return the text of a body, or of its beginning, whose last character may be cut through; None: no text."""
    named = _CHARSET.search(content_type)
    charset = _CHARSETS.get(named[1].lower(), "utf-8") if named else "utf-8"
    try:
        text = codecs.getincrementaldecoder(charset)().decode(part, final=not cut)
    except UnicodeDecodeError:
        return None
    control = sum(each < " " and each not in "\t\n\r" for each in text)
    return text if control <= _MOST_CONTROL * len(text) else None


def _indented(text: str, content_type: str | None, *, cut: bool) -> str | None:
    """Return JSON with a line for each value; None: it is none. No value is read, so none is changed or rounded."""
    if content_type is not None and "json" not in content_type.lower():
        return None
    if not text.lstrip().startswith(("{", "[")):
        return None
    if not cut and not _is_json(text):
        return None
    lines, at, depth, begins = list[str](), 0, 0, False
    while found := _WORD.match(text, at):
        word, at = found[1], found.end()
        if word in ("}", "]"):
            depth -= 1
            lines.append(word if begins else _line(depth) + word)
            begins = False
            continue
        if begins:
            lines.append(_line(depth))
        begins = word in ("{", "[")
        depth += begins
        lines.append(word + {":": " ", ",": _line(depth)}.get(word, ""))
    rest = text[at:]
    if begins and rest:
        lines.append(_line(depth))
    # The cut goes through a string, or through a short word.
    return "".join([*lines, rest]) if not rest or (cut and (rest[0] == '"' or len(rest) < len("false"))) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _line(depth: int) -> str:
    return "\n" + "  " * max(0, min(depth, _DEEPEST))


def _hex(part: bytes) -> str:
    lines = (part[at : at + _A_LINE] for at in range(0, len(part), _A_LINE))
    return "\n".join(f"{n * _A_LINE:08x}  {line.hex(' '):47}  {_ascii(line)}" for n, line in enumerate(lines))


def _ascii(line: bytes) -> str:
    return "".join(chr(each) if 0x20 <= each < 0x7F else "." for each in line)


def _size(number: int) -> str:
    for size, unit in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{number} bytes" if number != 1 else "1 byte"
