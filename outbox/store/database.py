"""A database that holds an outbox: its engine, its schema, its dialect; and the connections of our own to it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from importlib import import_module
from typing import Any

from sqlalchemy import URL, Engine
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import StaticPool

from outbox.errors import DatabaseError, SchemaError
from outbox.schema import SLOTS, Tables, tables
from outbox.store.dialects.dialect import Dialect, DriverChannel, Hint
from outbox.store.dialects.kinds import KINDS
from outbox.store.dialects.sql import Sql
from outbox.store.dialects.statements import Row, Statement
from outbox.store.label import label_of

_SCHEMA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_TABLES = (
    "message", "subscription", "lease", "progress", "parked", "ack", "dedup", "inbox", "op", "record", "worker", "meta",
)  # fmt: skip


class Database:
    """The database of an outbox: its engine, its schema, and the dialect of its SQL. Opens no connection by itself."""

    #: The words for what is missing, and the option with which a command makes or checks only that.
    _needed, _only = "the outbox tables are", ""
    #: Error texts: the name of this database, and the advice for a transaction that is in another one.
    described = "the outbox"
    elsewhere = (
        "whose relays would never find the message; use an Outbox on the database that the transaction writes to"
    )

    def __init__(
        self, engine: Engine, schema: str | None = None, *, slots: int = SLOTS, dialect: Dialect | None = None
    ) -> None:
        self.dialect = dialect or dialect_of(engine.dialect.name)
        if schema is not None and not _SCHEMA_NAME.fullmatch(schema):
            raise DatabaseError(f"schema {schema!r:.80} is not a plain identifier; use letters, digits and _")
        self.engine = engine
        self.schema = schema
        self.slots = slots
        self.tables: Tables = tables(schema, self.dialect.name)
        prefix = f'"{schema}".' if schema else ""
        #: The names that `sql` fills in, each with its text.
        self.names = {
            "now": self.dialect.now,
            "later": self.later(":seconds"),
            "id_in_ids": self.among("id", numbers="ids"),
            "number": "xact_id" if self.dialect.transaction_ids else "id",
            "identity": self.dialect.identity,
            "incarnation": self.dialect.incarnation,
            "installation": self.dialect.installation,
            "share_lock": self.dialect.share_lock,
            "skip_locked": self.dialect.skip_locked,
            **{name: f"{prefix}outbox_{name}" for name in _TABLES},
        }
        self._filled: dict[object, Sql] = {}

    def sql(self, statement: str, **parts: str) -> Sql:
        """Fill table names, the clock and `parts` into a statement. Parts are ours, never a user's text.

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
        return self.dialect.later.format(now=self.dialect.now, seconds=seconds)

    def among(self, value: str, numbers: str = "", texts: str = "") -> str:
        """Return the condition that `value` is in a list; `numbers` or `texts` names the list's parameter."""
        template = self.dialect.among_numbers if numbers else self.dialect.among_texts
        return template.format(value=value, list=f":{numbers or texts}")

    def bind(self, values: Any) -> Any:
        """Return a list as a parameter for `among`."""
        return self.dialect.bind_list(list(values))

    def moment(self, value: Any) -> datetime:
        """Return a moment that the driver has read from a column without nulls."""
        moment = self.dialect.moment(value)
        assert moment is not None
        return moment

    def open(self) -> Channel:
        """Open a connection of our own.

        Raises:
            DatabaseError: the engine's pool has one connection that all share.
        """
        self.require_independent_connections()
        return Channel(self, self.dialect.connect(self.engine, self.wake_up_name))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the driver's error about missing tables into one that says what to do."""
        try:
            yield
        except Exception as error:
            if self.dialect.missing_table(getattr(error, "orig", None) or error):
                where = f" in schema {self.schema}" if self.schema else ""
                named = self._named
                if not named:
                    where += f" in {label_of(self.engine.url)}"
                # A consumer may have another database than the commands that are typed beside it.
                command = self.upgrade_command.removesuffix(named) + named
                # The cause is left out, because it shows the statement's parameters: bodies, keys.
                raise SchemaError(f"{self._needed} not there{where}; run: {command}") from None
            raise

    @property
    def upgrade_command(self) -> str:
        """The command that makes the tables, or brings them up to date."""
        return self._command("upgrade")

    @property
    def check_command(self) -> str:
        """The command that compares the tables with what this version needs."""
        return self._command("check")

    def _command(self, verb: str) -> str:
        where = f" --schema {self.schema}" if self.schema else ""
        return f"outbox db {verb}{self._only}{where}"

    @property
    def _named(self) -> str:
        """The option that names this database, without user and password, which belong in the environment.

        An empty text: a URL of these parts would not lead to it.
        """
        url = self.engine.url
        if not url.database or not {"host", "service", "uri"}.isdisjoint(url.query):
            return ""
        plain = URL.create(url.get_backend_name(), host=url.host, port=url.port, database=url.database)
        return f" --database {shlex.quote(plain.render_as_string())}"

    def transient(self, error: Exception) -> bool:
        """Return whether the same may work later, with another try or on another connection."""
        return isinstance(error, PoolTimeout) or self.dialect.transient(getattr(error, "orig", None) or error)

    def locked(self, error: Exception) -> bool:
        """Return whether a statement failed because another transaction had for too long what the statement needs."""
        return self.dialect.locked(getattr(error, "orig", None) or error)

    @property
    def wake_up_name(self) -> str:
        """The name under which hints of this outbox are sent."""
        return f"outbox_{self.schema}" if self.schema else "outbox"

    def require_independent_connections(self) -> None:
        """Refuse a pool that would give a worker the application's own connection, with its open transaction."""
        if isinstance(self.engine.pool, StaticPool):
            raise DatabaseError(
                "a worker cannot share the one connection of a StaticPool: it would read and commit what the"
                " application has not committed; use a file or a server, with the default pool"
            )


class Channel:
    """A connection of our own to a database, outside of the application's pool and of its transactions.

    Every statement is a transaction unless `transaction()` holds it together with others. When the connection is lost,
    its user drops all that it remembers of the database.
    """

    def __init__(self, database: Database, driver_channel: DriverChannel) -> None:
        self.database = database
        self._driver_channel = driver_channel
        #: A descriptor that becomes readable when a wake-up arrives; None where these do not reach other processes.
        self.fileno = driver_channel.fileno

    def rows(self, statement: str, /, **parameters: Any) -> list[Row]:
        """Run a statement and return its rows.

        A template without parts is filled in here, and kept; a text that holds data has to be a `Sql`.
        """
        return self._driver_channel.rows(self._filled(statement), parameters)

    def run(self, statement: str, /, **parameters: Any) -> int:
        """Run a statement and return how many rows it touched."""
        return self._driver_channel.run(self._filled(statement), parameters)

    def rows_of_last(self, statements: Sequence[Statement]) -> list[Row]:
        """Run statements in one transaction, or in the one that is open, and return the rows of the last one.

        Where statements cost round trips, they are sent together.
        """
        return self._driver_channel.rows_of_last([(self._filled(each.sql), each.bound) for each in statements])

    def _filled(self, statement: str) -> Sql:
        return statement if isinstance(statement, Sql) else self.database.sql(statement)

    def transaction(self, *, patience: float | None = None) -> AbstractContextManager[None]:
        """Commit the statements inside together, or not at all. `patience`: how long to wait for a lock, in seconds."""
        return self._driver_channel.transaction(patience=patience)

    def listen(self) -> None:
        """Ask for wake-ups."""
        self._driver_channel.listen()

    def hinted(self) -> Hint | None:
        """Return the hint of the wake-ups that have arrived since the last call; None: there were none."""
        return self._driver_channel.hinted()

    def notify(self, pause: float = 0.0) -> None:
        """Wake the listeners of every process. `pause`: for how many seconds this process will not do so again."""
        self._driver_channel.notify(pause)

    def close(self) -> None:
        """Close the connection, whatever state it is in. Never raises."""
        self._driver_channel.close()


def dialect_of(name: str) -> Dialect:
    """Return the dialect of a kind of database, by SQLAlchemy's name for it.

    Raises:
        DatabaseError: no outbox can be there.
    """
    if name not in KINDS:
        raise DatabaseError(f"no outbox on {name} yet; use PostgreSQL or SQLite")
    found: Dialect = import_module(f"outbox.store.dialects.{name}.dialect").DIALECT
    return found
