"""PostgreSQL's part of a filter's condition."""

from __future__ import annotations

from outbox.model.filter.expression import LONGEST_NUMBER, NUMBER
from outbox.store.dialects.filtering import Filtering


def _matches(value: str, form: str) -> str:
    """Return the condition that a text has a form. Collation C is faster; the form has no quote and no `:name`."""
    # An E literal means the same with every setting of the server.
    return f"{value} COLLATE \"C\" ~ E'^{form}$'".replace("\\", "\\\\")


_X = "[0-9a-fA-F]"
#: All escapes that `->>` can read: not those of NUL and of half a pair. Without braces, which templates would fill in.
_CODE = (
    rf"\\u(?:[1-9a-cA-CefEF]{_X}{_X}{_X}|0[1-9a-fA-F]{_X}{_X}|00[1-9a-fA-F]{_X}|000[1-9a-fA-F]"
    rf"|[dD](?:[0-7]{_X}{_X}|[89abAB]{_X}{_X}\\u[dD][c-fC-F]{_X}{_X}))"
)
_TEXT = rf'"(?:[^"\\\x01-\x1f]|\\["\\/bfnrt]|{_CODE})*"'
_PAIR = f"{_TEXT} *: *{_TEXT} *"
#: A JSON object of texts; the braces are those of a template.
_OBJECT = f"[{{{{] *(?:{_PAIR}(?:, *{_PAIR})*)?[}}}}]"
#: Headers without escapes, as the library writes most. No quote is part of a text there, so the header's name with the
#: marks of JSON around it stands nowhere else, and plain searches find the text in a fifth of the time.
_SEARCHED = r"""CASE WHEN strpos(headers, E'\\') = 0
    THEN nullif(split_part(split_part(headers, {begin}, 2), '"', 1), '') END"""
#: A cast of what is no JSON would be an error, and stop the reader at this row for ever.
_PARSED = rf"""CASE WHEN strpos(headers, E'\\') > 0 OR strpos(headers, {{name}}) > 0
    THEN CASE WHEN {_matches("headers", _OBJECT)} THEN CAST(headers AS json) ->> {{name}} END END"""
#: Nearly every number has digits and perhaps a point, which takes no regular expression to see. Bytes are trimmed in a
#: third of the time that letters take; without a backslash every text can be cast.
_IS_PLAIN = r"""strpos({text}, E'\\') = 0 AND {text} NOT IN ('', '.')
    AND position(btrim(CAST({text} AS bytea), CAST('0123456789' AS bytea)) IN CAST('.' AS bytea)) > 0"""

FILTERING = Filtering(
    text="CAST({text} AS text)",
    header=f"coalesce({_SEARCHED}, {_PARSED})",
    holds="strpos(headers, {text}) > 0",
    escaped=r"strpos(headers, E'\\') > 0",
    number=f"CASE WHEN octet_length({{text}}) <= {LONGEST_NUMBER} AND (({_IS_PLAIN}) OR {_matches('{text}', NUMBER)})"
    " THEN CAST({text} AS numeric) END",
    literal="CAST({text} AS numeric)",
    compare="({left} {sign} {right})",
    fence=" OFFSET 0",
)
