"""The drivers by which an application may reach PostgreSQL: how each executes, and tells of a failed transaction.

PostgreSQL answers the COMMIT of a failed transaction with ROLLBACK, and no driver raises an error. Most drivers tell
before the commit that the transaction has failed. asyncpg does not: `commit` reads the server's answer to its COMMIT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg.rows import tuple_row
from sqlalchemy import URL

from outbox.store.dialects.statements import AsyncExecute, Execute, Row, Statement, counted, pyformat, with_numbers

#: The names of SQLAlchemy.
NAMES = frozenset(("psycopg", "psycopg_async", "psycopg2", "asyncpg", "pg8000"))

_IDLE, _FAILED = psycopg.pq.TransactionStatus.IDLE, psycopg.pq.TransactionStatus.INERROR
#: These statuses by PostgreSQL's letters, which pg8000 keeps.
_LETTERS = {b"I": _IDLE, b"E": _FAILED}


def executor(connection: psycopg.Connection[Any]) -> Execute:
    """Return the function that executes statements on psycopg's own connection."""

    def execute(statement: Statement) -> Sequence[Row]:
        # The connection's own cursor class may want other parameters and give other rows.
        cursor = psycopg.Cursor(connection, row_factory=tuple_row)
        cursor.execute(pyformat(statement.sql).encode(), statement.bound)
        return cursor.fetchall() if statement.returns else counted(statement, cursor)

    return execute


def async_executor(connection: Any) -> AsyncExecute:
    """Return the function that executes statements on an awaited connection of psycopg or asyncpg."""
    return _on_async_psycopg(connection) if isinstance(connection, psycopg.AsyncConnection) else _on_asyncpg(connection)


def _on_async_psycopg(connection: psycopg.AsyncConnection[Any]) -> AsyncExecute:
    async def execute(statement: Statement) -> Sequence[Row]:
        cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
        await cursor.execute(pyformat(statement.sql).encode(), statement.bound)
        return await cursor.fetchall() if statement.returns else counted(statement, cursor)

    return execute


def _on_asyncpg(connection: Any) -> AsyncExecute:
    async def execute(statement: Statement) -> Sequence[Row]:
        text, values = with_numbers(statement)
        if statement.returns:
            return [tuple(row) for row in await connection.fetch(text, *values)]
        # "INSERT 0 3"
        answer: str = await connection.execute(text, *values)
        return [(int(answer.rpartition(" ")[2]),)] if statement.counts else ()

    return execute


def is_aborted(driver: Any) -> bool:
    """Return whether COMMIT would be answered with ROLLBACK. No round trip; never True with asyncpg."""
    return _status(driver) == _FAILED


def in_transaction(driver: Any) -> bool:
    """Return whether the connection is in a transaction, failed or not. No round trip."""
    return _status(driver) != _IDLE


def commits_every_statement(driver: Any) -> bool:
    """Return whether the connection commits every statement: it is in autocommit, and in no transaction now.

    The flag alone is not enough, because a transaction may be opened in autocommit, too.
    """
    # asyncpg's own connection has no such mode: outside of its transactions every statement is one.
    return bool(getattr(driver, "autocommit", True)) and not in_transaction(driver)


def _status(driver: Any) -> int | None:
    """Return the status of a transaction; None where it may be a failed one or not."""
    # psycopg makes a new `info` object at every access; psycopg2 has only `info`.
    if known := getattr(driver, "pgconn", None) or getattr(driver, "info", None):
        status: int = known.transaction_status
        return status
    asyncpg = getattr(driver, "driver_connection", driver)
    if hasattr(asyncpg, "is_in_transaction"):
        return None if asyncpg.is_in_transaction() else _IDLE
    return _LETTERS.get(driver._transaction_status)


def commit(do: Callable[[], None], connection: Any) -> bool:
    """Call `do`, which commits a connection of SQLAlchemy's; return False if the server has rolled back instead."""
    driver = getattr(connection, "driver_connection", connection)
    transaction = getattr(driver, "_top_xact", None)
    if transaction is None:
        do()
        return True
    heard = _Heard(driver)
    transaction._connection = heard
    try:
        do()
    finally:
        transaction._connection = driver
    return heard.answer != "ROLLBACK"


class _Heard:
    """Stands for a connection of asyncpg while its transaction ends, and keeps the server's answer.

    asyncpg's `Connection.execute` returns the answer, and its `Transaction` drops it.
    """

    __slots__ = ("_driver", "answer")
    answer: str

    def __init__(self, driver: Any) -> None:
        object.__setattr__(self, "_driver", driver)
        object.__setattr__(self, "answer", "")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._driver, name, value)

    async def execute(self, statement: str) -> str:
        answer: str = await self._driver.execute(statement)
        object.__setattr__(self, "answer", answer)
        return answer


def state_of(error: BaseException) -> str | None:
    """Return PostgreSQL's code (SQLSTATE) of a driver's error; None if there is none."""
    for name in ("sqlstate", "pgcode"):
        if (found := getattr(error, name, None)) is not None:
            return str(found)
    # pg8000 hands the fields of the server's message on, by their letters.
    fields = error.args[0] if error.args else None
    return fields.get("C") if isinstance(fields, dict) else None


def blocking_url(url: URL) -> URL:
    """Return an application's URL as one for psycopg, with the parameters that libpq knows."""
    query = dict(url.query)
    if "ssl" in query:
        query["sslmode"] = query.pop("ssl")
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
    return url.set(drivername="postgresql+psycopg", query={name: query[name] for name in query if name in known})
