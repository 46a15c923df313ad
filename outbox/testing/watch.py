"""Follows the transactions in which messages were sent to their end, by the events of every engine."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.orm import Session

from outbox.model.message import Message
from outbox.outbox import Outbox, observers
from outbox.store.database import Database
from outbox.store.dialects.dialect import driver_of
from outbox.store.operations import probe

#: The event of a new savepoint does not tell its name, but the statement does, also for a savepoint made by hand.
_SAVEPOINT = re.compile(
    r"\s*(SAVEPOINT|ROLLBACK(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT)?|RELEASE(?:\s+SAVEPOINT)?)\s+\"?(\w+)\"?",
    re.IGNORECASE,
)


@dataclass(slots=True, eq=False)
class Entry:
    """A message that was appended, and its state: undecided, committed for everybody, or rolled back."""

    message: Message
    committed: bool = False
    rolled_back: bool = False


@dataclass(slots=True, eq=False)
class _Transaction:
    """The undecided messages of one connection, and its open savepoints, each with the number of messages before it."""

    entries: list[Entry] = field(default_factory=list)
    savepoints: list[tuple[str, int]] = field(default_factory=list)
    #: The messages of the COMMIT under way, or of the last one.
    committed: list[Entry] = field(default_factory=list)

    def set_savepoint(self, name: str) -> None:
        self.savepoints.append((name, len(self.entries)))

    def release(self, name: str) -> None:
        self.savepoints = self.savepoints[: self._place(name) or 0]

    def roll_back_to(self, name: str) -> None:
        place = self._place(name)
        # A savepoint from before the watch began has no place: all that was seen came after it.
        kept = 0 if place is None else self.savepoints[place][1]
        self.savepoints = [] if place is None else self.savepoints[: place + 1]
        _forget(self.entries[kept:])
        del self.entries[kept:]

    def keep(self) -> None:
        """Keep the messages: a Session committed that takes this for the end, so no later rollback concerns them."""
        self.entries.clear()
        self.savepoints = [(name, 0) for name, _ in self.savepoints]

    def commit(self) -> None:
        for entry in self.entries:
            entry.committed = True
        self.committed = self.entries
        self.entries, self.savepoints = [], []

    def roll_back(self) -> None:
        _forget(self.entries)
        self.entries, self.savepoints = [], []

    def commit_failed(self) -> None:
        _forget(self.committed)
        self.committed = []

    def _place(self, name: str) -> int | None:
        """Return the index of the newest savepoint of that name; None if there is none."""
        return next((i for i in reversed(range(len(self.savepoints))) if self.savepoints[i][0] == name), None)


def _forget(entries: Sequence[Entry]) -> None:
    for entry in entries:
        entry.committed, entry.rolled_back = False, True


class Watch:
    """Notes every message that an outbox of this process appends, between `start` and `stop`.

    A connection's messages are undecided until it commits or rolls back. With a savepoint, those that came after it are
    rolled back. The commit of a Session also decides where the Session is bound to a Connection inside another
    transaction. In production it would have been the end; only the test rolls back later.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._lock = threading.RLock()
        self._transactions: weakref.WeakKeyDictionary[Connection, _Transaction] = weakref.WeakKeyDictionary()
        #: The entries by raw connection and by the outbox whose tables are asked.
        self._raw: dict[tuple[Any, Outbox], list[Entry]] = {}
        self._listeners: list[tuple[type, str, Callable[..., None]]] = [
            (Engine, "after_cursor_execute", self._executed),
            (Engine, "commit", self._commit),
            (Engine, "commit_twophase", lambda connection, *_: self._commit(connection)),
            (Engine, "rollback", self._rollback),
            (Engine, "rollback_twophase", lambda connection, *_: self._rollback(connection)),
            (Engine, "handle_error", self._failed),
            (Session, "after_commit", self._session_committed),
        ]

    def start(self) -> None:
        """Begin to watch."""
        for target, name, listener in self._listeners:
            event.listen(target, name, listener)
        observers.append(self._appended)

    def stop(self) -> None:
        """Stop watching; what was noted stays."""
        observers.remove(self._appended)
        for target, name, listener in self._listeners:
            event.remove(target, name, listener)

    def settle(self) -> None:
        """Find out what became of the messages on raw connections, which have no events for their transactions."""
        with self._lock:
            for (driver, outbox), entries in list(self._raw.items()):
                undecided = [entry for entry in entries if not entry.committed and not entry.rolled_back]
                if undecided:
                    _ask(driver, outbox.database, undecided)

    # Events

    def _appended(self, outbox: Outbox, connection: object, messages: Sequence[Message]) -> None:
        entries = [Entry(message) for message in messages]
        with self._lock:
            self.entries += entries
            if isinstance(connection, Connection):
                self._of(connection).entries += entries
            else:
                self._raw.setdefault((connection, outbox), []).extend(entries)

    def _executed(self, connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        found = _SAVEPOINT.match(statement)
        if found is None:
            return
        verb, name = found[1].upper(), found[2]
        with self._lock:
            transaction = self._of(connection)
            if verb == "SAVEPOINT":
                transaction.set_savepoint(name)
            elif verb.startswith("RELEASE"):
                transaction.release(name)
            else:
                transaction.roll_back_to(name)

    def _commit(self, connection: Connection) -> None:
        """Decide a connection's messages right before its COMMIT."""
        with self._lock:
            transaction = self._of(connection)
            if transaction.entries and _is_aborted(connection):
                transaction.roll_back()
            else:
                transaction.commit()

    def _rollback(self, connection: Connection) -> None:
        with self._lock:
            self._of(connection).roll_back()

    def _failed(self, context: ExceptionContext) -> None:
        """Take back a COMMIT that failed: its event came before it, and its error is one without a statement."""
        if context.connection is not None and context.statement is None:
            with self._lock:
                self._of(context.connection).commit_failed()

    def _session_committed(self, session: Session) -> None:
        if isinstance(session.bind, Connection) and not session.in_nested_transaction():
            with self._lock:
                self._of(session.bind).keep()

    def _of(self, connection: Connection) -> _Transaction:
        found = self._transactions.get(connection)
        if found is None:
            found = self._transactions[connection] = _Transaction()
            # A connection that is dropped without an end: the pool rolls it back.
            weakref.finalize(connection, found.roll_back).atexit = False
        return found


def _is_aborted(connection: Connection) -> bool:
    """Return whether PostgreSQL would answer this COMMIT with a ROLLBACK."""
    driver = driver_of(connection)
    ours = isinstance(driver, psycopg.Connection | psycopg.AsyncConnection)
    return ours and driver.info.transaction_status == TransactionStatus.INERROR


def _ask(driver: Any, database: Database, entries: Sequence[Entry]) -> None:
    """Look which rows are there: for everybody, or inside the transaction that is still open.

    Nothing is known while the connection is busy, failed, or asynchronous and inside its transaction.
    """
    ids = [entry.message.message_id for entry in entries]
    if driver.closed or driver.info.transaction_status == TransactionStatus.IDLE:
        present = probe.committed(database, ids)
        for entry in entries:
            entry.committed = entry.message.message_id in present
            entry.rolled_back = not entry.committed
    elif isinstance(driver, psycopg.Connection) and driver.info.transaction_status == TransactionStatus.INTRANS:
        present = probe.seen_inside(database, driver, ids)
        for entry in entries:
            entry.rolled_back = entry.message.message_id not in present
