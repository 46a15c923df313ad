"""Statements apart from connections: written once, run on any connection of the application.

A script is a generator that yields one statement after the other, and is sent the rows of each. `run` and `arun` drive
a script on a connection of SQLAlchemy or of psycopg, blocking or awaited.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg.rows import tuple_row
from sqlalchemy import Connection, TextClause, text

R = TypeVar("R")

Row = tuple[Any, ...]
Parameters = Mapping[str, Any]
NONE: Parameters = {}

_PARAMETER = re.compile(r"(?<!:):([a-z][a-z0-9_]*)")


class Sql(str):
    """A complete statement, with nothing left to fill in. A text that holds data has to be a `Sql`."""

    __slots__ = ()


class Statement(NamedTuple):
    """SQL with `:name` parameters; with a list of parameters the SQL runs once for each.

    `returns`: the rows are wanted. `counts`: a row with the number of touched rows is wanted.
    """

    sql: str
    parameters: Parameters | list[Parameters] = NONE
    returns: bool = False
    counts: bool = False

    @property
    def bound(self) -> dict[str, Any]:
        """The parameters, which are not a list of them."""
        assert isinstance(self.parameters, dict), "a list of parameters is for databases without round trips"
        return self.parameters


#: Yields statements, is sent their rows, and returns a result in the end.
Script = Generator[Statement, Sequence[Row], R]


class Telling(NamedTuple):
    """A statement that writes, and tells of the written rows: `returns` them, or has a statement for `reading` them."""

    write: Sql
    reading: Sql | None = None
    returns: bool = False

    def __call__(self, bound: Parameters) -> Script[Sequence[Row]]:
        """Write, and return the rows; empty ones if there is neither."""
        if self.returns:
            return (yield Statement(self.write, bound, returns=True))
        ((touched,),) = yield Statement(self.write, bound, counts=True)
        if touched and self.reading is not None:
            return (yield Statement(self.reading, bound, returns=True))
        return [()] * touched


Execute = Callable[[Statement], Sequence[Row]]


def run(execute: Execute, steps: Script[R]) -> R:
    """Run a script on a blocking connection, and return the result."""
    try:
        statement = next(steps)
        while True:
            statement = steps.send(execute(statement))
    except StopIteration as stop:
        result: R = stop.value
        return result


async def arun(execute: Callable[[Statement], Awaitable[Sequence[Row]]], steps: Script[R]) -> R:
    """Run a script on an awaited connection, and return the result."""
    try:
        statement = next(steps)
        while True:
            statement = steps.send(await execute(statement))
    except StopIteration as stop:
        result: R = stop.value
        return result


def executor(connection: Connection | psycopg.Connection[Any] | sqlite3.Connection) -> Execute:
    """Return the function that executes statements on this connection."""
    if isinstance(connection, Connection):
        return _on_core(connection)
    return _on_sqlite(connection) if isinstance(connection, sqlite3.Connection) else _on_psycopg(connection)


def async_executor(connection: Any) -> Callable[[Statement], Awaitable[Sequence[Row]]]:
    """Return the function that executes statements on this connection of psycopg or asyncpg.

    For an async connection of SQLAlchemy use `executor` with its blocking inner connection.
    """
    return _on_async_psycopg(connection) if isinstance(connection, psycopg.AsyncConnection) else _on_asyncpg(connection)


def _on_async_psycopg(connection: psycopg.AsyncConnection[Any]) -> Callable[[Statement], Awaitable[Sequence[Row]]]:
    async def execute(statement: Statement) -> Sequence[Row]:
        # The connection's own cursor class may want other parameters and give other rows.
        cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
        await cursor.execute(pyformat(statement.sql).encode(), statement.bound)
        return await cursor.fetchall() if statement.returns else _counted(statement, cursor)

    return execute


def _on_asyncpg(connection: Any) -> Callable[[Statement], Awaitable[Sequence[Row]]]:
    async def execute(statement: Statement) -> Sequence[Row]:
        text, values = _with_numbers(statement)
        if statement.returns:
            return [tuple(row) for row in await connection.fetch(text, *values)]
        # "INSERT 0 3"
        answer: str = await connection.execute(text, *values)
        return [(int(answer.rpartition(" ")[2]),)] if statement.counts else ()

    return execute


def _on_core(connection: Connection) -> Execute:
    styled = _STYLES.get(connection.dialect.paramstyle)

    def execute(statement: Statement) -> Sequence[Row]:
        if styled is None:
            result = connection.execute(_text(statement.sql), statement.parameters)
            return result.all() if statement.returns else _counted(statement, result)
        # SQLAlchemy's compiler would cost as much as everything else that `send` does.
        result = connection.exec_driver_sql(*styled(statement))
        if not statement.returns:
            return _counted(statement, result)
        # Rows as the driver gives them, because making SQLAlchemy's rows costs a tenth of the whole statement.
        assert result.cursor is not None
        rows: Sequence[Row] = result.cursor.fetchall()
        result.close()
        return rows

    return execute


def _on_psycopg(connection: psycopg.Connection[Any]) -> Execute:
    def execute(statement: Statement) -> Sequence[Row]:
        cursor = psycopg.Cursor(connection, row_factory=tuple_row)
        cursor.execute(pyformat(statement.sql).encode(), statement.bound)
        return cursor.fetchall() if statement.returns else _counted(statement, cursor)

    return execute


def _on_sqlite(connection: sqlite3.Connection) -> Execute:
    def execute(statement: Statement) -> Sequence[Row]:
        # The connection's own row factory may give other rows.
        cursor = connection.cursor()
        cursor.row_factory = None
        if isinstance(statement.parameters, list):
            cursor.executemany(statement.sql, statement.parameters)
        else:
            cursor.execute(statement.sql, statement.parameters)
        return cursor.fetchall() if statement.returns else _counted(statement, cursor)

    return execute


def _counted(statement: Statement, executed: Any) -> Sequence[Row]:
    return [(executed.rowcount,)] if statement.counts else ()


@lru_cache(maxsize=128)
def _text(sql: str) -> TextClause:
    return text(sql)


@lru_cache(maxsize=512)
def pyformat(statement: str) -> str:
    """Return a statement with its `:name` parameters in the style of psycopg, `%(name)s`."""
    return _PARAMETER.sub(r"%(\1)s", statement.replace("%", "%%"))


@lru_cache(maxsize=512)
def _numbered(statement: str) -> tuple[str, tuple[str, ...]]:
    """Return a statement with its `:name` parameters in the style of asyncpg, `$1`, and their names in that order."""
    names = tuple(dict.fromkeys(_PARAMETER.findall(statement)))
    return _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", statement), names


def _with_numbers(statement: Statement) -> tuple[str, tuple[Any, ...]]:
    text, names = _numbered(statement.sql)
    return text, tuple(statement.bound[name] for name in names)


#: How a driver takes a statement, by its style of parameters.
_STYLES: dict[str, Callable[[Statement], tuple[str, Any]]] = {
    "pyformat": lambda statement: (pyformat(statement.sql), statement.bound),
    "numeric_dollar": _with_numbers,
}
