"""PostgreSQL's INSERT. Few messages are rows of VALUES, many are arrays; columns that all leave empty are left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import chain
from typing import Any

from outbox.store.dialects.dialect import APPENDED
from outbox.store.dialects.postgresql.native import NATIVE
from outbox.store.dialects.statements import Row, Script, Statement

#: psycopg remembers how it parsed a statement of 50 parameters at most. With more of them arrays are quicker.
_MOST_PARAMETERS = 50

_TYPES = {
    "message_id": "uuid", "topic": "text", "key": "text", "slot": "smallint", "tags": "text", "headers": "text",
    "body": "text", "content_type": "text", "deliver_at": "text", "delay": "bigint", "expires_at": "text",
}  # fmt: skip
#: The values that stand for null in an array, because with `array_nulls = off` null itself would become a text. No
#: message has them as values.
_NOTHING = {
    "key": "", "tags": "", "headers": "", "content_type": "", "deliver_at": "", "delay": -1, "expires_at": "",
}  # fmt: skip
#: The expressions that make a row's values from elements of arrays, where these are not the values themselves.
_ELEMENTS = {
    **{name: f"nullif({name}, {nothing!r})" for name, nothing in _NOTHING.items()},
    "body": "decode(body, 'hex')",
    "expires_at": "CAST(nullif(expires_at, '') AS timestamptz)",
}
#: The columns of every message.
_ALWAYS = frozenset(("message_id", "topic", "slot", "body"))
#: Parameters that are not the value of their column as they are given.
_DERIVED = frozenset(("deliver_at", "delay"))
_TIMES = frozenset(("deliver_at", "expires_at"))


def append(names: Mapping[str, str], rows: Sequence[Row]) -> Script[None]:
    """Append any number of messages by one statement; ids follow the order of the list."""
    columns: dict[str, Sequence[Any]] = {
        name: column
        for name, column in zip(APPENDED, zip(*rows, strict=True), strict=True)
        if name in _ALWAYS or column.count(None) < len(rows)
    }
    if "delay" in columns:
        columns["delay"] = [_microseconds(delay) for delay in columns["delay"]]
    few = len(rows) * len(columns) <= _MOST_PARAMETERS
    text, parameters = _insert(tuple(columns), len(rows) if few else 0, names["message"], names["now"])
    bound: dict[str, Any]
    if few:
        bound = dict(zip(parameters, chain.from_iterable(columns.values()), strict=True))
    else:
        bound = {name: _array(name, column) for name, column in columns.items()}
    yield Statement(text, bound)


def _microseconds(delay: timedelta | None) -> int | None:
    """Return a delay in microseconds, because an interval of days would follow the time zone's changes of the clock."""
    return None if delay is None else delay // timedelta(microseconds=1)


def _array(name: str, column: Sequence[Any]) -> list[Any]:
    """Return a column as an array of values that mean the same with any settings of the server."""
    if name == "body":
        # In hexadecimal, because the driver's form of bytes in an array depends on standard_conforming_strings.
        return [body.hex() for body in column]
    nothing = _NOTHING.get(name)
    if name in _TIMES:
        return [nothing if moment is None else moment.isoformat() for moment in column]
    return [nothing if value is None else value for value in column] if None in column else list(column)


@lru_cache(maxsize=256)
def _insert(used: tuple[str, ...], rows: int, message: str, now: str) -> tuple[str, tuple[str, ...]]:
    """Return the statement for so many rows, 0 for arrays, with these columns; and the names of its parameters."""
    columns = [*(name for name in used if name not in _DERIVED), *_moments(now), "deliver_at"]
    into = f"INSERT INTO {message} ({', '.join(columns)})"
    if rows:
        # The rows of VALUES draw their ids one after the other, in their order.
        lines = [_line(used, f":{{}}_{row}".format, now) for row in range(rows)]
        values = f"{into} VALUES {', '.join(f'({line})' for line in lines)}"
        return values, tuple(f"{name}_{row}" for name in used for row in range(rows))
    arrays = ", ".join(f"CAST(:{name} AS {_TYPES[name]}[])" for name in used)
    line = _line(used, lambda name: _ELEMENTS.get(name, name), now)
    unnested = f"unnest({arrays}) WITH ORDINALITY AS m({', '.join(used)}, place)"
    return f"{into} SELECT {line} FROM {unnested} ORDER BY place", used


def _line(used: Collection[str], given: Callable[[str], str], now: str) -> str:
    """Return the values of one row as SQL; `given` makes the expression of a parameter from its column's name."""
    values = [given(name) for name in used if name not in _DERIVED]
    moments = []
    if "deliver_at" in used:
        moments.append(f"CAST({given('deliver_at')} AS timestamptz)")
    if "delay" in used:
        moments.append(f"{now} + CAST({given('delay')} AS bigint) * interval '1 microsecond'")
    deliver_at = f"coalesce({', '.join(moments)})" if moments else "NULL"
    return ", ".join([*values, *(now for _ in _moments(now)), deliver_at])


def _moments(now: str) -> tuple[str, ...]:
    """Return the columns that get the moment of now: none with the server's clock, which is their default."""
    return () if now == NATIVE.now else ("created_at",)
