"""The inbox: a row for each message that a consumer has handled, written in the consumer's transaction."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from outbox.store.database import Channel, Database
from outbox.store.dialects.statements import Script, Statement

#: How many rows are deleted at once: a few milliseconds of work, so that a worker can do it beside its other work.
PRUNED_AT_ONCE = 1_000

#: By primary key. If another open transaction has inserted the same row, this waits for its end. If that one commits,
#: this inserts nothing; if it rolls back, the row is inserted here.
_HANDLED = """
    {insert_once} {inbox} (consumer, message_id, handled_at, expires_at)
    VALUES (:consumer, :message_id, {now}, {later}) {unless_there}
"""
_HANDLED_AT = "SELECT handled_at FROM {inbox} WHERE consumer = :consumer AND message_id = :message_id"
#: By primary key. The moment tells the row of a failed handler from the row of a later one.
_FORGET = "DELETE FROM {inbox} WHERE consumer = :consumer AND message_id = :message_id AND handled_at = :handled_at"
#: Found by the index on expires_at, deleted by primary key. Rows that another worker is deleting are skipped, because
#: two workers that lock in different orders could wait for each other.
_PRUNE = """
    DELETE FROM {inbox} WHERE (consumer, message_id) IN (SELECT consumer, message_id FROM (
        SELECT consumer, message_id FROM {inbox} WHERE expires_at <= {now}
        ORDER BY expires_at LIMIT :limit {skip_locked}) AS i)
"""


class InboxDatabase(Database):
    """A consumer's database, which may have only one of our tables: the inbox."""

    _needed, _only = "the table outbox_inbox is", ("--inbox-only",)
    described = "the inbox"
    elsewhere = "where nobody would find what was handled; use an Inbox on the database of the transaction"


class InboxRows:
    """Writes the inbox of one outbox."""

    def __init__(self, database: Database, retention: timedelta) -> None:
        self._handled = database.telling(_HANDLED, "handled_at", _HANDLED_AT)
        self._forget = database.sql(_FORGET)
        self._retention = retention.total_seconds()
        self._bind_uuid = database.dialect.values.bind_uuid

    def handle(self, consumer: str, message_id: UUID) -> Script[Any]:
        """Note that a consumer handles a message; return the moment the first time, as the driver gives it, else None.

        A rollback takes the note back.
        """
        parameters = {"consumer": consumer, "message_id": self._bind_uuid(message_id), "seconds": self._retention}
        rows = yield from self._handled(parameters)
        return rows[0][0] if rows else None

    def forget(self, consumer: str, message_id: UUID, handled_at: Any) -> Script[bool]:
        """Take the note of `handle` back; return False if it is not there. `handled_at`: what `handle` returned."""
        parameters = {"consumer": consumer, "message_id": self._bind_uuid(message_id), "handled_at": handled_at}
        ((gone,),) = yield Statement(self._forget, parameters, counts=True)
        return bool(gone)


def prune(channel: Channel) -> int:
    """Delete one portion of the rows whose retention is over; return how many."""
    # A transaction has our isolation level. Under another one a row that was deleted meanwhile would be an error.
    with channel.transaction():
        return channel.run(_PRUNE, limit=PRUNED_AT_ONCE)
