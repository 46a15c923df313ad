"""Where it is measured: a PostgreSQL of the benchmarks' own with its defaults, a fresh database for each of them."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import Engine

from benchmarks.measure import Scale
from outbox import create_engine, migrate
from outbox.testing.servers import PostgresServer

#: Forks each process of a benchmark from one that has imported the library: a hundred starts of an interpreter saved.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["benchmarks.arrivals", "benchmarks.writers"])

#: Messages of a filled table come in transactions of this size.
_TRANSACTION = 100

#: Bodies of 300 bytes, and a key for every ten messages, or none; a price up to 100 in the headers, or none.
_FILL = """
DO $$
DECLARE
    rest bigint := {count};
BEGIN
    WHILE rest > 0 LOOP
        INSERT INTO {table} (message_id, topic, key, slot{headers}, body, content_type)
        SELECT gen_random_uuid(), 'orders', {key}, {slot}{priced},
               convert_to(rpad((rest - i)::text, 300, '.'), 'UTF8'), 'text/plain'
        FROM generate_series(1, least(rest, {transaction})) AS i;
        COMMIT;
        rest := rest - {transaction};
    END LOOP;
END $$
"""
_KEYED = {"key": sql.SQL("'order-' || (rest - i) / 10"), "slot": sql.SQL("(rest - i) / 10 % 256")}
_PRICED = {
    "headers": sql.SQL(", headers"),
    "priced": sql.SQL(""", '{"region":"eu","price":"' || (rest - i) % 100 || '.50","tenant":"acme"}'"""),
}
_UNPRICED = {"headers": sql.SQL(""), "priced": sql.SQL("")}
_KEYLESS = {"key": sql.SQL("NULL"), "slot": sql.SQL("floor(random() * 256)")}


@dataclass(frozen=True, slots=True)
class Place:
    """A database with outbox tables, for one benchmark."""

    engine: Engine
    url: str

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """A plain connection to it."""
        return psycopg.connect(self.url.replace("+psycopg", ""))

    def execute(self, statement: str) -> None:
        """A statement outside of any transaction."""
        with self.connect() as connection:
            connection.autocommit = True
            connection.execute(statement)

    def fill(self, count: int, table: str = "outbox_message", *, keyed: bool = True, priced: bool = False) -> None:
        """Append messages, and leave nothing of that to be done while something is measured."""
        fill = sql.SQL(_FILL).format(
            count=sql.Literal(count),
            table=sql.Identifier(table),
            transaction=sql.Literal(_TRANSACTION),
            **(_PRICED if priced else _UNPRICED),
            **(_KEYED if keyed else _KEYLESS),
        )
        with self.connect() as connection:
            connection.autocommit = True
            connection.execute("SET synchronous_commit = off")
            connection.execute(fill)
            connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(sql.Identifier(table)))
            connection.execute("CHECKPOINT")

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """A transaction held open, whose snapshot keeps every row version that is deleted meanwhile."""
        with self.connect() as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute("SELECT count(*) FROM outbox_meta")
            yield
            with suppress(psycopg.Error):
                connection.rollback()


@dataclass(frozen=True, slots=True)
class Site:
    """The server, and how much is measured on it."""

    server: PostgresServer
    scale: Scale

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A new database; gone afterwards."""
        name = f"bench_{uuid.uuid4().hex}"
        url = self.server.create_database(name)
        engine = create_engine(url)
        try:
            migrate.upgrade(engine)
            yield Place(engine, url)
        finally:
            engine.dispose()
            self.server.drop_database(name)
