"""SQLite's part of a filter's condition. SQLite has no decimals, so its connections get functions."""

from __future__ import annotations

import sqlite3
from decimal import Decimal

from outbox.model.filter.expression import number_of
from outbox.store.dialects.filtering import Filtering

_PATH = "'$.\"' || {name} || '\"'"

FILTERING = Filtering(
    text="{text}",
    header="CASE WHEN json_valid(headers) THEN"
    f" CASE json_type(headers, {_PATH}) WHEN 'text' THEN json_extract(headers, {_PATH}) END END",
    holds="instr(headers, {text}) > 0",
    escaped=r"instr(headers, '\') > 0",
    # As bytes, because what an escape of half a pair stands for is no text that Python could be given.
    number="outbox_number(CAST({text} AS blob))",
    literal="{text}",
    compare="(outbox_compare({left}, {right}) {sign} 0)",
    fence="",
)


def add_functions(driver: sqlite3.Connection) -> None:
    """Give a connection the functions of `FILTERING`."""
    driver.create_function("outbox_number", 1, _number, deterministic=True)
    driver.create_function("outbox_compare", 2, _compare, deterministic=True)


def _number(text: bytes | None) -> str | None:
    found = (text or b"").decode("ascii", "replace")
    return None if number_of(found) is None else found


def _compare(left: str | None, right: str | None) -> int | None:
    """Return -1, 0 or 1 for the texts of two numbers; None without one of them."""
    if left is None or right is None:
        return None
    one, other = Decimal(left), Decimal(right)
    return (one > other) - (one < other)
