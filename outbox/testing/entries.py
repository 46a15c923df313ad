"""The captured messages of a test, each with its state, kept up to date by the events of all outboxes."""

from __future__ import annotations

import re
import sqlite3
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session

from outbox.model.message import Message
from outbox.store.database import Database
from outbox.store.log.append import present
from outbox.telemetry.events import EVERYWHERE, Committed, Event, RolledBack, Written
from outbox.writing.commit_hook import rolled_back_to, savepoint_released, savepoint_set

#: A hand-written statement about a savepoint; the savepoints of `begin_nested` are noticed without.
_SAVEPOINT = re.compile(
    r"\s*(SAVEPOINT|ROLLBACK(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT)?|RELEASE(?:\s+SAVEPOINT)?)\s+\"?(\w+)\"?",
    re.IGNORECASE,
)


@dataclass(slots=True, eq=False)
class Entry:
    """A written message, and its state: undecided, committed, or rolled back.

    `connection`: returns the connection that wrote the message, or None if the connection is gone. `kept`: a Session
    bound to a Connection, inside another transaction, has committed; in production the message would be stored,
    whatever the test rolls back.
    """

    message: Message
    database: Database
    connection: Callable[[], Any]
    committed: bool = False
    rolled_back: bool = False
    kept: bool = False

    @property
    def undecided(self) -> bool:
        """True while neither the transaction has ended nor a test's Session has committed."""
        return not (self.committed or self.rolled_back or self.kept)


class Entries:
    """Collects every message of any outbox in the process, between `start` and `stop`."""

    def __init__(self) -> None:
        self.all: list[Entry] = []
        # Reentrant: garbage collection may roll a transaction back at any point.
        self._lock = threading.RLock()
        #: By the identity of the message, because a message may be written again.
        self._open: defaultdict[int, list[Entry]] = defaultdict(list)

    def start(self) -> None:
        """Begin to collect."""
        EVERYWHERE.listen(self._told)
        event.listen(Engine, "after_cursor_execute", self._executed)
        event.listen(Session, "after_commit", self._session_committed)

    def stop(self) -> None:
        """Collect no more; the entries stay."""
        EVERYWHERE.unlisten(self._told)
        event.remove(Engine, "after_cursor_execute", self._executed)
        event.remove(Session, "after_commit", self._session_committed)

    def settle(self) -> None:
        """Find out the state of messages whose transaction has ended, or may have, without an event."""
        with self._lock:
            to_ask: defaultdict[tuple[Database, Any], list[Entry]] = defaultdict(list)
            for entry in self._undecided():
                connection = entry.connection()
                if isinstance(connection, Connection):
                    # An invalidated connection does not even roll back.
                    entry.rolled_back = connection.closed or connection.invalidated
                else:
                    to_ask[entry.database, connection].append(entry)
            for (database, driver), entries in to_ask.items():
                _ask(driver, database, entries)

    def _undecided(self) -> Iterable[Entry]:
        return [entry for entries in self._open.values() for entry in entries if entry.undecided]

    def _told(self, happened: Event) -> None:
        with self._lock:
            match happened:
                case Written(database=Database() as database, connection=connection, messages=messages):
                    for message in messages:
                        entry = Entry(message, database, _reference(connection))
                        self.all.append(entry)
                        self._open[id(message)].append(entry)
                case Committed(messages=messages):
                    for entry in self._taken(messages):
                        entry.committed = True
                case RolledBack(messages=messages):
                    for entry in self._taken(messages):
                        entry.rolled_back = not entry.kept

    def _taken(self, messages: Sequence[Message]) -> Iterable[Entry]:
        """Take the newest open entry of each message."""
        return [self._open[id(message)].pop() for message in messages if self._open[id(message)]]

    def _executed(self, connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        found = _SAVEPOINT.match(statement)
        if found is not None and not found[2].startswith("sa_savepoint_"):
            note = {"SAV": savepoint_set, "REL": savepoint_released, "ROL": rolled_back_to}[found[1][:3].upper()]
            note(connection, found[2])

    def _session_committed(self, session: Session) -> None:
        if isinstance(session.bind, Connection) and not session.in_nested_transaction():
            with self._lock:
                for entry in self._undecided():
                    entry.kept = entry.connection() is session.bind


def _reference(connection: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(connection)
    except TypeError:
        # A connection of sqlite3, or one that asyncpg's pool lends.
        return lambda: connection


def _ask(driver: Any, database: Database, entries: Sequence[Entry]) -> None:
    """Look for the rows: committed, or inside the open transaction of a driver's own connection.

    `driver`: the connection; None: the connection, of whatever kind, is gone. The state stays unknown while the
    connection is busy, failed, or asynchronous and inside a transaction.
    """
    ids = [entry.message.message_id for entry in entries]
    if driver is None or not _is_open(driver):
        with database.engine.connect() as connection:
            found = database.execute(connection, present(database, ids))
        for entry in entries:
            entry.committed = entry.message.message_id in found
            entry.rolled_back = not entry.committed
    elif isinstance(driver, psycopg.Connection | sqlite3.Connection) and not _is_busy(driver):
        found = database.execute(driver, present(database, ids))
        for entry in entries:
            entry.rolled_back = entry.message.message_id not in found


def _is_open(driver: Any) -> bool:
    if isinstance(driver, sqlite3.Connection):
        return driver.in_transaction
    if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        return not (driver.closed or driver.info.transaction_status == TransactionStatus.IDLE)
    return bool(driver.is_in_transaction())


def _is_busy(driver: psycopg.Connection[Any] | sqlite3.Connection) -> bool:
    if isinstance(driver, sqlite3.Connection):
        return False
    return driver.info.transaction_status != TransactionStatus.INTRANS
