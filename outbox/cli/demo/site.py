"""The demo's own servers, and the replacements on a machine without servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import func, select

from outbox import migrate
from outbox.cli.demo.destination import Destination, LinesFile, Stream
from outbox.cli.demo.service import order_service
from outbox.errors import MissingExtraError
from outbox.testing.servers import NatsServer, PostgresServer, ServerMissing
from outbox.testing.servers.process import Guard, scratch_folder
from outbox.writing.engines import create_engine

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A database with the order service's tables, a destination, and a folder for logs; gone when the demo ends."""

    database_url: str
    destination: Destination
    folder: Path
    books: Books

    @property
    def is_postgresql(self) -> bool:
        """True on PostgreSQL, where writers run side by side; on SQLite one writes at a time."""
        return self.database_url.startswith("postgresql")

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the demo's processes, without the user's own settings of an outbox."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        return mine | {"OUTBOX_DATABASE": self.database_url, "OUTBOX_CONFIG": os.devnull}


class Books:
    """The committed orders, read from the table of the business."""

    def __init__(self, url: str, order: Any) -> None:
        # Not the outbox's engine: on SQLite that one begins with the write lock, and a reader needs none.
        self._engine = sqlalchemy.create_engine(url)
        self._order = order

    def committed(self) -> dict[str, int]:
        """Return how many changes of each order were committed, by key."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(self._order.id, self._order.version))
            return {f"order-{number}": version for number, version in rows}

    def changes(self) -> int:
        """Return how many changes were committed in all; each change is a message."""
        with self._engine.connect() as connection:
            return int(connection.scalar(select(func.coalesce(func.sum(self._order.version), 0))) or 0)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


@contextmanager
def opened_site(tell: Tell, *, light: bool) -> Iterator[Site]:
    """Start the servers that are installed; yield the site. `light`: no servers, but SQLite and a file."""
    with ExitStack() as stack:
        folder = scratch_folder("demo", None)
        stack.callback(Guard(folder).release)
        url = _database(stack, folder, tell, light=light)
        service = prepared(url)
        books = Books(url, service.Order)
        stack.callback(books.close)
        destination = _destination(stack, folder, tell, light=light)
        stack.callback(destination.close)
        yield Site(database_url=url, destination=destination, folder=folder, books=books)


def _database(stack: ExitStack, folder: Path, tell: Tell, *, light: bool) -> str:
    if not light:
        try:
            server = stack.enter_context(PostgresServer(durable=True))
        except ServerMissing as missing:
            tell(f"{missing}; going on with SQLite")
        else:
            tell(f"PostgreSQL, a private one, runs on port {server.port}")
            return server.create_database("shop")
    tell("the database is SQLite: one transaction writes at a time")
    return f"sqlite:///{folder / 'shop.sqlite3'}"


def _destination(stack: ExitStack, folder: Path, tell: Tell, *, light: bool) -> Destination:
    if not light:
        try:
            import outbox.senders.nats  # noqa: F401 - fails without its driver

            server = stack.enter_context(NatsServer())
        except (ServerMissing, MissingExtraError) as missing:
            tell(f"{missing}; going on with a file")
        else:
            tell(f"NATS JetStream, a private one, runs on port {server.port}")
            return Stream(server.url)
    tell("the destination is a file of JSON lines")
    return LinesFile(folder / "orders.jsonl")


def prepared(url: str) -> Any:
    """Make the tables of the outbox and of the order service; return the service."""
    before = os.environ.get("OUTBOX_DATABASE")
    os.environ["OUTBOX_DATABASE"] = url
    try:
        service = order_service()
    finally:
        if before is None:
            del os.environ["OUTBOX_DATABASE"]
        else:
            os.environ["OUTBOX_DATABASE"] = before
    engine = create_engine(url)
    migrate.upgrade(engine)
    service.Base.metadata.create_all(engine)
    engine.dispose()
    service.engine.dispose()
    return service
