"""Places: the address of a database, kept so that no password appears in a plan, a log or a pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from outbox.errors import DatabaseError, MissingExtraError, OptionError
from outbox.model.command import Commands
from outbox.runtime.secret import is_secret_name
from outbox.store.dialects.kinds import is_file
from outbox.store.label import label_of

if TYPE_CHECKING:
    from outbox.store.database import Database

_FORM = "write postgresql://host:5432/name or sqlite:////absolute/path"
_POSTGRESQL = ("postgresql", "postgres")
_VARIABLE = "env:"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one database: a URL without a password, or `env:NAME`, an environment variable with the URL.

    `option`: the name of the option or argument, for error texts.
    """

    text: str
    option: str = "url"

    def __post_init__(self) -> None:
        if self.variable is not None:
            return
        url = _parsed(self.text, self.option)
        if url.password is not None or any(is_secret_name(name) for name in url.query):
            raise OptionError(
                f"{self.option}: holds a password, which plans, logs and event logs would show; set {self.option} to"
                f" {_VARIABLE}NAME, the name of an environment variable with the URL, or use a service of libpq:"
                " postgresql:///?service=NAME"
            )

    @property
    def variable(self) -> str | None:
        """The name of the environment variable that holds the URL; None: the text is the URL."""
        return self.text.removeprefix(_VARIABLE) if self.text.startswith(_VARIABLE) else None

    def resolve(self) -> URL:
        """Return the complete URL, in the process that connects; raise if the environment variable holds none."""
        if self.variable is None:
            return _parsed(self.text, self.option)
        text = os.environ.get(self.variable)
        if not text:
            raise OptionError(
                f"{self.option}: the environment variable {self.variable} is not set in this process; set the variable"
                " where Spark's driver and executors are started"
            )
        return _parsed(text, f"the environment variable {self.variable}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of an outbox: the server with the rows, the primary for positions if that is another, the schema."""

    rows: Address
    planner: Address | None = None
    schema: str | None = None

    @property
    def commands(self) -> Commands:
        """Writes commands about the outbox; a variable of this process names no database for a shell."""
        primary = self.planner or self.rows
        return Commands(schema=self.schema, where=() if primary.variable is not None else ("--database", primary.text))

    def label(self) -> str:
        """Return host, database and schema of the server with the rows, without secrets."""
        return self._label(self.rows)

    def primary_label(self) -> str:
        """Return host, database and schema of the server that positions come from, without secrets."""
        return self._label(self.planner or self.rows)

    def primary(self) -> Database:
        """Return the database that positions come from, without a connection. Its errors show no parameters.

        Raises:
            OptionError: a SQLite file is given a schema, or `Address.resolve` fails.
            DatabaseError: there is no such SQLite file.
            MissingExtraError: psycopg is not installed.
        """
        url = (self.planner or self.rows).resolve()
        defaults = {"connect_timeout": 10, "application_name": "outbox spark"}
        if is_file(url):
            defaults = {}
            if self.schema is not None:
                raise OptionError("schema: SQLite has no schemas; leave the option out")
            # SQLite itself would create the file.
            if not Path(url.database or "").exists():
                upgrade = self.commands.line("db", "upgrade")
                raise DatabaseError(f"there is no file {url.database}; to make the tables, run: {upgrade}")
        try:
            from outbox.store.database import Database
            from outbox.writing.engines import create_engine
        except ImportError as error:
            raise MissingExtraError(
                "the planner needs psycopg and libpq where Spark's driver runs: pip install 'outbox-log[binary]'"
            ) from error
        given = {name: value for name, value in defaults.items() if name not in url.query}
        engine = create_engine(url.render_as_string(hide_password=False), hide_parameters=True, connect_args=given)
        return Database(engine, self.schema)

    def _label(self, address: Address) -> str:
        try:
            return label_of(address.resolve(), self.schema)
        except OptionError:
            return f"${address.variable}"


def conninfo(url: URL) -> str:
    """Return a PostgreSQL URL in the form of libpq, `key='value' …`; no driver needs to be installed."""
    from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

    given: Mapping[str, object] = PGDialect_psycopg().create_connect_args(url)[1]  # type: ignore[no-untyped-call]
    named = {"connect_timeout": 10, "fallback_application_name": "outbox spark", **given}
    return " ".join(f"{name}='{_escaped(value)}'" for name, value in named.items() if name != "context")


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("'", "\\'")


def _parsed(text: str, option: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # Neither the text nor the cause is shown, because both may hold a password.
        raise OptionError(f"{option}: is not a URL; {_FORM}") from None
    backend = url.drivername.partition("+")[0]
    if backend in _POSTGRESQL:
        return url.set(drivername="postgresql+psycopg")
    if not is_file(url):
        raise OptionError(f"{option}: no outbox lives in {backend}; {_FORM}")
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise OptionError(
            f"{option}: Spark's processes cannot share a database in memory; write sqlite:////absolute/path"
        )
    return url.set(drivername="sqlite")
