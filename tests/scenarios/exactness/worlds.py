"""A database whose clock is the test's own."""

from __future__ import annotations

import sqlite3
from collections import Counter
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine, event, text

from outbox.store.dialects.postgresql.dialect import DIALECT as POSTGRESQL
from outbox.store.dialects.sqlite.channel import SqliteChannel
from outbox.store.dialects.sqlite.dialect import DIALECT as SQLITE
from tests.scenarios.exactness.business import set_up
from tests.support.dialects import outbox_of, varied

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


class World:
    """An outbox, and the moment that its database takes for now."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = NOON
        #: What happened, in all lives together.
        self.seen = Counter[str]()
        #: Whether several transactions may write at once.
        self.concurrent = engine.dialect.name == "postgresql"
        if self.concurrent:
            with engine.begin() as connection:
                connection.execute(text("CREATE TABLE clock (moment timestamptz NOT NULL)"))
                connection.execute(text("INSERT INTO clock VALUES (:now)"), {"now": self.now})
            dialect = varied(POSTGRESQL, now="(SELECT moment FROM clock)")
        else:
            engine.dispose()
            event.listen(engine, "connect", lambda driver, _: self._tell_time(driver))
            dialect = varied(SQLITE, now="test_now()", connect=self._connect)
        set_up(engine, keys=0)
        self.outbox = outbox_of(engine, dialect)
        self.database = self.outbox.database

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)
        if self.concurrent:
            with self.engine.begin() as connection:
                connection.execute(text("UPDATE clock SET moment = :now"), {"now": self.now})

    def clear(self) -> None:
        """Forget everything; ids go on rising."""
        tables = ("outbox_message", "outbox_parked", "outbox_progress", "outbox_lease", "outbox_subscription")
        with self.engine.begin() as connection:
            for table in tables:
                connection.execute(text(f"{'TRUNCATE' if self.concurrent else 'DELETE FROM'} {table}"))

    def _tell_time(self, driver: sqlite3.Connection) -> None:
        driver.create_function("test_now", 0, lambda: self.now.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3])

    def _connect(self, engine: Engine, name: str) -> SqliteChannel:
        channel = SqliteChannel(engine, name)
        self._tell_time(channel._driver)
        return channel
