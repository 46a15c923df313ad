"""A database that holds an outbox: engine, schema and dialect; and our own connections to the database."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import StaticPool

from outbox.errors import DatabaseError, SchemaError, TransactionAbortedError
from outbox.model.command import Commands
from outbox.model.slots import SLOTS
from outbox.store.dialects import part_of
from outbox.store.dialects.dialect import Dialect, DriverChannel, wake_up_name
from outbox.store.dialects.statements import (
    Execute,
    Parameters,
    Row,
    Script,
    Sql,
    Statement,
    Telling,
    arun,
    executor,
    run,
)
from outbox.store.failure import fix_of_writer, note_missing_right
from outbox.store.label import label_of, option_of

R = TypeVar("R")

_SCHEMA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_TABLES = (
    "message", "subscription", "lease", "progress", "parked", "decision", "dedup", "inbox", "op", "record", "worker",
    "meta", "withdrawal", "topic", "group", "client",
)  # fmt: skip

#: The text of the error about a write in a failed transaction.
FAILED = (
    "a statement of this transaction failed, so nothing can be written in it any more; roll back, or use a savepoint"
    " around what may fail"
)


def require_schema_name(schema: str | None) -> None:
    """Refuse a schema that is no plain identifier."""
    if schema is not None and not _SCHEMA_NAME.fullmatch(schema):
        raise DatabaseError(f"schema {schema!r:.80} is not a plain identifier; use letters, digits and _")


class Database:
    """Engine, schema and dialect of an outbox. Opens no connection unless asked."""

    #: The words for what is missing, and the option with which a command makes or checks only that.
    _needed = "the outbox tables are"
    _only: tuple[str, ...] = ()
    #: Error texts: the name of this database, and the advice for a transaction that is in another one.
    described = "the outbox"
    elsewhere = (
        "whose relays would never find the message; use an Outbox on the database that the transaction writes to"
    )

    def __init__(
        self, engine: Engine, schema: str | None = None, *, slots: int = SLOTS, commands: Commands | None = None
    ) -> None:
        """`commands`: writes the commands that texts advise about this outbox.

        None: they name the database by the URL of the engine, because a shell beside an application may know another.
        """
        self.dialect = part_of(engine.dialect.name, Dialect)
        require_schema_name(schema)
        self.engine = engine
        self.schema = schema
        self.slots = slots
        self.commands = commands or Commands(schema=schema, where=self._options())
        prefix = f'"{schema}".' if schema else ""
        #: The names that `sql` fills in, each with its text.
        self.names = {
            "now": self.dialect.clock.now,
            "later": self.later(":seconds"),
            "id_in_ids": self.among("id", numbers="ids"),
            "number": "xact_id" if self.dialect.reads.transaction_ids else "id",
            "incarnation": self.dialect.reads.incarnation,
            "who_answers": self.dialect.reads.who_answers,
            "insert_once": self.dialect.writes.insert_once,
            "unless_there": self.dialect.writes.unless_there,
            "share_lock": self.dialect.locks.share,
            "skip_locked": self.dialect.locks.skip_locked,
            "identity": self.dialect.home.identity,
            "installation": self.dialect.home.installation,
            **self.dialect.values.types,
            **{name: f"{prefix}outbox_{name}" for name in _TABLES},
        }
        self._filled: dict[object, Sql] = {}

    @cached_property
    def label(self) -> str:
        """Host, name and schema, without secrets."""
        return label_of(self.engine.url, self.schema)

    def sql(self, statement: str, **parts: str) -> Sql:
        """Fill `names` and `parts` into a statement. Parts are ours, never a user's text.

        `{number}` is the column that a position counts, `{later}` is the clock, moved by `:seconds`, and `{id_in_ids}`
        is true where `id` is in the list `:ids`.
        """
        template = (statement, *parts.items()) if parts else statement
        filled = self._filled.get(template)
        if filled is None:
            filled = self._filled[template] = Sql(statement.format(**self.names, **parts))
        return filled

    def later(self, seconds: str) -> str:
        """Return the database's clock as SQL, moved by `seconds`, an SQL number."""
        return self.dialect.clock.later.format(now=self.dialect.clock.now, seconds=seconds)

    def among(self, value: str, numbers: str = "", texts: str = "") -> str:
        """Return the condition that `value` is in a list; `numbers` or `texts` names the list's parameter."""
        template = self.dialect.values.among_numbers if numbers else self.dialect.values.among_texts
        return template.format(value=value, list=f":{numbers or texts}")

    def bind(self, values: Any) -> Any:
        """Return a list as a parameter for `among`."""
        return self.dialect.values.bind_list(list(values))

    def records(self, parameter: str, **columns: str) -> str:
        """Return the table of rows that are bound by `bind_records`, given its columns with their types."""
        types = self.dialect.values.types
        return self.dialect.values.records(parameter, {name: types[type] for name, type in columns.items()})

    def bind_records(self, parameter: str, rows: Sequence[Row], **columns: str) -> Parameters:
        """Return rows as the parameters of `records`."""
        return self.dialect.values.bind_records(parameter, tuple(columns), rows)

    def header(self, headers: str, name: str) -> str:
        """Return the SQL of one header, out of the column `headers`."""
        return self.dialect.values.header.format(headers=headers, name=name)

    def seconds(self, *, since: str, until: str = "") -> str:
        """Return the SQL of the seconds between two moments; `until`: now, if nothing else is given."""
        return self.dialect.clock.seconds.format(since=since, until=until or self.dialect.clock.now)

    def telling(self, write: str, columns: str, reading: str = "", **parts: str) -> Telling:
        """Return a statement that writes, and tells `columns` of the written rows, or reads them by `reading`."""
        returning = self.dialect.writes.returning
        if returning is not None:
            return Telling(self.sql(f"{write} {returning}", **parts, columns=columns), returns=True)
        return Telling(self.sql(write, **parts), self.sql(reading, **parts) if reading else None)

    def moment(self, value: Any) -> datetime:
        """Return a moment that the driver has read from a column without nulls."""
        moment = self.dialect.clock.read(value)
        assert moment is not None
        return moment

    def open(self) -> Channel:
        """Open a connection of our own; raise if the engine's pool has one connection that all share."""
        self.require_independent_connections()
        return Channel(self, self.dialect.driving.connect(self.engine, self.wake_up_name))

    def open_plainly(self) -> Channel:
        """Do as `open`, and change no setting of the session, which a pooler may share with the application."""
        self.require_independent_connections()
        return Channel(self, self.dialect.driving.connect_plainly(self.engine, self.wake_up_name))

    def execute(self, connection: Any, script: Script[R]) -> R:
        """Run a script in the transaction of a connection: of SQLAlchemy, or of a driver, which blocks.

        Errors as in `explained`.
        """
        execute = executor if isinstance(connection, Connection) else self.dialect.driving.executor
        # Not by `explained`, which is six calls more for each message.
        try:
            return run(execute(connection), script)
        except Exception as error:
            self._explain(error)
            raise

    async def aexecute(self, driver: Any, script: Script[R]) -> R:
        """Do as `execute` in the transaction of a driver's own connection, which is awaited."""
        async_executor = self.dialect.driving.async_executor
        assert async_executor is not None, "such a connection has been refused"
        with self.explained():
            return await arun(async_executor(driver), script)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the driver's error about missing tables or columns, or a failed transaction, into one with the fix."""
        try:
            yield
        except Exception as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """Raise the error with the fix, or add the fix to `error`, which the caller then raises."""
        cause = getattr(error, "orig", None) or error
        if self.dialect.errors.in_failed_transaction(cause):
            raise TransactionAbortedError(FAILED) from None
        if self.dialect.errors.missing_table(cause):
            where = f" in schema {self.schema}" if self.schema else ""
            if not self.commands.where:
                where += f" in {label_of(self.engine.url)}"
            # The cause is left out, because it shows the statement's parameters: bodies, keys.
            raise SchemaError(f"{self._needed} not there{where}; run: {self.upgrade_command}") from None
        if self.dialect.errors.missing_column(cause):
            # The stored version does not tell: earlier programs go on with tables that a later one has upgraded.
            lacking = str(cause).partition("\n")[0]
            raise SchemaError(f"{lacking}: the tables are of an earlier version; run: {self.upgrade_command}") from None
        if self.dialect.errors.lacks_right(cause):
            note_missing_right(cause, self.commands)
            error.add_note(fix_of_writer(cause, self.commands))

    @property
    def upgrade_command(self) -> str:
        """The command that makes the tables, or brings them up to date."""
        return self.commands.line("db", "upgrade", *self._only)

    @property
    def check_command(self) -> str:
        """The command that compares the tables with those of this version."""
        return self.commands.line("doctor", *self._only)

    def _options(self) -> tuple[str, ...]:
        """Return the options for this database, without secrets; none if the URL alone does not lead here."""
        url = self.dialect.driving.blocking_url(self.engine.url)
        leads_here = url.database not in {None, "", ":memory:"} and "uri" not in url.query
        return ("--database", option_of(url)) if leads_here else ()

    def transient(self, error: Exception) -> bool:
        """Return whether the same may work later, with another try or on another connection."""
        return isinstance(error, PoolTimeout) or self.dialect.errors.transient(getattr(error, "orig", None) or error)

    def locked(self, error: Exception) -> bool:
        """Return whether a statement failed because another transaction had for too long what the statement needs."""
        return self.dialect.errors.locked(getattr(error, "orig", None) or error)

    @property
    def wake_up_name(self) -> str:
        """The name under which hints of this outbox are sent."""
        return wake_up_name(self.schema)

    def require_independent_connections(self) -> None:
        """Refuse a pool that would give a worker the application's connection, in an open transaction."""
        if isinstance(self.engine.pool, StaticPool):
            raise DatabaseError(
                "a worker cannot share the one connection of a StaticPool: it would read and commit what the"
                " application has not committed; use a file or a server, with the default pool"
            )


class Channel:
    """A connection of our own to a database, outside of the application's pool and of its transactions.

    Every statement is a transaction unless `transaction()` holds several together. When the connection is lost, its
    user drops all knowledge about the database. `DriverChannel` says more.
    """

    def __init__(self, database: Database, driver_channel: DriverChannel) -> None:
        self.database = database
        self._driver_channel = driver_channel
        self.fileno = driver_channel.fileno
        # These need no statement to be filled in.
        self.transaction, self.unlimited = driver_channel.transaction, driver_channel.unlimited
        self.listen, self.hinted, self.notify = driver_channel.listen, driver_channel.hinted, driver_channel.notify
        self.close = driver_channel.close

    def rows(self, statement: str, /, **parameters: Any) -> list[Row]:
        """Run a statement and return its rows. A template without parts is filled in; data must be in a `Sql`."""
        return self._driver_channel.rows(self._filled(statement), parameters)

    def run(self, statement: str, /, **parameters: Any) -> int:
        """Run a statement and return how many rows it touched."""
        return self._driver_channel.run(self._filled(statement), parameters)

    def rows_of_last(self, statements: Sequence[Statement]) -> list[Row]:
        """Run statements in one transaction, and return the rows of the last; see `DriverChannel`."""
        return self._driver_channel.rows_of_last([(self._filled(each.sql), each.bound) for each in statements])

    def now(self) -> datetime:
        """Read the database's clock."""
        return self.database.moment(self.rows("SELECT {now}")[0][0])

    def _filled(self, statement: str) -> Sql:
        return statement if isinstance(statement, Sql) else self.database.sql(statement)


def on_channel(channel: Channel) -> Execute:
    """Return the function that executes statements on a connection of our own.

    A statement without rows is sent together with the next statement that returns rows, in one transaction. A statement
    that counts has to be inside a transaction with the statements before it.
    """
    waiting: list[Statement] = []

    def execute(statement: Statement) -> list[Row]:
        if statement.counts:
            for each in waiting:
                channel.run(each.sql, **each.bound)
            waiting.clear()
            return [(channel.run(statement.sql, **statement.bound),)]
        if not statement.returns:
            waiting.append(statement)
            return []
        if not waiting:
            return channel.rows(statement.sql, **statement.bound)
        together = [*waiting, statement]
        waiting.clear()
        return channel.rows_of_last(together)

    return execute
