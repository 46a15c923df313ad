"""Places: the address of a database, kept so that no password appears in a plan, a log or a pickle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from outbox.errors import DatabaseError, OptionError
from outbox.runtime.secret import is_secret_name
from outbox.store.dialects.kinds import is_file
from outbox.store.label import label_of

_FORM = "write postgresql://host:5432/name or sqlite:////absolute/path"
_POSTGRESQL = ("postgresql", "postgres")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of one database: a URL without a password, an environment variable that holds a URL, or a service
    of libpq.

    `names`: the names of the three options or arguments, for error texts.
    """

    url: str | None = None
    env: str | None = None
    service: str | None = None
    names: tuple[str, str, str] = ("url", "urlEnv", "service")

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.url, self.env, self.service)) != 1:
            raise OptionError(f"{self.names[0]}: say where the database is, by exactly one of {', '.join(self.names)}")
        if self.url is not None:
            self._require_no_password(_parsed(self.url, self.names[0]))

    def resolve(self) -> URL:
        """Return the complete URL; called in the process that connects.

        Raises:
            OptionError: the environment variable is not set, or does not hold a URL that the outbox can use.
        """
        if self.service is not None:
            return URL.create("postgresql+psycopg", query={"service": self.service})
        if self.env is None:
            assert self.url is not None
            return _parsed(self.url, self.names[0])
        text = os.environ.get(self.env)
        if not text:
            raise OptionError(
                f"{self.names[1]}: the environment variable {self.env} is not set in this process; set it where"
                " Spark's driver and its executors are started"
            )
        return _parsed(text, f"the environment variable {self.env}")

    def _require_no_password(self, url: URL) -> None:
        if url.password is not None or any(is_secret_name(name) for name in url.query):
            raise OptionError(
                f"{self.names[0]}: holds a password, which plans, logs and event logs would show; set {self.names[1]}"
                f" to the name of an environment variable that holds the URL, or {self.names[2]} to a service of libpq"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of an outbox: the server with the rows, the primary for positions if that is another, the schema."""

    rows: Address
    planner: Address | None = None
    schema: str | None = None

    @property
    def primary(self) -> Address:
        """The server that positions come from."""
        return self.planner or self.rows

    def label(self) -> str:
        """Return host, database and schema of the server with the rows, without secrets."""
        return self._label(self.rows)

    def primary_label(self) -> str:
        """Return host, database and schema of the server that positions come from, without secrets."""
        return self._label(self.primary)

    def _label(self, address: Address) -> str:
        try:
            return label_of(address.resolve(), self.schema)
        except OptionError:
            return f"${address.env}"


def conninfo(url: URL) -> str:
    """Return a PostgreSQL URL in the form of libpq, `key='value' …`; no driver needs to be installed for this."""
    from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

    given = {"connect_timeout": 10, "fallback_application_name": "outbox spark"}
    given |= PGDialect_psycopg().create_connect_args(url)[1]  # type: ignore[no-untyped-call]
    return " ".join(f"{name}='{_escaped(value)}'" for name, value in given.items() if name != "context")


def engine_options(url: URL) -> dict[str, Any]:
    """Return the arguments for an engine: its errors show no parameters, and it gives up connecting after 10 s.

    The URL may set another timeout. SQLite has none.
    """
    if is_file(url):
        return {"hide_parameters": True}
    defaults = {"connect_timeout": 10, "application_name": "outbox spark"}
    given = {name: value for name, value in defaults.items() if name not in url.query}
    return {"hide_parameters": True, "connect_args": given}


def require_file(url: URL) -> None:
    """Refuse a SQLite file that does not exist, because SQLite would create it.

    Raises:
        DatabaseError: there is no such file.
    """
    if not Path(url.database or "").exists():
        raise DatabaseError(f"there is no file {url.database}; to make it, run: outbox db upgrade")


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("'", "\\'")


def _parsed(text: str, name: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # Neither the text nor the cause is shown: it may hold a password.
        raise OptionError(f"{name}: is not a URL; {_FORM}") from None
    backend = url.drivername.partition("+")[0]
    if backend in _POSTGRESQL:
        return url.set(drivername="postgresql+psycopg")
    if not is_file(url):
        raise OptionError(f"{name}: no outbox lives in {backend}; {_FORM}")
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise OptionError(
            f"{name}: Spark's processes cannot share a database in memory; write sqlite:////absolute/path"
        )
    return url.set(drivername="sqlite")
