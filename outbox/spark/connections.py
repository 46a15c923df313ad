"""Connections of a task: each runs a statement and gives its rows as Arrow record batches of one schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from outbox.errors import DatabaseError, MissingExtraError, OptionError, OutboxError
from outbox.spark.place import conninfo
from outbox.spark.task import Task
from outbox.store.dialects.extraction import speech_of

if TYPE_CHECKING:
    import pyarrow as pa
    from sqlalchemy import URL

#: The most rows of one fetch, where a driver returns rows.
_MOST_ROWS = 50_000
#: PostgreSQL counts microseconds from the year 2000.
_EPOCH_2000 = 946_684_800_000_000


class Connection(Protocol):
    """One connection, which belongs to one task."""

    def batches(self, statement: str, schema: pa.Schema, size: int) -> Generator[pa.RecordBatch, None, None]:
        """Return the rows of a statement, in batches of about `size` bytes."""

    def row(self, statement: str) -> tuple[Any, ...]:
        """Return the one row of a statement."""

    def close(self) -> None:
        """Close the connection, whatever state it is in. Never raises."""


def method_of(task: Task) -> str:
    """Return how a task's rows are fetched: "adbc", "psycopg" or "sqlite".

    Raises:
        OptionError: the method that the task asks for does not work with its database.
        MissingExtraError: the driver is not installed.
    """
    wanted, methods = task.manner.fetch, task.extraction.methods
    if wanted not in ("auto", *methods):
        raise OptionError(f"fetch: {wanted} does not read {task.extraction.dialect}; leave it out")
    has_adbc = find_spec("adbc_driver_postgresql") is not None
    if wanted == "adbc" and not has_adbc:
        raise MissingExtraError("fetch=adbc needs a driver on every executor: pip install 'outbox-log[spark]'")
    return next(each for each in methods if wanted in (each, "auto") and (each != "adbc" or has_adbc))


def broken_by(method: str) -> tuple[type[Exception], ...]:
    """Return the errors that a method's driver raises; `refused` tells whether another try may succeed."""
    found: tuple[type[Exception], ...] = _METHODS[method].errors()
    return found


@contextmanager
def connected(task: Task, method: str) -> Iterator[Connection]:
    """Yield a connection to the database with a task's rows, and close it at the end."""
    connection = _METHODS[method](task.place.rows.resolve())
    try:
        yield connection
    finally:
        connection.close()


class AdbcConnection:
    """PostgreSQL through ADBC, which reads by COPY in binary form and builds Arrow data from it in C."""

    def __init__(self, url: URL) -> None:
        from adbc_driver_postgresql import dbapi

        self._driver = dbapi.connect(conninfo(url), autocommit=True)
        with self._driver.cursor() as cursor:
            for setting in speech_of("postgresql").settings:
                cursor.execute(setting)

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Return the driver's own errors, and OSError, which a break in the middle of a stream raises."""
        from adbc_driver_manager import Error

        return (Error, OSError)

    def batches(self, statement: str, schema: pa.Schema, size: int) -> Generator[pa.RecordBatch, None, None]:
        """Stream the rows; the driver parses while the server sends."""
        import pyarrow as pa
        from adbc_driver_postgresql import StatementOptions

        with self._driver.cursor() as cursor:
            cursor.adbc_statement.set_options(**{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(size)})
            cursor.execute(statement)
            with cursor.fetch_record_batch() as reader:
                for batch in reader:
                    arrays = [
                        array if array.type == field.type else array.cast(field.type)
                        for array, field in zip(batch.columns, schema, strict=True)
                    ]
                    yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def row(self, statement: str) -> tuple[Any, ...]:
        """Return the one row of a statement."""
        with self._driver.cursor() as cursor:
            cursor.execute(statement)
            return tuple(cursor.fetchone())

    def close(self) -> None:
        """Close the socket, even if a statement runs on it."""
        with suppress(Exception):
            self._driver.close()


class PsycopgConnection:
    """PostgreSQL through psycopg, where ADBC is not installed: rows of a server-side cursor, in binary form."""

    def __init__(self, url: URL) -> None:
        import psycopg
        from psycopg.types.numeric import Int8BinaryLoader

        self._driver = psycopg.connect(conninfo(url))
        self._driver.read_only = True
        with self._driver.transaction():
            self._driver.execute("; ".join(speech_of("postgresql").settings).encode())
        self._driver.adapters.register_loader("timestamptz", Int8BinaryLoader)

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Return the driver's own errors."""
        import psycopg

        return (psycopg.Error,)

    def batches(self, statement: str, schema: pa.Schema, size: int) -> Generator[pa.RecordBatch, None, None]:
        """Fetch as many rows at a time as make a batch."""
        with self._driver.transaction(), self._driver.cursor("outbox_rows") as cursor:
            cursor.execute(statement.encode(), binary=True)
            yield from _in_batches(cursor.fetchmany, schema, size, epoch=_EPOCH_2000)

    def row(self, statement: str) -> tuple[Any, ...]:
        """Return the one row of a statement."""
        with self._driver.transaction():
            return tuple(self._driver.execute(statement.encode()).fetchone() or ())

    def close(self) -> None:
        """Close the socket."""
        with suppress(Exception):
            self._driver.close()


class SqliteConnection:
    """A SQLite file through the standard library."""

    def __init__(self, url: URL) -> None:
        assert url.database is not None
        # Without `mode=rw` SQLite would create a file for every mistyped name.
        self._driver = sqlite3.connect(f"file:{_percent(url.database)}?mode=rw", uri=True, isolation_level=None)
        self._driver.execute("PRAGMA busy_timeout = 5000")

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Return the driver's own errors."""
        return (sqlite3.Error,)

    def batches(self, statement: str, schema: pa.Schema, size: int) -> Generator[pa.RecordBatch, None, None]:
        """Fetch as many rows at a time as make a batch."""
        cursor = self._driver.execute(statement)
        try:
            yield from _in_batches(cursor.fetchmany, schema, size, epoch=0)
        finally:
            cursor.close()

    def row(self, statement: str) -> tuple[Any, ...]:
        """Return the one row of a statement."""
        return tuple(self._driver.execute(statement).fetchone())

    def close(self) -> None:
        """Close the file."""
        with suppress(Exception):
            self._driver.close()


#: Names of driver errors that lie in the statement or in the user's rights, so that no other try helps. Then: what
#: servers say in such errors while one connects.
_FOR_GOOD = {"ProgrammingError", "NotSupportedError", "DataError", "IntegrityError"}
_REFUSALS = (
    "does not exist", "authentication failed", "permission denied", "no pg_hba.conf entry", "no password",
    "no such table", "unable to open database file",
)  # fmt: skip

_NO_RIGHT = "permission denied for"
_RIGHTS = (
    "; have its owner GRANT SELECT ON outbox_message, outbox_meta TO this role; registering, other tables and purging"
    " need more, see Rights in docs/spark.md"
)

_METHODS: dict[str, Any] = {"adbc": AdbcConnection, "psycopg": PsycopgConnection, "sqlite": SqliteConnection}


def _percent(path: str) -> str:
    from urllib.parse import quote

    return quote(path)


def _in_batches(fetch: Any, schema: pa.Schema, size: int, *, epoch: int) -> Generator[pa.RecordBatch, None, None]:
    """Fetch one row, then each time as many as make a batch by the size of those before, but at most twice as many.

    How large a row is shows only when it is there: a first fetch of more rows may take many times the size.
    """
    number = 1
    while rows := fetch(number):
        batch = _batch(rows, schema, epoch=epoch)
        yield batch
        number = max(1, min(_MOST_ROWS, 2 * number, number * size // max(1, batch.nbytes)))


def _batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema, *, epoch: int) -> pa.RecordBatch:
    """Return rows as a record batch.

    Times arrive as microseconds since `epoch`, which is given in microseconds since 1970.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    arrays = []
    for values, field in zip(zip(*rows, strict=True), schema, strict=True):
        if pa.types.is_timestamp(field.type):
            moments = pa.array(values, pa.int64())
            arrays.append(pc.add(moments, epoch).cast(field.type) if epoch else moments.cast(field.type))
        elif pa.types.is_boolean(field.type):
            arrays.append(pa.array([None if value is None else bool(value) for value in values], field.type))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def refused(error: Exception) -> DatabaseError | None:
    """Return the error to raise if no other try would help; None if another try may succeed."""
    kinds = {each.__name__ for each in type(error).__mro__}
    text = str(error).strip()
    if kinds & _FOR_GOOD or any(words in text for words in _REFUSALS):
        fix = _RIGHTS if _NO_RIGHT in text else ""
        return DatabaseError(f"the database refuses to be read: {text}{fix}")
    return None


@contextmanager
def rights_told() -> Iterator[None]:
    """Turn an error about a missing right into one that names the rights a reader needs; other errors pass."""
    try:
        yield
    except Exception as error:
        cause = getattr(error, "orig", None) or error
        told = refused(cause) if _NO_RIGHT in str(cause) and not isinstance(error, OutboxError) else None
        if told is None:
            raise
        raise told from error
