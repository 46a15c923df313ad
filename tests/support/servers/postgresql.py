"""Standbys and processes of a private PostgreSQL."""

from __future__ import annotations

import psycopg

from outbox.testing.servers import PostgresServer


class Standby(PostgresServer):
    """A hot standby of a running server, which follows by streaming."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__(durable=primary._durable, settings=primary._settings)
        self._primary = primary

    def _create_cluster(self) -> None:
        source = ["-h", "127.0.0.1", "-p", str(self._primary.port), "-U", "postgres"]
        self._run("pg_basebackup", "-D", self.data, *source, "-R", "-X", "stream", "-c", "fast", "--no-sync")


def postmaster_pid(server: PostgresServer) -> int:
    """The process id of a running server."""
    assert server._program is not None, "the server is not running"
    return server._program.pid


def backend_pids(server: PostgresServer, database: str | None = None) -> list[int]:
    """The process ids of the connections of clients, to one database or to all."""
    query = """
        SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
        AND (%(database)s::text IS NULL OR datname = %(database)s) ORDER BY pid
    """
    with psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", dbname="postgres") as connection:
        return [pid for (pid,) in connection.execute(query, {"database": database})]
