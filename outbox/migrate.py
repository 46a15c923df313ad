"""Bring a database's outbox tables to the version of the library, or print the SQL."""

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
from sqlalchemy import URL, Connection, Engine, MetaData, inspect, literal_column, make_url, select, text
from sqlalchemy.engine import Dialect as EngineDialect
from sqlalchemy.engine.mock import MockConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema

from outbox.errors import DatabaseError, SchemaError
from outbox.model.slots import SLOTS
from outbox.schema import VERSION, VERSION_TABLE, inbox_metadata, record_metadata, revision_table, tables
from outbox.store import identity
from outbox.store.database import Database
from outbox.store.dialects import part_of
from outbox.store.dialects.dialect import Dialect
from outbox.store.dialects.kinds import KINDS
from outbox.store.operations.check import INBOX_ALONE, of_tables, tables_of, tables_there

#: The version that is stored in tables that are not complete. It is no real version, so workers refuse them.
_INCOMPLETE = 0
_MOST_SHOWN = 3

#: Alembic keeps what it works on in a global of the process, so one thread at a time may use it.
_alembic = Lock()


def upgrade(bind: Engine | Connection, schema: str | None = None, slots: int = SLOTS) -> None:
    """Create the tables, or bring them up to date; harmless on current tables, and in several processes at once.

    Tables of a later version of this library stay as they are, if this version may use them.

    Complete tables without a revision (from an application's own Alembic, or `create_all`) are taken over. All changes
    are one transaction. A connection that is in a transaction already is joined, and the caller commits. On PostgreSQL
    the transaction waits for locks for three seconds at most, unless the session has a `lock_timeout`.

    Args:
        bind: the database for the tables.
        schema: PostgreSQL's schema for the tables, created when missing; None is the first of the search path.
        slots: the number of slots that keys are hashed into. Only the first upgrade writes the number.

    Raises:
        DatabaseError: the database is neither PostgreSQL nor SQLite, spreads over several servers, or has no schemas.
        SchemaError: this version cannot use the tables, which a newer one has made; or the tables have no revision, and
            differ from those of this version; or another transaction keeps a lock on a table. Nothing was changed.
    """
    if not isinstance(bind, Engine | Connection):
        raise TypeError(f"upgrade takes an Engine or a Connection that blocks, not {type(bind).__name__}")
    _require_support(bind.dialect.name, schema)
    with _alembic, _transaction(bind) as connection:
        ours, dialect = tables(schema, connection.dialect.name), connection.dialect
        message = dialect.identifier_preparer.format_table(ours.message)
        identity.require_native(part_of(dialect.name, Dialect), message, lambda query: connection.scalar(text(query)))
        if _are_newer(connection, schema):
            return
        with _explained(connection):
            command.upgrade(_config(connection=connection, schema=schema), "head")
        if _version(connection, schema) != VERSION:
            _write_rows(connection, schema, slots, VERSION)


def downgrade(bind: Engine | Connection, revision: str, schema: str | None = None) -> None:
    """Bring the tables back to an earlier revision, with all that they hold; harmless on tables of that revision.

    Workers of this version stop, and those of the version with that revision may start. The transaction is as in
    `upgrade`.

    Args:
        bind: the database of the tables.
        revision: the newest revision of the version to go back to, such as "0001".
        schema: as in `upgrade`.

    Raises:
        SchemaError: the tables are not there, or of a revision that this version does not know; or `revision` is not
            an earlier one; or another transaction keeps a lock on a table. Nothing was changed.
    """
    if not isinstance(bind, Engine | Connection):
        raise TypeError(f"downgrade takes an Engine or a Connection that blocks, not {type(bind).__name__}")
    _require_support(bind.dialect.name, schema)
    with _alembic, _transaction(bind) as connection:
        wait_for_others(connection, schema, VERSION_TABLE)
        version = _version_of(revision, before=current_revision(connection, schema))
        with _explained(connection):
            command.downgrade(_config(connection=connection, schema=schema, version=version), revision)
        meta = tables(schema, connection.dialect.name).meta
        connection.execute(meta.update().where(meta.c.version != version).values(version=version))


def _version_of(revision: str, *, before: str | None) -> int:
    """Return the version of the tables of a revision, which is not later than the revision `before`."""
    if before is None:
        raise SchemaError("there are no tables whose revision is known, so there is no way back")
    if not knows(before):
        raise SchemaError(f"the tables are of revision {before}, which this version does not know; {identity.NEWER}")
    earlier = {each.revision: each for each in ScriptDirectory.from_config(_config()).iterate_revisions(before, "base")}
    if revision not in earlier:
        raise SchemaError(f"{revision} is no revision before {before}; name one of: {', '.join(sorted(earlier))}")
    version: int = earlier[revision].module.version
    return version


def upgrade_record(bind: Engine | Connection, schema: str | None = None) -> bool:
    """Create the one table of a business database without an outbox, for transactions with verdict="record".

    Harmless on a database that has the table, and in several processes at once. Return True if the table was made. The
    transaction is as in `upgrade`.

    Args:
        bind: the business database.
        schema: as in `upgrade`.

    Raises:
        DatabaseError: the database is neither PostgreSQL nor SQLite, or has no schemas.
    """
    return _make(record_metadata(schema), bind, schema)


def upgrade_inbox(bind: Engine | Connection, schema: str | None = None) -> bool:
    """Create the one table of a consumer's database without an outbox, for its `Inbox`; else as `upgrade_record`.

    A later `upgrade` makes the rest of an outbox.
    """
    return _make(inbox_metadata(schema), bind, schema)


def _make(alone: MetaData, bind: Engine | Connection, schema: str | None) -> bool:
    """Create the one table of `alone`; return False if the database has the table."""
    if not isinstance(bind, Engine | Connection):
        raise TypeError(f"an upgrade takes an Engine or a Connection that blocks, not {type(bind).__name__}")
    _require_support(bind.dialect.name, schema)
    (table,) = alone.tables.values()
    with _transaction(bind) as connection:
        wait_for_others(connection, schema, table.name)
        if inspect(connection).has_table(table.name, schema=schema):
            return False
        if schema is not None and not inspect(connection).has_schema(schema):
            connection.execute(CreateSchema(schema))
        table.create(connection)
    return True


def wait_for_others(connection: Connection, schema: str | None, name: str) -> None:
    """Let processes that start together upgrade in turn; later processes find nothing to do."""
    part_of(connection.dialect.name, Dialect).locks.upgrades(connection, f"{schema or ''}.{name}")


def seed(bind: Connection | MockConnection, schema: str | None = None, slots: int = SLOTS) -> None:
    """Write the rows that an outbox begins with, and the version of its tables; harmless where all rows are there.

    For an application's own Alembic: the revision that makes the tables of `outbox.schema.metadata` calls `seed` with
    `op.get_bind()`, and so does each later revision that changes our tables. `seed` joins the transaction of `bind`,
    and writes into the script of `alembic upgrade --sql`, too.

    Args:
        bind: a connection that blocks, or Alembic's stand-in for a script.
        schema: the schema of the tables; None is the first of the search path.
        slots: the number of slots that keys are hashed into. Only the first call writes the number.

    Raises:
        DatabaseError: the database is neither PostgreSQL nor SQLite, or has no schemas.
        SchemaError: the tables are not there; or only `upgrade` keeps what an earlier version left behind.
    """
    if not isinstance(bind, Connection | MockConnection):
        raise TypeError(f"seed takes a Connection that blocks, as op.get_bind() is one, not {type(bind).__name__}")
    _require_support(bind.dialect.name, schema)
    if isinstance(bind, Connection):
        _require_nothing_left_behind(bind, schema)
    # The database that a script will run on is not known here; the statements before it must have made the tables.
    complete = isinstance(bind, MockConnection) or _are_complete(bind, Database(bind.engine, schema))
    _write_rows(bind, schema, slots, VERSION if complete else _INCOMPLETE)
    if complete:
        _stamp(bind, schema)


def take_over(connection: Connection, schema: str | None) -> None:
    """Store the revision of complete tables without a revision, which our migrations did not make.

    Raises:
        SchemaError: the tables are not complete, or have a revision that only a newer version of this library knows.
    """
    revision = current_revision(connection, schema)
    if revision is not None and not knows(revision):
        raise SchemaError(f"the tables are of revision {revision}, which this version does not know; {identity.NEWER}")
    present = tables_there(connection, tables(schema, connection.dialect.name))
    if revision is not None or not present:
        return
    database = Database(connection.engine, schema)
    if present == INBOX_ALONE:
        tables_of(database).metadata.create_all(connection)
    differences = [f"{each.where} {each.problem}" for each in of_tables(connection, database)]
    if differences:
        more = len(differences) - _MOST_SHOWN
        raise SchemaError(
            "`outbox db upgrade` did not make the outbox tables that are there, and cannot take them over as"
            f" they are: {'; '.join(differences[:_MOST_SHOWN])}{f'; and {more} more' if more > 0 else ''}. Nothing was"
            f" changed; to see what to do about each, run: {database.check_command}"
        )
    _stamp(connection, schema)


def sql(url: str | URL, schema: str | None = None, slots: int = SLOTS) -> str:
    """Return the SQL that makes the tables in an empty database, as one transaction, to be applied by hand.

    Args:
        url: a database URL, of which only the dialect counts, or the name of the dialect ("postgresql", "sqlite").
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


def fence(connection: Connection, schema: str | None, version: int) -> None:
    """Take the right to settle from workers of the stored version, before the tables become those of another one."""
    stored = None if current_revision(connection, schema) is None else _version(connection, schema)
    if stored in (None, version):
        return
    ours, dialect = tables(schema, connection.dialect.name), connection.dialect
    if (lock := part_of(dialect.name, Dialect).locks.table) is not None:
        # A worker that waits for a row of the fence has the table, which a revision may want for itself.
        connection.execute(text(lock.format(table=dialect.identifier_preparer.format_table(ours.lease))))
    connection.execute(text(identity.fence(dialect, ours)))


def current_revision(bind: Engine | Connection, schema: str | None = None) -> str | None:
    """Return the revision of the database's tables; None without tables."""
    with _transaction(bind) as connection:
        options = {"version_table": VERSION_TABLE, "version_table_schema": schema}
        return MigrationContext.configure(connection, opts=options).get_current_revision()


def _are_newer(connection: Connection, schema: str | None) -> bool:
    """Return whether a later version of this library made the tables, in a way that lets this version use them."""
    revision = current_revision(connection, schema)
    return revision is not None and not knows(revision) and _version(connection, schema) == VERSION


def head_revision() -> str | None:
    """Return the newest revision of the library."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def knows(revision: str | None) -> bool:
    """Return whether this library has a revision."""
    return any(revision == each.revision for each in ScriptDirectory.from_config(_config()).walk_revisions())


def _are_complete(connection: Connection, database: Database) -> bool:
    """Return whether the tables are those of this version; raise `SchemaError` if one is missing."""
    ours = tables_of(database)
    missing = {table.name for table in identity.seeded(ours)} - tables_there(connection, ours)
    if missing:
        raise SchemaError(
            f"{', '.join(sorted(missing))}: not there; call seed after the statements that make the tables"
        )
    return not of_tables(connection, database)


def _require_nothing_left_behind(connection: Connection, schema: str | None) -> None:
    """Refuse tables of an earlier version with messages that only our own revisions take over."""
    ours = tables(schema, connection.dialect.name)
    if not {ours.subscription.name, ours.parked.name, ours.meta.name} <= tables_there(connection, ours):
        return
    subscription, parked = ours.subscription.c, ours.parked.c
    found = connection.scalar(select(subscription.name).where(subscription.kind == "compensation"))
    if found is not None:
        raise SchemaError(f"{found} may have messages that nobody would send: {_instead(connection, schema)}")
    if (
        0 < (_version(connection, schema) or VERSION) < VERSION
        and connection.scalar(select(parked.id).limit(1)) is not None
    ):
        raise SchemaError(
            f"outbox_parked has messages of an earlier version, which would lose their order:"
            f" {_instead(connection, schema)}"
        )


def _instead(connection: Connection, schema: str | None) -> str:
    return (
        "undo this revision of your own Alembic, and let"
        f" `{Database(connection.engine, schema).upgrade_command}` change the tables instead, which keeps them"
    )


def _version(connection: Connection, schema: str | None) -> int | None:
    """Return the version stored in the tables, or None."""
    return connection.scalar(select(tables(schema, connection.dialect.name).meta.c.version))


def _write_rows(connection: Connection | MockConnection, schema: str | None, slots: int, version: int) -> None:
    for statement in first_rows(connection.dialect, schema, slots, version):
        connection.execute(text(statement))


def first_rows(dialect: EngineDialect, schema: str | None, slots: int, version: int = VERSION) -> list[str]:
    """Return the statements for the rows of a new outbox, and the version of the tables."""
    return identity.first_rows(tables(schema, dialect.name), dialect, version, slots)


def _stamp(connection: Connection | MockConnection, schema: str | None) -> None:
    """Store the newest revision as that of the tables."""
    table = revision_table(MetaData(schema=schema))
    if isinstance(connection, Connection):
        table.create(connection, checkfirst=True)
    connection.execute(table.delete())
    # Not as a parameter, which a script could not hold.
    connection.execute(table.insert().values(version_num=literal_column(f"'{head_revision()}'")))


@contextmanager
def _explained(connection: Connection) -> Iterator[None]:
    """Turn the driver's error about a table that is there already, or is locked, into an error with the fix."""
    try:
        yield
    except DBAPIError as error:
        errors = part_of(connection.dialect.name, Dialect).errors
        if isinstance(error.orig, Exception) and errors.locked(error.orig):
            raise SchemaError(
                "another transaction has one of the tables, and writers would wait behind the upgrade; nothing was"
                " changed: run it again when that transaction has ended"
            ) from error
        if not isinstance(error.orig, Exception) or not errors.already_there(error.orig):
            raise
        raise SchemaError(
            f"the upgrade would make what is there already ({' '.join(str(error.orig).split())}); nothing was changed."
            " If a revision of your own Alembic has made it, let that revision call outbox.migrate.seed, else remove it"
        ) from error


def _require_support(dialect: str, schema: str | None) -> None:
    kind = part_of(dialect, Dialect)
    if schema is not None and not kind.schemas:
        raise DatabaseError(f"{KINDS[dialect]} has no schemas; leave the schema out")


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
    """Return Alembic's configuration without a file; `env.py` reads the `attributes`."""
    config = Config(output_buffer=output, attributes=attributes)
    # Alembic interpolates percent signs.
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    return config


def _scripts() -> Path:
    """Return the folder of migrations: beside this file when installed from a wheel, else at the repository's top."""
    package = Path(__file__).resolve().parent
    shipped = package / "_migrations"
    return shipped if shipped.is_dir() else package.parent / "migrations"
