"""Bring a database's outbox tables to the version of this library, or print the SQL that would."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, make_url

from outbox.errors import DatabaseError
from outbox.schema import SLOTS

#: Ours alone, so that it never meets the application's own Alembic.
VERSION_TABLE = "outbox_alembic_version"

_DIALECTS = ("postgresql", "sqlite")

#: Alembic keeps what it works on in a global of the process.
_alembic = Lock()


def upgrade(bind: Engine | Connection, schema: str | None = None, slots: int = SLOTS) -> None:
    """Create the tables, or bring them up to date; harmless when they are, and when several processes do it at once.

    All of it is one transaction. A connection that is in one already is joined, and its owner commits.

    Args:
        bind: where the tables are, or shall be.
        schema: PostgreSQL's schema for them, created when missing; None is the first of the search path.
        slots: into how many the keys are hashed. It counts at the first upgrade only: it is fixed from then on.

    Raises:
        DatabaseError: the database is neither PostgreSQL nor SQLite, or has no schemas.
    """
    if not isinstance(bind, Engine | Connection):
        raise TypeError(f"upgrade takes an Engine or a Connection that blocks, not {type(bind).__name__}")
    _require_support(bind.dialect.name, schema)
    with _alembic, _transaction(bind) as connection:
        command.upgrade(_config(connection=connection, schema=schema, slots=slots), "head")


def sql(url: str | URL, schema: str | None = None, slots: int = SLOTS) -> str:
    """The SQL that makes the tables in an empty database, as one transaction, for those who apply it by hand.

    Args:
        url: a database URL, of which only the dialect counts, or the dialect's name ("postgresql", "sqlite").
        schema: as in `upgrade`.
        slots: as in `upgrade`.

    Raises:
        DatabaseError: as `upgrade`.
    """
    dialect = url if isinstance(url, str) and "://" not in url else make_url(url).get_backend_name()
    _require_support(dialect, schema)
    script = io.StringIO()
    with _alembic:
        command.upgrade(_config(script, dialect=dialect, schema=schema, slots=slots), "head", sql=True)
    return script.getvalue()


def current_revision(bind: Engine | Connection, schema: str | None = None) -> str | None:
    """The revision that the database's tables are at; None when there are none."""
    with _transaction(bind) as connection:
        options = {"version_table": VERSION_TABLE, "version_table_schema": schema}
        return MigrationContext.configure(connection, opts=options).get_current_revision()


def head_revision() -> str | None:
    """The revision that this library needs."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def _require_support(dialect: str, schema: str | None) -> None:
    if dialect not in _DIALECTS:
        raise DatabaseError(f"an outbox lives in PostgreSQL or SQLite, not in {dialect}")
    if schema is not None and dialect == "sqlite":
        raise DatabaseError("SQLite has no schemas; leave the schema out")


@contextmanager
def _transaction(bind: Engine | Connection) -> Iterator[Connection]:
    if isinstance(bind, Engine):
        with bind.begin() as connection:
            yield connection
    elif bind.in_transaction():
        yield bind
    else:
        with bind.begin():
            yield bind


def _config(output: io.StringIO | None = None, **attributes: Any) -> Config:
    """Alembic's configuration without a file; `attributes` are what `env.py` reads."""
    config = Config(output_buffer=output, attributes=attributes)
    # Alembic interpolates percent signs.
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    return config


def _scripts() -> Path:
    """The migrations: beside this file when installed from a wheel, else at the top of the repository."""
    package = Path(__file__).resolve().parent
    shipped = package / "_migrations"
    return shipped if shipped.is_dir() else package.parent / "migrations"
