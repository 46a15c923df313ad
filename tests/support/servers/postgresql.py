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


class Recovered(PostgresServer):
    """A server that takes the place of a lost one as of an earlier moment: a base backup, and the WAL up to a name.

    The base backup is made by the constructor, while the other server runs with a `wal_keep_size` for all its WAL.
    """

    def __init__(self, lost: PostgresServer) -> None:
        super().__init__(durable=lost._durable, settings=lost._settings)
        self._lost = lost
        self._prepare_folder()
        source = ["-h", "127.0.0.1", "-p", str(lost.port), "-U", "postgres"]
        self._run("pg_basebackup", "-D", self.data, *source, "-X", "none", "-c", "fast", "--no-sync")

    def recover(self, name: str) -> None:
        """Start on the port of the lost server, which has ended; `name`: given to `pg_create_restore_point` before."""
        (self.data / "recovery.signal").touch()
        self._settings |= {
            "restore_command": f"cp {self._lost.data}/pg_wal/%f %p",
            "recovery_target_name": name,
            "recovery_target_action": "promote",
        }
        self.port = self._lost.port
        self.start()


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
