"""The check of an outbox on PostgreSQL: the server's version and settings, collations, indexes, the sequence of ids."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from sqlalchemy import Connection, MetaData, text

from outbox.store.dialects.finding import Finding, given_again

_OLDEST = (13,)
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
#: NULLs where there is no sequence. The name is quoted for use in a statement.
_SEQUENCE = """
    SELECT s.name, has_sequence_privilege(s.name, 'SELECT'), quote_ident(current_user)
    FROM (SELECT pg_get_serial_sequence('{message}', 'id') AS name) AS s
"""
_DRAWN = "SELECT last_value - CASE WHEN is_called THEN 0 ELSE 1 END FROM {sequence}"
#: A row if new connections of the application commit asynchronously: the source of that setting, the role and the
#: database.
_ASYNCHRONOUS = """
    SELECT source, quote_ident(session_user), quote_ident(current_database()) FROM pg_settings
    WHERE name = 'synchronous_commit' AND setting = 'off'
"""
#: The fix, by source. A setting on the server's command line is accepted, because servers of tests, which are thrown
#: away, have it there.
_SYNCHRONOUS = {
    "user": "ALTER ROLE {role} SET synchronous_commit = on",
    "database user": "ALTER ROLE {role} IN DATABASE {database} SET synchronous_commit = on",
    "database": "ALTER DATABASE {database} SET synchronous_commit = on",
    "global": "ALTER ROLE ALL SET synchronous_commit = on",
    "configuration file": "ALTER SYSTEM SET synchronous_commit = on, then SELECT pg_reload_conf()",
    "client": "leave synchronous_commit out of the options that it connects with: URL, connect_args, PGOPTIONS",
    "session": "leave out the SET synchronous_commit that the application executes when it has connected",
}


def check_tables(connection: Connection, metadata: MetaData, _present: Collection[str]) -> Iterator[Finding]:
    """Find what is wrong with the server, with settings of the database, and with tables in ways of PostgreSQL."""
    version = connection.dialect.server_version_info or ()
    if version < _OLDEST:
        yield Finding("server", f"is PostgreSQL {version[0]}", "use PostgreSQL 13 or newer")
    yield from _of_commits(connection)
    where = {"schema": metadata.schema}
    ours = {table.name: table for table in metadata.tables.values()}
    for (name,) in connection.execute(text(_NOT_LOGGED.replace(":schema", "CAST(:schema AS text)")), where):
        if name in ours:
            fix = f"ALTER TABLE {ours[name]} SET LOGGED"
            yield Finding(name, "is not logged, so a crash of the server empties it", fix)
    for (name,) in connection.execute(text(_INVALID.replace(":schema", "CAST(:schema AS text)")), where):
        yield Finding(f"index {name}", "is not valid", f"REINDEX INDEX {name}")
    statement = text(_COLLATIONS.replace(":schema", "CAST(:schema AS text)"))
    collations = {(table, column): name for table, column, name in connection.execute(statement, where)}
    for table in metadata.tables.values():
        for column in table.columns:
            wanted = getattr(column.type.dialect_impl(connection.dialect), "collation", None)
            found = collations.get((table.name, column.name), wanted)
            if wanted is not None and found != wanted:
                problem = f"is ordered by the collation {found or 'of the database'}"
                yield Finding(f"{table.name}.{column.name}", problem, f'give it COLLATE "{wanted}"')


def check_ids(connection: Connection, names: Mapping[str, str], where: str, highest: int) -> Iterator[Finding]:
    """Find a sequence that would draw ids again, or that cannot be read. `where` is the column with the highest id."""
    sequence, may_read, role = connection.execute(text(_SEQUENCE.format(**names))).one()
    if sequence is not None and not may_read:
        problem = "draws ids from a sequence that this role may not read, so nobody knows whether they rise"
        yield Finding("outbox_message.id", problem, f"GRANT SELECT ON SEQUENCE {sequence} TO {role}")
    elif sequence is not None:
        drawn = connection.execute(text(_DRAWN.format(sequence=sequence))).scalar_one()
        mend = f"ALTER TABLE {names['message']} ALTER id RESTART WITH {highest + 1}"
        yield from given_again(drawn, where, highest, mend)


def _of_commits(connection: Connection) -> Iterator[Finding]:
    for source, role, database in connection.execute(text(_ASYNCHRONOUS)):
        if source in _SYNCHRONOUS:
            problem = f"is off (source: {source}), so a crash may take a transaction back whose messages are delivered"
            yield Finding("synchronous_commit", problem, _SYNCHRONOUS[source].format(role=role, database=database))
