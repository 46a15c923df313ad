"""Inspecting a database: what of its outbox is not as this version needs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Connection, DefaultClause, Index, Inspector, Table, inspect, text
from sqlalchemy.schema import CreateIndex

from outbox.errors import DatabaseError
from outbox.message import slot_of
from outbox.schema import VERSION
from outbox.store.database import Database
from outbox.store.dialect import Channel
from outbox.store.identity import Identity
from outbox.store.log import Log

_UPGRADE = "run: outbox db upgrade (what it would do by hand: outbox db sql)"
_MOST_SLOTS = 32_767
_SAMPLED = 1_000
_OLDEST_POSTGRESQL = (13,)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be: where, what, and what to do."""

    where: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}; {self.fix}"


_META = "SELECT version, slots, system_identifier, database_oid FROM {meta}"
#: The newest messages with a key, among a bounded number of rows by primary key.
_KEYED = """
    SELECT key, slot FROM (SELECT key, slot FROM {message} ORDER BY id DESC LIMIT :limit) AS r WHERE key IS NOT NULL
"""
_INVALID = """
    SELECT c.relname FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
    JOIN pg_class AS t ON t.oid = i.indrelid JOIN pg_namespace AS n ON n.oid = t.relnamespace
    WHERE NOT i.indisvalid AND t.relname LIKE 'outbox\\_%' AND n.nspname = coalesce(:schema, current_schema())
"""
_COLLATIONS = """
    SELECT table_name, column_name, collation_name FROM information_schema.columns
    WHERE table_name LIKE 'outbox\\_%' AND table_schema = coalesce(:schema, current_schema())
"""
_NOT_LOGGED = """
    SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relpersistence <> 'p' AND c.relkind = 'r' AND c.relname LIKE 'outbox\\_%'
      AND n.nspname = coalesce(:schema, current_schema())
"""

#: How a new connection of the application's commits, by whose word, for whom and where.
_ASYNCHRONOUS = """
    SELECT source, quote_ident(session_user), quote_ident(current_database()) FROM pg_settings
    WHERE name = 'synchronous_commit' AND setting = 'off'
"""
#: What mends it, by source. On the command line it stands for servers that are thrown away, as those of tests.
_SYNCHRONOUS = {
    "user": "ALTER ROLE {role} SET synchronous_commit = on",
    "database user": "ALTER ROLE {role} IN DATABASE {database} SET synchronous_commit = on",
    "database": "ALTER DATABASE {database} SET synchronous_commit = on",
    "global": "ALTER ROLE ALL SET synchronous_commit = on",
    "configuration file": "ALTER SYSTEM SET synchronous_commit = on, then SELECT pg_reload_conf()",
    "client": "leave synchronous_commit out of the options that it connects with: URL, connect_args, PGOPTIONS",
    "session": "leave out the SET synchronous_commit that the application executes when it has connected",
}


def stored_identity(database: Database, channel: Channel) -> Identity | None:
    """What the database says of its outbox; None when its one row is missing."""
    with database.explained():
        rows = channel.rows(database.sql(_META))
    return Identity(*rows[0]) if rows else None


def findings(database: Database, channel: Channel, slots: int | None = None) -> list[Finding]:
    """Everything that is not as this version needs it; an empty list is what one wants to see.

    `slots`: how many the application works with, if that is to be compared, too.
    """
    with database.engine.connect() as connection:
        inspector = inspect(connection)
        present = set(inspector.get_table_names(schema=database.schema))
        needed = {table.name: table for table in database.tables.metadata.tables.values()}
        if not present & set(needed):
            return [
                Finding("tables", "are not there", f"run: {database.upgrade_command}"),
                *_of_server(database, channel),
            ]
        found = [Finding(name, "is missing", _UPGRADE) for name in sorted(set(needed) - present)]
        for name in sorted(set(needed) & present):
            found += _of_table(inspector, needed[name], database.dialect.name)
        found += _of_postgresql(connection, database) if database.dialect.name == "postgresql" else []
        found += _of_sqlite(connection) if database.dialect.name == "sqlite" and "outbox_message" in present else []
    found += _of_server(database, channel)
    if "outbox_meta" in present:
        found += _of_meta(database, channel, slots, log_is_there="outbox_message" in present)
    return found


def _of_table(inspector: Inspector, table: Table, dialect: str) -> Iterator[Finding]:
    reflected: dict[str, Any] = {each["name"]: each for each in inspector.get_columns(table.name, schema=table.schema)}
    for column in table.columns:
        where = f"{table.name}.{column.name}"
        if column.name in reflected:
            yield from _of_column(where, column, reflected[column.name], dialect)
        else:
            yield Finding(where, "is missing", _UPGRADE)
    for name in sorted(set(reflected) - set(table.columns.keys())):
        column = reflected[name]
        if not column["nullable"] and column["default"] is None and not column.get("identity"):
            yield Finding(f"{table.name}.{name}", "is not ours and must not be null", "drop it, or give it a default")
    primary = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
    wanted = [column.name for column in table.primary_key.columns]
    if primary != wanted:
        yield Finding(table.name, f"has the primary key ({_listed(primary)}), not ({_listed(wanted)})", _UPGRADE)
    yield from _of_indexes(inspector, table, dialect)


def _of_column(where: str, column: Column[Any], found: dict[str, Any], dialect: str) -> Iterator[Finding]:
    wanted_type = _family(column.type.compile(_dialect(dialect)))
    found_type = _family(found["type"].compile(_dialect(dialect)))
    if found_type != wanted_type:
        yield Finding(where, f"is {found_type}, not {wanted_type}", "give it that type")
    if bool(found["nullable"]) != bool(column.nullable) and not column.primary_key:
        yield Finding(where, "may be null" if found["nullable"] else "must not be null", "change that")
    if column.identity is not None and dialect == "postgresql":
        yield from _of_identity(where, column, found.get("identity"))
    elif isinstance(column.server_default, DefaultClause):
        wanted = _plain(str(column.server_default.arg))
        if _plain(found["default"] or "") != wanted:
            yield Finding(where, f"has the default {found['default'] or 'none'}", f"set it to {wanted}")


def _of_identity(where: str, column: Column[Any], found: dict[str, Any] | None) -> Iterator[Finding]:
    alter = f"ALTER TABLE {column.table} ALTER {column.name}"
    if not found:
        yield Finding(where, "is no identity column", "make it one, GENERATED BY DEFAULT with CACHE 1")
        return
    cache, step = found["cache"], found["increment"]
    if cache != 1:
        problem = f"draws ids with a cache of {cache}, so that their order is not that of writing"
        yield Finding(where, problem, f"{alter} SET CACHE 1")
    if step < 1:
        yield Finding(where, f"draws ids in steps of {step}, but they must rise", f"{alter} SET INCREMENT BY 1")


def _of_indexes(inspector: Inspector, table: Table, dialect: str) -> Iterator[Finding]:
    reflected: dict[Any, Any] = {each["name"]: each for each in inspector.get_indexes(table.name, schema=table.schema)}
    for index in sorted(table.indexes, key=lambda each: str(each.name)):
        where, make = f"index {index.name}", _made_by(index, dialect)
        found = reflected.get(index.name)
        if found is None:
            yield Finding(where, "is missing", make)
            continue
        there, wanted = found["column_names"], [column.name for column in index.columns]
        if there != wanted:
            yield Finding(where, f"is on ({_listed(there)}), not on ({_listed(wanted)})", f"drop it; {make}")
        selects = _predicate(found.get("dialect_options", {}), dialect)
        needed = _predicate(_options(index, dialect), dialect)
        if selects != needed:
            yield Finding(where, f"selects {selects or 'all rows'}, not {needed or 'all rows'}", f"drop it; {make}")


def _of_postgresql(connection: Connection, database: Database) -> Iterator[Finding]:
    version = connection.dialect.server_version_info or ()
    if version < _OLDEST_POSTGRESQL:
        yield Finding("server", f"is PostgreSQL {version[0]}", "use PostgreSQL 13 or newer")
    yield from _of_commits(connection)
    where = {"schema": database.schema}
    ours = {table.name: table for table in database.tables.metadata.tables.values()}
    for (name,) in connection.execute(text(_NOT_LOGGED.replace(":schema", "CAST(:schema AS text)")), where):
        if name in ours:
            fix = f"ALTER TABLE {ours[name]} SET LOGGED"
            yield Finding(name, "is not logged, so a crash of the server empties it", fix)
    for (name,) in connection.execute(text(_INVALID.replace(":schema", "CAST(:schema AS text)")), where):
        yield Finding(f"index {name}", "is not valid", f"REINDEX INDEX {name}")
    statement = text(_COLLATIONS.replace(":schema", "CAST(:schema AS text)"))
    collations = {(table, column): name for table, column, name in connection.execute(statement, where)}
    for table in database.tables.metadata.tables.values():
        for column in table.columns:
            wanted = getattr(column.type.dialect_impl(connection.dialect), "collation", None)
            found = collations.get((table.name, column.name), wanted)
            if wanted is not None and found != wanted:
                problem = f"is ordered by the collation {found or 'of the database'}"
                yield Finding(f"{table.name}.{column.name}", problem, f'give it COLLATE "{wanted}"')


def _of_commits(connection: Connection) -> Iterator[Finding]:
    for source, role, database in connection.execute(text(_ASYNCHRONOUS)):
        if source in _SYNCHRONOUS:
            problem = f"is off (source: {source}), so a crash may take a transaction back whose messages are delivered"
            yield Finding("synchronous_commit", problem, _SYNCHRONOUS[source].format(role=role, database=database))


def _of_sqlite(connection: Connection) -> Iterator[Finding]:
    made = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = 'outbox_message'")).scalar_one()
    if "AUTOINCREMENT" not in made.upper():
        yield Finding("outbox_message.id", "is without AUTOINCREMENT, so ids would be given out twice", "make it anew")


def _of_server(database: Database, channel: Channel) -> Iterator[Finding]:
    try:
        Log(database).now(channel)
    except DatabaseError as error:
        problem, _, fix = str(error).partition("; ")
        yield Finding("server", problem, fix)
    except Exception as error:
        # Without the log there is no position on SQLite; that the table is missing has been said already.
        if not database.dialect.missing_table(error):
            raise


def _of_meta(database: Database, channel: Channel, slots: int | None, *, log_is_there: bool) -> Iterator[Finding]:
    stored = stored_identity(database, channel)
    if stored is None:
        yield Finding("outbox_meta", "is empty", "run: outbox db upgrade, or start a worker")
        return
    if stored.version != VERSION:
        yield Finding("outbox_meta", f"says version {stored.version}, this is {VERSION}", _UPGRADE)
    if not 1 <= stored.slots <= _MOST_SLOTS:
        yield Finding("outbox_meta", f"says {stored.slots} slots", f"between 1 and {_MOST_SLOTS} make sense")
    elif slots is not None and slots != stored.slots:
        yield Finding("outbox_meta", f"says {stored.slots} slots, not {slots}", f"say Outbox(…, slots={stored.slots})")
    elif log_is_there:
        keyed = channel.rows(database.sql(_KEYED), {"limit": _SAMPLED})
        wrong = sum(slot_of(key, stored.slots) != slot for key, slot in keyed)
        if wrong:
            problem = f"{wrong} of the newest {len(keyed)} messages with a key are not in the slot of their key"
            yield Finding("outbox_message.slot", problem, f"an application writes without slots={stored.slots}")
    if (stored.system_identifier, stored.database_oid) != channel.rows(database.dialect.identity)[0]:
        problem = "its log was written on another server, or under another database oid: this is a copy"
        yield Finding("database", problem, "run, with all workers stopped: outbox restore")


def _dialect(name: str) -> Any:
    from sqlalchemy.dialects import postgresql, sqlite

    return {"postgresql": postgresql, "sqlite": sqlite}[name].dialect()


def _family(type: str) -> str:
    """A type without collation and with the name that its own database shows."""
    plain = re.sub(r" COLLATE .*", "", type).upper()
    return {"TIMESTAMP": "DATETIME", "UUID": "CHAR(32)", "INT": "INTEGER"}.get(plain, plain)


def _options(index: Index, dialect: str) -> dict[str, Any]:
    return {f"{dialect}_where": index.dialect_options[dialect].get("where")}


def _predicate(options: dict[str, Any], dialect: str) -> str:
    condition = options.get(f"{dialect}_where")
    return "" if condition is None else _plain(str(condition))


def _made_by(index: Index, dialect: str) -> str:
    """The statement that makes an index."""
    return re.sub(r"\s+", " ", str(CreateIndex(index).compile(dialect=_dialect(dialect))).strip())


def _plain(expression: str) -> str:
    """An SQL expression without what a database adds when it stores one: casts, parentheses, its word for IN."""
    plain = re.sub(r"::[a-z]+( [a-z]+)*(\[\])?", "", expression)
    plain = re.sub(r"= ANY \(ARRAY\[(.*?)\]\)", r"IN \1", plain)
    plain = re.sub(r"[()]", " ", plain)
    return re.sub(r"\s+", " ", re.sub(r"\s*,\s*", ", ", plain)).strip()


def _listed(names: list[Any]) -> str:
    return ", ".join(map(str, names))
