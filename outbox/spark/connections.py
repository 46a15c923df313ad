"""Connections of a task: each runs a statement and gives its rows as Arrow record batches of one schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from outbox.errors import DatabaseError, MissingExtraError, OutboxError
from outbox.spark.place import conninfo
from outbox.store.dialects import part_of
from outbox.store.dialects.speech import Speech
from outbox.store.dialects.sqlite.filtering import add_functions

if TYPE_CHECKING:
    import pyarrow as pa
    from sqlalchemy import URL

#: The most rows of one fetch, where a driver returns rows.
_MOST_ROWS = 50_000


class AdbcConnection:
    """PostgreSQL through ADBC, which reads by COPY in binary form and builds Arrow data from the stream in C."""

    def __init__(self, url: URL) -> None:
        from adbc_driver_postgresql import dbapi

        self._driver = dbapi.connect(conninfo(url), autocommit=True)
        with self._driver.cursor() as cursor:
            for setting in part_of("postgresql", Speech).settings:
                cursor.execute(setting)

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Return the errors of the driver, and those of a break in a stream: ADBC 1.6 raises ArrowInvalid."""
        import pyarrow as pa
        from adbc_driver_manager import Error

        return (Error, OSError, pa.ArrowInvalid)

    def batches(self, statement: str, schema: pa.Schema, size: int) -> Generator[pa.RecordBatch, None, None]:
        """Stream the rows; the driver parses while the server sends."""
        import pyarrow as pa
        from adbc_driver_postgresql import StatementOptions

        with self._driver.cursor() as cursor:
            cursor.adbc_statement.set_options(**{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(size)})
            cursor.execute(statement)
            with cursor.fetch_record_batch() as reader:
                for batch in reader:
                    try:
                        arrays = [
                            array if array.type == field.type else array.cast(field.type)
                            for array, field in zip(batch.columns, schema, strict=True)
                        ]
                    except pa.ArrowInvalid as error:
                        raise DatabaseError(f"a value of the database does not fit its column: {error}") from error
                    yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def row(self, statement: str) -> tuple[Any, ...]:
        """Return the single row of a statement."""
        with self._driver.cursor() as cursor:
            cursor.execute(statement)
            return tuple(cursor.fetchone())

    def close(self) -> None:
        """Close the socket, even if a statement runs on it."""
        with suppress(Exception):
            self._driver.close()


class SqliteConnection:
    """A SQLite file through the standard library."""

    def __init__(self, url: URL) -> None:
        assert url.database is not None
        # Without `mode=rw` SQLite would create a file for every mistyped name.
        self._driver = sqlite3.connect(f"file:{quote(url.database)}?mode=rw", uri=True, isolation_level=None)
        self._driver.execute("PRAGMA busy_timeout = 5000")
        add_functions(self._driver)

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Return the errors of the driver; `refused` tells whether another try may succeed."""
        return (sqlite3.Error,)

    def batches(self, statement: str, schema: pa.Schema, size: int) -> Generator[pa.RecordBatch, None, None]:
        """Fetch one row, then each time as many as make a batch by the size of those before, but at most twice as many.

        How large a row is shows only after the fetch: a first fetch of more rows may take many times the size.
        """
        cursor, number = self._driver.execute(statement), 1
        try:
            while rows := cursor.fetchmany(number):
                batch = _batch(rows, schema)
                yield batch
                number = max(1, min(_MOST_ROWS, 2 * number, number * size // max(1, batch.nbytes)))
        finally:
            cursor.close()

    def row(self, statement: str) -> tuple[Any, ...]:
        """Return the single row of a statement."""
        return tuple(self._driver.execute(statement).fetchone())

    def close(self) -> None:
        """Close the file."""
        with suppress(Exception):
            self._driver.close()


Connection = AdbcConnection | SqliteConnection
_CLASSES: dict[str, type[AdbcConnection | SqliteConnection]] = {
    "postgresql": AdbcConnection,
    "sqlite": SqliteConnection,
}


def driver_of(dialect: str) -> type[AdbcConnection | SqliteConnection]:
    """Return the class of connections to a database of this kind; raise `MissingExtraError` without the driver."""
    found = _CLASSES[dialect]
    if found is AdbcConnection and find_spec("adbc_driver_postgresql") is None:
        raise MissingExtraError("PostgreSQL is read by ADBC, on every executor: pip install 'outbox-log[spark]'")
    return found


#: Names of driver errors that lie in the statement or in the user's rights, so that no other try helps. Then: texts of
#: servers in such errors at the start of a connection.
_FOR_GOOD = {"ProgrammingError", "NotSupportedError", "DataError", "IntegrityError"}
_REFUSALS = (
    "does not exist", "authentication failed", "permission denied", "no pg_hba.conf entry", "no password",
    "no such table", "unable to open database file",
)  # fmt: skip

_NO_RIGHT = "permission denied for"
_RIGHTS = (
    "; have its owner GRANT SELECT ON outbox_message, outbox_meta TO this role; to register, what is printed by: outbox"
    " db grants --reader ROLE --register; for another table, SELECT on it"
)


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
    """Add the rights that a reader needs to an error about a missing right; other errors pass."""
    try:
        yield
    except Exception as error:
        cause = getattr(error, "orig", None) or error
        told = refused(cause) if _NO_RIGHT in str(cause) and not isinstance(error, OutboxError) else None
        if told is None:
            raise
        raise told from error


def _batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Return SQLite's rows as a record batch. Times arrive as microseconds since 1970, booleans as numbers."""
    import pyarrow as pa

    arrays = []
    for values, field in zip(zip(*rows, strict=True), schema, strict=True):
        if pa.types.is_timestamp(field.type):
            arrays.append(pa.array(values, pa.int64()).cast(field.type))
        elif pa.types.is_boolean(field.type):
            arrays.append(pa.array([None if value is None else bool(value) for value in values], field.type))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
