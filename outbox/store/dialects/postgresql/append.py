"""PostgreSQL's INSERT. Few messages are rows of VALUES, many are arrays; columns that all leave empty are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from outbox.store.dialects.dialect import APPENDED
from outbox.store.dialects.statements import Row, Script, Statement

#: psycopg remembers how it parsed a statement of 50 parameters at most, with the name of the compensation. With more of
#: them arrays are quicker.
_MOST_PARAMETERS = 49

_TYPES = {
    "message_id": "uuid", "topic": "text", "key": "text", "slot": "smallint", "tags": "text", "headers": "text",
    "body": "text", "content_type": "text", "deliver_at": "text", "delay": "bigint", "expires_at": "text",
    "direct": "text",
}  # fmt: skip
#: The values that stand for null in an array, because with `array_nulls = off` null itself would become a text. No
#: message has them as values.
_NOTHING = {
    "key": "", "tags": "", "headers": "", "content_type": "", "deliver_at": "", "delay": -1, "expires_at": "",
    "direct": "",
}  # fmt: skip
#: The expressions that make a row's values from elements of arrays, where these are not the values themselves.
_ELEMENTS = {
    **{name: f"nullif({name}, {nothing!r})" for name, nothing in _NOTHING.items()},
    "body": "decode(body, 'hex')",
    "expires_at": "CAST(nullif(expires_at, '') AS timestamptz)",
}
#: Parameters that are not the value of their column as they are given.
_DERIVED = frozenset(("deliver_at", "delay", "direct"))
_TIMES = frozenset(("deliver_at", "expires_at"))
#: A message is marked only where the compensation exists. The transaction may be in another database than its writer
#: thinks, or the subscription may have been dropped; then only the relay would send the message.
_KNOWN_DIRECT = """
    CASE WHEN EXISTS (SELECT 1 FROM {subscription} WHERE name = CAST(:compensation AS text))
         THEN CAST({given} AS text) END"""


class _Shape(NamedTuple):
    """The facts that decide the text of the statement: the columns used, and the number of rows, 0 for arrays."""

    used: tuple[str, ...]
    rows: int


def append(
    names: Mapping[str, str], rows: Sequence[Row], *, compensation: str | None = None
) -> Script[list[tuple[int, bool]]]:
    """Append any number of messages by one statement; ids follow the order of the list."""
    shape, parameters = _bound(rows)
    if compensation is None:
        yield Statement(_insert(shape, names["message"], names["now"], None), parameters)
        return []
    parameters["compensation"] = compensation
    statement = _insert(shape, names["message"], names["now"], names["subscription"])
    found = yield Statement(statement, parameters, returns=True)
    return sorted((id, marked) for id, marked in found)


def _bound(rows: Sequence[Row]) -> tuple[_Shape, dict[str, Any]]:
    """Return the shape of the statement for these rows, and its parameters; columns that all leave empty have none."""
    used: list[str] = []
    columns: list[Sequence[Any]] = []
    for name, column in zip(APPENDED, zip(*rows, strict=True), strict=True):
        if column.count(None) < len(rows):
            used.append(name)
            columns.append(column if name != "delay" else [_microseconds(delay) for delay in column])
    if len(rows) * len(used) > _MOST_PARAMETERS:
        arrays = {name: _array(name, column) for name, column in zip(used, columns, strict=True)}
        return _Shape(tuple(used), 0), arrays
    shape = _Shape(tuple(used), len(rows))
    return shape, dict(zip(_numbered(shape), chain.from_iterable(columns), strict=True))


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
def _numbered(shape: _Shape) -> tuple[str, ...]:
    return tuple(f"{name}_{row}" for name in shape.used for row in range(shape.rows))


@lru_cache(maxsize=256)
def _insert(shape: _Shape, message: str, now: str, subscription: str | None) -> str:
    columns = [*(name for name in shape.used if name not in _DERIVED), "created_at", "deliver_at", "direct"]
    into = f"INSERT INTO {message} ({', '.join(columns)})"
    returning = "" if subscription is None else " RETURNING id, direct IS NOT NULL"
    if shape.rows:
        # The rows of VALUES draw their ids one after the other, in their order.
        lines = [_line(shape, f":{{}}_{row}".format, now, subscription) for row in range(shape.rows)]
        return f"{into} VALUES {', '.join(f'({line})' for line in lines)}{returning}"
    arrays = ", ".join(f"CAST(:{name} AS {_TYPES[name]}[])" for name in shape.used)
    line = _line(shape, lambda name: _ELEMENTS.get(name, name), now, subscription)
    unnested = f"unnest({arrays}) WITH ORDINALITY AS m({', '.join(shape.used)}, place)"
    return f"{into} SELECT {line} FROM {unnested} ORDER BY place{returning}"


def _line(shape: _Shape, given: Callable[[str], str], now: str, subscription: str | None) -> str:
    """Return the values of one row as SQL; `given` makes the expression of a parameter from its column's name."""
    values = [given(name) for name in shape.used if name not in _DERIVED]
    moments = []
    if "deliver_at" in shape.used:
        moments.append(f"CAST({given('deliver_at')} AS timestamptz)")
    if "delay" in shape.used:
        moments.append(f"{now} + CAST({given('delay')} AS bigint) * interval '1 microsecond'")
    deliver_at = f"coalesce({', '.join(moments)})" if moments else "NULL"
    direct = "NULL"
    if subscription is not None and "direct" in shape.used:
        direct = _KNOWN_DIRECT.format(subscription=subscription, given=given("direct"))
    return ", ".join((*values, now, deliver_at, direct))
