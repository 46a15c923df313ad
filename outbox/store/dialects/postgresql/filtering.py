"""PostgreSQL's part of a filter's condition."""

from __future__ import annotations

from outbox.model.filter.expression import LONGEST_NUMBER, NUMBER
from outbox.store.dialects.filtering import Filtering


def _matches(value: str, form: str) -> str:
    """Return the condition that a text has a form. Collation C is faster; the form has no quote and no `:name`."""
    # An E literal means the same with every setting of the server.
    return f"{value} COLLATE \"C\" ~ E'^{form}$'".replace("\\", "\\\\")


def _object(text: str) -> str:
    """Return the form of a JSON object of such texts."""
    pair = f'"{text}" *: *"{text}" *'
    return f"[{{] *(?:{pair}(?:, *{pair})*)?[}}]"


_ESCAPED = r'[^"\\\x01-\x1f]|\\["\\/bfnrt]'
_HEX = "[0-9a-fA-F]"
#: All escapes that `->>` can read: not those of NUL and of half a pair.
_CODE = (
    rf"\\u(?:[1-9a-cA-CefEF]{_HEX}{{3}}|0[1-9a-fA-F]{_HEX}{{2}}|00[1-9a-fA-F]{_HEX}|000[1-9a-fA-F]"
    rf"|[dD](?:[0-7]{_HEX}{{2}}|[89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}))"
)
#: As the library writes headers, and with what else other writers may write. The first is twice as fast.
_PLAIN, _ANY = _object(f"(?:{_ESCAPED})*"), _object(f"(?:{_ESCAPED}|{_CODE})*")

FILTERING = Filtering(
    text="CAST({text} AS text)",
    # A cast of anything else would be an error, and stop the reader at this row for ever.
    headers=f"CASE WHEN {_matches('headers', _PLAIN)} OR {_matches('headers', _ANY)} THEN CAST(headers AS json) END",
    header="({headers} ->> {name})",
    number=f"CASE WHEN length({{text}}) <= {LONGEST_NUMBER} AND {_matches('{text}', NUMBER)}"
    " THEN CAST({text} AS numeric) END",
    literal="CAST({text} AS numeric)",
    compare="({left} {sign} {right})",
    fence=" OFFSET 0",
)
