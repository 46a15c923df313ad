"""The check of an outbox on PostgreSQL: collations, indexes, storage, the sequence of ids."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from sqlalchemy import Connection, MetaData, Table, text

from outbox.store.dialects.finding import Finding, given_again

#: The schema of the tables.
_HERE = "coalesce(CAST(:schema AS text), current_schema())"
_INVALID = f"""
    SELECT c.relname FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
    JOIN pg_class AS t ON t.oid = i.indrelid JOIN pg_namespace AS n ON n.oid = t.relnamespace
    WHERE NOT i.indisvalid AND t.relname LIKE 'outbox\\_%' AND n.nspname = {_HERE}
"""
#: Whether the check of the slots holds for all rows; NULL where there is none.
_SLOTS = f"""
    SELECT c.convalidated FROM pg_class AS t JOIN pg_namespace AS n ON n.oid = t.relnamespace
    LEFT JOIN pg_constraint AS c ON c.conrelid = t.oid AND c.conname = 'outbox_message_slot'
    WHERE t.relname = 'outbox_message' AND n.nspname = {_HERE}
"""
_COLLATIONS = f"""
    SELECT table_name, column_name, collation_name FROM information_schema.columns
    WHERE table_name LIKE 'outbox\\_%' AND table_schema = {_HERE}
"""
_NOT_LOGGED = f"""
    SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relpersistence <> 'p' AND c.relkind = 'r' AND c.relname LIKE 'outbox\\_%'
      AND n.nspname = {_HERE}
"""
#: NULLs where there is no sequence. The name is quoted for use in a statement.
_SEQUENCE = """
    SELECT s.name, has_sequence_privilege(s.name, 'SELECT'), quote_ident(current_user)
    FROM (SELECT pg_get_serial_sequence('{message}', 'id') AS name) AS s
"""
_DRAWN = "SELECT last_value - CASE WHEN is_called THEN 0 ELSE 1 END FROM {sequence}"
_UNCLEANED = f"""
    SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace,
         pg_options_to_table(c.reloptions) AS o
    WHERE c.relkind = 'r' AND c.relname LIKE 'outbox\\_%' AND n.nspname = {_HERE}
      AND o.option_name = 'autovacuum_enabled' AND NOT CAST(o.option_value AS boolean)
"""


def check_tables(connection: Connection, metadata: MetaData, _present: Collection[str]) -> Iterator[Finding]:
    """Find what is wrong with tables in ways of PostgreSQL."""
    where = {"schema": metadata.schema}
    ours = {table.name: table for table in metadata.tables.values()}
    for (name,) in connection.execute(text(_NOT_LOGGED), where):
        if name in ours:
            fix = f"ALTER TABLE {ours[name]} SET LOGGED"
            yield Finding(name, "is not logged, so a crash of the server empties it", fix)
    for (name,) in connection.execute(text(_UNCLEANED), where):
        if name in ours:
            fix = f"ALTER TABLE {ours[name]} RESET (autovacuum_enabled)"
            yield Finding(name, "is left out by autovacuum, so dead rows pile up", fix)
    for (name,) in connection.execute(text(_INVALID), where):
        yield Finding(f"index {name}", "is not valid", f"REINDEX INDEX {name}")
    collations = {(table, column): name for table, column, name in connection.execute(text(_COLLATIONS), where)}
    for table in metadata.tables.values():
        for column in table.columns:
            wanted = getattr(column.type.dialect_impl(connection.dialect), "collation", None)
            found = collations.get((table.name, column.name), wanted)
            if wanted is not None and found != wanted:
                problem = f"is ordered by the collation {found or 'of the database'}"
                yield Finding(f"{table.name}.{column.name}", problem, f'give it COLLATE "{wanted}"')


def check_slots(connection: Connection, message: Table) -> Iterator[Finding]:
    """Find a log that takes a message with a negative slot, or may have one from before the check."""
    for (holds,) in connection.execute(text(_SLOTS), {"schema": message.schema}):
        if holds is None:
            fix = f"ALTER TABLE {message} ADD CONSTRAINT outbox_message_slot CHECK (slot >= 0) NOT VALID"
            yield Finding("outbox_message.slot", "is not checked, and a negative slot is in no partition", fix)
        elif not holds:
            fix = f"ALTER TABLE {message} VALIDATE CONSTRAINT outbox_message_slot"
            yield Finding("outbox_message.slot", "is checked in new messages only", fix)


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
