"""Statements apart from connections: written once, run on any connection of the application.

A script is a generator that yields one statement after the other, and is sent the rows of each. `run` and `arun` drive
a script on a connection of SQLAlchemy, or on a driver's own, blocking or awaited.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

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
AsyncExecute = Callable[[Statement], Awaitable[Sequence[Row]]]


def run(execute: Execute, steps: Script[R]) -> R:
    """Run a script on a blocking connection, and return the result."""
    try:
        statement = next(steps)
        while True:
            statement = steps.send(execute(statement))
    except StopIteration as stop:
        result: R = stop.value
        return result


async def arun(execute: AsyncExecute, steps: Script[R]) -> R:
    """Run a script on an awaited connection, and return the result."""
    try:
        statement = next(steps)
        while True:
            statement = steps.send(await execute(statement))
    except StopIteration as stop:
        result: R = stop.value
        return result


def executor(connection: Connection) -> Execute:
    """Return the function that executes statements on a connection of SQLAlchemy."""
    style = connection.dialect.paramstyle

    def execute(statement: Statement) -> Sequence[Row]:
        # SQLAlchemy's compiler would cost as much as everything else that `send` does.
        if style == "pyformat":
            result = connection.exec_driver_sql(pyformat(statement.sql), statement.parameters)
        elif style == "numeric_dollar":
            result = connection.exec_driver_sql(*with_numbers(statement))
        else:
            result = connection.execute(_text(statement.sql), statement.parameters)
            return result.all() if statement.returns else counted(statement, result)
        if not statement.returns:
            return counted(statement, result)
        # Rows as the driver gives them, because making SQLAlchemy's rows costs a tenth of the whole statement.
        assert result.cursor is not None
        rows: Sequence[Row] = result.cursor.fetchall()
        result.close()
        return rows

    return execute


def counted(statement: Statement, executed: Any) -> Sequence[Row]:
    """Return a row with the number of touched rows, if the statement counts; `executed`: a driver's cursor or such."""
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


def with_numbers(statement: Statement) -> tuple[str, tuple[Any, ...]]:
    """Return a statement in the style of asyncpg, with its values."""
    text, names = _numbered(statement.sql)
    return text, tuple(statement.bound[name] for name in names)
