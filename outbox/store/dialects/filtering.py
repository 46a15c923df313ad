"""The parts of a filter's condition in which databases differ; needs no driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtering:
    """Parts of a condition in the SQL of one database. No part ever raises, whatever a row holds."""

    #: The parameter or the literal `{text}` as a text, and nothing else.
    text: str
    #: The text of the header `{name}` out of the column `headers`; null without the header, or if its value is no text.
    #: `{begin}` is what stands before the text in plain JSON: `"name":"`.
    header: str
    #: The column `headers` holds the text `{text}` as it is; and it holds a backslash, of an escape.
    holds: str
    escaped: str
    #: A number out of the text `{text}`, null if it is none; and out of a text that is one.
    number: str
    literal: str
    #: Two numbers compared by `{sign}`.
    compare: str
    #: The end of a subquery whose columns are to be computed once.
    fence: str
