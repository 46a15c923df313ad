"""The check of a PostgreSQL server: its version, its settings, and who holds up what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, text

from outbox.store.dialects.finding import Finding

_OLDEST = (13,)
#: A transaction that is open for longer holds up the clean-up of rows, and is a mistake more often than not.
PATIENCE = timedelta(minutes=10)
#: Snapshots of a standby or a slot are counted in transactions, because the server does not know their age.
PATIENCE_TRANSACTIONS = 1_000_000
#: With a larger share of its connections in use, a server soon refuses some.
MOST_USED = 0.8

#: A server that speaks as PostgreSQL does, by its own word, or a log that Citus spreads over several servers: by the
#: trigger on each such table.
_FOREIGN = """
    SELECT CASE WHEN position('-YB-' IN version()) > 0 THEN 'YugabyteDB'
        WHEN left(version(), 9) = 'Cockroach' THEN 'CockroachDB'
        WHEN EXISTS (SELECT 1 FROM pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid
                     WHERE t.tgrelid = to_regclass('{message}') AND p.proname = 'citus_truncate_trigger')
        THEN 'Citus' END
"""
_WHY = "no snapshot of one server lists its open transactions, so a position would pass over messages"
_FOREIGN_FIXES = {"Citus": "keep the tables of the outbox local: SELECT undistribute_table('{message}')"}
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
#: Who keeps dead rows from being removed: since when or how far back, evidence, and the fix. Of the sessions of other
#: roles a role sees nothing unless it has pg_read_all_stats.
_PINNED = """
    SELECT format('session %s', pid), format('for %s', date_trunc('second', clock_timestamp() - xact_start)),
           concat_ws(', ', 'role ' || usename, 'application ' || nullif(application_name, ''), client_addr, state),
           format('end its transaction, or SELECT pg_terminate_backend(%s)', pid)
    FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND datname = current_database() AND pid <> pg_backend_pid()
      AND coalesce(backend_xid, backend_xmin) IS NOT NULL AND xact_start <= clock_timestamp() - :patience
    UNION ALL
    SELECT format('prepared transaction %L', gid),
           format('for %s', date_trunc('second', clock_timestamp() - prepared)), 'owner ' || owner,
           format('COMMIT PREPARED %L, or ROLLBACK PREPARED %L', gid, gid)
    FROM pg_prepared_xacts
    WHERE database = current_database() AND prepared <= clock_timestamp() - :patience
    UNION ALL
    SELECT format('replication slot %s', slot_name), format('for %s transactions', age(xmin)),
           CASE WHEN active THEN 'its standby reads with hot_standby_feedback' ELSE 'nobody uses the slot' END,
           format('end long queries on its standby, or SELECT pg_drop_replication_slot(%L)', slot_name)
    FROM pg_replication_slots WHERE age(xmin) >= :transactions
    UNION ALL
    SELECT format('standby %s', application_name), format('for %s transactions', age(backend_xmin)),
           'it reads with hot_standby_feedback', 'end long queries on the standby'
    FROM pg_stat_replication WHERE age(backend_xmin) >= :transactions
"""
_UNCLEANED = "SELECT name FROM pg_settings WHERE name IN ('autovacuum', 'track_counts') AND setting = 'off'"
#: Every role may read these numbers, where pg_stat_activity hides the sessions of others.
_CONNECTIONS = """
    SELECT sum(numbackends)::int,
           current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
    FROM pg_stat_database
"""


def why_foreign(read: Callable[[str], Any], message: str) -> tuple[str, str] | None:
    """Return why no outbox can be on the server, and the fix; None on PostgreSQL.

    `read` returns the value of a query; `message` is the name of the log.
    """
    name = read(_FOREIGN.format(message=message.replace("'", "''")))
    if name is None:
        return None
    fix = _FOREIGN_FIXES.get(name, "use PostgreSQL itself").format(message=message)
    return f"{name} runs transactions on several servers; {_WHY}", fix


def check_server(connection: Connection) -> Iterator[Finding]:
    """Find what is wrong with the server, with its settings, and with other sessions."""
    version = connection.dialect.server_version_info or ()
    if version < _OLDEST:
        yield Finding("server", f"is PostgreSQL {version[0]}", "use PostgreSQL 13 or newer")
    yield from _of_commits(connection)
    pinned = {"patience": PATIENCE, "transactions": PATIENCE_TRANSACTIONS}
    for who, how_long, evidence, fix in connection.execute(text(_PINNED), pinned):
        yield Finding(who, f"has kept dead rows from being removed {how_long}", fix, evidence)
    for (name,) in connection.execute(text(_UNCLEANED)):
        yield Finding(
            name, "is off, so dead rows pile up", f"ALTER SYSTEM SET {name} = on, then SELECT pg_reload_conf()"
        )
    used, limit = connection.execute(text(_CONNECTIONS)).one()
    if used >= MOST_USED * limit:
        fix = "raise max_connections, make the pools of the applications smaller, or put a pooler before them"
        yield Finding("connections", "are nearly used up", fix, f"{used} of {limit}")


def _of_commits(connection: Connection) -> Iterator[Finding]:
    for source, role, database in connection.execute(text(_ASYNCHRONOUS)):
        if source in _SYNCHRONOUS:
            problem = f"is off (source: {source}), so a crash may take a transaction back whose messages are delivered"
            yield Finding("synchronous_commit", problem, _SYNCHRONOUS[source].format(role=role, database=database))
